"""Which reducer a row goes to, and the rows of each reducer as batches of their own.

    key columns -> xxhash64 -> key group -> reducer

A *key group* is ``pmod(xxhash64(key columns), max_parallelism)``, with Spark SQL's functions of these names, so a Spark
query can tell where a row lives. Reducers own contiguous ranges of key groups: when their number changes, whole ranges
move and no row is hashed again. ``max_parallelism`` is therefore fixed for the life of a streaming processor's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.api import PartitionedRowset
from shuffle.errors import BadInput, SchemaMismatch, TooLarge
from shuffle.ids import ReducerIndex
from shuffle.limits import KEY_GROUPS_DEFAULT
from shuffle.partition.hash_cache import ROWS_MIN, KeyMemo, memorable
from shuffle.partition.xxhash64 import hashable, xxhash64
from shuffle.support.suggest import did_you_mean

KEY_GROUPS_MAX = 32768
"""A key group fits 16 bits: what Flink allows, too."""

_DIRECT_BUCKETS_MAX = 3
"""Up to here a gather per bucket is cheapest; with more, its random reads cost more than one gather and a copy."""

_CHUNK_ROWS_MIN = 1 << 18
"""Chunks smaller than this on average are joined before hashing: values that repeat are hashed once for a chunk, and
the key columns are a small part of a row."""

Indexes = np.ndarray[Any, np.dtype[Any]]


def key_groups(rows: pa.Table, by: Sequence[str], max_parallelism: int = KEY_GROUPS_DEFAULT) -> Indexes:
    """The key group of each row: ``pmod(xxhash64(by…), max_parallelism)``, as int64."""
    _check_max_parallelism(max_parallelism)
    hashes, codes = _hashes(_key_columns(rows, by))
    groups = _groups_of(hashes, max_parallelism)
    return groups if codes is None else groups.take(codes)


def _groups_of(hashes: Indexes, max_parallelism: int) -> Indexes:
    if max_parallelism & (max_parallelism - 1) == 0:
        return hashes & np.int64(max_parallelism - 1)
    return hashes % np.int64(max_parallelism)


def _hashes(keys: pa.Table) -> tuple[Indexes, Indexes | None]:
    """Hashes of the keys, and for each row which of them is its own; ``None``: there is one for each row."""
    if _has_small_chunks(keys):
        keys = keys.combine_chunks()
    batches = keys.to_batches()
    if len(batches) == 1 and keys.num_rows >= ROWS_MIN:
        memo = _memo_of(keys.schema)
        found = None if memo is None else memo.find(batches[0].columns)
        return found or (xxhash64(batches[0].columns), None)
    parts = [xxhash64(batch.columns) for batch in batches]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts]), None


def _has_small_chunks(keys: pa.Table) -> bool:
    chunks: int = max(column.num_chunks for column in keys.columns)
    return chunks > 1 and keys.num_rows < _CHUNK_ROWS_MIN * chunks


@lru_cache(maxsize=16)
def _memo_of(keys: pa.Schema) -> KeyMemo | None:
    """What is remembered of these key columns; a worker has one list of them."""
    return KeyMemo() if all(memorable(field.type) for field in keys) else None


def reducer_of_key_group(key_group: int, reducers: int, max_parallelism: int = KEY_GROUPS_DEFAULT) -> ReducerIndex:
    _check_reducers(reducers, max_parallelism)
    if not 0 <= key_group < max_parallelism:
        raise BadInput(f"there is no key group {key_group}: they go from 0 to {max_parallelism - 1}")
    return ReducerIndex(key_group * reducers // max_parallelism)


def key_group_range(reducer: int, reducers: int, max_parallelism: int = KEY_GROUPS_DEFAULT) -> range:
    """The key groups that a reducer owns; together the reducers own each key group once."""
    _check_reducers(reducers, max_parallelism)
    if not 0 <= reducer < reducers:
        raise BadInput(f"there is no reducer {reducer}: they go from 0 to {reducers - 1}")
    return range(-(-reducer * max_parallelism // reducers), -(-(reducer + 1) * max_parallelism // reducers))


def hash_partition(
    rows: pa.Table, by: Sequence[str], reducers: int, max_parallelism: int = KEY_GROUPS_DEFAULT
) -> PartitionedRowset:
    """Sends each row to the reducer that owns the key group of its columns ``by``; a null is a value like any other."""
    _check_reducers(reducers, max_parallelism)
    keys = _key_columns(rows, by)
    if _has_small_chunks(keys):
        # The rows of each reducer will be gathered from one piece anyway; so the key columns are joined only once.
        rows = rows.combine_chunks()
        keys = rows.select(keys.column_names)
    hashes, codes = _hashes(keys)
    owners = _reducers_by_key_group(reducers, max_parallelism).take(_groups_of(hashes, max_parallelism))
    return PartitionedRowset(rows, owners if codes is None else owners.take(codes))


def split_by_partition(
    rows: pa.Table, partition_indexes: Indexes, reducers: int
) -> list[tuple[pa.RecordBatch | None, Indexes]]:
    """For each reducer, its rows as one record batch (``None``: none) and their positions in ``rows``, ascending.

    The order of the rows is kept. No two batches share memory, so dropping one bucket's batch frees it, whoever still
    holds the others.
    """
    narrow = _checked_indexes(partition_indexes, rows, reducers)
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


def _part(batch: pa.RecordBatch, positions: Indexes) -> tuple[pa.RecordBatch | None, Indexes]:
    if not len(positions):
        return None, positions
    return (batch if len(positions) == batch.num_rows else _gather(batch, positions)), positions


def _gather(batch: pa.RecordBatch, positions: Indexes) -> pa.RecordBatch:
    # The positions were made here, each of a row, so they need not be looked at again.
    return pc.take(batch, pa.array(positions), boundscheck=False)


def _checked_indexes(partition_indexes: Indexes, rows: pa.Table, reducers: int) -> Indexes:
    """The indexes in as few bits as they fit."""
    _check_reducers(reducers, KEY_GROUPS_MAX)
    if len(partition_indexes) != rows.num_rows:
        raise BadInput(f"{rows.num_rows} rows but {len(partition_indexes)} partition indexes")
    if len(partition_indexes) and not 0 <= partition_indexes.min() <= partition_indexes.max() < reducers:
        row = int(np.flatnonzero((partition_indexes < 0) | (partition_indexes >= reducers))[0])
        index = int(partition_indexes[row])
        raise BadInput(
            f"map sent row {row} of its result to reducer {index}, but the reducers go from 0 to {reducers - 1}",
            row=row,
            index=index,
        )
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


def _key_columns(rows: pa.Table, by: Sequence[str]) -> pa.Table:
    if isinstance(by, str) or not by:
        raise BadInput(f"hash_partition needs a list of key columns, not {by!r}")
    for name in by:
        found = rows.schema.get_all_field_indices(name)
        if len(found) != 1:
            hint = did_you_mean(name, rows.column_names, f"; there are {', '.join(rows.column_names)}")
            problem = f"has no column {name!r} to partition by{hint}" if not found else f"has two columns {name!r}"
            raise SchemaMismatch(f"the rowset {problem}", column=name)
        kind = rows.schema.field(found[0]).type
        if not hashable(kind):
            raise BadInput(f"cannot partition by column {name!r}: Spark's xxhash64 does not hash {kind}", column=name)
    return rows.select(list(by))


def _check_max_parallelism(max_parallelism: int) -> None:
    if not 1 <= max_parallelism <= KEY_GROUPS_MAX:
        raise BadInput(f"max_parallelism must be from 1 to {KEY_GROUPS_MAX}, not {max_parallelism}")


def _check_reducers(reducers: int, max_parallelism: int) -> None:
    _check_max_parallelism(max_parallelism)
    if not 1 <= reducers <= max_parallelism:
        raise BadInput(
            f"{reducers} reducers cannot share {max_parallelism} key groups: from 1 to {max_parallelism} reducers can"
        )


@lru_cache(maxsize=16)
def _reducers_by_key_group(reducers: int, max_parallelism: int) -> Indexes:
    owners = np.arange(max_parallelism, dtype=np.int64) * reducers // max_parallelism
    owners = owners.astype(np.uint8 if reducers <= 256 else np.uint16)
    owners.flags.writeable = False
    return owners
