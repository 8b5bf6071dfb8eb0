"""A block: the rows that one commit writes to one table, as they are stored in the table's changelog.

    head      4 B magic · 4 B rows · 8 B version · 4 B length of every key · 4 B length of every value (each FFFFFFFF if
              they differ) · 4 B number of parts · 4 B zero
    part      4 B stored bytes · 4 B raw bytes, for each part
    the parts one after the other, filled up with zeros to a multiple of 8

The parts are, in this order: the lengths of the keys (only if they differ), the keys, the bitmap of the rows that are
there (only if some are deleted), the lengths of the values (only if they differ), the values. A deleted row has a value
without bytes. A part is compressed if that makes it smaller. Rows of one length are stored byte by byte, all first
bytes, then all second ones: bytes at one place of a number or of a key resemble each other, so they take a fraction of
the space, and compressing them takes a fraction of the time.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shuffle.errors import CorruptData
from shuffle.statestore.codec.arrow_bytes import NumpyArray, data_of, equal_length, nulls_of, offsets_of, validity_of

_MAGIC = b"BLK1"
_HEAD = struct.Struct("<4sIQIIII")
_PART = struct.Struct("<II")
_UNEVEN = 0xFFFFFFFF
_COMPRESS_BYTES_MIN = 256
"""The least bytes of a part that is worth compressing."""

BLOCK_ROWS_MAX = 1 << 24
BLOCK_BYTES_MAX = 1 << 30
"""The most rows and the most raw bytes that a block may claim to have: more than any commit may write."""


@functools.cache
def _codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=1)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """The rows of one block: keys, and values of which null means that the row was deleted."""

    version: int
    """The version of the commit that wrote the rows; of a compacted block, the one up to which it holds everything."""
    keys: pa.BinaryArray
    values: pa.BinaryArray


class BlockBody:
    """The encoded rows of a block. They do not depend on the version, which is known only when the commit is made."""

    def __init__(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        self.rows = len(keys)
        deleted = nulls_of(values)
        raw: list[pa.Buffer] = []
        self._key_bytes = _add(raw, keys)
        if deleted is not None:
            bitmap = validity_of(deleted)
            assert bitmap is not None
            raw.append(bitmap)
        self._value_bytes = _add(raw, values)
        self._has_deleted = deleted is not None
        stored = [_compressed(part) for part in raw]
        sizes = b"".join(_PART.pack(part.size, full.size) for part, full in zip(stored, raw, strict=True))
        self._parts: list[bytes | memoryview] = [sizes, *(memoryview(part) for part in stored)]
        size = _HEAD.size + sum(len(part) for part in self._parts)
        self._parts.append(bytes(-size % 8))
        self.size_bytes = size + -size % 8
        self._count = len(raw)

    def encode(self, version: int) -> bytes:
        """The whole block as it is stored, as the change of the commit with this version."""
        flags = int(self._has_deleted)
        head = _HEAD.pack(_MAGIC, self.rows, version, self._key_bytes, self._value_bytes, self._count, flags)
        return b"".join([head, *self._parts])


def _add(parts: list[pa.Buffer], values: pa.BinaryArray) -> int:
    """Add the parts of a column; returns the length of each value, or ``_UNEVEN``."""
    offsets, data = offsets_of(values), data_of(values)
    used = data[offsets[0] : offsets[-1]]
    width = int(offsets[1]) - int(offsets[0])
    if equal_length(offsets, width):
        turned = np.ascontiguousarray(used.reshape(len(values), width).T)
        parts.append(pa.py_buffer(turned.reshape(-1)))
        return width
    parts.append(pa.py_buffer(np.diff(offsets).astype("<u4")))
    parts.append(pa.py_buffer(used))
    return _UNEVEN


def _compressed(part: pa.Buffer) -> pa.Buffer:
    if part.size < _COMPRESS_BYTES_MIN:
        return part
    smaller = _codec().compress(part)
    # A slice, because the memoryview of the buffer itself is as long as the buffer was before it was made to fit.
    return smaller.slice(0, smaller.size) if smaller.size < part.size else part


def decode_block(data: pa.Buffer, where: str) -> RowBlock:
    """The rows of a stored block; ``CorruptData``, which names ``where``, if these are not the bytes of one."""
    try:
        return _Decoder(data).block()
    except (struct.error, ValueError, pa.ArrowException, OSError) as error:
        raise CorruptData(f"{where}: no block of a changelog: {error}") from None


class _Decoder:
    def __init__(self, data: pa.Buffer) -> None:
        self._data = data
        magic, rows, version, key_bytes, value_bytes, count, flags = _HEAD.unpack_from(memoryview(data))
        if magic != _MAGIC or not 0 < rows <= BLOCK_ROWS_MAX or count > 5:
            raise ValueError("its head is damaged")
        self._rows, self._version, self._has_deleted = rows, version, bool(flags)
        self._widths = key_bytes, value_bytes
        self._sizes = [_PART.unpack_from(memoryview(data), _HEAD.size + number * _PART.size) for number in range(count)]
        self._at = _HEAD.size + count * _PART.size
        if sum(raw for _, raw in self._sizes) > BLOCK_BYTES_MAX:
            raise ValueError("it claims to be too large")

    def block(self) -> RowBlock:
        keys = self._column(self._widths[0], None)
        validity = self._next() if self._has_deleted else None
        if validity is not None and validity.size != (self._rows + 7) // 8:
            raise ValueError("its bitmap is damaged")
        values = self._column(self._widths[1], validity)
        if self._sizes or not -8 < self._at - self._data.size <= 0:
            raise ValueError("its parts do not fit it")
        return RowBlock(self._version, keys, values)

    def _column(self, width: int, validity: pa.Buffer | None) -> pa.BinaryArray:
        if width != _UNEVEN:
            turned = self._next()
            if turned.size != self._rows * width:
                raise ValueError("a column has too few bytes")
            straight = np.frombuffer(turned, np.uint8).reshape(width, self._rows).T
            data: NumpyArray = np.ascontiguousarray(straight).reshape(-1)
            offsets = np.arange(self._rows + 1, dtype=np.int32) * np.int32(width)
        else:
            lengths = np.frombuffer(self._next(), "<u4")
            data = np.frombuffer(self._next(), np.uint8)
            ends = np.cumsum(lengths, dtype=np.int64)
            if len(lengths) != self._rows or int(ends[-1]) != len(data):
                raise ValueError("the lengths of a column do not fit it")
            offsets = np.concatenate([[0], ends]).astype(np.int32)
        buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), self._rows, buffers)

    def _next(self) -> pa.Buffer:
        stored, raw = self._sizes.pop(0)
        if self._at + stored > self._data.size:
            raise ValueError("it is cut off")
        part = self._data.slice(self._at, stored)
        self._at += stored
        return part if stored == raw else _codec().decompress(part, decompressed_size=raw)
