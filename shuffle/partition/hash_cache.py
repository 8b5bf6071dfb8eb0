"""A cache of the hashes of key values that repeat: they are looked up by value instead of computed.

Keys repeat: users, clusters, devices. For each key column the cache keeps the values that it has seen, and for all key
columns together one hash for every combination of values. A batch is then looked up, column by column, and only new
values in it are hashed. The hashes are the same with and without the cache; it only saves time.

Where keys do not repeat enough for that, the cache returns None, and is not used for the next batches.
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
"""The fewest rows of a batch for which the cache is used: in smaller ones little repeats, and a lookup costs more than
hashing."""

COMBINATIONS_MAX = 1 << 18
"""The most combinations of key values whose hashes are kept: 2 MiB of hashes."""

_ROWS_PER_COMBINATION = 4
"""The fewest rows that a batch must have for each combination that is kept, since the lookup of each batch goes through
all known values."""

_PAUSE_BATCHES = 64
"""The number of batches before a cache that did not pay off is tried again."""

Hashes = np.ndarray[Any, np.dtype[np.int64]]
Codes = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class _Known:
    """The known values of each column, and the hashes of their combinations, ordered so that the value of the last
    column changes fastest."""

    values: list[pa.Array]
    hashes: Hashes


class HashCache:
    """The cache for one list of key columns. Threads may share it: at worst they hash the same values twice."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._pause = 0

    def find(self, columns: list[pa.Array]) -> tuple[Hashes, Codes] | None:
        """The known hashes, and for each row the index of its own; ``None`` if it is better to hash the rows."""
        if self._pause > 0:
            self._pause -= 1
            return None
        result = self._look_up(columns, min(len(columns[0]) // _ROWS_PER_COMBINATION, COMBINATIONS_MAX))
        if result is None:
            self._known, self._pause = None, _PAUSE_BATCHES
        return result

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


def cacheable(data_type: pa.DataType) -> bool:
    """Whether values of this type can be looked up: equal values, and no others, have the same bytes."""
    types = pa.types
    return bool(
        types.is_string(data_type)
        or types.is_binary(data_type)
        or types.is_integer(data_type)
        or types.is_timestamp(data_type)
        or types.is_date32(data_type)
    )


def _codes(column: pa.Array, values: pa.Array) -> tuple[Codes, pa.Array]:
    """For each row the index of its value in ``values``, and ``values`` with new ones added: the same array if there
    are none."""
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
        indexes = np.tile(np.repeat(np.arange(len(each), dtype=np.int32), below), above)
        columns.append(each.take(pa.array(indexes)))
        above *= len(each)
    return xxhash64(columns)
