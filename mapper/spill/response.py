"""The response to one GetRows out of spilled batches: what is to be read for it, and which of the rows read it takes.

No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shuffle.errors import RowsGone
from shuffle.ids import ReducerIndex, ShuffleIndex
from shuffle.mapper.bucket import ServedBatch
from shuffle.mapper.rows import fit, with_metadata
from shuffle.mapper.spill.format import SpilledBatch
from shuffle.mapper.spill.index import Spill


@dataclass(frozen=True, slots=True)
class SpillRead:
    """What to read of a spill for one GetRows."""

    reducer_index: ReducerIndex
    spill: Spill
    """The spill to read. Its ``learn`` is to be called with the batches that were read."""
    position: int
    """The position in the spill's queue of the first batch to read."""
    end: int
    """The position in the spill's queue behind the last batch to read."""
    cursor: ShuffleIndex
    to_row_index: ShuffleIndex | None
    max_rows: int
    max_bytes: int
    with_metadata: bool = False


class SpillResponse:
    """The response to one GetRows, out of spilled batches that are added in their order."""

    def __init__(self, read: SpillRead, bytes_max: int) -> None:
        self._read = read
        self._cursor = read.cursor
        self._rows_left = read.max_rows
        self._bytes_left = min(read.max_bytes, bytes_max)
        self.served: list[ServedBatch] = []

    def add(self, batch: SpilledBatch) -> bool:
        """Take the rows of ``batch`` that fit; whether the next batch is needed, too.

        A batch that does not continue at the cursor ends the response. If nothing has been taken yet, rows are missing
        that the reducer has not committed, by its own request, and that is an error: they are never skipped.
        """
        if self._cursor < batch.previous_row_index:
            if not self.served:
                raise self._gone(batch.previous_row_index)
            return False
        begin = int(np.searchsorted(batch.row_indexes, self._cursor, side="right"))
        end = len(batch.row_indexes)
        if self._read.to_row_index is not None:
            end = int(np.searchsorted(batch.row_indexes, self._read.to_row_index, side="right"))
        rows_max = min(end - begin, self._rows_left)
        if rows_max <= 0:
            return False
        rows = fit(batch.rows.slice(begin, rows_max), self._bytes_left)
        if rows.num_rows == 0:
            if self.served:
                return False
            rows = batch.rows.slice(begin, 1)  # A bound that no response can keep would stop the reducer.
        last = begin + rows.num_rows
        self._cursor = ShuffleIndex(int(batch.row_indexes[last - 1]))
        self._rows_left -= rows.num_rows
        self._bytes_left -= rows.nbytes
        if self._read.with_metadata:
            rows = with_metadata(rows, batch.row_indexes[begin:last], batch.times_us[begin:last])
        self.served.append(ServedBatch(rows, self._cursor))
        return last == len(batch.row_indexes) and self._rows_left > 0 and self._bytes_left > 0

    def _gone(self, before: ShuffleIndex) -> RowsGone:
        return RowsGone(
            f"reducer {self._read.reducer_index} asks for rows after {self._cursor}, but those up to {before} were "
            "committed in its name and are gone: another instance of this reducer is alive, or its state was lost. "
            "Read the reducer's state again",
            reducer_index=self._read.reducer_index,
            dropped_row_index=before,
        )
