"""A bucket: one reducer's queue of entry parts that it has not committed yet.

Rows that were served stay here until the reducer says that they are committed; until then they may be requested again.
No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from shuffle.ids import NOTHING_COMMITTED, ReducerIndex, ShuffleIndex
from shuffle.mapper.entry_life import SERVE
from shuffle.mapper.rows import fit, with_metadata
from shuffle.mapper.window import EntryPart, Window


class ServedBatch(NamedTuple):
    """Rows of a response, and the shuffle index of the last of them."""

    rows: pa.RecordBatch
    last_row_index: ShuffleIndex


class Bucket:
    """The uncommitted rows of one reducer, in the order of their shuffle indexes."""

    def __init__(self, reducer_index: ReducerIndex) -> None:
        self.reducer_index = reducer_index
        self._parts: deque[EntryPart] = deque()
        self.committed = NOTHING_COMMITTED
        """The highest shuffle index that a request of the reducer has called committed. After a restart it may be ahead
        of what has been mapped again."""
        self.freed = NOTHING_COMMITTED
        """The shuffle index of the last row that was freed because it is committed. Nothing up to it can be served any
        more."""
        self.served = NOTHING_COMMITTED
        """The highest shuffle index that this instance has served since its restart, from here or from the spill."""
        self.spilled = NOTHING_COMMITTED
        """The shuffle index of the last row that was spilled from here. If the spill does not have it, another instance
        came to the same state and had it committed."""
        self.rows = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def first_row_index(self) -> ShuffleIndex | None:
        """The shuffle index of the first row that is not committed."""
        return self._parts[0].row_index_at(self._parts[0].begin) if self._parts else None

    @property
    def last_row_index(self) -> ShuffleIndex | None:
        return self._parts[-1].last_row_index if self._parts else None

    def push(self, part: EntryPart) -> None:
        if not self._parts:
            part.entry.pointer_count += 1
        else:
            assert self._parts[-1].last_row_index < part.first_row_index
        self._parts.append(part)
        self.rows += part.rows

    def commit(self, row_index: ShuffleIndex, window: Window) -> None:
        """Free what is ``<= row_index``, and move the pointer to the entry that now holds the first row."""
        self.committed = max(self.committed, row_index)
        while self._parts and self._parts[0].first_row_index <= row_index:
            part = self._parts[0]
            row_after = part.row_after(row_index)
            if row_after > part.begin:
                self.freed = max(self.freed, part.row_index_at(row_after - 1))
            self.rows -= window.commit(part, row_index)
            if not part.is_committed:
                break
            self._parts.popleft()
            part.entry.pointer_count -= 1
            if self._parts:
                self._parts[0].entry.pointer_count += 1

    def spill(self, shuffle_end: ShuffleIndex, window: Window) -> None:
        """Free the parts before ``shuffle_end``: their rows are in the spill now, and are served from there."""
        while self._parts and self._parts[0].last_row_index < shuffle_end:
            part = self._parts.popleft()
            self.spilled = part.last_row_index
            self.rows -= window.spill(part)
            part.entry.pointer_count -= 1
            if self._parts:
                self._parts[0].entry.pointer_count += 1

    def first_row_index_after(self, row_index: ShuffleIndex) -> ShuffleIndex | None:
        """The shuffle index of the first uncommitted row above ``row_index``; None if there is none."""
        if not self._parts or self._parts[-1].last_row_index <= row_index:
            return None
        part = self._parts[bisect_right(self._parts, row_index, key=attrgetter("last_row_index"))]
        return part.row_index_at(max(part.begin, part.row_after(row_index)))

    def rows_after(
        self,
        cursor: ShuffleIndex,
        to_row_index: ShuffleIndex | None,
        max_rows: int,
        max_bytes: int,
        with_metadata: bool = False,
    ) -> Iterator[ServedBatch]:
        """The uncommitted rows after ``cursor``, in order, without copying. At least one if there is one.

        A single row larger than ``max_bytes`` comes alone: a bound that no response can keep would stop the reducer.
        """
        rows_left, bytes_left = max_rows, max_bytes
        rows: pa.RecordBatch | None = None
        first = bisect_right(self._parts, cursor, key=attrgetter("last_row_index"))
        for number in range(first, len(self._parts)):
            part = self._parts[number]
            assert part.batch is not None
            if rows is not None:  # Most responses are of one part, and need not know its size.
                bytes_left -= rows.nbytes
                if bytes_left <= 0:
                    return
            begin = max(part.begin, part.row_after(cursor))
            requested_end = part.batch.num_rows if to_row_index is None else part.row_after(to_row_index)
            end = min(requested_end, begin + rows_left)
            if end <= begin:
                return
            rows = fit(part.batch.slice(begin, end - begin), bytes_left)
            if rows.num_rows == 0:
                if bytes_left < max_bytes:
                    return
                rows = part.batch.slice(begin, 1)
            last = part.row_index_at(begin + rows.num_rows - 1)
            part.entry.happens(SERVE)
            yield ServedBatch(_with_metadata_of(rows, part, begin) if with_metadata else rows, last)
            rows_left -= rows.num_rows
            if rows_left <= 0 or begin + rows.num_rows < requested_end:
                return


def _with_metadata_of(rows: pa.RecordBatch, part: EntryPart, begin: int) -> pa.RecordBatch:
    """``rows``, which begin at row ``begin`` of the batch of ``part``, with the metadata columns behind their own."""
    assert part.row_offsets is not None
    indexes = part.row_offsets[begin : begin + rows.num_rows].astype(np.int64) + part.entry.shuffle_begin
    return with_metadata(rows, indexes, np.full(rows.num_rows, part.entry.ingested_us, np.int64))
