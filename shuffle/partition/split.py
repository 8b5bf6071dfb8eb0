"""The rows of a mapped batch, divided into one record batch for each reducer."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput, TooLarge
from shuffle.partition.key_group import KEY_GROUPS_MAX, Indexes, check_reducers
from shuffle.partition.native_split import NativeSplit
from shuffle.support.native import kernels

_DIRECT_BUCKETS_MAX = 3
"""The most reducers for which a gather per bucket is cheapest; with more, its random reads cost more than one gather
and a copy."""

NATIVE_ROWS_MIN = 8192
NATIVE_PART_MIN = 128
"""The fewest rows, in all and for each reducer, that are split by compiled kernels. Of fewer rows the calls cost more
than Arrow's own."""


def check_partition_indexes(partition_indexes: Indexes, reducers: int, who: str = "map") -> None:
    """Raises ``BadInput``, naming the first such row, if ``who`` has sent a row to a reducer that does not exist."""
    if not len(partition_indexes) or 0 <= partition_indexes.min() <= partition_indexes.max() < reducers:
        return
    row = int(np.flatnonzero((partition_indexes < 0) | (partition_indexes >= reducers))[0])
    index = int(partition_indexes[row])
    raise BadInput(
        f"{who} sent row {row} of its result to reducer {index}, but the reducers go from 0 to {reducers - 1}",
        row=row,
        index=index,
    )


def split_by_partition(
    rows: pa.Table, partition_indexes: Indexes, reducers: int
) -> list[tuple[pa.RecordBatch | None, Indexes]]:
    """For each reducer, its rows as one record batch (``None`` if it has none) and their ascending offsets in ``rows``.

    The order of the rows is kept. No two batches share memory, so dropping one bucket's batch frees it, whoever still
    holds the others.
    """
    narrow = _narrow_indexes(partition_indexes, rows, reducers)
    library = kernels()
    if library is not None and rows.num_columns and rows.num_rows >= max(NATIVE_ROWS_MIN, NATIVE_PART_MIN * reducers):
        native = NativeSplit(library, rows, narrow, reducers)
        if int(native.counts.max()) < rows.num_rows:  # Otherwise all rows are for one reducer, and stay as they are.
            return native.parts()
    batch = _one_batch(rows)
    if reducers <= _DIRECT_BUCKETS_MAX:
        return [_part(batch, np.flatnonzero(narrow == reducer).astype(np.uint32)) for reducer in range(reducers)]
    # numpy sorts 8 and 16 bits by radix, about six times as fast as wider integers.
    order = np.argsort(narrow, kind="stable").astype(np.uint32)
    counts = np.bincount(narrow, minlength=reducers)
    ends = np.cumsum(counts)
    used = np.flatnonzero(counts)
    parts: list[tuple[pa.RecordBatch | None, Indexes]] = [(None, order[:0]) for _ in range(reducers)]
    if len(used) == 1:
        parts[used[0]] = (batch, order)
        return parts
    gathered = _gather(batch, order)
    for reducer in used:
        begin, end = int(ends[reducer] - counts[reducer]), int(ends[reducer])
        # A slice would keep all of ``gathered`` alive; concat_arrays copies just its part.
        columns = [pa.concat_arrays([column.slice(begin, end - begin)]) for column in gathered.columns]
        parts[reducer] = (pa.RecordBatch.from_arrays(columns, schema=batch.schema), order[begin:end].copy())
    return parts


def _part(batch: pa.RecordBatch, row_offsets: Indexes) -> tuple[pa.RecordBatch | None, Indexes]:
    if not len(row_offsets):
        return None, row_offsets
    return (batch if len(row_offsets) == batch.num_rows else _gather(batch, row_offsets)), row_offsets


def _gather(batch: pa.RecordBatch, row_offsets: Indexes) -> pa.RecordBatch:
    # The offsets were computed here from the rows themselves, so their bounds need not be checked.
    return pc.take(batch, pa.array(row_offsets), boundscheck=False)


def _narrow_indexes(partition_indexes: Indexes, rows: pa.Table, reducers: int) -> Indexes:
    """The indexes, checked, in as few bits as they fit."""
    check_reducers(reducers, KEY_GROUPS_MAX)
    if len(partition_indexes) != rows.num_rows:
        raise BadInput(f"{rows.num_rows} rows but {len(partition_indexes)} partition indexes")
    check_partition_indexes(partition_indexes, reducers)
    return partition_indexes.astype(np.uint8 if reducers <= 256 else np.uint16, copy=False)


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    if not rows.num_columns:
        raise BadInput("map returned rows without columns")
    batches = rows.combine_chunks().to_batches()
    if len(batches) > 1:
        raise TooLarge(
            "a mapped batch has a column of more than 2 GiB: read fewer rows at a time, or split them in map"
        )
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=rows.schema)
