"""Schemas of tables and queues: what is refused, how they are written down, and what ``conform`` lets through."""

from __future__ import annotations

import decimal
import json
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import BadInput, CorruptData, NullKey, SchemaMismatch, ShuffleError, TooLarge
from shuffle.statestore.codec.arrow_bytes import to_list
from shuffle.statestore.codec.schema import COLUMNS_MAX, PARTITIONS_MAX, QueueSchema, TableSchema, conform
from shuffle.statestore.codec.small_batch import SMALL_BATCH_ROWS_MAX
from shuffle.statestore.codec.sorted_table import Table

KEY = pa.schema([("user", pa.string()), ("day", pa.date32())])
VALUE = pa.schema(
    [
        ("hits", pa.int64()),
        ("price", pa.decimal128(12, 3)),
        ("seen", pa.timestamp("us", "Europe/Paris")),
        ("raw", pa.binary()),
    ]
)


def table(**changed: Any) -> TableSchema:
    fields: dict[str, Any] = {"name": "activity", "key": KEY, "value": VALUE, **changed}
    return TableSchema(**fields)


def test_table_of_all_supported_types_is_valid_and_survives_json() -> None:
    types = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
    types += [pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.binary(), pa.date32(), pa.decimal128(38, -2)]
    types += [pa.timestamp(unit, tz) for unit in ("s", "ms", "us", "ns") for tz in (None, "UTC", "+02:00")]
    schema = table(
        key=pa.schema([(f"k{index}", kind) for index, kind in enumerate(types)]),
        value=pa.schema([pa.field(f"v{index}", kind, nullable=index % 2 == 0) for index, kind in enumerate(types)]),
        constraints={"positive": "v0 > 0"},
        table_id=7,
    )
    schema.validate()
    again = TableSchema.from_json(schema.to_json())
    assert again == schema
    assert hash(again) == hash(schema)
    assert again.to_json() == schema.to_json()
    assert {"name": "k0", "type": "int8"} in json.loads(schema.to_json())["key"]


def test_large_types_are_kept_as_the_plain_ones() -> None:
    schema = table(key=pa.schema([("k", pa.large_string())]), value=pa.schema([("v", pa.large_binary())]))
    assert schema.key.field("k").type == pa.string()
    assert schema.value.field("v").type == pa.binary()
    assert schema.row.names == ["k", "v"]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"name": ""}, BadInput, "name of a table"),
        ({"name": "x" * 300}, TooLarge, "255"),
        ({"name": "a\nb"}, BadInput, "unprintable"),
        ({"key": pa.schema([])}, BadInput, "no key column"),
        ({"value": pa.schema([("user", pa.int64())])}, BadInput, "two columns named 'user'"),
        ({"value": pa.schema([("", pa.int64())])}, BadInput, "name of a column"),
        ({"value": pa.schema([("tags", pa.list_(pa.string()))])}, SchemaMismatch, "'tags'"),
        ({"key": pa.schema([("k", pa.float16())])}, SchemaMismatch, "halffloat"),
        ({"value": pa.schema([(f"c{index}", pa.int8()) for index in range(COLUMNS_MAX)])}, TooLarge, "columns"),
        ({"constraints": {"c": 5}}, BadInput, "must be text"),
        ({"constraints": {f"c{index}": "TRUE" for index in range(101)}}, TooLarge, "constraints"),
    ],
)
def test_table_schema_refused(changed: dict[str, Any], error: type[ShuffleError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        table(**changed).validate()
    assert caught.value.fields["table"] == changed.get("name", "activity")


def test_queue_of_nested_types_is_valid_and_survives_json() -> None:
    inner = pa.struct([("x", pa.int8()), ("m", pa.map_(pa.string(), pa.float64()))])
    schema = QueueSchema(
        "logs", pa.schema([pa.field("e", pa.list_(inner), nullable=False), ("s", pa.large_string())]), 3, 9
    )
    schema.validate()
    assert QueueSchema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
        pa.sparse_union([pa.field("a", pa.int8())]),
        pa.struct([("u", pa.dense_union([pa.field("a", pa.int8())]))]),
        pa.run_end_encoded(pa.int32(), pa.string()),
    ],
)
def test_queue_type_refused_also_when_nested(kind: pa.DataType) -> None:
    with pytest.raises(SchemaMismatch, match="'c'"):
        QueueSchema("logs", pa.schema([("c", kind)]), 1).validate()


@pytest.mark.parametrize("partitions", [0, -1, True, PARTITIONS_MAX + 1])
def test_queue_partitions_out_of_bounds(partitions: int) -> None:
    with pytest.raises(BadInput, match="partition"):
        QueueSchema("logs", pa.schema([("c", pa.int8())]), partitions).validate()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"name": "t"}', "null", '{"name":"t","key":[{"name":"a","type":"?"}]}']
)
def test_description_that_is_none_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptData):
        TableSchema.from_json(text)
    with pytest.raises(CorruptData):
        QueueSchema.from_json(text)


