"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 60.0
POLL_S = 0.01


def wait_until(true: Callable[[], bool], what: Callable[[], str] | str = "", wait_s: float = WAIT_S) -> None:
    """Until it is true; fails with ``what`` when that takes too long."""
    deadline_s = time.monotonic() + wait_s
    while not true():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {wait_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL_S)


def pause(pid: int) -> None:
    """SIGSTOP, and wait for its effect: a process on another core goes on for a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()), f"{pid} is stopped")


def _is_stopped(task: Path) -> bool:
    # The name in the second field may hold anything, brackets and spaces too.
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
