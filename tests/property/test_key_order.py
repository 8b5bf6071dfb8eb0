"""Encoded keys sort as Python sorts the tuples they came from, and come back as they were."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffle.statestore.codec.keys import KeyCodec

# Few letters, so that prefixes, zero bytes and near equal strings really come up.
TEXT = st.text(st.sampled_from("\0\x01ab\x7f\xff߿ࠀ￿\U00010000\U0010ffff"), max_size=5) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=8
)
BYTES = st.lists(st.sampled_from([0, 1, 2, 97, 254, 255]), max_size=5).map(bytes) | st.binary(max_size=8)
DECIMALS = st.integers(-(10**38) + 1, 10**38 - 1).map(lambda digits: Decimal(f"{digits}E-3")) | st.integers(-3, 3).map(
    lambda digits: Decimal(f"{digits}E-3")
)


def whole(bits: int, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.integers(low, high) | st.sampled_from([low, low + 1, 0, high - 1, high])


KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *((getattr(pa, f"int{bits}")(), whole(bits, True)) for bits in (8, 16, 32, 64)),
    *((getattr(pa, f"uint{bits}")(), whole(bits, False)) for bits in (8, 16, 32, 64)),
    (pa.float64(), st.floats() | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])),
    (pa.float32(), st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])),
    (pa.bool_(), st.booleans()),
    (pa.string(), TEXT),
    (pa.binary(), BYTES),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("ms", "UTC"), st.integers(-(10**12), 10**12)),
    (pa.decimal128(38, 3), DECIMALS),
]


@st.composite
def keys(draw: st.DrawFn) -> tuple[pa.Schema, list[tuple[Any, ...]]]:
    columns = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    schema = pa.schema([(f"k{index}", kind) for index, (kind, _) in enumerate(columns)])
    rows = draw(st.lists(st.tuples(*(values for _, values in columns)), max_size=12))
    return schema, rows


def batch_of(schema: pa.Schema, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [pa.array([row[index] for row in rows], field.type) for index, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def comparable(value: Any) -> Any:
    """Python's own order, with NaN after all other floats."""
    if isinstance(value, float):
        return (math.isnan(value), 0.0 if math.isnan(value) else value)
    return value


@given(keys())
@settings(max_examples=150, deadline=None)
def test_bytes_sort_and_compare_as_the_tuples_do(case: tuple[pa.Schema, list[tuple[Any, ...]]]) -> None:
    schema, rows = case
    encoded = KeyCodec("t", schema).encode_columns(batch_of(schema, rows).columns).to_pylist()
    python = [tuple(comparable(value) for value in row) for row in rows]
    for left, left_bytes in zip(python, encoded, strict=True):
        for right, right_bytes in zip(python, encoded, strict=True):
            assert (left < right) == (left_bytes < right_bytes)
            assert (left == right) == (left_bytes == right_bytes)


@given(keys(), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_keys_come_back_also_from_a_slice(case: tuple[pa.Schema, list[tuple[Any, ...]]], skipped: int) -> None:
    schema, rows = case
    batch = batch_of(schema, rows)
    codec = KeyCodec("t", schema)
    decoded = codec.decode(codec.encode_columns(batch.columns).slice(skipped))
    for column, field, before in zip(decoded, schema, batch.slice(skipped).columns, strict=True):
        column.validate(full=True)
        assert column.type == field.type
        if pa.types.is_floating(field.type):
            assert [comparable(value) for value in column.to_pylist()] == [comparable(v) for v in before.to_pylist()]
        else:
            assert column.equals(before)
    assert codec.encode_columns(batch.slice(skipped).columns).equals(codec.encode_columns(batch.columns).slice(skipped))


@given(keys(), st.data())
@settings(max_examples=80, deadline=None)
def test_prefix_range_holds_exactly_the_keys_with_these_leading_values(
    case: tuple[pa.Schema, list[tuple[Any, ...]]], data: st.DataObject
) -> None:
    schema, rows = case
    if not rows:
        return
    width = data.draw(st.integers(0, len(schema)))
    leading = data.draw(st.sampled_from(rows))[:width]
    codec = KeyCodec("t", schema)
    begin, end = codec.prefix_range(leading)
    target = [comparable(value) for value in leading]
    for row, key in zip(rows, codec.encode_columns(batch_of(schema, rows).columns).to_pylist(), strict=True):
        inside = begin <= key and (end is None or key < end)
        assert inside == ([comparable(value) for value in row[:width]] == target)


def test_dates_before_1970_sort_first() -> None:
    schema = pa.schema([("d", pa.date32())])
    days = [datetime.date(1969, 12, 31), datetime.date(1970, 1, 1), datetime.date(2020, 1, 1)]
    encoded = KeyCodec("t", schema).encode_columns([pa.array(days, pa.date32())]).to_pylist()
    assert encoded == sorted(encoded)
