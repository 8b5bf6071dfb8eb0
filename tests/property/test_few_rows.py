"""A small batch, encoded row by row, gives the same bytes as whole columns."""

from __future__ import annotations

import random
import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffle.errors import CorruptData, TooLarge
from shuffle.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import to_list, with_prefix
from shuffle.statestore.codec.keys import KeyCodec
from shuffle.statestore.codec.schema import TableSchema
from shuffle.statestore.codec.small_batch import SMALL_BATCH_ROWS_MAX, SmallKeyCodec, SmallValueCodec
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.codec.values import RowCodec
from tests.property.test_key_order import KINDS as KEY_KINDS
from tests.property.test_row_codec import KINDS as VALUE_KINDS


@st.composite
def batches(draw: st.DrawFn, types: list[tuple[pa.DataType, st.SearchStrategy[object]]], nulls: bool) -> pa.RecordBatch:
    """A slice of a batch: what lies before and behind it must not show."""
    columns = draw(st.lists(st.sampled_from(types), min_size=1, max_size=10))
    count, skipped = draw(st.integers(0, SMALL_BATCH_ROWS_MAX)), draw(st.integers(0, 9))
    schema = pa.schema([(f"c{index}", data_type) for index, (data_type, _) in enumerate(columns)])
    arrays = []
    for data_type, values in columns:
        drawn = draw(
            st.lists(values | st.none() if nulls else values, min_size=count + skipped, max_size=count + skipped)
        )
        arrays.append(pa.array(drawn, data_type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema).slice(skipped)


@given(batches(KEY_KINDS, nulls=False))
@settings(max_examples=200, deadline=None)
def test_keys_are_the_same(batch: pa.RecordBatch) -> None:
    whole = with_prefix(KeyCodec("t", batch.schema).encode_columns(batch.columns), b"tab")
    assert SmallKeyCodec(batch.schema).encode(batch.columns, b"tab") == whole.to_pylist()


@given(batches(VALUE_KINDS, nulls=True))
@settings(max_examples=200, deadline=None)
def test_values_are_the_same(batch: pa.RecordBatch) -> None:
    whole = RowCodec("t", batch.schema).encode_columns(batch.columns, batch.num_rows)
    assert SmallValueCodec(batch.schema).encode(batch.columns, batch.num_rows) == whole.to_pylist()


@given(st.booleans().flatmap(lambda nulls: batches(VALUE_KINDS, nulls=nulls)))
@settings(max_examples=200, deadline=None)
def test_values_are_decoded_alike_or_left_to_the_other_codec(batch: pa.RecordBatch) -> None:
    encoded = SmallValueCodec(batch.schema).encode(batch.columns, batch.num_rows)
    decoded = SmallValueCodec(batch.schema).decode(encoded)
    if decoded is not None:
        whole = RowCodec("t", batch.schema).decode(pa.array(encoded, pa.binary()))
        assert [column.type for column in decoded] == batch.schema.types
        for few, many in zip(decoded, whole, strict=True):
            few.validate(full=True)
            assert SmallValueCodec(pa.schema([("c", few.type)])).encode([few], len(few)) == SmallValueCodec(
                pa.schema([("c", many.type)])
            ).encode([many], len(many))  # Bytes: a NaN is not equal to itself.


def test_plain_values_are_decoded_here() -> None:
    batch = pa.RecordBatch.from_pydict({"n": [1, -2], "s": ["ab", ""], "b": [b"\0\xff", b"z"], "f": [0.5, -1.0]})
    codec = SmallValueCodec(batch.schema)
    decoded = codec.decode(codec.encode(batch.columns, 2))
    assert decoded is not None
    assert [column.to_pylist() for column in decoded] == [column.to_pylist() for column in batch.columns]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_values_are_left_to_the_codec_that_reports_them(data: st.DataObject) -> None:
    schema = pa.schema([("n", pa.int32()), ("s", pa.string()), ("b", pa.binary())])
    batch = pa.RecordBatch.from_arrays(
        [pa.array([7, 8], pa.int32()), pa.array(["abc", "d"]), pa.array([b"", b"xy"], pa.binary())], schema=schema
    )
    encoded = SmallValueCodec(schema).encode(batch.columns, 2)
    damaged = bytearray(encoded[1])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    values = [encoded[0], bytes(damaged[: data.draw(st.integers(0, len(damaged)))])]
    try:
        whole = RowCodec("t", schema).decode(pa.array(values, pa.binary()))
    except CorruptData:
        assert SmallValueCodec(schema).decode(values) is None
    else:
        decoded = SmallValueCodec(schema).decode(values)
        assert decoded is None or [column.to_pylist() for column in decoded] == [column.to_pylist() for column in whole]


def test_what_stands_under_a_null_does_not_show() -> None:
    dirty = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(b"\x07" * 16)])
    text = pa.Array.from_buffers(
        pa.string(),
        2,
        [
            pa.py_buffer(b"\x02"),
            pa.py_buffer(struct.pack("<iii", 0, 2, 3)),
            pa.py_buffer(b"xyz"),
        ],
    )
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    batch = pa.RecordBatch.from_arrays([dirty, text], schema=schema)
    whole = RowCodec("t", schema).encode_columns(batch.columns, 2)
    assert SmallValueCodec(schema).encode(batch.columns, 2) == whole.to_pylist()


def test_rows_are_encoded_alike_whatever_their_number() -> None:
    schema = TableSchema(
        "t", pa.schema([("s", pa.string()), ("n", pa.int32())]), pa.schema([("v", pa.float64()), ("b", pa.bool_())])
    )
    table, chance = Table(schema), random.Random(1)
    count = 3 * SMALL_BATCH_ROWS_MAX
    rows = pa.table(
        {
            "s": ["a\0" * (row % 3) for row in range(count)],
            "n": pa.array(range(-count, 0), pa.int32()),
            "v": [None if row % 5 == 0 else chance.random() for row in range(count)],
            "b": [None if row % 7 == 0 else row % 2 == 0 for row in range(count)],
        }
    )
    keys, values = (to_list(column) for column in table.encode_rows(rows))
    for begin in range(0, count, SMALL_BATCH_ROWS_MAX - 1):
        some_keys, some_values = table.encode_rows(rows.slice(begin, SMALL_BATCH_ROWS_MAX - 1))
        assert isinstance(some_keys, list)
        assert some_keys == keys[begin : begin + SMALL_BATCH_ROWS_MAX - 1]
        assert some_values == values[begin : begin + SMALL_BATCH_ROWS_MAX - 1]
        assert table.encode_keys(rows.select(["s", "n"]).slice(begin, 2))[1] == keys[begin : begin + 2]


def test_one_row_over_the_limit_is_refused_like_many() -> None:
    table = Table(TableSchema("t", pa.schema([("k", pa.binary())]), pa.schema([("v", pa.binary())])))
    longest = pa.table({"k": [b"k" * KEY_BYTES_MAX], "v": [b""]})
    assert len(to_list(table.encode_rows(longest)[0])[0]) == KEY_BYTES_MAX + 5
    with pytest.raises(TooLarge, match="row 1: the key"):
        table.encode_rows(pa.table({"k": [b"", b"k" * (KEY_BYTES_MAX + 1)], "v": [b"", b""]}))
    with pytest.raises(TooLarge, match="row 0: the value"):
        table.encode_rows(pa.table({"k": [b"k"], "v": [bytes(VALUE_BYTES_MAX)]}))
