"""The hashes of key values that come again and again: found by value instead of computed.

Keys repeat: users, clusters, devices. Of each key column the cache keeps the values that it has seen, and of all of
them together one hash for every combination. A batch is then looked up, column by column, and only what is new in it is
hashed. What comes out is the same hash in every case: the cache saves time and decides nothing.

Where keys do not repeat enough for that, the cache says so, and leaves the next batches alone for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.partition.xxhash64 import repeats, xxhash64

ROWS_MIN = 8192
"""Smaller batches are not for the cache: there is little to find again, and looking up costs more than hashing."""

COMBINATIONS_MAX = 1 << 18
"""Of key values whose hashes are kept: 2 MiB of them."""

_ROWS_PER_COMBINATION = 4
"""A batch must have so many rows for each combination that is kept: each batch looks through all known values."""

_PAUSE_BATCHES = 64
"""How many batches go by before a cache that did not pay is tried again."""

Hashes = np.ndarray[Any, np.dtype[np.int64]]
Codes = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class _Known:
    """Values by column, and the hashes of their combinations: the last column's value changes fastest."""

    values: list[pa.Array]
    hashes: Hashes


class HashCache:
    """For one list of key columns. Threads may share it: at worst they learn the same values twice."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._pause = 0

    def find(self, columns: list[pa.Array]) -> tuple[Hashes, Codes] | None:
        """Hashes, and for each row which of them is its own; ``None`` if it is better to hash the rows."""
        if self._pause > 0:
            self._pause -= 1
            return None
        found = self._look_up(columns, min(len(columns[0]) // _ROWS_PER_COMBINATION, COMBINATIONS_MAX))
        if found is None:
            self._known, self._pause = None, _PAUSE_BATCHES
        return found

    def _look_up(self, columns: list[pa.Array], combinations_max: int) -> tuple[Hashes, Codes] | None:
        known = self._known
        if known is None and not all(repeats(column) for column in columns):
            return None
        before = [column.slice(0, 0) for column in columns] if known is None else known.values
        looked_up = [_codes(column, values) for column, values in zip(columns, before, strict=True)]
        values = [now for _, now in looked_up]
        sizes = [len(now) for now in values]
        if math.prod(sizes) > combinations_max:
            return None
        if known is None or any(now is not then for now, then in zip(values, before, strict=True)):
            self._known = known = _Known(values, _hash_combinations(values))
        combined = looked_up[0][0]
        for (codes, _), size in zip(looked_up[1:], sizes[1:], strict=True):
            combined = combined * np.int32(size) + codes
        return known.hashes, combined


def cacheable(kind: pa.DataType) -> bool:
    """Whether values of this type can be looked up: equal ones, and no others, have the same bytes."""
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_integer(kind)
        or types.is_timestamp(kind)
        or types.is_date32(kind)
    )


def _codes(column: pa.Array, values: pa.Array) -> tuple[Codes, pa.Array]:
    """For each row the place of its value in ``values``, which are the same array unless some had to be added."""
    codes = pc.index_in(column, value_set=values)
    if codes.null_count:
        is_new = codes.is_null()
        unknown = column.filter(is_new)
        values = pa.concat_arrays([values, unknown.unique()])
        codes = pc.replace_with_mask(codes, is_new, pc.index_in(unknown, value_set=values))
    return codes.to_numpy(), values


def _hash_combinations(values: list[pa.Array]) -> Hashes:
    columns = []
    below = math.prod(len(each) for each in values)
    above = 1
    for each in values:
        below //= max(len(each), 1)
        places = np.tile(np.repeat(np.arange(len(each), dtype=np.int32), below), above)
        columns.append(each.take(pa.array(places)))
        above *= len(each)
    return xxhash64(columns)
