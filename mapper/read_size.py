"""How many rows a mapper reads at once: those of one call of ``map``, or of several while it is behind its input.

A read, the check that this is the only instance, a window entry, and the wake-up of the reducers cost the same for ten
rows and for ten thousand. Where ``batch_rows_max`` is small, a mapper with a backlog would spend most of its time on
them. So it reads more rows than ``map`` takes at once, calls ``map`` several times, and does the rest once.

No I/O, threads or clocks in here.
"""

from __future__ import annotations

ROWS_MAX = 16_384
"""The rows from which on a read is large enough: what comes with it is then a small part of its cost."""

MAP_S_MAX = 0.008
"""The seconds for which ``map`` may work on the rows of one read before the first of them can be fetched. Latency
matters more than cost where ``map`` is slow."""


class ReadSize:
    """The number of rows to read next, in whole batches of ``batch_rows_max``."""

    def __init__(self, batch_rows_max: int) -> None:
        self._batch_rows_max = batch_rows_max
        self._batches_max = max(1, ROWS_MAX // batch_rows_max)
        self._batches = 1

    @property
    def rows(self) -> int:
        return self._batches * self._batch_rows_max

    def mapped(self, asked_rows: int, rows: int, map_s: float) -> None:
        """A read of up to ``asked_rows`` returned ``rows``, and mapping them took ``map_s`` seconds."""
        if map_s > MAP_S_MAX:
            self._batches = max(1, self._batches // 2)
        elif rows < asked_rows:
            # There is no backlog, or it is gone. Should the reader have returned less than it could, as one does that
            # ends with a file, the size comes back with the next reads.
            self._batches = max(1, -(-rows // self._batch_rows_max))
        elif map_s < MAP_S_MAX / 2:
            self._batches = min(2 * self._batches, self._batches_max)
