"""Spilled rows: what they look like in their queue, and what a mapper knows about them.

When the front of the window is held by stragglers only, their rows move to a queue of the state store, and the window
moves on. Each (mapper, reducer) has a partition of its own; a row of it is one *spilled batch*: rows of the reducer as
an Arrow stream, and their shuffle indexes. Together with the batches a row of the table ``<processor>/spills`` is
written that says where they end, and the mapper's state behind them: one transaction, so that each row of a reducer is
either in its spill or will be mapped again, and never both.

What is before the persisted state and not committed is in the spill; what is after it is in the window.

No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shuffle.errors import CorruptData, RowsGone
from shuffle.ids import NOTHING_COMMITTED, ReducerIndex, ShuffleIndex
from shuffle.limits import MIB
from shuffle.mapper.bucket import ServedBatch
from shuffle.mapper.rows import fit, with_metadata
from shuffle.spec.config import Compression

BATCH_BYTES = 2 * MIB
"""Of the rows in one spilled batch, about. What is read, decompressed and trimmed at once."""

HEADS_MAX = 4096
"""Spilled batches that were read and are not committed yet, of which a mapper remembers where they end: 8 GiB of rows.
A reducer further ahead of its own commits than that is served all the same, only slower."""

SPILL_SCHEMA = pa.schema(
    [
        ("previous_row_index", pa.int64()),
        ("first_row_index", pa.int64()),
        ("last_row_index", pa.int64()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("rows_before", pa.int64()),
        ("bytes_before", pa.int64()),
        ("index_steps", pa.binary()),
        ("time_rows", pa.binary()),
        ("times_us", pa.binary()),
        ("batch", pa.binary()),
    ]
)
"""Of the queues of spilled batches.

