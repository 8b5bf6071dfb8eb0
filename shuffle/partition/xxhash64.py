"""Spark SQL's ``xxhash64(columns…)`` over Arrow columns, bit for bit.

The algorithm is XXH64 with seed 42. Several columns are chained: the hash of one column is the seed of the next, and a
null leaves the seed as it is. How a value becomes bytes is Spark's choice, and followed here:

| Arrow type                          | hashed as                                                                |
|-------------------------------------|--------------------------------------------------------------------------|
| null                                | nothing: the seed stays                                                  |
| bool, int8, int16, int32            | a 4-byte integer                                                         |
| int64                               | an 8-byte integer                                                        |
| uint8, uint16 / uint32              | Spark has none: widened to int32 / int64, as Spark reads them elsewhere  |
| uint64                              | Spark has none: its 64 bits as an 8-byte integer                         |
| float16, float32                    | the 4 bytes of the float; -0.0 as 0.0, every NaN as the canonical one    |
| float64                             | the 8 bytes of the double, with the same two rules                       |
| string, binary (all layouts)        | the bytes                                                                |
| date32, date64                      | days as a 4-byte integer                                                 |
| timestamp, duration (any unit)      | microseconds as an 8-byte integer (nanoseconds rounded down)             |
| time32, time64                      | nanoseconds as an 8-byte integer                                         |
| decimal, precision <= 18            | the unscaled value as an 8-byte integer                                  |
| decimal, precision <= 38            | the bytes of the unscaled value, big endian, as few as hold its sign     |
| struct                              | its fields, chained                                                      |
| list (all layouts)                  | its elements, chained                                                    |
| dictionary, run-end encoded, extension | the values behind them                                                |
| map, union, calendar interval       | refused (of maps, Spark says the same: equal ones may differ in order)   |

How the hashing itself is done is in ``xxhash64_kernels``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput
from shuffle.partition.xxhash64_kernels import Int64Array, Words, hash_bytes, hash_ints, hash_longs, hash_pieces
from shuffle.support.native import kernels

SPARK_SEED = 42

_DICTIONARY_SAMPLE_ROWS = 4096
_DICTIONARY_SAMPLE_DISTINCT_MAX = 0.8
"""The largest share of distinct values in the sample with which a column is encoded before hashing. Encoding a string
column costs about half of hashing it when values repeat, and three times as much when they do not. Of 4096 rows out of
10,000 values, 82 % are distinct: above that, hashing every row is likely to be cheaper."""

_PRODUCT_SHARE_MAX = 4
"""Distinct combinations are hashed instead of rows if there are at most one for this many rows."""


class _Chain:
    """The hashes of the columns so far: one per distinct combination of values, and each row's combination."""

    __slots__ = ("codes", "table")

    def __init__(self, table: Words, codes: Int64Array | None) -> None:
        self.table = table
        self.codes = codes
        """For each row the index of its hash in ``table``; ``None`` if the table has one hash per row."""

    def rows(self) -> Words:
        if self.codes is None:
            return self.table
        return np.repeat(self.table, len(self.codes)) if len(self.table) == 1 else self.table.take(self.codes)


def xxhash64(columns: list[pa.Array], seed: int = SPARK_SEED) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Spark SQL's ``xxhash64(columns…)``: one signed 64-bit hash per row. The columns have the same length."""
    if not columns:
        raise BadInput("xxhash64 needs at least one column")
    row_count = len(columns[0])
    if not row_count and not any(len(column) for column in columns):
        return np.empty(0, np.int64)
    chain = _Chain(np.full(1, seed & 0xFFFFFFFFFFFFFFFF, np.uint64), np.zeros(row_count, np.int64))
    for column in columns:
        if len(column) != row_count:
            raise BadInput(f"the columns of one hash have different lengths: {row_count} and {len(column)}")
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        chain = _extend(chain, _storage(column))
    return chain.rows().view(np.int64)


def hashable(data_type: pa.DataType) -> bool:
    """Whether columns of this type have a hash (see the table at the top)."""
    if isinstance(data_type, pa.BaseExtensionType):
        return hashable(data_type.storage_type)
    types = pa.types
    if types.is_dictionary(data_type) or types.is_run_end_encoded(data_type):
        return hashable(data_type.value_type)
    if types.is_struct(data_type):
        return all(hashable(data_type.field(position).type) for position in range(data_type.num_fields))
    if _is_list(data_type):
        return hashable(data_type.value_type)
    if types.is_decimal(data_type):
        return bool(data_type.precision <= 38)
    if types.is_interval(data_type):
        return False
    return bool(types.is_null(data_type) or types.is_primitive(data_type) or _is_bytes(data_type))


