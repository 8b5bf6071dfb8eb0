"""Rows as bytes: the exact bytes, and bytes that are none. Round trips are in tests/property."""

from __future__ import annotations

import pyarrow as pa
import pytest

from shuffle.errors import CorruptData, SchemaMismatch, TooLarge
from shuffle.limits import VALUE_BYTES_MAX
from shuffle.statestore.codec.schema import TableSchema
from shuffle.statestore.codec.values import RowCodec

MIXED = pa.schema([("s", pa.string()), ("n", pa.int16()), ("b", pa.binary()), ("f", pa.bool_())])


def values_of(rows: pa.RecordBatch) -> pa.Array:
    return RowCodec("t", rows.schema).encode_columns(rows.columns, rows.num_rows)


def test_bytes_are_the_documented_ones() -> None:
    rows = pa.RecordBatch.from_pylist(
        [{"s": "ab", "n": -2, "b": b"\0", "f": True}, {"s": None, "n": None, "b": b"", "f": False}], schema=MIXED
    )
    assert values_of(rows).to_pylist() == [
        b"\x00" + b"\xfe\xff" + b"\x01" + b"\x02\0\0\0" + b"\x01\0\0\0" + b"ab\0",
        b"\x03" + b"\0\0" + b"\0" + bytes(8),
    ]


def test_what_stands_under_a_null_is_not_stored() -> None:
    validity = pa.py_buffer(b"\x00")
    under = pa.py_buffer((12345).to_bytes(8, "little"))
    dirty = pa.Array.from_buffers(pa.int64(), 1, [validity, under])
    text = pa.Array.from_buffers(
        pa.string(), 1, [validity, pa.py_buffer(bytes(4) + b"\x02\0\0\0"), pa.py_buffer(b"xx")]
    )
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    clean = pa.record_batch([pa.nulls(1, pa.int64()), pa.nulls(1, pa.string())], schema=schema)
    assert values_of(pa.record_batch([dirty, text], schema=schema)).equals(values_of(clean))


def test_no_value_columns_are_no_bytes() -> None:
    codec = RowCodec("t", pa.schema([]))
    for count in (0, 3):
        assert codec.encode_columns([], count).to_pylist() == [b""] * count
    assert codec.decode(pa.array([b""] * 3, pa.binary())) == []


def test_other_columns_are_refused() -> None:
    with pytest.raises(SchemaMismatch, match="'s' is missing"):
        TableSchema("t", pa.schema([("k", pa.int64())]), MIXED).row_columns(pa.record_batch({"k": [1], "n": [1]}))


def test_value_too_long_names_the_row() -> None:
    rows = pa.record_batch({"b": pa.array([b"", bytes(VALUE_BYTES_MAX)], pa.binary())})
    with pytest.raises(TooLarge, match="row 1") as caught:
        values_of(rows)
    assert (caught.value.table, caught.value.row) == ("t", 1)


@pytest.mark.parametrize("value", [b"", b"\0", b"\0" * 8, b"\0" * 10])
def test_fixed_value_of_another_length_is_corrupt(value: bytes) -> None:
    codec = RowCodec("t", pa.schema([("n", pa.int64())]))
    good = bytes(9)
    for values in ([value], [good, value], [value, good]):
        with pytest.raises(CorruptData, match="table 't'") as caught:
            codec.decode(pa.array(values, pa.binary()))
        assert caught.value.row == values.index(value)


def test_value_with_strings_cut_or_padded_anywhere_is_corrupt() -> None:
    codec = RowCodec("t", MIXED)
    good = values_of(pa.RecordBatch.from_pylist([{"s": "abc", "n": 1, "b": b"xyz", "f": True}], schema=MIXED))[
        0
    ].as_py()
    for bad in [*(good[:length] for length in range(len(good))), good + b"\0"]:
        with pytest.raises(CorruptData):
            codec.decode(pa.array([good, bad, good], pa.binary()))
        with pytest.raises(CorruptData):
            codec.decode(pa.array([bad], pa.binary()))


def test_lengths_that_lie_are_corrupt() -> None:
    codec = RowCodec("t", pa.schema([("s", pa.binary()), ("b", pa.binary())]))
    lying = b"\0" + b"\xff\xff\xff\xff" + b"\x03\0\0\0" + b"ab"
    with pytest.raises(CorruptData):
        codec.decode(pa.array([lying], pa.binary()))


def test_string_that_is_not_utf8_is_corrupt() -> None:
    codec = RowCodec("t", pa.schema([("s", pa.string())]))
    with pytest.raises(CorruptData, match="'s'"):
        codec.decode(pa.array([b"\0\x01\0\0\0\xff"], pa.binary()))
