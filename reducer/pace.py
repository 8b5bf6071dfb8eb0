"""How a reducer slows down its requests and commits under load, so that each of them has more rows.

A commit writes a page at least and every key that it touches once, and a request costs its round trip, whatever is in
them. Under load, fewer and larger ones leave more of the machine to the rows; otherwise latency matters more. The load
that counts is that of a core: of sixty-four reducers on two cores each may have little to do while all together have
too much. Rows are spread by a hash, so a reducer takes its own load for that of each of the others.

No threads or clocks in here: the caller says what time it is.
"""

from __future__ import annotations

from shuffle.limits import KIB, MIB

GATHER_BYTES_PER_S = 16 * MIB
"""The rate of input of the reducers of one core, in bytes per second, from which on rows add up before they are
reduced."""

GATHER_BYTES_MIN = 1 * MIB
"""The least bytes of a batch, times the reducers of a core, after which rows may add up. After a smaller one the next
rows are reduced at once."""

SLOW_S = 0.1
"""The seconds for reducing and committing a batch from which on the machines are taken to be busy, whatever the rate: a
reducer that waits for a core most of the time has a low one. Rows that wait for their turn that long can as well wait
for others."""

GATHER_S = 0.3
"""The longest time, in seconds, for which rows of a few reducers add up. Keys repeat: the rows of three tenths of a
second have few more of them than those of one tenth, so that a commit costs and writes little more, and there are a
third as many."""

GATHER_S_PER_REDUCER = 0.03
GATHER_S_MAX = 1.0
"""With many reducers it is this many seconds for each of a core's, up to ``GATHER_S_MAX``. A commit takes three to four
milliseconds of processor time in all processes together, and each reducer makes its own: without this, commits would
take the cores for themselves."""

IDLE_S = 0.04
IDLE_S_PER_REDUCER = 0.012
IDLE_S_MAX = 0.4
"""The seconds without new rows after which a reducer waits for no more: this many at least, or, with many reducers,
this many for each of a core's. A batch of a mapper has rows for all of them, and the next takes longer to come the more
they are."""

RESPONSE_BYTES_SMALL = 512 * KIB
"""The bytes of a response below which the next request to that mapper is delayed, under load. A larger one is worth its
round trip."""

REQUEST_PAUSE = 0.75
"""The time by which it is delayed, as a part of the time without new rows. It is less than 1, or a reducer would stop
waiting for rows that it has not requested."""


class Pace:
    """The load of one reducer, and what follows from it."""

    def __init__(self, reducers_per_core: float = 1.0) -> None:
        reducers_per_core = max(1.0, reducers_per_core)
        self._bytes_per_s = GATHER_BYTES_PER_S / reducers_per_core
        self._bytes_min = GATHER_BYTES_MIN / reducers_per_core
        self.gather_s = max(GATHER_S, min(GATHER_S_PER_REDUCER * reducers_per_core, GATHER_S_MAX))
        """The longest time, in seconds, for which rows add up."""
        self.idle_s = max(IDLE_S, min(IDLE_S_PER_REDUCER * reducers_per_core, IDLE_S_MAX))
        """The seconds without new rows after which they do so no longer."""
        self._taken_s = 0.0
        """The time at which the last batch was taken."""
        self._taken_bytes = 0
        """The number of bytes of that batch."""
        self._is_loaded = False

    def taken(self, size_bytes: int, now_s: float) -> None:
        """A batch of ``size_bytes`` is being reduced."""
        self._taken_bytes, self._taken_s = size_bytes, now_s

    def is_loaded(self, now_s: float) -> bool:
        """Whether rows are to add up before the next batch: the last one was large for the time that it took, or took
        very long."""
        seconds = now_s - self._taken_s
        is_busy = seconds > SLOW_S or self._taken_bytes > self._bytes_per_s * seconds
        self._is_loaded = is_busy and self._taken_bytes > self._bytes_min
        return self._is_loaded

    def request_pause_s(self, response_bytes: int) -> float:
        """The seconds to wait before the next request to a mapper whose response had ``response_bytes``."""
        return REQUEST_PAUSE * self.idle_s if self._is_loaded and response_bytes < RESPONSE_BYTES_SMALL else 0.0
