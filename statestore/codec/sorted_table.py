"""A sorted table from the client's side: typed rows in, encoded keys and values out, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.errors import BadInput
from shuffle.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import Binary, longest_of, to_array, to_numpy, with_prefix
from shuffle.statestore.codec.constraints import TableConstraints
from shuffle.statestore.codec.keys import KeyCodec, bytes_after, table_prefix
from shuffle.statestore.codec.schema import TableSchema
from shuffle.statestore.codec.small_batch import SMALL_BATCH_ROWS_MAX, SmallKeyCodec, SmallValueCodec
from shuffle.statestore.codec.values import RowCodec

Bound = Mapping[str, Any] | Sequence[Any]


class Table:
    """The codecs of one table. Keys begin with the table's prefix, which keeps tables apart in one ordered map."""

    def __init__(self, schema: TableSchema) -> None:
        self.schema = schema
        self.table_id = schema.table_id
        self._prefix = table_prefix(schema.table_id)
        self._keys = KeyCodec(schema.name, schema.key)
        self._values = RowCodec(schema.name, schema.value)
        self._small_keys = SmallKeyCodec(schema.key)
        self._small_values = SmallValueCodec(schema.value)
        self._constraints = TableConstraints(schema, self._values)

    def encode_keys(self, keys: pa.Table | pa.RecordBatch) -> tuple[pa.RecordBatch, Binary]:
        conformed = self.schema.conform_keys(keys)
        return conformed, self._encode_key_columns(conformed.columns)

    def encode_rows(self, rows: pa.Table | pa.RecordBatch) -> tuple[Binary, Binary]:
        columns = self.schema.row_columns(rows)
        width = len(self.schema.key)
        return self._encode_key_columns(columns[:width]), self._encode_value_columns(columns[width:], rows.num_rows)

    def _encode_key_columns(self, columns: list[pa.Array]) -> Binary:
        if len(columns[0]) <= SMALL_BATCH_ROWS_MAX:
            keys = self._small_keys.encode(columns, self._prefix)
            if longest_of(keys) <= KEY_BYTES_MAX:
                return keys
        return with_prefix(self._keys.encode_columns(columns), self._prefix)

    def _encode_value_columns(self, columns: list[pa.Array], count: int) -> Binary:
        if count <= SMALL_BATCH_ROWS_MAX:
            values = self._small_values.encode(columns, count)
            if longest_of(values) <= VALUE_BYTES_MAX:
                return values
        return self._values.encode_columns(columns, count)

    def check(self, values: Binary) -> None:
        """Raises ``ConstraintViolated`` where the store would."""
        self._constraints.check(values)

    def decode_rows(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.RecordBatch:
        arrays = [*self._keys.decode(keys, skip_bytes=len(self._prefix)), *self._values.decode(values)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema.row)

    def decode_lookup(self, keys: pa.RecordBatch, values: Binary) -> pa.Table:
        """The rows of a lookup: each of ``keys`` that has a value, with that value; the others are left out."""
        if isinstance(values, list):
            if None in values:
                keys = keys.filter(pa.array([value is not None for value in values], pa.bool_()))
                values = [value for value in values if value is not None]
        elif values.null_count:
            keys, values = keys.filter(values.is_valid()), values.drop_null()
        arrays = [*keys.columns, *self._decode_values(values)]
        return pa.Table.from_arrays(arrays, schema=self.schema.row)

    def _decode_values(self, values: Binary) -> list[pa.Array]:
        """The value columns of values without nulls."""
        if isinstance(values, list) and len(values) <= SMALL_BATCH_ROWS_MAX:
            columns = self._small_values.decode(values)
            if columns is not None:
                return columns
        return self._values.decode(to_array(values))

    def decode_values(self, values: Binary) -> pa.Table:
        """The value columns of a lookup, a row for each of its keys; null where there is no value."""
        values = to_array(values)
        columns = self._values.decode(values.drop_null() if values.null_count else values)
        if values.null_count:
            present = to_numpy(values.is_valid()).view(np.bool_)
            places = pa.array(np.cumsum(present) - 1, mask=~present)
            columns = [column.take(places) for column in columns]
        fields = [field.with_nullable(True) for field in self.schema.value]
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))

    def range(
        self, begin: Bound | None, end: Bound | None, prefix: Bound | None, partial: bool = False
    ) -> tuple[bytes, bytes | None]:
        """The encoded bounds of a range, begin and end: the fields of a ``KeyRange``.

        ``begin`` (inclusive) and ``end`` (exclusive) are leading key values; ``prefix`` stands for both.
        """
        if prefix is not None:
            if begin is not None or end is not None:
                raise BadInput("give either prefix, or begin and end", table=self.schema.name)
            low, high = self._keys.prefix_range(prefix, partial=partial)
        else:
            low = self._keys.encode_prefix(begin) if begin is not None else b""
            high = self._keys.encode_prefix(end) if end is not None else None
        return self._prefix + low, self._prefix + high if high is not None else bytes_after(self._prefix)