``previous_row_index``: the reducer's last row before this batch that it has either in the spill or, as far as was
known then, committed: a reader that is not that far has lost rows. ``bytes``: of the rows in memory. ``rows_before``,
``bytes_before``: of all that was ever spilled before this batch for this pair. ``index_steps``: from the index of each
row to that of the next, as unsigned numbers of 1, 2, 4 or 8 bytes (which, the length tells). ``times_us``: when rows
were read, as numbers of 8 bytes, each for as many rows as ``time_rows`` says, in 4 bytes. ``batch``: an Arrow stream
with one record batch."""

Indexes = np.ndarray[Any, np.dtype[np.int64]]


class SpillPart(NamedTuple):
    """Rows of one reducer that are to be spilled, and of each its shuffle index and when it was read."""

    rows: pa.RecordBatch
    row_indexes: Indexes
    times_us: Indexes


@dataclass(frozen=True, slots=True)
class SpillEnd:
    """Where the spill of one (mapper, reducer) ends: its row in the table ``<processor>/spills``."""

    position: int = 0
    """Of the next batch in the partition."""
    last_row_index: ShuffleIndex = NOTHING_COMMITTED
    """Of the last row spilled."""
    rows: int = 0
    """Ever spilled, over the life of the processor."""
    nbytes: int = 0
    """The bytes of those rows in memory."""
    stored_bytes: int = 0
    """What was written for them."""
    since_ms: int = 0
    """When the spill was last begun, being empty; wall clock."""


class SpillHead(NamedTuple):
    """Where one spilled batch is and ends."""

    position: int
    last_row_index: ShuffleIndex
    rows_after: int
    """Ever spilled, up to the end of this batch."""
    bytes_after: int


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
        self.dropped = NOTHING_COMMITTED
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
            self._drop(self._heads.popleft())
        if self.end.last_row_index <= row_index:
            self._heads.clear()
            last = self.end.position - 1
            self._drop(SpillHead(last, self.end.last_row_index, self.end.rows, self.end.nbytes))

    def _drop(self, head: SpillHead) -> None:
        self.begin = head.position + 1
        self._rows_done, self._bytes_done = head.rows_after, head.bytes_after
        self.dropped = head.last_row_index

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


@dataclass(frozen=True, slots=True)
class SpillRead:
    """What to read of a spill to answer one GetRows."""

    reducer_index: ReducerIndex
    spill: Spill
    """Whose ``learn`` wants to hear of the batches read."""
    position: int
    end: int
    cursor: ShuffleIndex
    to_row_index: ShuffleIndex | None
    max_rows: int
    max_bytes: int
    with_metadata: bool = False


# writing


def encode(
    parts: Sequence[SpillPart], before: SpillEnd, dropped: ShuffleIndex, compression: Compression, since_ms: int
) -> tuple[pa.Table, SpillEnd]:
    """``parts`` as spilled batches that follow upon ``before``, and the end behind them.

    ``dropped`` is the last row of the reducer that is in neither the window nor the spill, being committed;
    ``since_ms``, when this spill was begun.
    """
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    columns: dict[str, list[Any]] = {field.name: [] for field in SPILL_SCHEMA}
    end = before
    for rows, indexes, times in _sized(parts):
        first, last = int(indexes[0]), int(indexes[-1])
        stored, steps = _stream(rows, options), _steps(indexes)
        time_rows, times_us = _runs(times)
        previous = max(end.last_row_index, dropped if dropped < first else NOTHING_COMMITTED)
        numbers = (previous, first, last, rows.num_rows, rows.nbytes, end.rows, end.nbytes)
        for name, value in zip(columns, (*numbers, steps, time_rows, times_us, stored), strict=True):
            columns[name].append(value)
        end = replace(
            end,
            position=end.position + 1,
            last_row_index=ShuffleIndex(last),
            rows=end.rows + rows.num_rows,
            nbytes=end.nbytes + rows.nbytes,
            stored_bytes=end.stored_bytes + len(stored) + len(steps) + len(time_rows) + len(times_us),
        )
    return pa.table(columns, schema=SPILL_SCHEMA), replace(end, since_ms=since_ms)


def _sized(parts: Sequence[SpillPart]) -> Iterator[SpillPart]:
    """The same rows in batches of about ``BATCH_BYTES``: small neighbours together, large ones cut."""
    waiting: list[SpillPart] = []
    waiting_bytes = 0
    for part in parts:
        pieces = max(1, part.rows.nbytes // BATCH_BYTES)
        step = -(-part.rows.num_rows // pieces)
        for begin in range(0, part.rows.num_rows, step):
            rows = part.rows.slice(begin, step)
            if waiting and waiting_bytes + rows.nbytes > BATCH_BYTES:
                yield _joined(waiting)
                waiting, waiting_bytes = [], 0
            waiting.append(SpillPart(rows, part.row_indexes[begin : begin + step], part.times_us[begin : begin + step]))
            waiting_bytes += rows.nbytes
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[SpillPart]) -> SpillPart:
    if len(parts) == 1:
        return parts[0]
    return SpillPart(
        pa.concat_batches([part.rows for part in parts]),
        np.concatenate([part.row_indexes for part in parts]),
        np.concatenate([part.times_us for part in parts]),
    )


def _stream(rows: pa.RecordBatch, options: pa.ipc.IpcWriteOptions) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_batch(rows)
    # A copy, since Arrow never lets go of a memoryview that an array was made of.
    return bytes(sink.getvalue())


def _steps(indexes: Indexes) -> bytes:
    steps = np.diff(indexes)
    largest = int(steps.max(initial=1))
    width = next(width for width in (1, 2, 4, 8) if largest < 1 << (8 * width))
    return steps.astype(f"<u{width}").tobytes()


def _runs(times_us: Indexes) -> tuple[bytes, bytes]:
    """Rows that were read together have one time: how many rows in a row, and their times."""
    begins = np.concatenate([[0], np.flatnonzero(np.diff(times_us)) + 1])
    counts = np.diff(np.append(begins, len(times_us)))
    return counts.astype("<u4").tobytes(), times_us[begins].astype("<i8").tobytes()


# reading


class SpilledBatch(NamedTuple):
    head: SpillHead
    previous_row_index: ShuffleIndex
    rows: pa.RecordBatch
    row_indexes: Indexes
    times_us: Indexes


def decode_heads(found: pa.Table, begin: int) -> list[SpillHead]:
    """Where the spilled batches end that were read from position ``begin`` on."""
    names = ("last_row_index", "rows_before", "rows", "bytes_before", "bytes")
    return [
        SpillHead(begin + at, ShuffleIndex(last), rows_before + rows, bytes_before + nbytes)
        for at, (last, rows_before, rows, bytes_before, nbytes) in enumerate(
            zip(*(found[name].to_pylist() for name in names), strict=True)
        )
    ]


def decode_batch(found: pa.Table, at: int, head: SpillHead) -> SpilledBatch:
    """The spilled batch in row ``at``; uncompressed ones are not copied."""
    rows = pa.ipc.open_stream(found["batch"][at].as_buffer()).read_next_batch()
    first = found["first_row_index"][at].as_py()
    indexes = _indexes(first, rows.num_rows, found["index_steps"][at].as_py())
    if rows.num_rows != found["rows"][at].as_py() or int(indexes[-1]) != head.last_row_index:
        raise CorruptData(
            f"spilled batch {head.position} says {found['rows'][at].as_py()} rows up to {head.last_row_index}, and has "
            f"{rows.num_rows} up to {int(indexes[-1])}",
            position=head.position,
        )
    runs = (np.frombuffer(found[name][at].as_py(), kind) for name, kind in (("times_us", "<i8"), ("time_rows", "<u4")))
    return SpilledBatch(head, ShuffleIndex(found["previous_row_index"][at].as_py()), rows, indexes, np.repeat(*runs))


def _indexes(first: int, rows: int, steps: bytes) -> Indexes:
    indexes = np.empty(rows, np.int64)
    indexes[0] = first
    if rows > 1:
        width = len(steps) // (rows - 1)
        np.cumsum(np.frombuffer(steps, f"<u{width}"), out=indexes[1:])
        indexes[1:] += first
    return indexes


class SpillAnswer:
    """The answer to one GetRows, out of spilled batches that are given in their order."""

    def __init__(self, read: SpillRead, bytes_max: int) -> None:
        self._read = read
        self._cursor = read.cursor
        self._rows_left = read.max_rows
        self._bytes_left = min(read.max_bytes, bytes_max)
        self.served: list[ServedBatch] = []

    def add(self, batch: SpilledBatch) -> bool:
        """Takes what fits of ``batch``; whether the next one is wanted too.

        A batch that does not continue at the cursor ends the answer; if nothing has been taken yet, rows are missing
        that the reducer has not committed by what it says of itself, and that is an error: they are never skipped.
        """
        if self._cursor < batch.previous_row_index:
            if not self.served:
                raise self._gone(batch.previous_row_index)
            return False
        begin = int(np.searchsorted(batch.row_indexes, self._cursor, side="right"))
        end = len(batch.row_indexes)
        if self._read.to_row_index is not None:
            end = int(np.searchsorted(batch.row_indexes, self._read.to_row_index, side="right"))
        wanted = min(end - begin, self._rows_left)
        if wanted <= 0:
            return False
        rows = fit(batch.rows.slice(begin, wanted), self._bytes_left)
        if rows.num_rows == 0:
            if self.served:
                return False
            rows = batch.rows.slice(begin, 1)  # A bound that no answer can keep would stop the reducer.
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
