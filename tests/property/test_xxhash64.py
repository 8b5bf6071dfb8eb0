"""The vectorised hash against XXH64 written out in plain integers, value by value."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffle.errors import BadInput
from shuffle.partition.xxhash64 import hashable, xxhash64
from shuffle.partition.xxhash64_kernels import hash_bytes, hash_one

M = 2**64 - 1


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def chained(columns: Sequence[Sequence[bytes | None]], seed: int = 42) -> list[int]:
    """The definition: a null keeps the seed, a value's hash is the seed of the next column."""
    out = []
    for row in zip(*columns, strict=True):
        state = seed
        for value in row:
            state = state if value is None else hash_one(value, state)
        out.append(signed(state))
    return out


@pytest.mark.parametrize(
    ("value", "seed", "expected"),
    [
        (b"", 0, 0xEF46DB3751D8E999),
        (b"a", 0, 0xD24EC4F1A98C6E5B),
        (b"abc", 0, 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
    ],
)
def test_hash_one_gives_the_published_values(value: bytes, seed: int, expected: int) -> None:
    assert hash_one(value, seed) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=100), min_size=1, max_size=60),
    st.lists(st.integers(0, M), min_size=60, max_size=60),
)
def test_bytes_of_any_length_with_a_seed_per_row(values: list[bytes], seeds: list[int]) -> None:
    repeated = values * (40 // len(values) + 1)
    per_row = [seeds[position % 60] for position in range(len(repeated))]
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in repeated])])
    got = hash_bytes(np.frombuffer(b"".join(repeated), np.uint8), offsets, np.array(per_row, np.uint64))
    assert got.tolist() == [hash_one(value, seed) for value, seed in zip(repeated, per_row, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(*[st.one_of(st.none(), st.text(max_size=20))] * 3), min_size=1, max_size=40),
    st.sampled_from([pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int16(), pa.string())]),
    st.integers(0, 5),
)
def test_columns_are_chained_whatever_the_layout(rows: list[tuple[Any, ...]], layout: pa.DataType, skip: int) -> None:
    skip = min(skip, len(rows))
    columns = [list(column) for column in zip(*rows, strict=True)]
    arrays = [pa.array(column, pa.string()).cast(layout).slice(skip) for column in columns]
    octets = [[None if value is None else value.encode() for value in column[skip:]] for column in columns]
    assert xxhash64(arrays).tolist() == chained(octets)


@pytest.mark.parametrize("distinct", [3, 60, 2_000, 20_000])
def test_repeated_and_distinct_values_hash_alike(distinct: int) -> None:
    """Enough rows to choose between hashing distinct combinations and hashing rows."""
    generator = np.random.default_rng(distinct)
    users = [None if code == 0 else f"user-{code}" for code in generator.integers(0, distinct, 20_000)]
    clusters = [None if code == 0 else f"c{code}" for code in generator.integers(0, 5, 20_000)]
    names = [None if code == 0 else "x" * code for code in generator.integers(0, 70, 20_000)]
    columns = [users, clusters, names]
    expected = chained([[None if value is None else value.encode() for value in column] for column in columns])
    assert xxhash64([pa.array(column) for column in columns]).tolist() == expected
    encoded = [pa.array(column).dictionary_encode() for column in columns]
    assert xxhash64(encoded).tolist() == expected


def test_very_long_values_beside_short_ones() -> None:
    values = [b"x" * 100_000, b"", b"y" * 31, b"z" * 32, b"w" * 33] + [bytes(range(256)) * 3] * 20
    assert xxhash64([pa.array(values)]).tolist() == chained([values])


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**64 - 1)), min_size=1, max_size=50))
def test_uint64_is_hashed_as_its_bits(values: list[int | None]) -> None:
    as_signed = [None if value is None else signed(value) for value in values]
    assert xxhash64([pa.array(values, pa.uint64())]).tolist() == xxhash64([pa.array(as_signed, pa.int64())]).tolist()


