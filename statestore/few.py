"""A few rows as bytes: what ``keys`` and ``values`` make of whole columns, made value by value.

Whole columns cost a microsecond or so for each step, however few rows there are, and an array to hold the result five
more. A transaction of one row is that alone. So up to ``FEW_ROWS`` rows go this way, and give the very same bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from statestore.buffers import storage_dtype
from statestore.column_types import is_text_or_bytes

FEW_ROWS = 16
"""Up to here a loop over the rows is not slower than the whole columns."""

_ZERO, _ESCAPED, _END = b"\x00", b"\x00\xff", b"\x00\x01"

Ordered = Callable[[bytes], bytes]
"""From the little-endian bytes of a value to bytes that sort as the values do."""


class FewKeys:
    """The keys of a few rows of one table."""

    def __init__(self, schema: pa.Schema) -> None:
        last = len(schema) - 1
        self._parts = [_key_part(field.type, index == last) for index, field in enumerate(schema)]

    def encode(self, columns: Sequence[pa.Array], prefix: bytes) -> list[bytes]:
        """``columns`` are exactly those of the schema, without nulls."""
        keys = [prefix] * len(columns[0])
        if not keys:
            return keys
        for part, column in zip(self._parts, columns, strict=True):
            keys = [key + piece for key, piece in zip(keys, part(column), strict=True)]
        return keys


class FewValues:
    """The values of a few rows of one table."""

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = len(schema)
        self._null_bytes = (len(schema) + 7) // 8
        self._text = [index for index, field in enumerate(schema) if is_text_or_bytes(field.type)]
        self._fixed = [
            (index, fixed_reader(field.type), bytes(_width(field.type)))
            for index, field in enumerate(schema)
            if not is_text_or_bytes(field.type)
        ]

    def encode(self, columns: Sequence[pa.Array], count: int) -> list[bytes]:
        """``columns`` are exactly those of the schema."""
        if not (self._columns and count):
            return [b""] * count
        fixed = [read(columns[index]) for index, read, _ in self._fixed]
        text = [texts_of(columns[index]) for index in self._text]
        nulls = [0] * count
        if any(column.null_count for column in columns):
            nulls = self._nulls(columns, count)
            fixed = [_blanked(f, nulls, i, nothing) for f, (i, _, nothing) in zip(fixed, self._fixed, strict=True)]
            text = [_blanked(values, nulls, index, b"") for values, index in zip(text, self._text, strict=True)]
        rows = []
        for row, null in enumerate(nulls):
            pieces = [null.to_bytes(self._null_bytes, "little"), *(column[row] for column in fixed)]
            pieces += [len(column[row]).to_bytes(4, "little") for column in text]
            pieces += [column[row] for column in text]
            rows.append(b"".join(pieces))
        return rows

    def _nulls(self, columns: Sequence[pa.Array], count: int) -> list[int]:
        """For each row a bit for each column, set where it is null."""
        nulls = [0] * count
        for index, column in enumerate(columns):
            if column.null_count:
                for row in _null_rows(column):
                    nulls[row] |= 1 << index
        return nulls


def _blanked(found: list[bytes], nulls: list[int], index: int, nothing: bytes) -> list[bytes]:
    """What stands under a null is arbitrary in Arrow, and nothing here."""
    return [nothing if null >> index & 1 else value for value, null in zip(found, nulls, strict=True)]


def fixed_reader(kind: pa.DataType) -> Callable[[pa.Array], list[bytes]]:
    """Gives the values of a fixed-width column as they lie in memory; bools as a byte each."""
    if pa.types.is_boolean(kind):
        return lambda column: [b"\x01" if value else b"\x00" for value in column.to_pylist()]
    width = _width(kind)

    def read(column: pa.Array) -> list[bytes]:
        begin, data = column.offset, memoryview(column.buffers()[1])
        return [bytes(data[at * width : (at + 1) * width]) for at in range(begin, begin + len(column))]

    return read


def texts_of(column: pa.Array) -> list[bytes]:
    """The values of a string or binary column."""
    count = len(column)
    _, offsets, data = column.buffers()
    if data is None:
        return [b""] * count
    bounds = struct.unpack_from(f"<{count + 1}i", offsets, 4 * column.offset)
    view = memoryview(data)
    return [bytes(view[bounds[row] : bounds[row + 1]]) for row in range(count)]


def _null_rows(column: pa.Array) -> list[int]:
    bits, begin = memoryview(column.buffers()[0]), column.offset
    return [row for row in range(len(column)) if not bits[(begin + row) >> 3] >> ((begin + row) & 7) & 1]


def _width(kind: pa.DataType) -> int:
    return int(storage_dtype(kind).itemsize)


def _key_part(kind: pa.DataType, last: bool) -> Callable[[pa.Array], list[bytes]]:
    if is_text_or_bytes(kind):
        if last:
            return texts_of
        return lambda column: [text.replace(_ZERO, _ESCAPED) + _END for text in texts_of(column)]
    ordered, read = _ordered(kind), fixed_reader(kind)
    return lambda column: [ordered(value) for value in read(column)]


def _ordered(kind: pa.DataType) -> Ordered:
    if pa.types.is_floating(kind):
        return _ordered_float(_width(kind))
    if pa.types.is_boolean(kind) or pa.types.is_unsigned_integer(kind):
        return lambda value: value[::-1]
    width = _width(kind)
    bias = 1 << (8 * width - 1)
    return lambda value: (int.from_bytes(value, "little", signed=True) + bias).to_bytes(width, "big")


def _ordered_float(width: int) -> Ordered:
    form = struct.Struct("<f" if width == 4 else "<d")
    sign, mask = 1 << (8 * width - 1), (1 << 8 * width) - 1
    nan = form.pack(math.nan)

    def ordered(value: bytes) -> bytes:
        number: Any = form.unpack(value)[0]
        if number != number:
            value = nan
        elif number == 0:
            value = bytes(width)
        bits = int.from_bytes(value, "little")
        return (~bits & mask if bits & sign else bits | sign).to_bytes(width, "big")

    return ordered
