"""Arrow arrays as numpy arrays and back, without a Python step per row; and lists of bytes for small batches.

Every function here honours the offset of a sliced array: a slice shares its parent's buffers.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NumpyArray = np.ndarray[Any, Any]

Binary: TypeAlias = "pa.BinaryArray | list[Any]"
"""Encoded keys or values, with None or null where there is no value: an array, or a list of bytes for a small batch."""

BINARY_BYTES_MAX = 2**31 - 1
"""The most bytes that the 32-bit offsets of an Arrow binary array can address."""

_FEW = 16
"""The number of rows up to which a loop costs less than the call of a compute kernel."""

_STORAGE: dict[str, str] = {
    **{f"int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    "float": "<f4",
    "double": "<f8",
    "bool": "|u1",
    "date32[day]": "<i4",
}


def storage_dtype(data_type: pa.DataType) -> np.dtype[Any]:
    """The numpy type of a fixed-width type in memory, which ``to_numpy`` returns and ``from_numpy`` takes."""
    if pa.types.is_timestamp(data_type):
        return np.dtype("<i8")
    if pa.types.is_decimal128(data_type):
        # Little-endian two's complement of 16 bytes; numpy has no such integer, so it goes as two halves.
        return np.dtype([("low", "<u8"), ("high", "<u8")])
    return np.dtype(_STORAGE[str(data_type)])


def to_numpy(array: pa.Array) -> NumpyArray:
    """The values of a fixed-width array; the value at a null is arbitrary."""
    dtype, count = storage_dtype(array.type), len(array)
    if not count:
        return np.empty(0, dtype)
    data = array.buffers()[1]
    if pa.types.is_boolean(array.type):
        first_byte, first_bit = divmod(array.offset, 8)
        bits = np.frombuffer(data, np.uint8, offset=first_byte, count=(first_bit + count + 7) // 8)
        return np.unpackbits(bits, bitorder="little")[first_bit : first_bit + count]
    return np.frombuffer(data, dtype, count=count, offset=array.offset * dtype.itemsize)


def from_numpy(values: NumpyArray, data_type: pa.DataType, validity: pa.Buffer | None = None) -> pa.Array:
    """The array of a fixed-width type over ``values``, which are of its ``storage_dtype``."""
    count = len(values)
    if pa.types.is_boolean(data_type):
        data = pa.py_buffer(np.packbits(values, bitorder="little"))
    else:
        # A single value of a packed record counts as contiguous where it lies, but Arrow also needs it aligned.
        data = pa.py_buffer(np.require(values, requirements=["C", "A"]))
    return pa.Array.from_buffers(data_type, count, [validity, data])


def fits_precision(array: pa.Array) -> bool:
    """Says whether the decimals of an array have no more digits than their type allows; Arrow itself does not check."""
    halves = to_numpy(array)
    bound = 10**array.type.precision
    if bound <= 1 << 63:
        # The upper half of such a number only repeats the sign of the lower half.
        low = halves["low"].view(np.int64)
        return bool((halves["high"].view(np.int64) == low >> 63).all() and (low < bound).all() and (low > -bound).all())
    low, high = halves["low"], halves["high"].view(np.int64)
    above, below = divmod(bound - 1, 1 << 64), divmod(1 - bound, 1 << 64)
    too_large = (high > above[0]) | ((high == above[0]) & (low > np.uint64(above[1])))
    too_small = (high < below[0]) | ((high == below[0]) & (low < np.uint64(below[1])))
    return not (too_large | too_small).any()


def validity_of(nulls: NumpyArray) -> pa.Buffer | None:
    """Arrow's bitmap for a boolean array that is true where there is a null."""
    if not nulls.any():
        return None
    return pa.py_buffer(np.packbits(~nulls, bitorder="little"))


def nulls_of(array: pa.Array) -> NumpyArray | None:
    """A boolean array that is true where there is a null, or ``None`` if there is none."""
    if not array.null_count:
        return None
    nulls: NumpyArray = to_numpy(array.is_null()).view(np.bool_)
    return nulls


def offsets_of(array: pa.Array) -> NumpyArray:
    """The offsets at which each value begins in ``data_of``, and the one at which the last value ends."""
    if not len(array):
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32, count=len(array) + 1, offset=array.offset * 4)


def data_of(array: pa.Array) -> NumpyArray:
    """The whole data buffer of a binary or string array, also of a sliced one."""
    data = array.buffers()[2] if len(array) else None
    if data is None:
        return np.empty(0, np.uint8)
    return np.frombuffer(data, np.uint8)


def as_binary(array: pa.Array) -> pa.Array:
    """The bytes of a string or binary array, in the same buffers: for a few rows a cast would cost most of all."""
    if pa.types.is_binary(array.type):
        return array
    return pa.Array.from_buffers(pa.binary(), len(array), array.buffers(), offset=array.offset)


def as_string(array: pa.Array) -> pa.Array:
    """The strings of a binary array; ``pa.ArrowInvalid`` if it is not UTF-8."""
    offsets = offsets_of(array)
    used = data_of(array)[offsets[0] : offsets[-1]]
    if len(used) and used.max() >= 0x80:
        return array.cast(pa.string())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers(), offset=array.offset)


def to_list(values: Binary) -> list[Any]:
    return values if isinstance(values, list) else values.to_pylist()


def to_array(values: Binary) -> pa.BinaryArray:
    return pa.array(values, pa.binary()) if isinstance(values, list) else values