@given(st.lists(st.one_of(st.none(), st.integers(0, 255)), min_size=1, max_size=50))
def test_small_unsigned_integers_are_widened(values: list[int | None]) -> None:
    ints = xxhash64([pa.array(values, pa.int32())]).tolist()
    assert xxhash64([pa.array(values, pa.uint8())]).tolist() == ints
    assert xxhash64([pa.array(values, pa.uint16())]).tolist() == ints
    assert xxhash64([pa.array(values, pa.uint32())]).tolist() == xxhash64([pa.array(values, pa.int64())]).tolist()


def test_all_nans_are_one_value_and_both_zeros_too() -> None:
    nans = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8000000000000, 0xFFF8000000000001)]
    assert len(set(xxhash64([pa.array(nans)]).tolist())) == 1
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        assert len(set(xxhash64([pa.array([0.0, -0.0], kind)]).tolist())) == 1


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_the_unit_of_a_timestamp_does_not_matter(unit: str) -> None:
    micros = pa.array([0, 5_000_000, -3_000_000, None], pa.timestamp("us"))
    other = micros.cast(pa.timestamp(unit))
    assert xxhash64([other]).tolist() == xxhash64([micros]).tolist()


def test_other_layouts_of_lists_decimals_and_run_ends_hash_alike() -> None:
    lists = [[1, None], None, [3, 4]]
    expected = xxhash64([pa.array(lists, pa.list_(pa.int64()))]).tolist()
    layouts = [pa.large_list(pa.int64()), pa.list_view(pa.int64()), pa.list_(pa.int64(), 2)]
    assert [xxhash64([pa.array(lists, layout)]).tolist() for layout in layouts] == [expected] * 3
    decimals = pa.array([1, -2, None], pa.decimal128(9, 2))
    narrow = [pa.decimal32(9, 2), pa.decimal64(9, 2), pa.decimal256(9, 2)]
    assert {tuple(xxhash64([decimals.cast(kind)]).tolist()) for kind in narrow} == {
        tuple(xxhash64([decimals]).tolist())
    }
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", "b"]))
    assert xxhash64([runs]).tolist() == xxhash64([pa.array(["a", "a", "b"])]).tolist()


def test_slices_of_every_type_start_where_they_should() -> None:
    values = {
        pa.bool_(): [True, False, None, True],
        pa.float32(): [1.5, None, -0.0, 2.0],
        pa.binary(3): [b"abc", b"def", None, b"ghi"],
        pa.decimal128(30, 2): [1, None, -(10**20), 7],
        pa.struct([("a", pa.int32()), ("b", pa.string())]): [{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}, {}],
        pa.list_(pa.string()): [["a"], None, ["b", None, "c"], []],
    }
    for kind, column in values.items():
        whole = xxhash64([pa.array(column, kind)]).tolist()
        assert xxhash64([pa.array(column, kind).slice(1, 2)]).tolist() == whole[1:3], kind


def test_types_without_a_hash_are_refused() -> None:
    refused = [pa.map_(pa.string(), pa.int8()), pa.month_day_nano_interval(), pa.decimal256(40, 0)]
    for kind in [*refused, pa.struct([("a", refused[0])]), pa.list_(refused[0])]:
        assert not hashable(kind)
        with pytest.raises(BadInput, match="cannot hash"):
            xxhash64([pa.array([None, None], kind) if not pa.types.is_nested(kind) else _filled(kind)])


def _filled(kind: pa.DataType) -> pa.Array:
    one_map: list[tuple[str, int]] = [("k", 1)]
    value: Any = one_map
    if pa.types.is_struct(kind):
        value = {"a": one_map}
    elif pa.types.is_list(kind):
        value = [one_map]
    return pa.array([value], kind)


def test_no_rows_and_no_columns() -> None:
    assert xxhash64([pa.array([], pa.string()), pa.array([], pa.list_(pa.int8()))]).tolist() == []
    assert xxhash64([pa.nulls(3)]).tolist() == [42, 42, 42]
    with pytest.raises(BadInput, match="at least one column"):
        xxhash64([])
    with pytest.raises(BadInput, match="different lengths"):
        xxhash64([pa.array([1]), pa.array([1, 2])])
