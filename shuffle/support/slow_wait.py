"""Announces what a command waits for, if the wait gets long enough to be noticed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ANNOUNCE_AFTER_S = 0.7
"""Seconds after which a wait is announced. Shorter waits are not noticed; after a second a wait looks like a hang."""


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def announce_slow(
    waiting_for: str, say: Callable[[str], None] = say_on_stderr, after_s: float = ANNOUNCE_AFTER_S
) -> Iterator[None]:
    """Says once, through ``say``, what is waited for, if the block takes longer than ``after_s``."""
    timer = threading.Timer(after_s, say, (f"waiting for {waiting_for}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
