"""Computes which reducer a row goes to.

    key columns -> xxhash64 -> key group -> reducer

A *key group* is ``pmod(xxhash64(key columns), max_parallelism)``, with Spark SQL's functions of these names, so a Spark
query can compute which reducer a row goes to. Reducers own contiguous ranges of key groups: when their number changes,
whole ranges move and no row is hashed again. ``max_parallelism`` is therefore fixed for the life of a streaming
processor's state.

``key_groups``, ``reducer_of_key_group`` and ``key_group_range`` are public, because Spark users need them to find the
reducer that holds a key, and so does whoever changes the number of reducers, to find out which key groups move.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.api import PartitionedRowset
from shuffle.errors import BadInput, SchemaMismatch
from shuffle.ids import ReducerIndex
from shuffle.limits import KEY_GROUPS_DEFAULT
from shuffle.partition.hash_cache import ROWS_MIN, HashCache, cacheable
from shuffle.partition.xxhash64 import hashable, xxhash64
from shuffle.support.native import address_of, kernels
from shuffle.support.suggest import did_you_mean

KEY_GROUPS_MAX = 32768
"""The most key groups of a processor, so that a key group fits into 16 bits. Flink has the same limit."""

_CHUNK_ROWS_MIN = 1 << 18
"""Chunks with fewer rows than this on average are joined before hashing: values that repeat are hashed once for a
chunk, and the key columns are a small part of a row."""

_NATIVE_CHUNK_ROWS_MIN = 8192
"""The same with compiled kernels, which have no use for values that repeat. Below it, the calls for each chunk cost
more than joining them."""

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
    """Hashes of the keys, and for each row the index of its own; ``None`` if there is one hash for each row."""
    if _has_small_chunks(keys):
        keys = keys.combine_chunks()
    batches = keys.to_batches()
    if len(batches) == 1 and keys.num_rows >= ROWS_MIN and kernels() is None:
        cache = _cache_of(keys.schema)
        cached = None if cache is None else cache.find(batches[0].columns)
        return cached or (xxhash64(batches[0].columns), None)
    parts = [xxhash64(batch.columns) for batch in batches]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts]), None


def _has_small_chunks(keys: pa.Table) -> bool:
    chunks: int = max(column.num_chunks for column in keys.columns)
    return chunks > 1 and keys.num_rows < (_CHUNK_ROWS_MIN if kernels() is None else _NATIVE_CHUNK_ROWS_MIN) * chunks


@lru_cache(maxsize=16)
def _cache_of(keys: pa.Schema) -> HashCache | None:
    """The cache for these key columns (a worker has one list of them); ``None`` if their types cannot be cached."""
    return HashCache() if all(cacheable(field.type) for field in keys) else None


def reducer_of_key_group(key_group: int, reducers: int, max_parallelism: int = KEY_GROUPS_DEFAULT) -> ReducerIndex:
    """The reducer that owns a key group when there are ``reducers`` of them."""
    check_reducers(reducers, max_parallelism)
    if not 0 <= key_group < max_parallelism:
        raise BadInput(f"there is no key group {key_group}: they go from 0 to {max_parallelism - 1}")
    return ReducerIndex(key_group * reducers // max_parallelism)


def key_group_range(reducer: int, reducers: int, max_parallelism: int = KEY_GROUPS_DEFAULT) -> range:
    """The key groups that a reducer owns; together the reducers own each key group once."""
    check_reducers(reducers, max_parallelism)
    if not 0 <= reducer < reducers:
        raise BadInput(f"there is no reducer {reducer}: they go from 0 to {reducers - 1}")
    return range(-(-reducer * max_parallelism // reducers), -(-(reducer + 1) * max_parallelism // reducers))


def hash_partition(
    rows: pa.Table, by: Sequence[str], reducers: int, max_parallelism: int = KEY_GROUPS_DEFAULT
) -> PartitionedRowset:
    """Sends each row to the reducer that owns the key group of its columns ``by``; a null is a value like any other."""
    check_reducers(reducers, max_parallelism)
    keys = _key_columns(rows, by)
    if _has_small_chunks(keys):
        # The rows of each reducer will be gathered from one piece anyway; so the key columns are joined only once.
        rows = rows.combine_chunks()
        keys = rows.select(keys.column_names)
    hashes, codes = _hashes(keys)
    owners = _owners(hashes, reducers, max_parallelism)
    return PartitionedRowset(rows, owners if codes is None else owners.take(codes))


def _owners(hashes: Indexes, reducers: int, max_parallelism: int) -> Indexes:
    """The reducer of each hash."""
    by_group = _reducers_by_key_group(reducers, max_parallelism)
    library = kernels()
    if library is None:
        return by_group.take(_groups_of(hashes, max_parallelism))
    owners = np.empty(len(hashes), by_group.dtype)
    kernel = library.owners_8 if owners.itemsize == 1 else library.owners_16
    kernel(address_of(hashes), len(hashes), max_parallelism, address_of(by_group), address_of(owners))
    return owners


def _key_columns(rows: pa.Table, by: Sequence[str]) -> pa.Table:
    if isinstance(by, str) or not by:
        raise BadInput(f"hash_partition needs a list of key columns, not {by!r}")
    for name in by:
        matches = rows.schema.get_all_field_indices(name)
        if len(matches) != 1:
            hint = did_you_mean(name, rows.column_names, f"; there are {', '.join(rows.column_names)}")
            problem = f"has no column {name!r} to partition by{hint}" if not matches else f"has two columns {name!r}"
            raise SchemaMismatch(f"the rowset {problem}", column=name)
        data_type = rows.schema.field(matches[0]).type
        if not hashable(data_type):
            raise BadInput(
                f"cannot partition by column {name!r}: Spark's xxhash64 does not hash {data_type}", column=name
            )
    return rows.select(list(by))


def _check_max_parallelism(max_parallelism: int) -> None:
    if not 1 <= max_parallelism <= KEY_GROUPS_MAX:
        raise BadInput(f"max_parallelism must be from 1 to {KEY_GROUPS_MAX}, not {max_parallelism}")


def check_reducers(reducers: int, max_parallelism: int) -> None:
    """Raises ``BadInput`` unless each of the reducers can own at least one key group."""
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