def test_conform_orders_columns_joins_chunks_and_widens() -> None:
    expected = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.float64()), ("d", pa.decimal128(10, 4))])
    halves = [
        pa.table(
            {
                "d": pa.array([decimal.Decimal("1.5")], pa.decimal128(5, 1)),
                "c": pa.array([1.5], pa.float32()),
                "b": pa.array([text], pa.large_string()),
                "a": pa.array([2], pa.uint32()),
            }
        )
        for text in ("x", "y")
    ]
    batch = conform(pa.concat_tables(halves), expected, "t")
    assert batch.schema == expected
    assert batch.to_pylist() == [{"a": 2, "b": text, "c": 1.5, "d": decimal.Decimal("1.5000")} for text in ("x", "y")]


def test_conform_takes_null_and_dictionary_columns() -> None:
    expected = pa.schema([("a", pa.int64()), ("b", pa.string())])
    rows = pa.table({"a": pa.nulls(2), "b": pa.array(["x", None]).dictionary_encode()})
    assert conform(rows, expected, "t").to_pylist() == [{"a": None, "b": "x"}, {"a": None, "b": None}]


def test_conform_takes_a_table_without_chunks() -> None:
    expected = pa.schema([("a", pa.int64())])
    assert conform(expected.empty_table(), expected, "t").num_rows == 0


@pytest.mark.parametrize(
    ("rows", "column", "words"),
    [
        (pa.table({"a": [1]}), "b", "missing"),
        (pa.table({"a": [1], "b": ["x"], "z": [1]}), "z", "no column 'z'"),
        (pa.table([[1], [1], ["x"]], names=["a", "a", "b"]), "a", "twice"),
        (pa.table({"a": [1.0], "b": ["x"]}), "a", "double was given where int64"),
        (pa.table({"a": pa.array([1], pa.uint64()), "b": ["x"]}), "a", "uint64"),
        (pa.table({"a": [1], "b": [b"x"]}), "b", "binary"),
    ],
)
def test_conform_names_the_wrong_column(rows: pa.Table, column: str, words: str) -> None:
    with pytest.raises(SchemaMismatch, match=words) as caught:
        conform(rows, pa.schema([("a", pa.int64()), ("b", pa.string())]), "t")
    assert (caught.value.table, caught.value.column) == ("t", column)


def test_conform_names_the_row_that_does_not_fit() -> None:
    seconds = pa.array([0] * 77 + [2**62, 0, 2**62], pa.timestamp("s"))
    with pytest.raises(SchemaMismatch, match="row 77") as caught:
        conform(pa.table({"a": seconds}), pa.schema([("a", pa.timestamp("ns"))]), "t")
    assert caught.value.row == 77


def test_conform_keeps_wall_clock_and_instant_apart() -> None:
    with pytest.raises(SchemaMismatch):
        conform(pa.table({"a": pa.array([0], pa.timestamp("us"))}), pa.schema([("a", pa.timestamp("us", "UTC"))]), "t")


def test_conform_null_in_a_not_nullable_column_names_the_row() -> None:
    with pytest.raises(SchemaMismatch, match="row 1"):
        conform(pa.table({"a": [1, None]}), pa.schema([pa.field("a", pa.int64(), nullable=False)]), "t")


def test_conform_refuses_what_is_not_arrow() -> None:
    with pytest.raises(BadInput, match="dict"):
        conform({"a": [1]}, pa.schema([("a", pa.int64())]), "t")


def test_row_columns_are_keys_then_values_and_refuse_null_keys() -> None:
    schema = TableSchema("t", pa.schema([("k", pa.int64())]), pa.schema([("v", pa.string())]))
    columns = schema.row_columns(pa.table({"v": ["x", None], "k": [1, 2]}))
    assert [column.to_pylist() for column in columns] == [[1, 2], ["x", None]]
    with pytest.raises(NullKey, match="row 1") as caught:
        schema.row_columns(pa.table({"v": ["x", None], "k": [1, None]}))
    assert (caught.value.table, caught.value.column, caught.value.row) == ("t", "k", 1)
    with pytest.raises(SchemaMismatch, match="'v'"):
        schema.conform_keys(pa.table({"v": ["x"], "k": [1]}))


def test_rows_of_a_table_without_values_are_encoded_as_such() -> None:
    schema = TableSchema("t", pa.schema([("k", pa.int64())]), pa.schema([]))
    schema.validate()
    for count in (3, SMALL_BATCH_ROWS_MAX + 1):
        keys, values = Table(schema).encode_rows(pa.table({"k": range(count)}))
        assert (len(keys), to_list(values)) == (count, [b""] * count)
