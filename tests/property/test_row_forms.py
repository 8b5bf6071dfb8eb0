"""What the store takes for a key or a value is what its table would have made of some row, and nothing else."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shuffle.errors import BadInput, CorruptData
from shuffle.statestore.codec.arrow_bytes import fits_precision, with_prefix
from shuffle.statestore.codec.keys import KeyCodec
from shuffle.statestore.codec.schema import TableSchema
from shuffle.statestore.codec.small_batch import SmallKeyCodec, SmallValueCodec
from shuffle.statestore.codec.values import RowCodec
from shuffle.statestore.engine.catalogue import TableEntry
from shuffle.statestore.request import TableWrite
from tests.property.test_few_rows import KEY_KINDS, VALUE_KINDS, batches

PREFIX = b"tab"


def binary(*values: bytes) -> pa.BinaryArray:
    return pa.array(values, pa.binary())


def keys_are_valid(schema: pa.Schema, *keys: bytes) -> bool:
    """Says whether the keys are valid. The codecs for whole columns and for small batches have to agree."""
    try:
        KeyCodec("t", schema).check(binary(*keys), len(PREFIX))
        valid = True
    except CorruptData:
        valid = False
    assert SmallKeyCodec(schema).are_valid(keys, len(PREFIX)) == valid
    return valid


def values_are_valid(schema: pa.Schema, *values: bytes) -> bool:
    try:
        RowCodec("t", schema).check(binary(*values))
        valid = True
    except CorruptData:
        valid = False
    assert SmallValueCodec(schema).are_valid(values) == valid
    return valid


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    kind = draw(st.sampled_from(["change", "cut", "add", "insert"]))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    byte = bytes([draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))])
    if kind == "cut":
        return data[:at]
    if kind == "add":
        return data + byte
    return data[:at] + byte + data[at + (kind == "change") :]


@given(batches(KEY_KINDS, nulls=False), st.data())
@settings(max_examples=300, deadline=None)
def test_keys_are_valid_exactly_if_they_are_those_of_rows(batch: pa.RecordBatch, data: st.DataObject) -> None:
    codec = KeyCodec("t", batch.schema)
    keys = with_prefix(codec.encode_columns(batch.columns), PREFIX).to_pylist()
    assert keys_are_valid(batch.schema, *keys)
    assume(keys)
    damaged = PREFIX + data.draw(damage(keys[0][len(PREFIX) :]))
    if keys_are_valid(batch.schema, damaged, *keys[1:]):
        columns = codec.decode(binary(damaged), skip_bytes=len(PREFIX))
        assert all(fits_precision(column) for column in columns if pa.types.is_decimal128(column.type))
        assert codec.encode_columns(columns).to_pylist() == [damaged[len(PREFIX) :]]


@given(batches(VALUE_KINDS, nulls=True), st.data())
@settings(max_examples=300, deadline=None)
def test_values_are_valid_exactly_if_they_are_those_of_rows(batch: pa.RecordBatch, data: st.DataObject) -> None:
    codec = RowCodec("t", batch.schema)
    values = codec.encode_columns(batch.columns, batch.num_rows).to_pylist()
    assert values_are_valid(batch.schema, *values)
    assume(values)
    damaged = data.draw(damage(values[0]))
    if values_are_valid(batch.schema, damaged, *values[1:]):
        assert codec.encode_columns(codec.decode(binary(damaged)), 1).to_pylist() == [damaged]


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (pa.bool_(), b"\x02"),
        (pa.float64(), b"\x7f" + b"\xff" * 7),  # -0.0
        (pa.float64(), b"\xff" * 8),  # another NaN
        (pa.float32(), b"\0\0\0\0"),  # a negative one
        (pa.decimal128(3, 1), (2**127 + 1000).to_bytes(16, "big")),
        (pa.decimal128(38, 1), b"\xff" * 16),
        (pa.int64(), b"1234567"),
        (pa.string(), b"\xff"),
    ],
)
def test_another_form_of_a_key_is_none(kind: pa.DataType, key: bytes) -> None:
    """A row could be stored under two keys, and a lookup would find only one of them."""
    assert not keys_are_valid(pa.schema([("k", kind)]), PREFIX + key)


@pytest.mark.parametrize(
    "key", [b"a\0\1", b"a\0b\0\1" + bytes(8), b"a\0\0\1" + bytes(8), b"\xff\0\1" + bytes(8), b"a" + bytes(8)]
)
def test_string_inside_a_key_that_is_not_escaped_is_none(key: bytes) -> None:
    schema = pa.schema([("s", pa.string()), ("n", pa.int64())])
    assert keys_are_valid(schema, PREFIX + b"a\0\xffb\0\1" + bytes(8))
    assert not keys_are_valid(schema, PREFIX + key)


def test_value_says_null_only_where_there_may_be_one() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.string())])
    right = b"\x02" + struct.pack("<q", 7) + bytes(4)
    assert values_are_valid(schema, right)
    for wrong in (
        b"\x01" + bytes(12),
        b"\x04" + right[1:],
        right[:-4] + struct.pack("<I", 1) + b"x",
        b"",
        right + b"x",
    ):
        assert not values_are_valid(schema, wrong)
    assert values_are_valid(pa.schema([]), b"", b"")
    assert not values_are_valid(pa.schema([]), b"x")


def test_rows_of_a_slice_with_deletes_among_them_are_looked_at() -> None:
    entry = TableEntry.of(TableSchema("t", pa.schema([("n", pa.int64())]), pa.schema([("v", pa.string())]), table_id=1))
    key = [entry.prefix + struct.pack(">Q", n) for n in range(40)]
    value = b"\0" + struct.pack("<I", 2) + b"ab"
    values = [None if n % 3 == 0 else value for n in range(40)]
    entry.check_write(TableWrite(1, pa.array(key, pa.binary())[3:], pa.array(values, pa.binary())[3:]))
    values[20] = value + b"c"
    for cut in (slice(3, None), slice(20, 21)):
        with pytest.raises(BadInput, match="not a row of this table"):
            entry.check_write(TableWrite(1, key[cut], values[cut]))
        with pytest.raises(BadInput, match="not a row of this table"):
            entry.check_write(TableWrite(1, pa.array(key[cut], pa.binary()), pa.array(values[cut], pa.binary())))