def _is_list(data_type: pa.DataType) -> bool:
    types = pa.types
    views = types.is_list_view(data_type) or types.is_large_list_view(data_type)
    return bool(
        types.is_list(data_type) or types.is_large_list(data_type) or types.is_fixed_size_list(data_type) or views
    )


def _is_bytes(data_type: pa.DataType) -> bool:
    types = pa.types
    flat = (
        types.is_string(data_type)
        or types.is_binary(data_type)
        or types.is_large_string(data_type)
        or types.is_large_binary(data_type)
    )
    return bool(
        flat
        or types.is_fixed_size_binary(data_type)
        or types.is_string_view(data_type)
        or types.is_binary_view(data_type)
    )


def _storage(column: pa.Array) -> pa.Array:
    """The column without extension types and run-end encoding."""
    while isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    return column


def _extend(chain: _Chain, column: pa.Array) -> _Chain:
    """Chains one more column to the hashes, by distinct combination if there are few, else by row."""
    combinations_max = max(len(column) // _PRODUCT_SHARE_MAX, 1)
    encoded = None if chain.codes is None else _encode(column, combinations_max // max(len(chain.table), 1))
    if encoded is None or chain.codes is None:
        return _Chain(_hash_column(column, chain.rows()), None)
    values, codes = encoded.dictionary, encoded.indices
    if codes.null_count:
        codes = pc.fill_null(codes.cast(pa.int64()), len(values))
        values = pa.concat_arrays([values, pa.nulls(1, values.type)])
    codes_by_row = codes.to_numpy(zero_copy_only=False)
    if len(chain.table) * len(values) > combinations_max:
        return _Chain(_hash_column(column, chain.rows()), None)
    if len(chain.table) == 1:
        return _Chain(_hash_column(values, np.repeat(chain.table, len(values))), codes_by_row)
    repeated = np.tile(np.arange(len(values)), len(chain.table))
    table = _hash_column(values.take(pa.array(repeated)), np.repeat(chain.table, len(values)))
    return _Chain(table, chain.codes * len(values) + codes_by_row)


def _encode(column: pa.Array, distinct_max: int) -> pa.DictionaryArray | None:
    """The column by distinct value, if that is likely to pay and there seem to be no more than ``distinct_max``."""
    if pa.types.is_dictionary(column.type):
        return column
    flat = pa.types.is_string(column.type) or pa.types.is_binary(column.type)
    if not flat or len(column) < 2 * _DICTIONARY_SAMPLE_ROWS or kernels() is not None:
        return None  # With compiled kernels hashing every row is cheaper than finding the distinct ones.
    if not repeats(column, distinct_max):
        return None
    return column.dictionary_encode()


def repeats(column: pa.Array, distinct_max: int = _DICTIONARY_SAMPLE_ROWS) -> bool:
    """Whether, by a sample, the values of the column repeat, and at most ``distinct_max`` of them are distinct."""
    distinct = len(column.slice(0, _DICTIONARY_SAMPLE_ROWS).unique())
    return distinct <= min(_DICTIONARY_SAMPLE_ROWS * _DICTIONARY_SAMPLE_DISTINCT_MAX, distinct_max)


def _hash_column(column: pa.Array, seeds: Words) -> Words:
    """One hash per row: that of the row's value, or the row's seed where the value is null."""
    column = _storage(column)
    data_type = column.type
    if pa.types.is_null(data_type):
        return seeds
    if pa.types.is_dictionary(data_type):
        return _hash_column(column.dictionary_decode(), seeds)
    if pa.types.is_struct(data_type):
        # flatten() hands a null of the struct down to all of its fields, and nulls leave the seed.
        for field in column.flatten():
            seeds = _hash_column(field, seeds)
        return seeds
    if _is_list(data_type):
        return _hash_lists(column, seeds)
    if pa.types.is_decimal(data_type):
        hashes = _hash_decimals(column, seeds)
    elif _is_bytes(data_type):
        hashes = _hash_strings(column, seeds)
    else:
        hashes = _hash_fixed_width(column, seeds)
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        hashes = np.where(valid, hashes, seeds)
    return hashes


def _hash_lists(column: pa.Array, seeds: Words) -> Words:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    elements = column.flatten()
    starts = np.cumsum(lengths) - lengths
    hashes = seeds.copy()
    active = np.arange(len(lengths))
    for position in range(int(lengths.max(initial=0))):
        active = active[lengths[active] > position]
        hashes[active] = _hash_column(elements.take(pa.array(starts[active] + position)), hashes[active])
    return hashes


def _values_of(column: pa.Array, dtype: str) -> np.ndarray[Any, Any]:
    """The fixed-width values of a column; where it is null they are arbitrary."""
    width = np.dtype(dtype).itemsize
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(len(column), dtype)
    return np.frombuffer(buffer, dtype, count=len(column), offset=column.offset * width)


def _hash_strings(column: pa.Array, seeds: Words) -> Words:
    data_type, types = column.type, pa.types
    if not len(column):
        return seeds
    if types.is_fixed_size_binary(data_type):
        octets = np.frombuffer(column.buffers()[1] or b"", np.uint8)
        offsets = np.arange(column.offset, column.offset + len(column) + 1, dtype=np.int64) * data_type.byte_width
        return hash_bytes(octets, offsets, seeds)
    if types.is_string_view(data_type) or types.is_binary_view(data_type):
        column = column.cast(pa.large_binary())
        data_type = column.type
    wide = types.is_large_string(data_type) or types.is_large_binary(data_type)
    _, offsets_buffer, data = column.buffers()
    width = 8 if wide else 4
    offsets = np.frombuffer(offsets_buffer, f"<i{width}", count=len(column) + 1, offset=column.offset * width)
    return hash_bytes(np.frombuffer(data or b"", np.uint8), offsets, seeds)


def _hash_decimals(column: pa.Array, seeds: Words) -> Words:
    data_type = column.type
    if data_type.precision > 38:
        raise BadInput(f"cannot hash {data_type}: Spark's decimals have at most 38 digits")
    stride = data_type.bit_width // 64
    if data_type.bit_width == 32:
        return hash_longs(_values_of(column, "<i4").astype(np.int64).view(np.uint64), seeds)
    limbs = np.frombuffer(column.buffers()[1], "<u8", count=len(column) * stride, offset=column.offset * stride * 8)
    low = limbs[::stride]
    if data_type.precision <= 18:
        return hash_longs(low, seeds)
    # Java's BigInteger.toByteArray(): big endian, without leading bytes that only repeat the sign.
    octets = np.stack([limbs[1::stride], low], axis=1).astype(">u8").view(np.uint8)
    sign = np.where(octets[:, :1] & 0x80, np.uint8(0xFF), np.uint8(0))
    redundant = (octets[:, :-1] == sign) & ((octets[:, 1:] & 0x80) == (sign & 0x80))
    skipped = np.logical_and.accumulate(redundant, axis=1).sum(axis=1)
    starts = np.arange(len(column), dtype=np.int64) * 16 + skipped
    return hash_pieces(octets.reshape(-1), starts, 16 - skipped, seeds)


_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}
_NANOSECONDS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_INTS = {"int8": "i1", "int16": "<i2", "int32": "<i4", "uint8": "u1", "uint16": "<u2", "date32[day]": "<i4"}
_LONGS = {"int64": "<i8", "uint32": "<u4", "uint64": "<u8"}


def _hash_fixed_width(column: pa.Array, seeds: Words) -> Words:
    data_type, types = column.type, pa.types
    name = str(data_type)
    if name in _INTS:
        return hash_ints(_low_32(_values_of(column, _INTS[name])), seeds)
    if name in _LONGS:
        return hash_longs(_values_of(column, _LONGS[name]).astype(np.int64, copy=False).view(np.uint64), seeds)
    if types.is_boolean(data_type):
        return hash_ints(_values_of(column.cast(pa.int8()), "i1").astype(np.uint64), seeds)
    if types.is_float16(data_type):
        return _hash_fixed_width(column.cast(pa.float32()), seeds)
    if types.is_float32(data_type):
        return hash_ints(_float_bits(_values_of(column, "<f4"), "<u4", 0x7FC00000).astype(np.uint64), seeds)
    if types.is_float64(data_type):
        return hash_longs(_float_bits(_values_of(column, "<f8"), "<u8", 0x7FF8000000000000), seeds)
    if types.is_date64(data_type):
        return hash_ints(_low_32(_values_of(column, "<i8") // 86_400_000), seeds)
    if types.is_timestamp(data_type) or types.is_duration(data_type):
        ticks = _values_of(column, "<i8")
        micros = ticks // 1000 if data_type.unit == "ns" else ticks * np.int64(_MICROSECONDS[data_type.unit])
        return hash_longs(micros.view(np.uint64), seeds)
    if types.is_time(data_type):
        ticks = _values_of(column, "<i4" if data_type.bit_width == 32 else "<i8").astype(np.int64)
        return hash_longs((ticks * np.int64(_NANOSECONDS[data_type.unit])).view(np.uint64), seeds)
    raise BadInput(f"cannot hash a column of type {data_type}: Spark's xxhash64 has no meaning for it", type=name)


def _low_32(values: np.ndarray[Any, Any]) -> Words:
    return values.astype(np.int32, copy=False).view(np.uint32).astype(np.uint64)


def _float_bits(values: np.ndarray[Any, Any], dtype: str, canonical_nan: int) -> np.ndarray[Any, Any]:
    bits = values.view(dtype).copy()
    bits[values == 0] = 0
    bits[np.isnan(values)] = canonical_nan
    return bits
