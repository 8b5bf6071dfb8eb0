"""Says what is waited for, when a wait gets long enough to be noticed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ANNOUNCE_AFTER_S = 0.7
"""Shorter waits are nobody's concern; longer ones look like a hang after a second."""


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def announce_slow(
    waiting_for: str, say: Callable[[str], None] = say_on_stderr, after_s: float = ANNOUNCE_AFTER_S
) -> Iterator[None]:
    """If the block takes longer than ``after_s``, says once that it waits, and for what."""
    timer = threading.Timer(after_s, say, (f"waiting for {waiting_for}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
