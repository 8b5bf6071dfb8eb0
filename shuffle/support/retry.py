"""Retries: after which errors they are worth it, and how long to wait before each attempt.

An error either passes by itself (a store that is being restarted, a race that was lost) or it does not (a damaged file,
a row that the user's code refuses). ``passes_by_itself`` is the only place that decides it. Waits double up to a
bound (``Backoff``), and nothing waits without one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from shuffle.errors import (
    CommitConflict,
    CommitUnknown,
    CorruptData,
    Expired,
    FormatTooNew,
    PublishUnknown,
    ServiceUnavailable,
    ShuffleError,
    SplitBrain,
    StoreError,
    StoreLocked,
    StoreNotWritable,
)

if TYPE_CHECKING:
    import threading

T = TypeVar("T")

JITTER = 0.5
"""The share of a wait that is random, so that many workers do not retry at the same time."""

LASTING = (MemoryError, CorruptData, FormatTooNew, StoreNotWritable, StoreLocked)
"""Errors of the store or of the machine that do not pass by themselves: the worker ends with them."""

_TROUBLE = (
    StoreError,
    CommitConflict,
    CommitUnknown,
    Expired,
    ServiceUnavailable,
    SplitBrain,
    PublishUnknown,
    MemoryError,
)
"""Errors that are caused by the store, by a service around us or by the machine, not by a row or the user's code."""

_CAUSES_MAX = 32
"""The most exceptions of a chain of causes that are looked at; only loops make longer chains."""

_DOUBLINGS_MAX = 30
"""The most times that a wait is doubled, so that the power does not overflow."""


def trouble_behind(error: BaseException) -> BaseException | None:
    """The error of the store or of the machine that ``error`` is, or was raised from or during; None if there is none.

    User code often wraps the exceptions that it catches, so the causes of ``error`` are searched as well.
    """
    seen: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if seen is None or isinstance(seen, _TROUBLE):
            return seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def passes_by_itself(error: BaseException) -> bool:
    """Whether the same attempt may succeed later without anybody doing anything about ``error``."""
    trouble = trouble_behind(error)
    return trouble is not None and not isinstance(trouble, LASTING)


def doubled_s(first_s: float, max_s: float, failures: int) -> float:
    """The wait after ``failures`` earlier failures in a row: ``first_s``, twice that, and so on, at most ``max_s``."""
    return float(min(max_s, first_s * 2.0 ** min(failures, _DOUBLINGS_MAX)))


class Backoff:
    """The next wait after each failure in a row. The share ``jitter`` of it is random, by ``chance``."""

    def __init__(
        self, first_ms: int, max_ms: int, chance: Callable[[], float] = random.random, jitter: float = JITTER
    ) -> None:
        self._first_s = first_ms / 1000
        self._max_s = max_ms / 1000
        self._chance = chance
        self._jitter = jitter
        self.failures = 0
        """The number of failures in a row so far."""

    def next_s(self) -> float:
        """Counts a failure and returns the seconds to wait now: the current bound, less up to the share ``jitter``."""
        bound_s = doubled_s(self._first_s, self._max_s, self.failures)
        self.failures += 1
        return bound_s * (1 - self._jitter + self._jitter * self._chance()) if self._jitter else bound_s

    def reset(self) -> None:
        """Notes a success: the next wait is the first one again."""
        self.failures = 0


def patiently(
    call: Callable[[], T],
    backoff: Backoff,
    stop: threading.Event,
    on_wait: Callable[[ShuffleError, float], None],
) -> T | None:
    """Calls ``call`` until it returns, for as long as its errors pass by themselves; None if ``stop`` is set before.

    ``on_wait`` is called with each such error, and with the seconds until the next attempt.
    """
    while not stop.is_set():
        try:
            result = call()
        except ShuffleError as error:
            if not passes_by_itself(error):
                raise
            wait_s = backoff.next_s()
            on_wait(error, wait_s)
            stop.wait(wait_s)
        else:
            backoff.reset()
            return result
    return None
