"""Child processes that are started, watched, started again when they die, and stopped.

Only the processes this module has started are ever signalled. What they write to stderr goes to a file each, from
which the reason of a death is read: a worker ends with exit code 3 for an exception in the user's code, 2 for a wrong
spec, and prints ``error: …`` last.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shuffle.limits import KIB, MIB
from shuffle.run import launch
from shuffle.support.logs import get_logger
from shuffle.support.retry import doubled_s

LOG_BYTES_MAX = 16 * MIB
"""Of one worker's log; beyond it the file is set aside (one such file is kept) and begun again."""
TAIL_BYTES = 64 * KIB
ERROR_CHARS_MAX = 2_000

_log = get_logger(__name__)


@dataclass(slots=True)
class RestartPolicy:
    """When a child that died is started again: at once the first time, then after waits that double.

    Plain arithmetic on the times it is given; a child that ran for ``healthy_s`` starts with a clean record.
    """

    delay_s_min: float = 0.2
    delay_s_max: float = 10.0
    healthy_s: float = 20.0
    keeps_dying_after: int = 3
    """Deaths in a row, none of them after a healthy run, from which it is a case for people."""
    deaths: int = 0
    """In a row."""
    restarts: int = 0
    """Ever."""

    def died(self, ran_s: float) -> float:
        """Notes a death after ``ran_s`` seconds of running; the seconds to wait before the next start."""
        self.deaths = 1 if ran_s >= self.healthy_s else self.deaths + 1
        self.restarts += 1
        if self.deaths == 1:
            return 0.0
        return doubled_s(self.delay_s_min, self.delay_s_max, self.deaths - 2)

    @property
    def keeps_dying(self) -> bool:
        return self.deaths >= self.keeps_dying_after


@dataclass(slots=True)
class Child:
    """One process that is to be kept running."""

    name: str
    """``mapper 0``, ``mapper 0-3``, ``reducer 1``, ``statestore``."""
    module: str
    arguments: Callable[[], Sequence[str]]
    """Asked at each start: a restarted store, for one, must come back under its old address."""
    log_path: Path
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    workers: Sequence[str] = ()
    """The names of the workers in it, if it has any: ``mapper 0``, ``mapper 1``."""
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    log_begin: int = 0
    """Where in its log this run of the child begins."""
    next_start_s: float = 0.0
    last_error: str | None = None
    last_code: int | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def start(self, now_s: float) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self.log_begin = log.tell()
            # A process group of its own: Ctrl-C in the terminal reaches the controller alone, which then stops all in
            # their order.
            self.process = subprocess.Popen(
                launch.command(self.module, *self.arguments()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=launch.environment(),
                process_group=0,
            )
        self.started_s = now_s
        _log.info("started", child=self.name, pid=self.process.pid)

    def reap(self, now_s: float) -> bool:
        """Notes it if the child has died; whether it has, just now."""
        if self.process is None or self.process.poll() is None:
            return False
        code = self.process.returncode
        self.process = None
        self.last_code = code
        self.last_error = self._reason(code)
        delay_s = self.policy.died(now_s - self.started_s)
        self.next_start_s = now_s + delay_s
        # The controller says so to people, on its screen or in a line.
        _log.info("died", child=self.name, reason=self.last_error, restart_in_s=delay_s)
        return True

    def send(self, number: int) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(number)

    def trim_log(self) -> None:
        """Sets the log aside when it is too long. The child appends, so it goes on at the new end."""
        try:
            if self.log_path.stat().st_size > LOG_BYTES_MAX:
                shutil.copyfile(self.log_path, self.log_path.with_suffix(".old.log"))
                os.truncate(self.log_path, 0)
                self.log_begin = 0
        except OSError as error:
            _log.warning("log not trimmed", child=self.name, error=error)

    def _reason(self, code: int) -> str:
        lines = self._tail()
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        if errors:
            return "\n".join(lines[errors[-1] :])[len("error: ") : ERROR_CHARS_MAX]
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"ended with code {code}" + (f": {last}" if last else "")[:ERROR_CHARS_MAX]

    def _tail(self) -> list[str]:
        try:
            with open(self.log_path, "rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_begin, end - TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


class Supervisor:
    """Keeps children running. ``tick`` does what is due and never waits; ``stop`` waits, for a bounded time."""

    def __init__(self, stop_s_max: float = 15.0) -> None:
        self.children: list[Child] = []
        self._stop_s_max = stop_s_max

    def add(self, child: Child, now_s: float | None = None) -> Child:
        self.children.append(child)
        child.start(time.monotonic() if now_s is None else now_s)
        return child

    def tick(self, now_s: float) -> list[Child]:
        """Starts again what is due; the children that have died since the last tick."""
        died = [child for child in self.children if child.reap(now_s)]
        for child in self.children:
            if child.process is None and child.next_start_s <= now_s:
                child.trim_log()
                child.start(now_s)
            elif child.process is not None:
                child.trim_log()
        return died

    def keeps_dying(self) -> list[Child]:
        return [child for child in self.children if child.policy.keeps_dying]

    def stop(self, children: Iterable[Child]) -> None:
        """SIGTERM to all, and SIGKILL to what is still there when the time is up."""
        stopping = [child for child in children if child.running]
        for child in stopping:
            child.send(signal.SIGTERM)
            child.send(signal.SIGCONT)  # A stopped process would take no notice of the first.
        deadline_s = time.monotonic() + self._stop_s_max
        for child in stopping:
            assert child.process is not None
            try:
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.warning("did not stop in time, killing it", child=child.name, pid=child.pid)
                child.send(signal.SIGKILL)
                child.process.wait()
        self.children = [child for child in self.children if child not in stopping]

    def kill(self) -> None:
        """SIGKILL to all, at once: the way out when somebody insists."""
        for child in self.children:
            child.send(signal.SIGKILL)
        for child in self.children:
            if child.process is not None:
                child.process.wait()
        self.children = []
