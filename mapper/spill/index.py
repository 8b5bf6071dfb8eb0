"""What a mapper knows of the spill of one reducer: where it begins and ends, and where its batches are.

No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from shuffle.durable.spill_ends import SpillEnd
from shuffle.ids import NOTHING_COMMITTED, ShuffleIndex
from shuffle.mapper.spill.format import SpillHead

HEADS_MAX = 4096
"""The most spilled batches, read and not committed yet, of which a mapper remembers where they end: 8 GiB of rows. A
reducer that is further ahead of its own commits than that is still served, only slower."""


class Spill:
    """What a mapper knows of the spill of one reducer: from ``begin`` to ``end``, none of it wholly committed."""

    def __init__(self, end: SpillEnd, begin: int, rows_before: int, bytes_before: int) -> None:
        self.end = end
        self.begin = min(begin, end.position)
        self._rows_done = rows_before
        self._bytes_done = bytes_before
        self._heads: deque[SpillHead] = deque()
        """The heads of the batches from ``begin`` on that were read, without a gap. Those behind them become known when
        they are read: the heads of a spill of days would fill the memory otherwise."""
        self.freed = NOTHING_COMMITTED
        """The shuffle index of the last row of the last batch that was freed from here, because it is committed."""
        self.trimmed = self.begin
        """The position up to which the spill's queue was trimmed in the store."""

    @property
    def is_empty(self) -> bool:
        return self.begin >= self.end.position

    @property
    def rows(self) -> int:
        """The number of rows in the spill, with all rows of a batch that is partly committed."""
        return 0 if self.is_empty else self.end.rows - self._rows_done

    @property
    def nbytes(self) -> int:
        return 0 if self.is_empty else self.end.nbytes - self._bytes_done

    def commit(self, row_index: ShuffleIndex) -> None:
        """The reducer has committed everything up to ``row_index``: free the batches that are wholly below it."""
        if self.is_empty:
            return
        while self._heads and self._heads[0].last_row_index <= row_index:
            self._free(self._heads.popleft())
        if self.end.last_row_index <= row_index:
            self._heads.clear()
            last = self.end.position - 1
            self._free(SpillHead(last, self.end.last_row_index, self.end.rows, self.end.nbytes))

    def _free(self, head: SpillHead) -> None:
        self.begin = head.position + 1
        self._rows_done, self._bytes_done = head.rows_after, head.bytes_after
        self.freed = head.last_row_index

    def position_after(self, cursor: ShuffleIndex) -> int:
        """The position of the batch at which to begin reading the rows after ``cursor``. The batch may end before
        them."""
        at = bisect_right(self._heads, cursor, key=attrgetter("last_row_index"))
        if at < len(self._heads):
            return self._heads[at].position
        return self._heads[-1].position + 1 if self._heads else self.begin

    def learn(self, heads: Sequence[SpillHead]) -> None:
        """Remember the heads of batches that were read. Those that do not follow upon the known ones are left out."""
        for head in heads:
            following = self._heads[-1].position + 1 if self._heads else self.begin
            if head.position == following and len(self._heads) < HEADS_MAX:
                self._heads.append(head)

    def extend(self, end: SpillEnd) -> None:
        """More rows were spilled, and the spill ends at ``end`` now."""
        assert end.position > self.end.position
        if self.is_empty:
            self.begin = self.end.position
            self._rows_done, self._bytes_done = self.end.rows, self.end.nbytes
        self.end = end
