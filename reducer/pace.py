"""How a reducer slows down its requests and commits under load, so that each of them has more rows.

A commit writes a page at least and every key that it touches once, and a request costs its round trip, whatever is in
them. Under load, fewer and larger ones leave more of the machine to the rows; otherwise latency matters more. The load
that counts is that of the processor: of sixty-four reducers each may have little to do while all together have too
much. Rows are spread by a hash, so each reducer takes its own load, times their number, for that of all.

No threads or clocks in here: the caller says what time it is.
"""

from __future__ import annotations

from shuffle.limits import KIB, MIB

GATHER_BYTES_PER_S = 16 * MIB
"""The rate of input of all reducers together, in bytes per second, from which on rows add up before they are
reduced."""

GATHER_BYTES_MIN = 1 * MIB
"""The least bytes of a batch, times the number of reducers, after which rows may add up. After a smaller one the next
rows are reduced at once."""

GATHER_S_MAX = 0.3
"""The longest time, in seconds, for which rows add up. Keys repeat: the rows of three tenths of a second have few more
of them than those of one tenth, so that a commit costs and writes little more, and there are a third as many."""

GATHER_IDLE_S = 0.04
"""The seconds without new rows after which the reducer waits for no more."""

RESPONSE_BYTES_SMALL = 512 * KIB
"""The bytes of a response below which the next request to that mapper is delayed, under load. A larger one is worth its
round trip."""

REQUEST_PAUSE_S = 0.03
"""The seconds by which it is delayed. They are less than ``GATHER_IDLE_S``, or a reducer would stop waiting for rows
that it has not requested."""


class Pace:
    """The load of one reducer, and what follows from it."""

    def __init__(self, reducer_count: int = 1) -> None:
        self._bytes_per_s = GATHER_BYTES_PER_S / reducer_count
        self._bytes_min = GATHER_BYTES_MIN / reducer_count
        self._taken_s = 0.0
        """The time at which the last batch was taken."""
        self._taken_bytes = 0
        """The number of bytes of that batch."""
        self._is_loaded = False

    def taken(self, size_bytes: int, now_s: float) -> None:
        """A batch of ``size_bytes`` is being reduced."""
        self._taken_bytes, self._taken_s = size_bytes, now_s

    def is_loaded(self, now_s: float) -> bool:
        """Whether rows are to add up before the next batch: the last one was large for the time that it took."""
        self._is_loaded = self._taken_bytes > max(self._bytes_min, self._bytes_per_s * (now_s - self._taken_s))
        return self._is_loaded

    def request_pause_s(self, response_bytes: int) -> float:
        """The seconds to wait before the next request to a mapper whose response had ``response_bytes``."""
        return REQUEST_PAUSE_S if self._is_loaded and response_bytes < RESPONSE_BYTES_SMALL else 0.0
