"""Keys as bytes: the exact bytes, the bounds of scans, and what is refused. Order is in tests/property."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import BadInput, CorruptData, NullKey, SchemaMismatch, TooLarge
from shuffle.limits import KEY_BYTES_MAX
from shuffle.statestore.codec.keys import KeyCodec, bytes_after
from shuffle.statestore.codec.schema import TableSchema

SI = pa.schema([("name", pa.string()), ("number", pa.int16())])
IS = pa.schema([("number", pa.int16()), ("name", pa.string())])


def keys_of(schema: pa.Schema, rows: pa.Table | pa.RecordBatch) -> pa.Array:
    """The keys of any number of rows, on the way that they take when they are looked up."""
    conformed = TableSchema("t", schema, pa.schema([])).conform_keys(rows)
    return KeyCodec("t", schema).encode_columns(conformed.columns)


def encoded(schema: pa.Schema, *rows: tuple[Any, ...]) -> list[bytes]:
    batch = pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
    keys: list[bytes] = keys_of(schema, batch).to_pylist()
    return keys


def test_bytes_are_the_documented_ones() -> None:
    assert encoded(SI, ("a\0b", -1), ("", 1)) == [b"a\x00\xffb\x00\x01\x7f\xff", b"\x00\x01\x80\x01"]
    assert encoded(IS, (-1, "a\0b"), (1, "")) == [b"\x7f\xffa\x00b", b"\x80\x01"]
    assert encoded(pa.schema([("f", pa.float64())]), (0.0,), (-0.0,)) == [b"\x80" + bytes(7)] * 2
    assert encoded(pa.schema([("b", pa.bool_()), ("u", pa.uint8())]), (True, 255), (False, 0)) == [b"\x01\xff", b"\0\0"]


def test_key_columns_are_found_by_name_and_cast() -> None:
    rows = pa.table({"name": ["x"], "number": pa.array([5], pa.int8())})
    assert keys_of(IS, rows).to_pylist() == [b"\x80\x05x"]


def test_sliced_and_chunked_columns() -> None:
    schema = pa.schema([("b", pa.bool_()), ("s", pa.string()), ("n", pa.int64()), ("z", pa.binary())])
    codec = KeyCodec("t", schema)
    whole = pa.table(
        {
            "b": [index % 3 == 0 for index in range(40)],
            "s": ["\0" * (index % 4) + "é" * index for index in range(40)],
            "n": list(range(40)),
            "z": [b"\x00\x01" * (index % 5) for index in range(40)],
        }
    )
    keys = keys_of(schema, whole)
    part = whole.slice(13, 9)
    assert keys_of(schema, part).to_pylist() == keys.to_pylist()[13:22]
    assert keys_of(schema, pa.concat_tables([whole.slice(0, 7), whole.slice(7)])).equals(keys)
    decoded = codec.decode(keys.slice(13, 9))
    assert [column.to_pylist() for column in decoded] == [column.to_pylist() for column in part.columns]


@pytest.mark.parametrize("schema", [SI, IS, pa.schema([("number", pa.int16())])])
def test_bytes_before_the_key_are_skipped(schema: pa.Schema) -> None:
    codec = KeyCodec("t", schema)
    rows = pa.table({"name": ["a\0", "", "é"], "number": pa.array([1, -1, 0], pa.int16())}).select(schema.names)
    tagged = pa.array([b"\x00\x01tag" + key for key in keys_of(schema, rows).to_pylist()], pa.binary())
    assert [column.to_pylist() for column in codec.decode(tagged, skip_bytes=5)] == [
        c.to_pylist() for c in rows.columns
    ]
    with pytest.raises(CorruptData):
        codec.decode(pa.array([b"\0"], pa.binary()), skip_bytes=5)


def test_no_rows() -> None:
    for schema in (SI, IS):
        codec = KeyCodec("t", schema)
        keys = keys_of(schema, schema.empty_table())
        assert len(keys) == 0
        assert [column.type for column in codec.decode(keys)] == schema.types


def test_null_key_names_column_and_row() -> None:
    with pytest.raises(NullKey, match="'name'") as caught:
        encoded(SI, ("a", 1), (None, 2))
    assert (caught.value.table, caught.value.column, caught.value.row) == ("t", "name", 1)


def test_key_too_long_names_the_row() -> None:
    with pytest.raises(TooLarge, match="row 1") as caught:
        encoded(IS, (1, "a"), (1, "a" * KEY_BYTES_MAX), (1, "a" * KEY_BYTES_MAX))
    assert caught.value.row == 1
    assert len(encoded(IS, (1, "a" * (KEY_BYTES_MAX - 2)))[0]) == KEY_BYTES_MAX


def test_key_column_missing() -> None:
    with pytest.raises(SchemaMismatch, match="'number' is missing"):
        keys_of(SI, pa.table({"name": ["a"]}))


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        (pa.schema([("n", pa.int64())]), b"short"),
        (pa.schema([("n", pa.int64())]), b"a little long"),
        (SI, b"no end"),
        (SI, b"end but no number\x00\x01"),
        (SI, b"end and too much\x00\x01\x00\x00\x00"),
        (IS, b"\x00"),
        (IS, b"\x00\x00\xff\xfe"),
    ],
)
def test_key_that_is_none_is_corrupt(schema: pa.Schema, key: bytes) -> None:
    codec = KeyCodec("t", schema)
    with pytest.raises(CorruptData, match="table 't'"):
        codec.decode(pa.array([key], pa.binary()))
    good = keys_of(
        schema,
        pa.RecordBatch.from_pylist(
            [dict.fromkeys(schema.names, 1) | ({"name": "x"} if len(schema) > 1 else {})], schema=schema
        ),
    )[0].as_py()
    with pytest.raises(CorruptData):
        codec.decode(pa.array([good, key, good], pa.binary()))


def test_prefix_by_position_and_by_name_is_the_same() -> None:
    codec = KeyCodec("t", SI)
    assert codec.encode_prefix(("a",)) == codec.encode_prefix({"name": "a"}) == b"a\x00\x01"
    assert codec.encode_prefix({"number": 1, "name": "a"}) == codec.encode_prefix(["a", 1]) == encoded(SI, ("a", 1))[0]
    assert codec.encode_prefix(()) == b""
    assert codec.prefix_range(()) == (b"", None)


def test_prefix_of_part_of_a_fixed_run() -> None:
    codec = KeyCodec("t", pa.schema([("a", pa.int8()), ("d", pa.date32()), ("c", pa.int8())]))
    assert codec.encode_prefix((1,)) == b"\x81"
    assert codec.encode_prefix((1, datetime.date(1970, 1, 2))) == b"\x81\x80\x00\x00\x01"


def test_range_of_a_whole_key_holds_only_that_key() -> None:
    begin, end = KeyCodec("t", IS).prefix_range((1, "a"))
    assert end is not None
    assert begin == encoded(IS, (1, "a"))[0] < end <= encoded(IS, (1, "a\0"))[0]


@pytest.mark.parametrize("schema", [SI, IS])
def test_partial_string_range_holds_exactly_the_strings_that_begin_so(schema: pa.Schema) -> None:
    strings = ["", "a", "a\0", "a\0b", "a\x01", "aa", "b", "\0", "a\U0010ffff", "aé"]
    rows = [tuple(text if name == "name" else 1 for name in schema.names) for text in strings]
    for prefix in ("", "a", "a\0", "aa", "\0", "zz"):
        given = {"name": prefix} | ({"number": 1} if schema is IS else {})
        begin, end = KeyCodec("t", schema).prefix_range(given, partial=True)
        matching = [
            s
            for s, key in zip(strings, encoded(schema, *rows), strict=True)
            if begin <= key and (end is None or key < end)
        ]
        assert matching == [text for text in strings if text.startswith(prefix)]


@pytest.mark.parametrize(
    ("values", "partial", "words"),
    [
        (("a", 1, 2), False, "3 key values"),
        ({"number": 1}, False, "'number' needs name"),
        ({"colour": 1}, False, "'colour' is not a key column"),
        ("a", False, "tuple"),
        (("a", "x"), False, "'number'"),
        (("a", 2**20), False, "'number'"),
        ((None,), False, "'name' is null"),
        (("a", 1), True, "has no prefixes"),
        (("a" * (KEY_BYTES_MAX + 1),), False, "more than"),
    ],
)
def test_bound_refused(values: Any, partial: bool, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        KeyCodec("t", SI).encode_prefix(values, partial)


def test_bytes_after() -> None:
    assert bytes_after(b"a\xff\xff") == b"b"
    assert bytes_after(b"\xff") is None
    assert bytes_after(b"") is None
