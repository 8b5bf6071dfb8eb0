"""Starts child processes, watches them, restarts those that die, and stops them.

Only processes that this module has started are ever signalled. The output of each goes to a log file, from which the
reason of its death is read: a worker ends with exit code 3 for an exception in the user's code, 2 for a wrong spec, and
prints ``error: …`` last.
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
"""The most bytes of one worker's log. A longer file is copied to another (one such copy is kept) and begun again."""
TAIL_BYTES = 64 * KIB
"""The bytes at the end of a log in which the reason of a death is looked for."""
ERROR_CHARS_MAX = 2_000
"""The most characters of the reason of a death that are kept."""

_log = get_logger(__name__)


@dataclass(slots=True)
class RestartPolicy:
    """Decides when a child that died is started again: at once the first time, then after waits that double.

    It reads no clock, and computes only with the times it is given. A death after ``healthy_s`` seconds of running
    counts as the first one again.
    """

    delay_s_min: float = 0.2
    """The seconds to wait after the second death in a row; the wait doubles with each further one."""
    delay_s_max: float = 10.0
    """The longest wait, in seconds."""
    healthy_s: float = 20.0
    """The seconds of running after which a child counts as healthy."""
    keeps_dying_after: int = 3
    """The number of deaths in a row, none of them after a healthy run, from which restarts are not expected to help."""
    deaths: int = 0
    """The number of deaths in a row so far."""
    restarts: int = 0
    """The number of restarts since the beginning of the run."""

    def died(self, ran_s: float) -> float:
        """Notes a death after ``ran_s`` seconds of running; returns the seconds to wait before the next start."""
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
    """The name of the process, for people: ``mapper 0``, ``mapper 0-3``, ``reducer 1``, ``statestore``."""
    module: str
    """The Python module that the process runs."""
    arguments: Callable[[], Sequence[str]]
    """A function that returns the arguments of the process. It is called at each start, since a restarted store, for
    example, must have its old address again."""
    log_path: Path
    """The file to which the process writes its output."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    """The policy for restarts of this process."""
    workers: Sequence[str] = ()
    """The names of the workers in it, if it has any: ``mapper 0``, ``mapper 1``."""
    process: subprocess.Popen[bytes] | None = None
    """The process; None while it is not running."""
    started_s: float = 0.0
    """The monotonic time of the last start, in seconds."""
    log_begin: int = 0
    """The offset in the log at which the output of the current process begins."""
    next_start_s: float = 0.0
    """The monotonic time, in seconds, from which a process that died is started again."""
    last_error: str | None = None
    """The reason of the last death; None if it has not died."""
    last_code: int | None = None
    """The exit code of the last death; None if it has not died."""

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
            # A process group of its own: Ctrl-C in the terminal reaches only the controller, which then stops all
            # processes in their order.
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
        """Notes the death of the child, if it has died since the last call, and returns whether it has."""
        if self.process is None or self.process.poll() is None:
            return False
        code = self.process.returncode
        self.process = None
        self.last_code = code
        self.last_error = self._reason(code)
        delay_s = self.policy.died(now_s - self.started_s)
        self.next_start_s = now_s + delay_s
        # The controller reports it to people, on its screen or in a line.
        _log.info("died", child=self.name, reason=self.last_error, restart_in_s=delay_s)
        return True

    def send(self, number: int) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(number)

    def trim_log(self) -> None:
        """Copies and truncates the log when it is too long. The child appends, so it goes on at the new end."""
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
        """Starts again the children that are due; returns those that have died since the last tick."""
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
        """Sends SIGTERM to these children, and SIGKILL to those that still run after the time limit."""
        stopping = [child for child in children if child.running]
        for child in stopping:
            child.send(signal.SIGTERM)
            child.send(signal.SIGCONT)  # A stopped process handles SIGTERM only once it continues.
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
        """Sends SIGKILL to all children at once, after a second Ctrl-C or an error."""
        for child in self.children:
            child.send(signal.SIGKILL)
        for child in self.children:
            if child.process is not None:
                child.process.wait()
        self.children = []
