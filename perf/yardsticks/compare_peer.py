"""A system under comparison runs in a process of its own, a *peer*: one line of JSON is a request, one a response.

So its processor time and memory are separate from the benchmark's, it stays warm from one run to the next, and it may
have a Python environment of its own. Because of the latter this module imports nothing but the standard library.

Between requests the processes that a peer has started are stopped (SIGSTOP): an idle JVM still uses the cores (its
collector, its timers, its compiler), and the system that is being measured would lose that time.
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
    """The peer has ended, took too long, or responded with an error."""


def serve(handler: Handler) -> int:
    """Respond to requests, in the peer, until there are no more. Everything else it prints goes to standard error."""
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
                signal_descendants(signal.SIGSTOP)  # before the response, after which others are measured
                replies.write(json.dumps(reply) + "\n")
                replies.flush()
    finally:
        signal_descendants(signal.SIGCONT)  # a stopped process would not end
    return 0


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, where it can: a peer that runs a job does not notice."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def signal_descendants(number: signal.Signals) -> None:
    """Send a signal to all descendants of this process."""
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """The pids of all descendants, from Linux's ``/proc``; on other systems none are found, and nothing is stopped."""
    found: list[int] = []
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found += [child, *_descendants(child)]
    return found


class Peer:
    """The client of a peer. The peer ends when its standard input is closed, or when this process ends."""

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

    def call(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its response."""
        self.send(**request)
        return self.response(timeout_s)

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it has ended by itself, or has been closed
            raise PeerFailed(f"{self.name} has ended:\n{self.log_tail()}") from None

    def response(self, timeout_s: float) -> dict[str, Any]:
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

    def has_response(self) -> bool:
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
