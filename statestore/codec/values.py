"""The value columns of a row as bytes.

    [ one bit per column, set where it is null ] [ fixed-width columns ] [ u32 length of each string or binary column ]
    [ the bytes of each string and binary column, one after the other ]

Everything is little-endian and packed. The bytes of a null are zero, so that equal rows have equal bytes. A table
without value columns has empty values. Everything is computed on whole columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.errors import CorruptData, TooLarge
from shuffle.limits import VALUE_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import (
    BINARY_BYTES_MAX,
    NumpyArray,
    as_binary,
    as_string,
    binary_scalar,
    bytes_of,
    data_of,
    equal_length,
    fits_precision,
    from_numpy,
    join,
    longest_of,
    nulls_of,
    offsets_of,
    pieces_at,
    records_at,
    rows_to_binary,
    storage_dtype,
    to_numpy,
    validity_of,
)
from shuffle.statestore.codec.column_types import is_text_or_bytes


def never_null(schema: pa.Schema) -> NumpyArray:
    """A mask of the null bits that are never set: those of columns that are not nullable, and the unused ones."""
    may_be = sum(1 << index for index, field in enumerate(schema) if field.nullable)
    size_bytes = (len(schema) + 7) // 8
    return np.frombuffer((~may_be & ((1 << 8 * size_bytes) - 1)).to_bytes(size_bytes, "little"), np.uint8)


class RowCodec:
    """Encodes and decodes the values of one table."""

    def __init__(self, table: str, schema: pa.Schema) -> None:
        self.table = table
        self.schema = schema
        self._text = [index for index, field in enumerate(schema) if is_text_or_bytes(field.type)]
        self._fixed = [index for index, field in enumerate(schema) if not is_text_or_bytes(field.type)]
        parts: list[Any] = [("nulls", "u1", ((len(schema) + 7) // 8,))] if len(schema) else []
        parts += [(str(index), storage_dtype(schema.field(index).type)) for index in self._fixed]
        parts += [(str(index), "<u4") for index in self._text]
        self._record = np.dtype(parts)
        self._width = self._record.itemsize
        self._never_null = never_null(schema)

    def encode_columns(self, columns: list[pa.Array], count: int) -> pa.Array:
        """One binary value for each of ``count`` rows, whose columns are exactly those of the schema."""
        if not len(self.schema):
            return pa.repeat(binary_scalar(b""), count)
        records = np.zeros(count, self._record)
        self._check_size(count * self._width + sum(bytes_of(columns[index]) for index in self._text))
        for index, column in enumerate(columns):
            values = np.diff(offsets_of(column)) if is_text_or_bytes(column.type) else to_numpy(column)
            records[str(index)] = values
            nulls = nulls_of(column)
            if nulls is not None:
                records[str(index)][nulls] = 0
                records["nulls"][:, index // 8] |= nulls.astype(np.uint8) << np.uint8(index % 8)
        values = join([rows_to_binary(records), *(as_binary(columns[index]) for index in self._text)])
        self._check_length(values)
        return values

    def decode(self, values: pa.Array) -> list[pa.Array]:
        """The value columns, in the order of the schema; ``CorruptData`` if the bytes are not what ``encode`` wrote."""
        if not len(self.schema):
            return []
        offsets, data = offsets_of(values), data_of(values)
        records = self._records(offsets, data)
        columns: list[pa.Array] = [None] * len(self.schema)
        for index in self._fixed:
            validity = self._validity(records, index)
            columns[index] = from_numpy(records[str(index)], self.schema.field(index).type, validity)
        if self._text:
            for index, pieces in self._payloads(records, offsets, data, self._text):
                columns[index] = self._finish_text(pieces, index, self._validity(records, index))
        return columns

    def check(self, values: pa.Array) -> None:
        """Raises ``CorruptData`` unless each value, none of them null, is what ``encode_columns`` makes of some row."""
        offsets, data = offsets_of(values), data_of(values)
        if not len(self.schema):
            if offsets[-1] != offsets[0]:
                raise self._corrupt(0, "has bytes, but its table has no value columns")
            return
        records = self._records(offsets, data)
        self._check_nulls(records)
        for index in self._fixed:
            data_type = self.schema.field(index).type
            column = records[str(index)]
            if pa.types.is_boolean(data_type) and column.max(initial=0) > 1:
                raise self._corrupt(int(column.argmax()), f"is not a row: {self.schema.names[index]!r} is no bool")
            if pa.types.is_decimal128(data_type) and not fits_precision(from_numpy(column, data_type)):
                raise self._corrupt(0, f"is not a row: {self.schema.names[index]!r} has too many digits")
        if self._text:
            strings = [index for index in self._text if pa.types.is_string(self.schema.field(index).type)]
            for index, pieces in self._payloads(records, offsets, data, strings):
                self._finish_text(pieces, index, None)

    def _check_nulls(self, records: NumpyArray) -> None:
        """Checks that only nullable columns are null, that unused bits are not set, and that nulls have zero bytes."""
        nulls = records["nulls"]
        if not nulls.any():
            return
        if (nulls & self._never_null).any():
            row = int(np.argmax((nulls & self._never_null).any(axis=1)))
            raise self._corrupt(row, "is null in a column that cannot be")
        for index in range(len(self.schema)):
            rows = records[str(index)][(nulls[:, index // 8] & np.uint8(1 << index % 8)) != 0]
            if rows.tobytes().strip(b"\0"):
                raise self._corrupt(0, f"has something under the null of {self.schema.names[index]!r}")

    def _records(self, offsets: NumpyArray, data: NumpyArray) -> NumpyArray:
        """The fixed-width part of every value."""
        if equal_length(offsets, self._width):
            return data[offsets[0] : offsets[-1]].view(self._record)
        lengths = np.diff(offsets)
        if not self._text or (lengths < self._width).any():
            row = int(np.argmax(lengths != self._width if not self._text else lengths < self._width))
            raise self._corrupt(row, f"has {lengths[row]} bytes where {self._width} are needed")
        return records_at(data, offsets[:-1], self._record)

    def _payloads(
        self, records: NumpyArray, offsets: NumpyArray, data: NumpyArray, requested: list[int]
    ) -> list[tuple[int, pa.Array]]:
        """The bytes of the requested string and binary columns; a null is still an empty value."""
        lengths = [records[str(index)].astype(np.int64) for index in self._text]
        whole = np.diff(offsets) - self._width
        wrong = sum(lengths) != whole
        if np.any(wrong):
            row = int(np.argmax(wrong))
            raise self._corrupt(row, f"has {whole[row]} bytes of strings, not as many as it says")
        pieces = []
        start = offsets[:-1] + np.int64(self._width)
        for index, length in zip(self._text, lengths, strict=True):
            end = start + length
            if index in requested:
                pieces.append((index, pieces_at(data, start, end)))
            start = end
        return pieces

    def _finish_text(self, pieces: pa.Array, index: int, validity: pa.Buffer | None) -> pa.Array:
        data_type = self.schema.field(index).type
        if pa.types.is_string(data_type):
            try:
                pieces = as_string(pieces)
            except pa.ArrowInvalid:
                raise CorruptData(
                    f"table {self.table!r}, column {self.schema.field(index).name!r}: a string is not UTF-8",
                    table=self.table,
                    column=self.schema.field(index).name,
                ) from None
        if validity is None:
            return pieces
        _, piece_offsets, piece_data = pieces.buffers()
        return pa.Array.from_buffers(
            data_type, len(pieces), [validity, piece_offsets, piece_data], offset=pieces.offset
        )

    def _validity(self, records: NumpyArray, index: int) -> pa.Buffer | None:
        return validity_of((records["nulls"][:, index // 8] & np.uint8(1 << index % 8)).astype(np.bool_))

    def _check_size(self, bytes_total: int) -> None:
        if bytes_total > BINARY_BYTES_MAX:
            raise TooLarge(
                f"table {self.table!r}: the values of one batch have more than 2 GiB; write it in smaller ones",
                table=self.table,
                limit=BINARY_BYTES_MAX,
            )

    def _check_length(self, values: pa.Array) -> None:
        if longest_of(values) > VALUE_BYTES_MAX:
            lengths = np.diff(offsets_of(values))
            row = int(np.argmax(lengths > VALUE_BYTES_MAX))
            raise TooLarge(
                f"table {self.table!r}, row {row}: the value has {lengths[row]} bytes, more than {VALUE_BYTES_MAX}",
                table=self.table,
                row=row,
                limit=VALUE_BYTES_MAX,
            )

    def _corrupt(self, row: int, what: str) -> CorruptData:
        return CorruptData(f"table {self.table!r}: the value {what}", table=self.table, row=row)
