"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0
POLL_S = 0.01


def wait_until(true: Callable[[], bool], what: Callable[[], str] | str = "", wait_s: float = WAIT_S) -> None:
    """Until it is true; fails with ``what`` when that takes too long."""
    deadline_s = time.monotonic() + wait_s
    while not true():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {wait_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL_S)
