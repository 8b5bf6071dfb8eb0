"""The state of an ``AggregateReducer`` between batches: the rows of its table that its commits have written.

Rows are found by an index over their encoded keys, and are changed in place, so that a batch costs what it touches and
not what there is. Only columns of a fixed width can be held; a table with others is looked up instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from shuffle.statestore.codec.arrow_bytes import NumpyArray, from_numpy, nulls_of, storage_dtype, to_numpy, validity_of
from shuffle.statestore.codec.byte_rows import ByteRows, Growing
from shuffle.statestore.codec.column_types import is_text_or_bytes
from shuffle.statestore.codec.key_hash import hash_keys
from shuffle.statestore.codec.key_index import KeyIndex
from shuffle.statestore.codec.keys import KeyCodec


class _Column:
    """One column of the state: its values, and where they are null."""

    def __init__(self, data_type: pa.DataType) -> None:
        self._type = data_type
        self.values = Growing(storage_dtype(data_type))
        self.nulls = Growing("?")

    @property
    def size_bytes(self) -> int:
        return self.values.size_bytes + self.nulls.size_bytes

    def at(self, rows: NumpyArray, others: pa.Array | None, unknown: NumpyArray) -> pa.Array:
        """The values of ``rows``, and in their order those of ``others`` where the row is unknown."""
        values = self.values.filled.take(rows) if len(rows) else np.zeros(0, self.values.filled.dtype)
        nulls = self.nulls.filled.take(rows) if len(rows) else np.zeros(0, np.bool_)
        if others is not None:
            all_values = np.zeros(len(unknown), values.dtype)
            all_nulls = np.zeros(len(unknown), np.bool_)
            all_values[~unknown], all_nulls[~unknown] = values, nulls
            other_nulls = nulls_of(others)
            all_values[unknown] = to_numpy(others)
            all_nulls[unknown] = False if other_nulls is None else other_nulls
            values, nulls = all_values, all_nulls
        return from_numpy(values, self._type, validity_of(nulls))

    def put(self, rows: NumpyArray, known: NumpyArray, column: pa.Array) -> None:
        """Set the values of ``rows``, and add those that are not known yet."""
        values, nulls = to_numpy(column), nulls_of(column)
        nulls = np.zeros(len(column), np.bool_) if nulls is None else nulls
        self.values.filled[rows] = values[known]
        self.nulls.filled[rows] = nulls[known]
        self.values.extend(values[~known])
        self.nulls.extend(nulls[~known])


class Found:
    """The keys of a batch, and which row of the held state each of them has."""

    __slots__ = ("encoded", "hashes", "rows", "unknown")

    def __init__(self, encoded: pa.BinaryArray, hashes: NumpyArray, rows: NumpyArray) -> None:
        self.encoded = encoded
        self.hashes = hashes
        self.rows = rows
        self.unknown = rows < 0


class HeldState:
    """Rows by key, in memory. Once they take ``bytes_max``, no further keys are added; those that are there stay."""

    def __init__(self, key: pa.Schema, fields: Sequence[pa.Field], bytes_max: int) -> None:
        self._codec = KeyCodec("", key)
        self._columns = [_Column(field.type) for field in fields]
        self._bytes_max = bytes_max
        self._keys = ByteRows()
        self._hashes = Growing("<u8")
        self._index = KeyIndex()

    @staticmethod
    def can_hold(fields: Sequence[pa.Field]) -> bool:
        return not any(is_text_or_bytes(field.type) for field in fields)

    def __len__(self) -> int:
        return self._keys.count

    @property
    def size_bytes(self) -> int:
        columns = sum(column.size_bytes for column in self._columns)
        return self._keys.size_bytes + self._hashes.size_bytes + self._index.size_bytes + columns

    def find(self, keys: pa.Table) -> Found:
        """Where the state has the keys of a batch, which are all different."""
        columns = [column.combine_chunks() for column in keys.columns]
        encoded = self._codec.encode_columns([_one_array(column) for column in columns])
        hashes = hash_keys(encoded)
        return Found(encoded, hashes, self._index.find(hashes, partial(self._have_keys, encoded)))

    def values(self, found: Found, others: Sequence[pa.Array] | None) -> list[pa.Array]:
        """The columns of the keys that were found, with those of ``others`` for the keys that are not held."""
        rows = found.rows if others is None else found.rows[~found.unknown]
        given: Sequence[pa.Array | None] = others if others is not None else [None] * len(self._columns)
        pairs = zip(self._columns, given, strict=True)
        return [column.at(rows, other, found.unknown) for column, other in pairs]

    def update(self, found: Found, columns: Sequence[pa.Array]) -> None:
        """The rows of the keys that were found are these now."""
        known = ~found.unknown
        rows = found.rows[known]
        if self.size_bytes >= self._bytes_max:
            columns = [column.filter(pa.array(known)) for column in columns]
            known = known[known]
        elif not known.all():
            self._add_keys(found)
        for held, column in zip(self._columns, columns, strict=True):
            held.put(rows, known, column)

    def _add_keys(self, found: Found) -> None:
        first = len(self)
        added = found.encoded.filter(pa.array(found.unknown))
        self._keys.extend(added)
        self._hashes.extend(found.hashes[found.unknown])
        hashes = self._hashes.filled
        self._index.put(hashes[first:], first, partial(self._have_keys, added), hashes)

    def _have_keys(self, keys: pa.BinaryArray, rows: NumpyArray, which: NumpyArray) -> NumpyArray:
        return self._keys.equal(rows, keys, which)


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)
