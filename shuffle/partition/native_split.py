"""``split_by_partition`` with compiled kernels: each row goes straight to the memory of its reducer.

The rows may come in several chunks, which are not joined first. Columns of types that no kernel knows (nested ones,
views) are gathered by Arrow.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import TooLarge
from shuffle.support.native import address_of

PADDING_BYTES = 64
"""The bytes behind each buffer that kernels may write over: they copy 16 bytes at a time."""

_OFFSET_MAX = 2**31 - 1

Indexes = np.ndarray[Any, np.dtype[Any]]
Part = tuple[pa.RecordBatch | None, Indexes]


class NativeSplit:
    """One table that is being split; ``part`` has the reducer of each row, in one byte or two."""

    def __init__(self, library: ctypes.CDLL, rows: pa.Table, part: Indexes, reducers: int) -> None:
        self._library = library
        self._rows = rows
        self._part = np.ascontiguousarray(part)
        self._bits = 8 * self._part.itemsize
        self.counts = np.zeros(reducers, np.int64)
        """The number of rows of each reducer."""
        bad = self._call("split_counts", self._part_at(0), len(part), reducers, address_of(self.counts))
        assert bad == -1, f"row {bad} is for a reducer that does not exist"
        self._used = np.flatnonzero(self.counts).tolist()
        self._sizes: list[int] = self.counts[self._used].tolist()
        self._slots = np.zeros(reducers, np.uint64)
        """For each reducer the address at which its next value goes. Reducers without rows have none."""

    def parts(self) -> list[Part]:
        """For each reducer its rows, and their offsets in the table."""
        offsets = self._row_offsets()
        columns = [self._column(column, offsets) for column in self._rows.columns]
        found: list[Part] = [(None, np.empty(0, np.uint32))] * len(self.counts)
        for number, reducer in enumerate(self._used):
            arrays = [arrays[number] for arrays in columns]
            found[reducer] = pa.RecordBatch.from_arrays(arrays, schema=self._rows.schema), offsets[number]
        return found

    def _call(self, kernel: str, *arguments: int) -> int:
        result: int = getattr(self._library, f"{kernel}_{self._bits}")(*arguments)
        return result

    def _part_at(self, row: int) -> int:
        return address_of(self._part) + row * self._part.itemsize

    def _aim(self, addresses: list[int]) -> int:
        """The next values go to ``addresses``, one for each reducer with rows."""
        self._slots[self._used] = addresses
        return address_of(self._slots)

    def _row_offsets(self) -> list[Indexes]:
        offsets = [np.empty(size, np.uint32) for size in self._sizes]
        slots = self._aim([address_of(array) for array in offsets])
        self._call("split_rows", self._part_at(0), len(self._part), 0, slots)
        return offsets

    def _column(self, column: pa.ChunkedArray, row_offsets: list[Indexes]) -> list[pa.Array]:
        data_type = column.type
        if not _is_flat(column):
            return [_taken(column, offsets) for offsets in row_offsets]
        if _is_text(data_type):
            buffers = self._texts(column)
        elif pa.types.is_boolean(data_type):
            buffers = [[bits] for bits, _ in self._bitmaps(column, 1)]
        else:
            buffers = [[values] for values in self._fixed(column, _width_of(data_type))]
        if column.null_count:
            validity = self._bitmaps(column, 0)
        else:
            validity = [(None, size) for size in self._sizes]
        return [
            pa.Array.from_buffers(data_type, size, [bits, *own], null_count=size - valid)
            for size, own, (bits, valid) in zip(self._sizes, buffers, validity, strict=True)
        ]

    def _fixed(self, column: pa.ChunkedArray, width: int) -> list[pa.Buffer]:
        buffers = [_allocate(size * width) for size in self._sizes]
        slots = self._aim([buffer.address for buffer in buffers])
        row = 0
        for chunk in column.chunks:
            if len(chunk):
                values = chunk.buffers()[1].address + chunk.offset * width
                self._call("split_fixed", values, width, self._part_at(row), len(chunk), slots)
            row += len(chunk)
        return buffers

    def _texts(self, column: pa.ChunkedArray) -> list[list[pa.Buffer]]:
        """Offsets and bytes for each reducer with rows."""
        offsets = [_allocate((size + 1) * 4) for size in self._sizes]
        for buffer in offsets:
            ctypes.memset(buffer.address, 0, 4)
        slots = self._aim([buffer.address + 4 for buffer in offsets])
        ends = np.zeros(len(self.counts), np.int64)
        row = 0
        for chunk in column.chunks:
            if len(chunk):
                begin = chunk.buffers()[1].address + chunk.offset * 4
                self._call("split_offsets", begin, self._part_at(row), len(chunk), slots, address_of(ends))
            row += len(chunk)
        if int(ends.max()) > _OFFSET_MAX:
            raise TooLarge(
                "a mapped batch has more than 2 GiB in one column for one reducer: read fewer rows at a time, or split "
                "them in map"
            )
        data = [_allocate(size) for size in ends[self._used].tolist()]
        slots = self._aim([buffer.address for buffer in data])
        row = 0
        for chunk in column.chunks:
            _, begin, octets = chunk.buffers()
            if len(chunk) and octets is not None:
                first = begin.address + chunk.offset * 4
                self._call("split_bytes", octets.address, octets.size, first, self._part_at(row), len(chunk), slots)
            row += len(chunk)
        return [list(pair) for pair in zip(offsets, data, strict=True)]

    def _bitmaps(self, column: pa.ChunkedArray, which: int) -> list[tuple[pa.Buffer, int]]:
        """The bits of buffer ``which`` of the column for each reducer with rows, and how many of them are ones. If a
        chunk has no such buffer, they are all ones."""
        buffers = [_allocate((size + 7) // 8) for size in self._sizes]
        for buffer in buffers:
            ctypes.memset(buffer.address, 0, buffer.size)
        slots = self._aim([buffer.address for buffer in buffers])
        at, ones = np.zeros(len(self.counts), np.int64), np.zeros(len(self.counts), np.int64)
        row = 0
        for chunk in column.chunks:
            bits, begin = chunk.buffers()[which], chunk.offset
            if bits is None:
                bits, begin = pa.py_buffer(b"\xff" * (len(chunk) // 8 + 1)), 0
            arguments = (slots, address_of(at), address_of(ones))
            self._call("split_bits", bits.address, begin, self._part_at(row), len(chunk), *arguments)
            row += len(chunk)
        return list(zip(buffers, ones[self._used].tolist(), strict=True))


def _allocate(size: int) -> pa.Buffer:
    return pa.allocate_buffer(size + PADDING_BYTES).slice(0, size)


def _is_flat(column: pa.ChunkedArray) -> bool:
    """Whether the kernels can split the column. Nulls alone may come without memory for values."""
    known = _is_text(column.type) or pa.types.is_boolean(column.type) or _width_of(column.type) > 0
    return known and all(chunk.buffers()[1] is not None for chunk in column.chunks if len(chunk))


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


def _width_of(data_type: pa.DataType) -> int:
    """The bytes of one value; 0 if they are not all of one width."""
    types = pa.types
    if types.is_primitive(data_type) or types.is_decimal(data_type) or types.is_fixed_size_binary(data_type):
        return int(data_type.bit_width) // 8
    return 0


def _taken(column: pa.ChunkedArray, row_offsets: Indexes) -> pa.Array:
    # The offsets were computed from the rows themselves, so their bounds need not be checked.
    taken = pc.take(column, pa.array(row_offsets), boundscheck=False)
    return pa.concat_arrays(taken.chunks) if taken.num_chunks != 1 else taken.chunk(0)
