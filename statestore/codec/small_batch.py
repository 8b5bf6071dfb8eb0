"""A few rows as bytes: what ``keys`` and ``values`` make of whole columns, made value by value.

Whole columns cost a microsecond or so for each step, however few rows there are, and an array to hold the result five
more. A transaction of one row is that alone. So up to ``FEW_ROWS`` rows go this way, and give the very same bytes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from shuffle.statestore.codec.arrow_bytes import storage_dtype
from shuffle.statestore.codec.column_types import is_text_or_bytes
from shuffle.statestore.codec.values import never_null

FEW_ROWS = 16
"""Up to here a loop over the rows is not slower than the whole columns."""

_ZERO, _ESCAPED, _END = b"\x00", b"\x00\xff", b"\x00\x01"

Ordered = Callable[[bytes], bytes]
"""From the little-endian bytes of a value to bytes that sort as the values do."""

Look = Callable[[bytes], bool]
"""Whether bytes are those of a value."""


class SmallKeyCodec:
    """The keys of a few rows of one table."""

    def __init__(self, schema: pa.Schema) -> None:
        last = len(schema) - 1
        self._parts = [_key_part(field.type, index == last) for index, field in enumerate(schema)]
        forms = [_key_form(field.type, index == last) for index, field in enumerate(schema)]
        self._form = re.compile(b"".join(form for form, _ in forms), re.DOTALL)
        self._looks = [look for _, look in forms if look is not None]
        """At each part that the form has put into brackets: whether it is right by itself."""
        self._any_form = len(schema) == 1 and is_text_or_bytes(schema.field(0).type)
        """All that follows the prefix is the one column, so that there is no form to look for."""
        self._any_ascii = all(look in (_is_text, _is_escaped_text) for look in self._looks)
        """A key of the right form is right if it is ASCII, as that is text, whatever parts of it are looked at."""

    def encode(self, columns: Sequence[pa.Array], prefix: bytes) -> list[bytes]:
        """``columns`` are exactly those of the schema, without nulls."""
        keys = [prefix] * len(columns[0])
        if not keys:
            return keys
        for part, column in zip(self._parts, columns, strict=True):
            keys = [key + piece for key, piece in zip(keys, part(column), strict=True)]
        return keys

    def are_right(self, keys: Sequence[bytes], skip_bytes: int) -> bool:
        """Whether each key is what ``encode`` makes of some row, byte for byte."""
        any_form, any_ascii = self._any_form, self._any_ascii
        matches, looks = self._form.fullmatch, self._looks
        for key in keys:
            is_text = any_ascii and key.isascii()
            if is_text and any_form:
                continue
            found = matches(key, skip_bytes)
            if found is None:
                return False
            if is_text:
                continue
            for look, part in zip(looks, found.groups(), strict=True):
                if not look(part):
                    return False
        return True


class SmallValueCodec:
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
        self._never_null = int.from_bytes(never_null(schema).tobytes(), "little")
        at = self._null_bytes
        self._places: list[tuple[int, slice, Look | None]] = []
        """Where the fixed part of each column is, and how to see whether it is right."""
        for index, _, nothing in self._fixed:
            self._places.append((index, slice(at, at + len(nothing)), _value_look(schema.field(index).type)))
            at += len(nothing)
        self._places += [(index, slice(at + 4 * n, at + 4 * n + 4), None) for n, index in enumerate(self._text)]
        self._looked_at = [(place, look) for _, place, look in self._places if look is not None]
        self._lengths, self._lengths_at = struct.Struct(f"<{len(self._text)}I"), at
        self._text_at = at + 4 * len(self._text)
        self._strings = [pa.types.is_string(schema.field(index).type) for index in self._text]
        self._any_bytes = not self._text and not self._looked_at
        """Nothing but numbers of which all bytes are one: without nulls, a value is right if it has their length."""
        self._no_nulls = bytes(self._null_bytes)

    def are_right(self, values: Sequence[bytes | None]) -> bool:
        """Whether each value is what ``encode`` makes of some row; None is no row, and right."""
        any_bytes, size_bytes, no_nulls = self._any_bytes, self._text_at, self._no_nulls
        for value in values:
            if value is None or (any_bytes and len(value) == size_bytes and value.startswith(no_nulls)):
                continue
            if not self._is_right(value):
                return False
        return True

    def _is_right(self, value: bytes) -> bool:
        if len(value) < self._text_at:
            return False
        nulls = int.from_bytes(value[: self._null_bytes], "little")
        if nulls and (
            nulls & self._never_null
            or any(nulls >> index & 1 and value[place].strip(_ZERO) for index, place, _ in self._places)
        ):
            return False
        for place, look in self._looked_at:
            if not look(value[place]):
                return False
        begin = self._text_at
        for length, is_string in zip(self._lengths.unpack_from(value, self._lengths_at), self._strings, strict=True):
            if is_string and not _is_text(value[begin : begin + length]):
                return False
            begin += length
        return begin == len(value)

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


def _is_text(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_escaped_text(data: bytes) -> bool:
    return data.isascii() or _is_text(data.replace(_ESCAPED, _ZERO))


def _value_look(kind: pa.DataType) -> Look | None:
    """How to see whether the bytes of a fixed-width value are one; None where all are."""
    if pa.types.is_boolean(kind):
        return lambda value: value <= b"\x01"
    if pa.types.is_decimal128(kind):
        bound = 10**kind.precision
        return lambda value: -bound < int.from_bytes(value, "little", signed=True) < bound
    return None


def _key_form(kind: pa.DataType, last: bool) -> tuple[bytes, Look | None]:
    """The form of a column of a key, as a regular expression, and how to look at what is in its brackets."""
    if is_text_or_bytes(kind):
        form = b"(.*+)" if last else rb"((?:[^\x00]++|\x00\xff)*+)\x00\x01"
        if pa.types.is_binary(kind):
            return form.replace(b"(", b"(?:", 1), None
        return form, _is_text if last else _is_escaped_text
    if pa.types.is_boolean(kind):
        return rb"[\x00\x01]", None
    width = _width(kind)
    one = b".{%d}" % width
    if pa.types.is_decimal128(kind):
        bound, bias = 10**kind.precision, 1 << (8 * width - 1)
        return b"(" + one + b")", lambda part: -bound < int.from_bytes(part, "big") - bias < bound
    if pa.types.is_floating(kind):
        ordered, sign, mask = _ordered_float(width), 1 << (8 * width - 1), (1 << 8 * width) - 1

        def is_canonical(part: bytes) -> bool:
            bits = int.from_bytes(part, "big")
            return ordered((bits ^ sign if bits & sign else ~bits & mask).to_bytes(width, "little")) == part

        return b"(" + one + b")", is_canonical
    return one, None


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
