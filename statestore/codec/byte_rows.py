"""A growing list of byte strings in few large buffers: rows are only added at the end, or cut off there.

While all of them have the same length, which is the usual case for the rows of one table, no offsets are kept and a
row is found by its number alone. What was added does not move for those who read it: when a buffer is full, a larger
copy takes its place, and readers keep the one that they have.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.statestore.codec.arrow_bytes import (
    BINARY_BYTES_MAX,
    NumpyArray,
    data_of,
    equal_length,
    nulls_of,
    offsets_of,
    order_of_even,
    validity_of,
)


class Growing:
    """A numpy array of numbers that grows at its end."""

    def __init__(self, dtype: np.dtype[np.generic] | str, count_max: int = 1024) -> None:
        self._array = np.zeros(count_max, dtype)
        self.count = 0

    @property
    def filled(self) -> NumpyArray:
        return self._array[: self.count]

    @property
    def size_bytes(self) -> int:
        return int(self._array.nbytes)

    def extend(self, added: NumpyArray) -> None:
        end = self.count + len(added)
        if end > len(self._array):
            grown = np.zeros(max(end, 2 * len(self._array)), self._array.dtype)
            grown[: self.count] = self.filled
            self._array = grown
        self._array[self.count : end] = added
        self.count = end

    def cut(self, count: int) -> None:
        self.count = count


class ByteRows:
    """Byte strings by their number; a row may also be null."""

    def __init__(self) -> None:
        self._data = Growing("u1")
        self._width: int | None = None
        """The length of every row; None if there is no row yet, or if lengths differ."""
        self._offsets: Growing | None = None
        """Where each row begins, and where the last one ends, once lengths differ."""
        self._nulls: Growing | None = None
        """True for each row that is null, once there is one."""
        self.count = 0

    @property
    def size_bytes(self) -> int:
        parts = (self._data, self._offsets, self._nulls)
        return sum(part.size_bytes for part in parts if part is not None)

    def extend(self, added: pa.BinaryArray) -> None:
        """Add the values of a binary array, which may contain nulls."""
        if not len(added):
            return
        offsets, nulls = offsets_of(added), nulls_of(added)
        width = int(offsets[1]) - int(offsets[0])
        if self._offsets is None:
            if not equal_length(offsets, width) or (self.count and width != self._width):
                self._keep_offsets()
            else:
                self._width = width
        begin = int(offsets[0])
        if self._offsets is not None:
            self._offsets.extend(offsets[1:].astype(np.int64) - begin + self._data.count)
        if nulls is not None and self._nulls is None:
            self._nulls = Growing("?")
            self._nulls.extend(np.zeros(self.count, np.bool_))
        if self._nulls is not None:
            self._nulls.extend(nulls if nulls is not None else np.zeros(len(added), np.bool_))
        self._data.extend(data_of(added)[begin : int(offsets[-1])])
        self.count += len(added)

    def _keep_offsets(self) -> None:
        self._offsets = Growing("<i8")
        self._offsets.extend(np.arange(self.count + 1, dtype=np.int64) * (self._width or 0))
        self._width = None

    def cut(self, count: int) -> None:
        """Remove the rows from number ``count`` on."""
        if self._offsets is not None:
            self._data.cut(int(self._offsets.filled[count]))
            self._offsets.cut(count + 1)
        else:
            self._data.cut(count * (self._width or 0))
        if self._nulls is not None:
            self._nulls.cut(count)
        self.count = count

    def take(self, rows: NumpyArray) -> pa.BinaryArray:
        """The rows with these numbers, as a binary array."""
        if not len(rows):
            return pa.array([], pa.binary())
        nulls = self.are_null(rows)
        validity = validity_of(nulls) if nulls is not None else None
        if self._offsets is None and (self._width or 0) * len(rows) <= BINARY_BYTES_MAX:
            data = self._fixed(rows)
            offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(self._width or 0)
            buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
            return pa.Array.from_buffers(pa.binary(), len(rows), buffers)
        taken = self._large().take(pa.array(rows)).cast(pa.binary())
        if validity is None:
            return taken
        return pa.Array.from_buffers(pa.binary(), len(rows), [validity, *taken.buffers()[1:]], offset=taken.offset)

    def slice(self, begin: int, end: int) -> pa.BinaryArray:
        """The rows from ``begin`` up to and without ``end``; their bytes are not copied."""
        if self._offsets is not None:
            bounds = self._offsets.filled[begin : end + 1]
        else:
            bounds = np.arange(begin, end + 1, dtype=np.int64) * (self._width or 0)
        data = self._data.filled[int(bounds[0]) : int(bounds[-1])]
        nulls = None if self._nulls is None else self._nulls.filled[begin:end]
        validity = validity_of(nulls) if nulls is not None else None
        buffers = [validity, pa.py_buffer((bounds - bounds[0]).astype(np.int32)), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), end - begin, buffers)

    def lengths(self, rows: NumpyArray) -> NumpyArray:
        """The length of each of these rows in bytes."""
        if self._offsets is None:
            return np.full(len(rows), self._width or 0, np.int64)
        offsets = self._offsets.filled
        lengths: NumpyArray = offsets.take(rows + 1) - offsets.take(rows)
        return lengths

    def order_of(self, rows: NumpyArray) -> NumpyArray:
        """The order in which these rows ascend; none of them is null."""
        if self._width:
            return order_of_even(self._fixed(rows).view(np.uint8).reshape(len(rows), self._width))
        order: NumpyArray = pc.array_sort_indices(self._large().take(pa.array(rows))).to_numpy()
        return order

    def are_null(self, rows: NumpyArray) -> NumpyArray | None:
        """True where the row with this number is null; None if there are no nulls at all."""
        return None if self._nulls is None else self._nulls.filled.take(rows)

    def equal(self, rows: NumpyArray, others: pa.BinaryArray, which: NumpyArray) -> NumpyArray:
        """Where row number ``rows[i]`` has the same bytes as ``others[which[i]]``; none of them is null."""
        offsets = offsets_of(others)
        if self._width is not None and len(others) and equal_length(offsets, self._width):
            used = data_of(others)[offsets[0] : offsets[-1]]
            if not self._width:
                return np.ones(len(rows), np.bool_)
            theirs = used.view(f"V{self._width}").take(which)
            same: NumpyArray = self._fixed(rows) == theirs
            return same
        mine = self.take(rows)
        equal: NumpyArray = _compare(mine, others.take(pa.array(which)))
        return equal

    def _fixed(self, rows: NumpyArray) -> NumpyArray:
        if not self._width:
            return np.zeros(0, np.uint8)
        return self._data.filled.view(f"V{self._width}").take(rows)

    def _large(self) -> pa.LargeBinaryArray:
        if self._offsets is not None:
            offsets = self._offsets.filled
        else:
            offsets = np.arange(self.count + 1, dtype=np.int64) * (self._width or 0)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._data.filled)]
        return pa.Array.from_buffers(pa.large_binary(), self.count, buffers)


def _compare(left: pa.BinaryArray, right: pa.BinaryArray) -> NumpyArray:
    same: NumpyArray = pc.equal(left, right).to_numpy(zero_copy_only=False)
    return same
