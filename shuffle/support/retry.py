"""Waits between attempts: they double up to a bound, and are never quite the same twice."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """The next wait after each failure. Jitter keeps many reducers from coming back at the same moment."""

    def __init__(self, first_ms: int, max_ms: int, chance: Callable[[], float] = random.random) -> None:
        self._first_s = first_ms / 1000
        self._max_s = max_ms / 1000
        self._chance = chance
        self.failures = 0
        """In a row."""

    def next_s(self) -> float:
        """How long to wait now: between half of the current bound and all of it."""
        bound_s = min(self._max_s, self._first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return bound_s * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        self.failures = 0