def no_values(keys: Binary) -> Binary:
    """As many nulls as there are keys, in the same form."""
    return [None] * len(keys) if isinstance(keys, list) else pa.nulls(len(keys), pa.binary())


def nulls_in(values: Binary) -> int:
    return values.count(None) if isinstance(values, list) else int(values.null_count)


def bytes_of(array: Binary) -> int:
    """The size of a binary array: values and offsets. ``nbytes`` also looks for shared buffers, which takes 8 µs."""
    if isinstance(array, list):
        # A loop: for the one or two values of most transactions a generator expression costs more than the sum itself.
        size_bytes = 4 * (len(array) + 1)
        for value in array:
            if value is not None:
                size_bytes += len(value)
        return size_bytes
    offsets = offsets_of(array)
    return int(offsets[-1]) - int(offsets[0]) + 4 * len(offsets)


def longest_of(array: Binary) -> int:
    """The length of the longest value of a binary array."""
    if isinstance(array, list):
        return max([len(value) for value in array if value is not None], default=0)
    offsets = offsets_of(array)
    if len(offsets) == 2:
        return int(offsets[1]) - int(offsets[0])
    return int((offsets[1:] - offsets[:-1]).max(initial=0))


def all_start_with(array: Binary, prefix: bytes) -> bool:
    """True if every value begins with ``prefix``; a null does not."""
    if len(array) <= _FEW:
        return all(value is not None and value.startswith(prefix) for value in to_list(array))
    array = to_array(array)
    return not array.null_count and bool(pc.all(pc.starts_with(array, pattern=prefix)).as_py())


@functools.cache
def binary_scalar(value: bytes) -> pa.BinaryScalar:
    """The Arrow scalar of a constant of the code. It is made when first used, not when this module is imported: Arrow
    imports pandas with the first value that it makes, which a process may want to prevent (``process_memory``)."""
    return pa.scalar(value, pa.binary())


def with_prefix(array: pa.Array, prefix: bytes) -> pa.Array:
    """The values of a binary array without nulls, each behind ``prefix``."""
    return pc.binary_join_element_wise(pa.scalar(prefix, pa.binary()), array, binary_scalar(b""))


def equal_length(offsets: NumpyArray, width: int) -> bool:
    """True if every value is exactly ``width`` bytes long."""
    count = len(offsets) - 1
    if int(offsets[-1]) - int(offsets[0]) != count * width:
        return False
    return bool((np.diff(offsets) == width).all())


def rows_to_binary(records: NumpyArray) -> pa.Array:
    """A binary array with one value for each fixed-width record."""
    count, width = len(records), records.dtype.itemsize
    offsets = np.arange(0, width * (count + 1), width, dtype=np.int32) if width else np.zeros(count + 1, np.int32)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(records.view(np.uint8))]
    )


def records_at(data: NumpyArray, starts: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    """The records of ``dtype`` that begin at ``starts``. The caller has checked that each lies inside ``data``."""
    width = dtype.itemsize
    if not len(starts):
        return np.empty(0, dtype)
    # One opaque item at every byte position: taking from it copies `width` bytes for each row, whatever the alignment.
    windows: NumpyArray = np.ndarray((len(data) - width + 1,), f"V{width}", buffer=data, strides=(1,))
    return windows[starts].view(dtype)


def pieces_at(data: NumpyArray, starts: NumpyArray, ends: NumpyArray) -> pa.Array:
    """A binary array of ``data[start:end]`` for every pair; the pairs ascend and do not overlap.

    The pieces and the gaps between them alternate, so [start, end, start, end, …] is a valid array of offsets over the
    same data, and every second value of it is one of the pieces.
    """
    count = len(starts)
    if not count:
        return pa.array([], pa.binary())
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = starts
    offsets[1::2] = ends
    both = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return both.take(pa.array(np.arange(0, 2 * count, 2)))


def sort_by_key(keys: Binary, values: Binary) -> tuple[Binary, Binary]:
    """The same pairs sorted by key; pairs with equal keys keep their order. A small batch is returned unchanged.

    RocksDB inserts sorted keys in half the time: it finds the position of each key near that of the one before.
    """
    if isinstance(keys, list):
        return keys, values
    order = pa.array(sort_order(keys))
    return keys.take(order), to_array(values).take(order)


def join(parts: list[Any]) -> pa.Array:
    """The parts (binary arrays or scalars) joined row by row; a null counts as empty."""
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, binary_scalar(b""), null_handling="replace", null_replacement="")


def sort_order(keys: pa.BinaryArray) -> NumpyArray:
    """The order in which the values of ``keys`` ascend; equal ones keep their order."""
    offsets = offsets_of(keys)
    width = int(offsets[1]) - int(offsets[0]) if len(keys) else 0
    if not width or not equal_length(offsets, width):
        order: NumpyArray = pc.array_sort_indices(keys).to_numpy()
        return order
    return order_of_even(data_of(keys)[offsets[0] : offsets[-1]].reshape(len(keys), width))


def order_of_even(rows: NumpyArray) -> NumpyArray:
    """The order in which rows of one length ascend, each a row of bytes; equal ones keep their order.

    They are sorted as numbers of 8 bytes, of which only those are looked at that differ at all. That takes a third of
    the time that comparing bytes does.
    """
    count, width = rows.shape
    words = np.zeros((count, (width + 7) // 8 * 8), np.uint8)
    words[:, :width] = rows
    columns = [column for column in words.view(">u8").astype(np.uint64).T if (column != column[0]).any()]
    return np.lexsort(columns[::-1]) if columns else np.arange(count)
