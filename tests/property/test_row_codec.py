"""Rows of any supported schema come back from their bytes as they were, nulls and slices included."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffle.statestore.codec.values import RowCodec

KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *((getattr(pa, f"int{bits}")(), st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)) for bits in (8, 16, 32, 64)),
    *((getattr(pa, f"uint{bits}")(), st.integers(0, 2**bits - 1)) for bits in (8, 16, 32, 64)),
    (pa.float64(), st.floats()),
    (pa.float32(), st.floats(width=32)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=6)),
    (pa.string(), st.text(max_size=6)),
    (pa.binary(), st.binary(max_size=6)),
    (pa.date32(), st.dates()),
    (pa.timestamp("ns"), st.integers(-(2**63), 2**63 - 1)),
    (pa.timestamp("us", "Asia/Tokyo"), st.integers(-(2**63), 2**63 - 1)),
    (pa.decimal128(38, 3), st.integers(-(10**38) + 1, 10**38 - 1).map(lambda digits: Decimal(f"{digits}E-3"))),
]


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    columns = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=10))
    count = draw(st.integers(0, 12))
    arrays = [
        pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), kind) for kind, values in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[f"v{index}" for index in range(len(columns))])


def same(left: pa.Array, right: pa.Array) -> bool:
    """Equal to the bit, so that a NaN is equal to itself; without the bits under nulls."""
    if pa.types.is_floating(left.type):
        whole = pa.int64() if left.type.bit_width == 64 else pa.int32()
        left, right = left.view(whole), right.view(whole)
    return bool(left.equals(right))


@given(batches(), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_rows_come_back_also_from_slices(batch: pa.RecordBatch, skipped: int, skipped_later: int) -> None:
    codec = RowCodec("t", batch.schema)
    part = batch.slice(skipped)
    values = codec.encode_columns(part.columns, part.num_rows)
    assert len(values) == part.num_rows
    decoded = codec.decode(values.slice(skipped_later))
    for column, before in zip(decoded, part.slice(skipped_later).columns, strict=True):
        column.validate(full=True)
        assert column.type == before.type
        assert same(column, before)


@given(batches())
@settings(max_examples=40, deadline=None)
def test_equal_rows_have_equal_bytes_wherever_they_stand(batch: pa.RecordBatch) -> None:
    codec = RowCodec("t", batch.schema)
    together = codec.encode_columns(batch.columns, batch.num_rows).to_pylist()
    assert together == [
        codec.encode_columns(batch.slice(row, 1).columns, 1)[0].as_py() for row in range(batch.num_rows)
    ]
