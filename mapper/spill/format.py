"""What spilled rows look like in their queue: encoding and decoding.

When the front of the window is held by stragglers only, their rows move to a queue of the state store, and the window
moves on. Each (mapper, reducer) has a partition of its own; a row of it is one *spilled batch*: rows of the reducer as
an Arrow stream, and their shuffle indexes. Together with the batches a row of the table ``<processor>/spills`` is
written that says where they end, and the mapper's state behind them: one transaction, so that each row of a reducer is
either in its spill or will be mapped again, and never both.

What is before the persisted state and not committed is in the spill; what is after it is in the window.

No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shuffle.durable.spill_ends import SpillEnd
from shuffle.errors import CorruptData
from shuffle.ids import NOTHING_COMMITTED, ShuffleIndex
from shuffle.limits import MIB
from shuffle.spec.config import Compression

BATCH_BYTES = 2 * MIB
"""The approximate number of bytes of the rows in one spilled batch. It is read, decompressed and trimmed as a whole."""

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
"""The schema of the queues of spilled batches.

``previous_row_index`` is the reducer's last row before this batch that is either in the spill or, as far as was known
then, committed: a reader whose cursor is before it has lost rows. ``first_row_index`` and ``last_row_index`` are the
shuffle indexes of the first and the last row. ``rows`` and ``bytes`` are the numbers of rows and of their bytes in
memory. ``rows_before`` and ``bytes_before`` are the sums of these over all batches that were ever spilled before this
one for this mapper and reducer. ``index_steps`` has the differences between the shuffle indexes of neighbouring rows,
as unsigned numbers of 1, 2, 4 or 8 bytes (the width follows from the length). ``times_us`` has the times at which rows
were read, as numbers of 8 bytes, each for as many rows as ``time_rows`` says, in numbers of 4 bytes. ``batch`` is an
Arrow stream with one record batch."""

Indexes = np.ndarray[Any, np.dtype[np.int64]]
"""Shuffle indexes, or times in microseconds since 1970, one for each row."""


class SpillPart(NamedTuple):
    """Rows of one reducer that are to be spilled, with the shuffle index of each and the time at which it was read."""

    rows: pa.RecordBatch
    row_indexes: Indexes
    times_us: Indexes


class SpillHead(NamedTuple):
    """The position of one spilled batch, and where it ends."""

    position: int
    """The position of the batch in the queue."""
    last_row_index: ShuffleIndex
    rows_after: int
    """The number of rows ever spilled for this mapper and reducer, up to the end of this batch."""
    bytes_after: int
    """The number of bytes of those rows."""


# writing


def encode(
    parts: Sequence[SpillPart], before: SpillEnd, freed: ShuffleIndex, compression: Compression, since_ms: int
) -> tuple[pa.Table, SpillEnd]:
    """``parts`` as spilled batches that follow upon ``before``, and the end behind them.

    ``freed`` is the last row of the reducer that is in neither the window nor the spill, because it is committed.
    ``since_ms`` is the time at which this spill was begun.
    """
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    columns: dict[str, list[Any]] = {field.name: [] for field in SPILL_SCHEMA}
    end = before
    for rows, indexes, times in _sized(parts):
        first, last = int(indexes[0]), int(indexes[-1])
        stored, steps = _stream(rows, options), _steps(indexes)
        time_rows, times_us = _runs(times)
        previous = max(end.last_row_index, freed if freed < first else NOTHING_COMMITTED)
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
    """The same rows in batches of about ``BATCH_BYTES``: small adjacent parts are joined, large ones cut."""
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
    # A copy, since Arrow never releases a memoryview that an array was made of.
    return bytes(sink.getvalue())


def _steps(indexes: Indexes) -> bytes:
    steps = np.diff(indexes)
    largest = int(steps.max(initial=1))
    width = next(width for width in (1, 2, 4, 8) if largest < 1 << (8 * width))
    return steps.astype(f"<u{width}").tobytes()


def _runs(times_us: Indexes) -> tuple[bytes, bytes]:
    """The times as runs, since rows that were read together have one time: the length of each run, and its time."""
    begins = np.concatenate([[0], np.flatnonzero(np.diff(times_us)) + 1])
    counts = np.diff(np.append(begins, len(times_us)))
    return counts.astype("<u4").tobytes(), times_us[begins].astype("<i8").tobytes()


# reading


class SpilledBatch(NamedTuple):
    """One spilled batch, decoded."""

    head: SpillHead
    previous_row_index: ShuffleIndex
    rows: pa.RecordBatch
    row_indexes: Indexes
    times_us: Indexes


def decode_heads(stored: pa.Table, begin: int) -> list[SpillHead]:
    """The heads of the spilled batches that were read from position ``begin`` on."""
    names = ("last_row_index", "rows_before", "rows", "bytes_before", "bytes")
    return [
        SpillHead(begin + at, ShuffleIndex(last), rows_before + rows, bytes_before + nbytes)
        for at, (last, rows_before, rows, bytes_before, nbytes) in enumerate(
            zip(*(stored[name].to_pylist() for name in names), strict=True)
        )
    ]


def decode_batch(stored: pa.Table, at: int, head: SpillHead) -> SpilledBatch:
    """The spilled batch in row ``at`` of ``stored``; uncompressed ones are not copied."""
    rows = pa.ipc.open_stream(stored["batch"][at].as_buffer()).read_next_batch()
    first = stored["first_row_index"][at].as_py()
    indexes = _indexes(first, rows.num_rows, stored["index_steps"][at].as_py())
    expected_rows = stored["rows"][at].as_py()
    if rows.num_rows != expected_rows or int(indexes[-1]) != head.last_row_index:
        raise CorruptData(
            f"spilled batch {head.position} says {expected_rows} rows up to {head.last_row_index}, and has "
            f"{rows.num_rows} up to {int(indexes[-1])}",
            position=head.position,
        )
    types = (("times_us", "<i8"), ("time_rows", "<u4"))
    runs = (np.frombuffer(stored[name][at].as_py(), dtype) for name, dtype in types)
    return SpilledBatch(head, ShuffleIndex(stored["previous_row_index"][at].as_py()), rows, indexes, np.repeat(*runs))


def _indexes(first: int, rows: int, steps: bytes) -> Indexes:
    indexes = np.empty(rows, np.int64)
    indexes[0] = first
    if rows > 1:
        width = len(steps) // (rows - 1)
        np.cumsum(np.frombuffer(steps, f"<u{width}"), out=indexes[1:])
        indexes[1:] += first
    return indexes
