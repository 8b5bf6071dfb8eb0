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
"""Spilled batches that were read and are not committed yet, of which a mapper remembers where they end: 8 GiB of rows.
A reducer further ahead of its own commits than that is served all the same, only slower."""


class Spill:
    """What a mapper knows of the spill of one reducer: from ``begin`` to ``end``, none of it wholly committed."""

    def __init__(self, end: SpillEnd, begin: int, rows_before: int, bytes_before: int) -> None:
        self.end = end
        self.begin = min(begin, end.position)
        self._rows_done = rows_before
        self._bytes_done = bytes_before
        self._heads: deque[SpillHead] = deque()
        """Of the batches from ``begin`` on that were read, without a gap. Those behind them will be known once they
        are read: a spill of days would fill the memory with them otherwise."""
        self.freed = NOTHING_COMMITTED
        """The last row of the last batch that was dropped from here, being committed."""
        self.trimmed = self.begin
        """Up to where the store was told that it is not needed any more."""

    @property
    def is_empty(self) -> bool:
        return self.begin >= self.end.position

    @property
    def rows(self) -> int:
        """Waiting here, those of a batch that is partly committed included."""
        return 0 if self.is_empty else self.end.rows - self._rows_done

    @property
    def nbytes(self) -> int:
        return 0 if self.is_empty else self.end.nbytes - self._bytes_done

    def commit(self, row_index: ShuffleIndex) -> None:
        """The reducer has committed everything up to ``row_index``: forget the batches that are wholly below it."""
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
        """The batch to begin reading at for the rows after ``cursor``; it may be one that ends before them."""
        at = bisect_right(self._heads, cursor, key=attrgetter("last_row_index"))
        if at < len(self._heads):
            return self._heads[at].position
        return self._heads[-1].position + 1 if self._heads else self.begin

    def learn(self, heads: Sequence[SpillHead]) -> None:
        """What was read of these batches; those that do not follow upon what is known are of no use."""
        for head in heads:
            following = self._heads[-1].position + 1 if self._heads else self.begin
            if head.position == following and len(self._heads) < HEADS_MAX:
                self._heads.append(head)

    def extend(self, end: SpillEnd) -> None:
        """More was spilled."""
        assert end.position > self.end.position
        if self.is_empty:
            self.begin = self.end.position
            self._rows_done, self._bytes_done = self.end.rows, self.end.nbytes
        self.end = end
