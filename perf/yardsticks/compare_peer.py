"""A system under comparison lives in a process of its own and is asked to work: one line of JSON in, one line out.

So its processor time and memory can be told from the benchmark's, it stays warm from one run to the next, and it may
have an environment of its own. For the latter this module imports nothing but the standard library.

While a peer is not asked for anything, the processes it has started stand still: a JVM with nothing to do still takes
a share of the cores (its collector, its timers, its compiler), and that would be taken from whoever is being measured.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STOP_TIMEOUT_S = 20.0
LOG_LINES = 25
_PR_SET_PDEATHSIG = 1

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class PeerFailed(Exception):
    """The other process has ended, takes too long, or says that it could not do what it was asked to."""


def serve(handler: Handler) -> int:
    """In the peer: answer requests until there are no more. What else is printed goes to standard error."""
    _end_with_parent()
    try:
        with os.fdopen(os.dup(1), "w") as replies:
            os.dup2(2, 1)
            for line in sys.stdin:
                signal_descendants(signal.SIGCONT)
                try:
                    reply = dict(handler(json.loads(line)))
                except Exception as error:
                    traceback.print_exc()
                    reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
                signal_descendants(signal.SIGSTOP)  # before the answer, after which others are measured
                replies.write(json.dumps(reply) + "\n")
                replies.flush()
    finally:
        signal_descendants(signal.SIGCONT)  # or they would never notice that they are to end
    return 0


def _end_with_parent() -> None:
    """A peer at work does not notice that nobody will ask for the answer: the kernel tells it, where it can."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def signal_descendants(number: signal.Signals) -> None:
    """To every process that this one has started, and those that they have."""
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """By Linux's own lists; elsewhere none are found, and nothing stands still."""
    found: list[int] = []
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found += [child, *_descendants(child)]
    return found


class Peer:
    """The asking side. The peer ends when its standard input or this process does."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.started_s = time.time()
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for us, and we close it
                text=True,
            )
        # One for the request under way, one for its end.
        self._replies: queue.Queue[str] = queue.Queue(maxsize=2)
        self._reader = threading.Thread(target=self._read, name=f"{name}-replies", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.send(**request)
        return self.answer(timeout_s)

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it has ended by itself, or has been closed
            raise PeerFailed(f"{self.name} has ended:\n{self.log_tail()}") from None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerFailed(f"{self.name} did not answer in {timeout_s:.0f} s:\n{self.log_tail()}") from None
        if not line:
            raise PeerFailed(f"{self.name} has ended:\n{self.log_tail()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerFailed(f"{self.name}: {reply['error']}\n{self.log_tail()}")
        return reply

    def answered(self) -> bool:
        return not self._replies.empty()

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        self._process.stdout.close()
