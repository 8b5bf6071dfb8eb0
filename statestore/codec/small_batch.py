"""The codec for small batches: the same bytes as ``keys`` and ``values`` make of whole columns, made value by value.

Each step over whole columns costs about a microsecond, however few rows there are, and the array that holds the result
costs five more. In a transaction of one row these fixed costs are nearly all of the cost. So batches of up to
``SMALL_BATCH_ROWS_MAX`` rows are encoded here.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from shuffle.statestore.codec.arrow_bytes import storage_dtype
from shuffle.statestore.codec.column_types import is_text_or_bytes
from shuffle.statestore.codec.values import never_null

SMALL_BATCH_ROWS_MAX = 16
"""The most rows of a small batch. Up to this number a loop over the rows is not slower than the kernels for columns."""

_ZERO, _ESCAPED, _END = b"\x00", b"\x00\xff", b"\x00\x01"

ToOrdered = Callable[[bytes], bytes]
"""A function that turns the little-endian bytes of a value into bytes that sort as the values do."""

IsValid = Callable[[bytes], bool]
"""A function that says whether bytes are the encoding of some value of its column."""


class SmallKeyCodec:
    """Encodes and checks the keys of small batches of one table."""

    def __init__(self, schema: pa.Schema) -> None:
        last = len(schema) - 1
        self._parts = [_key_part(field.type, index == last) for index, field in enumerate(schema)]
        patterns = [_key_pattern(field.type, index == last) for index, field in enumerate(schema)]
        self._pattern = re.compile(b"".join(pattern for pattern, _ in patterns), re.DOTALL)
        self._checks = [is_valid for _, is_valid in patterns if is_valid is not None]
        """One check for each group of the pattern: whether the bytes in that group are a value of their column."""
        self._single_text_column = len(schema) == 1 and is_text_or_bytes(schema.field(0).type)
        """True if the only key column is text or bytes: it is all that follows the prefix, so any bytes match."""
        self._ascii_is_valid = all(is_valid in (_is_text, _is_escaped_text) for is_valid in self._checks)
        """True if every check is one for text: a key that matches the pattern and is ASCII then needs none of them."""

    def encode(self, columns: Sequence[pa.Array], prefix: bytes) -> list[bytes]:
        """``columns`` are exactly those of the schema, without nulls."""
        keys = [prefix] * len(columns[0])
        if not keys:
            return keys
        for part, column in zip(self._parts, columns, strict=True):
            keys = [key + piece for key, piece in zip(keys, part(column), strict=True)]
        return keys

    def are_valid(self, keys: Sequence[bytes], skip_bytes: int) -> bool:
        """Says whether each key is what ``encode`` makes of some row, byte for byte."""
        single_text_column, ascii_is_valid = self._single_text_column, self._ascii_is_valid
        fullmatch, checks = self._pattern.fullmatch, self._checks
        for key in keys:
            is_text = ascii_is_valid and key.isascii()
            if is_text and single_text_column:
                continue
            match = fullmatch(key, skip_bytes)
            if match is None:
                return False
            if is_text:
                continue
            for is_valid, part in zip(checks, match.groups(), strict=True):
                if not is_valid(part):
                    return False
        return True


class SmallValueCodec:
    """Encodes, decodes and checks the values of small batches of one table."""

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
        self._fixed_slices: list[tuple[int, slice, IsValid | None]] = []
        """For each column: its index, the slice of its fixed-width part, and the check of these bytes, if any."""
        for index, _, zeros in self._fixed:
            self._fixed_slices.append((index, slice(at, at + len(zeros)), _value_check(schema.field(index).type)))
            at += len(zeros)
        self._fixed_slices += [(index, slice(at + 4 * n, at + 4 * n + 4), None) for n, index in enumerate(self._text)]
        self._checked_slices = [
            (column_slice, is_valid) for _, column_slice, is_valid in self._fixed_slices if is_valid is not None
        ]
        self._lengths, self._lengths_at = struct.Struct(f"<{len(self._text)}I"), at
        self._text_at = at + 4 * len(self._text)
        self._strings = [pa.types.is_string(schema.field(index).type) for index in self._text]
        self._types = schema.types
        self._has_bools = any(pa.types.is_boolean(data_type) for data_type in schema.types)
        self._all_bytes_valid = not self._text and not self._checked_slices
        """True if any bytes are a value of each column: without nulls, only the length has to be right then."""
        self._no_nulls = bytes(self._null_bytes)

    def are_valid(self, values: Sequence[bytes | None]) -> bool:
        """Says whether each value is what ``encode`` makes of some row; None stands for a deleted row, and is valid."""
        all_bytes_valid, size_bytes, no_nulls = self._all_bytes_valid, self._text_at, self._no_nulls
        for value in values:
            if value is None or (all_bytes_valid and len(value) == size_bytes and value.startswith(no_nulls)):
                continue
            if not self._is_valid(value):
                return False
        return True

    def _is_valid(self, value: bytes) -> bool:
        if len(value) < self._text_at:
            return False
        nulls = int.from_bytes(value[: self._null_bytes], "little")
        if nulls and (
            nulls & self._never_null
            or any(
                nulls >> index & 1 and value[column_slice].strip(_ZERO) for index, column_slice, _ in self._fixed_slices
            )
        ):
            return False
        for column_slice, is_valid in self._checked_slices:
            if not is_valid(value[column_slice]):
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
            fixed = [_blank_nulls(f, nulls, i, zeros) for f, (i, _, zeros) in zip(fixed, self._fixed, strict=True)]
            text = [_blank_nulls(values, nulls, index, b"") for values, index in zip(text, self._text, strict=True)]
        rows = []
        for row, null in enumerate(nulls):
            pieces = [null.to_bytes(self._null_bytes, "little"), *(column[row] for column in fixed)]
            pieces += [len(column[row]).to_bytes(4, "little") for column in text]
            pieces += [column[row] for column in text]
            rows.append(b"".join(pieces))
        return rows

    def decode(self, values: Sequence[bytes]) -> list[pa.Array] | None:
        """The columns of some values; None if it takes the codec for whole columns to tell what they are: if there are
        nulls, bools or text beyond ASCII among them, or if they are not what ``encode`` makes of some row."""
        count, text_at, no_nulls = len(values), self._text_at, self._no_nulls
        if self._has_bools or not count:
            return None
        for value in values:
            if len(value) < text_at or not value.startswith(no_nulls):
                return None
        columns: list[pa.Array] = [None] * self._columns
        for index, column_slice, _ in self._fixed_slices[: len(self._fixed)]:
            data = b"".join([value[column_slice] for value in values])
            columns[index] = pa.Array.from_buffers(self._types[index], count, [None, pa.py_buffer(data)])
        if not self._text:
            return columns if all(len(value) == text_at for value in values) else None
        return self._decode_text(values, columns)

    def _decode_text(self, values: Sequence[bytes], columns: list[pa.Array]) -> list[pa.Array] | None:
        lengths = [self._lengths.unpack_from(value, self._lengths_at) for value in values]
        if any(self._text_at + sum(one) != len(value) for one, value in zip(lengths, values, strict=True)):
            return None
        begins = [self._text_at] * len(values)
        for index, is_string, column_lengths in zip(self._text, self._strings, zip(*lengths, strict=True), strict=True):
            ends = [begin + length for begin, length in zip(begins, column_lengths, strict=True)]
            data = b"".join([value[begin:end] for value, begin, end in zip(values, begins, ends, strict=True)])
            if is_string and not data.isascii():
                return None
            offsets = struct.pack(f"<{len(values) + 1}i", 0, *accumulate(column_lengths))
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
            columns[index] = pa.Array.from_buffers(self._types[index], len(values), buffers)
            begins = ends
        return columns

    def _nulls(self, columns: Sequence[pa.Array], count: int) -> list[int]:
        """The null bits of each row: one bit for each column, set where the value is null."""
        nulls = [0] * count
        for index, column in enumerate(columns):
            if column.null_count:
                for row in _null_rows(column):
                    nulls[row] |= 1 << index
        return nulls


def _blank_nulls(values: list[bytes], nulls: list[int], index: int, zeros: bytes) -> list[bytes]:
    """The values of a column with ``zeros`` for each null: Arrow leaves arbitrary bytes there."""
    return [zeros if null >> index & 1 else value for value, null in zip(values, nulls, strict=True)]


def fixed_reader(data_type: pa.DataType) -> Callable[[pa.Array], list[bytes]]:
    """A function that returns the values of a fixed-width column as they lie in memory, and bools as one byte each."""
    if pa.types.is_boolean(data_type):
        return lambda column: [b"\x01" if value else b"\x00" for value in column.to_pylist()]
    width = _width(data_type)

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


def _value_check(data_type: pa.DataType) -> IsValid | None:
    """The check of the bytes of a fixed-width value; None where all bytes are a value."""
    if pa.types.is_boolean(data_type):
        return lambda value: value <= b"\x01"
    if pa.types.is_decimal128(data_type):
        bound = 10**data_type.precision
        return lambda value: -bound < int.from_bytes(value, "little", signed=True) < bound
    return None


def _key_pattern(data_type: pa.DataType, last: bool) -> tuple[bytes, IsValid | None]:
    """A regular expression for one column of a key, and the check for the group in it; None if it has no group."""
    if is_text_or_bytes(data_type):
        pattern = b"(.*+)" if last else rb"((?:[^\x00]++|\x00\xff)*+)\x00\x01"
        if pa.types.is_binary(data_type):
            return pattern.replace(b"(", b"(?:", 1), None
        return pattern, _is_text if last else _is_escaped_text
    if pa.types.is_boolean(data_type):
        return rb"[\x00\x01]", None
    width = _width(data_type)
    one = b".{%d}" % width
    if pa.types.is_decimal128(data_type):
        bound, bias = 10**data_type.precision, 1 << (8 * width - 1)
        return b"(" + one + b")", lambda part: -bound < int.from_bytes(part, "big") - bias < bound
    if pa.types.is_floating(data_type):
        to_ordered, sign, mask = _float_to_ordered(width), 1 << (8 * width - 1), (1 << 8 * width) - 1

        def is_canonical(part: bytes) -> bool:
            bits = int.from_bytes(part, "big")
            return to_ordered((bits ^ sign if bits & sign else ~bits & mask).to_bytes(width, "little")) == part

        return b"(" + one + b")", is_canonical
    return one, None


def _width(data_type: pa.DataType) -> int:
    return int(storage_dtype(data_type).itemsize)


def _key_part(data_type: pa.DataType, last: bool) -> Callable[[pa.Array], list[bytes]]:
    if is_text_or_bytes(data_type):
        if last:
            return texts_of
        return lambda column: [text.replace(_ZERO, _ESCAPED) + _END for text in texts_of(column)]
    to_ordered, read = _to_ordered(data_type), fixed_reader(data_type)
    return lambda column: [to_ordered(value) for value in read(column)]


def _to_ordered(data_type: pa.DataType) -> ToOrdered:
    if pa.types.is_floating(data_type):
        return _float_to_ordered(_width(data_type))
    if pa.types.is_boolean(data_type) or pa.types.is_unsigned_integer(data_type):
        return lambda value: value[::-1]
    width = _width(data_type)
    bias = 1 << (8 * width - 1)
    return lambda value: (int.from_bytes(value, "little", signed=True) + bias).to_bytes(width, "big")


def _float_to_ordered(width: int) -> ToOrdered:
    packer = struct.Struct("<f" if width == 4 else "<d")
    sign, mask = 1 << (8 * width - 1), (1 << 8 * width) - 1
    nan = packer.pack(math.nan)

    def to_ordered(value: bytes) -> bytes:
        number: Any = packer.unpack(value)[0]
        if number != number:
            value = nan
        elif number == 0:
            value = bytes(width)
        bits = int.from_bytes(value, "little")
        return (~bits & mask if bits & sign else bits | sign).to_bytes(width, "big")

    return to_ordered
