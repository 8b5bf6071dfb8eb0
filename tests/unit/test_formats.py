"""Formats of messages: columns out of values and back, bad values found with their index, both ways of Avro alike."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import random
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from shuffle.errors import BadInput, SpecError
from shuffle.formats import framing
from shuffle.formats.avro import AvroFormat, AvroSchema
from shuffle.formats.base import Format
from shuffle.formats.column_types import column_type, schema_of
from shuffle.formats.json_objects import JsonFormat
from shuffle.formats.opening import FormatOptions, RegistryOptions, describe_format, open_format
from shuffle.formats.plain import ArrowFormat, RawFormat
from shuffle.formats.protobuf import ProtobufFormat, descriptors_of_set

UTC = dt.UTC


def binary(*values: bytes | None) -> pa.Array:
    return pa.array(values, pa.binary())


def bad_indexes(found: Any) -> list[int]:
    return [one.index for one in found.bad]


# Types ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("string", pa.string()),
        ("int64", pa.int64()),
        ("double", pa.float64()),
        ("timestamp[ms]", pa.timestamp("ms")),
        ("timestamp[us, Europe/Berlin]", pa.timestamp("us", "Europe/Berlin")),
        ("decimal(10, 2)", pa.decimal128(10, 2)),
        ("list<list<int32>>", pa.list_(pa.list_(pa.int32()))),
        (
            "struct<a: int64, b: struct<c: string, d: decimal(4, 1)>>",
            pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.string()), ("d", pa.decimal128(4, 1))]))]),
        ),
    ],
)
def test_column_type_is_read_as_written(text: str, expected: pa.DataType) -> None:
    assert column_type(text) == expected


@pytest.mark.parametrize("text", ["", "int", "list<>", "list<int64", "struct<int64>", "decimal(50, 2)", "list<" * 40])
def test_column_type_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        column_type(text)


def test_unknown_column_type_suggests_the_known_one() -> None:
    with pytest.raises(BadInput, match=r"'n'.*strin.*string"):
        schema_of({"n": "strin"})


# JSON ----------------------------------------------------------------------------------------------------------------

JSON = schema_of(
    {
        "user": "string",
        "n": "int64",
        "small": "int8",
        "x": "double",
        "at": "timestamp[ms, UTC]",
        "tags": "list<string>",
        "where": "struct<city: string, zip: int32>",
    }
)


def test_json_objects_become_columns_and_come_back() -> None:
    rows = [
        {
            "user": f"ü{i}",
            "n": i * 10**12,
            "small": i % 100,
            "x": i / 7,
            "at": dt.datetime(2026, 1, 1, tzinfo=UTC) + dt.timedelta(milliseconds=i),
            "tags": ["a\n", "b"][: i % 3],
            "where": {"city": "Riga", "zip": i},
        }
        for i in range(1000)
    ]
    table = pa.Table.from_pylist(rows, JSON)
    codec = JsonFormat(JSON)
    values = codec.encode(table)
    assert len(values) == 1000
    assert json.loads(values[7].as_py())["user"] == "ü7"
    found = codec.decode(values)
    assert not found.bad
    assert found.values is None
    assert found.rows.to_pylist() == table.to_pylist()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"   ",
        b"null",
        b"17",
        b"[1]",
        b'{"n": 1',
        b'{"n": 1}}',
        b'{"n": "1"}',
        b'{"n": 1.5}',
        b'{"n": 99999999999999999999}',
        b'{"small": 500}',
        b'{"x": "1"}',
        b'{"at": "yesterday"}',
        b'{"at": 17}',
        b'{"at": "2026-01-01T00:00:00"}',
        b'{"tags": 1}',
        b'{"where": []}',
        b'{"user": "\xff"}',
        b'{"n": 1}\n{"n": 2}',
        b'{"n": NaN}',
        b"\x00",
        None,
    ],
)
def test_bad_json_is_found_among_good_ones_with_its_index(value: bytes | None) -> None:
    good = b'{"n": 1, "unknown": {"deep": [1]}}'
    found = JsonFormat(JSON).decode(binary(good, good, good, value, good))
    assert bad_indexes(found) == [3]
    assert found.bad[0].reason
    assert found.rows["n"].to_pylist() == [1, 1, 1, 1]
    assert found.values is not None
    assert found.values.tolist() == [0, 1, 2, 4]


def test_two_objects_in_one_value_and_none_in_another_do_not_shift_rows() -> None:
    found = JsonFormat(JSON).decode(binary(b'{"n": 1}\n{"n": 2}', b"", b'{"n": 3}'))
    assert bad_indexes(found) == [0, 1]
    assert found.rows["n"].to_pylist() == [3]


def test_json_over_several_lines_is_read() -> None:
    found = JsonFormat(JSON).decode(binary(b'{\n  "n": 1,\r\n "user": "a\\nb"\n}\n', b'{"n": 2}\n'))
    assert not found.bad
    assert found.rows.select(["user", "n"]).to_pylist() == [{"user": "a\nb", "n": 1}, {"user": None, "n": 2}]


def test_slice_of_an_array_is_decoded_as_the_slice() -> None:
    values = binary(b"nonsense", b'{"n": 1}', b'{"n": 2}', b"nonsense").slice(1, 2)
    found = JsonFormat(JSON).decode(values)
    assert not found.bad
    assert found.rows["n"].to_pylist() == [1, 2]


def test_json_column_type_without_json_is_refused() -> None:
    with pytest.raises(SpecError, match="'b': the format json has no binary"):
        open_format(FormatOptions("json", {"b": "binary"}), Path())


# Avro ----------------------------------------------------------------------------------------------------------------

AVRO = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "user", "type": "string"},
        {"name": "n", "type": "long"},
        {"name": "i", "type": "int"},
        {"name": "x", "type": "double"},
        {"name": "f", "type": "float"},
        {"name": "paid", "type": "boolean"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "raw", "type": ["bytes", "null"]},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": [f"K{i}" for i in range(100)]}},
        {"name": "code", "type": {"type": "fixed", "name": "Code", "size": 3}},
        {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}},
        {
            "name": "where",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "Place",
                    "fields": [{"name": "city", "type": "string"}, {"name": "zip", "type": ["null", "int"]}],
                },
            ],
        },
        {"name": "back", "type": ["null", "shop.Place"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "at_us", "type": ["null", {"type": "long", "logicalType": "local-timestamp-micros"}]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
    ],
}


def avro_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    place = {"city": "Riga", "zip": None}
    return [
        {
            "user": "ü" * chance.randrange(100),
            "n": chance.choice([0, -1, 63, 64, -65, 2**62, -(2**63)]),
            "i": chance.randrange(-(2**31), 2**31),
            "x": chance.random(),
            "f": 0.5,
            "paid": chance.random() < 0.5,
            "note": chance.choice([None, "", "x" * 70]),
            "raw": chance.choice([None, b"\xff" * 130]),
            "kind": f"K{chance.randrange(100)}",
            "code": b"abc",
            "tags": [chance.choice([None, "a"]) for _ in range(chance.randrange(4))],
            "where": chance.choice([None, place, {"city": "", "zip": 10**6}]),
            "back": chance.choice([None, place]),
            "at": dt.datetime(2026, 1, 1, tzinfo=UTC) + dt.timedelta(milliseconds=chance.randrange(10**9)),
            "at_us": chance.choice([None, dt.datetime(1960, 1, 1)]),
            "day": dt.date(2026, 1, 1) + dt.timedelta(chance.randrange(1000)),
            "clock": dt.time(1, 2, 3, 4000),
            "price": decimal.Decimal(chance.randrange(-(10**9), 10**9)).scaleb(-2),
            "id": "12345678-1234-5678-1234-567812345678",
        }
        for _ in range(count)
    ]


def test_avro_in_one_go_and_one_by_one_are_alike_and_come_back() -> None:
    schema = AvroSchema(json.dumps(AVRO))
    rows = avro_rows(500)
    table = pa.Table.from_pylist(rows, schema.schema)
    bodies = schema.encode(table)
    parsed = fastavro.parse_schema(json.loads(json.dumps(AVRO)))
    for row, body in zip(rows[:50], bodies.to_pylist()[:50], strict=True):
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, row)
        assert stream.getvalue() == body
    assert schema._attempt(bodies).equals(schema._one_by_one(bodies))
    assert schema._attempt(bodies).to_pylist() == table.to_pylist()
    assert not schema.decode(bodies).bad


def test_bad_avro_is_found_and_does_not_shift_the_others() -> None:
    schema = AvroSchema(
        '{"type":"record","name":"R","fields":[{"name":"s","type":"string"},{"name":"n","type":"long"}]}'
    )
    table = pa.table({"s": [f"s{i}" for i in range(300)], "n": list(range(300))})
    bodies = schema.encode(table).to_pylist()
    bodies[10] = bodies[10][:-1]  # too short: the next one would lend it a byte
    bodies[20] += b"\0"  # too long
    bodies[30] = b""
    bodies[40] = b"\x7fxx"
    bodies[50] = None
    bodies[60] = b"\x04\xff\xfe\x02"
    found = schema.decode(binary(*bodies))
    assert bad_indexes(found) == [10, 20, 30, 40, 50, 60]
    assert found.values is not None
    assert (
        found.rows["n"].to_pylist() == found.values.tolist() == [i for i in range(300) if i not in bad_indexes(found)]
    )


@pytest.mark.parametrize(
    "kind", ['{"type":"map","values":"long"}', '["null","long","string"]', '"null"', '"nonsense"', '{"type":"array"}']
)
def test_avro_type_without_a_column_is_refused_by_name(kind: str) -> None:
    with pytest.raises(BadInput, match="field_x"):
        AvroSchema('{"type":"record","name":"R","fields":[{"name":"field_x","type":' + kind + "}]}")


def test_prefix_of_a_registry_is_taken_off_and_put_on() -> None:
    bodies = binary(b"", b"abc")
    values = framing.framed(bodies, framing.prefix(258))
    assert values.to_pylist() == [b"\0\0\0\x01\x02", b"\0\0\0\x01\x02abc"]
    found = framing.split(pa.concat_arrays([values, binary(None, b"\0\0", b"\x01\0\0\0\0")]))
    assert found.ids.tolist() == [258, 258]
    assert found.bodies.equals(bodies)
    assert [one.index for one in found.bad] == [2, 3, 4]


@pytest.mark.parametrize("indexes", [[0], [1], [0, 3], [2, 70, 5]])
def test_indexes_of_a_message_come_back(indexes: list[int]) -> None:
    encoded = framing.encode_indexes(indexes)
    assert framing.decode_indexes(encoded + b"rest") == (indexes, len(encoded))


# Protobuf ------------------------------------------------------------------------------------------------------------


def descriptor_set() -> bytes:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    order = file.message_type.add(name="Order")
    order.field.add(name="user", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    order.field.add(name="amount", number=2, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    order.field.add(name="tags", number=3, type=kinds.TYPE_STRING, label=kinds.LABEL_REPEATED)
    other = file.message_type.add(name="Other")
    inner = other.nested_type.add(name="Inner")
    inner.field.add(name="n", number=1, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


@pytest.mark.parametrize("framed", [False, True])
def test_protobuf_messages_become_columns_and_come_back(framed: bool) -> None:
    codec = ProtobufFormat(descriptors_of_set(descriptor_set()), "shop.Order", framed, 7)
    table = pa.table(
        {"user": ["a", "ü", ""], "amount": [1, -(2**60), 0], "tags": [["x"], [], ["y", "z"]]}, schema=codec.schema
    )
    values = codec.encode(table)
    assert [value[:6] == b"\0\0\0\0\x07\0" for value in values.to_pylist()] == [framed] * 3
    found = codec.decode(values)
    assert not found.bad
    assert found.rows.to_pylist() == table.to_pylist()


def test_bad_protobuf_is_found_with_its_index() -> None:
    codec = ProtobufFormat(descriptors_of_set(descriptor_set()), "shop.Order")
    good = b"\x0a\x01a\x10\x02"
    found = codec.decode(binary(good, b"\x0a\x05a", None, b"\x0a\x01\xff", good, b"\xff\xff"))
    assert bad_indexes(found) == [1, 2, 3, 5]
    assert found.rows["amount"].to_pylist() == [2, 2]


def test_protobuf_message_of_another_type_is_bad() -> None:
    codec = ProtobufFormat(descriptors_of_set(descriptor_set()), "shop.Other.Inner", True, 7)
    values = binary(
        framing.prefix(7, [1, 0]) + b"\x08\x05", framing.prefix(7, [0]), framing.prefix(7) + b"\x04", framing.prefix(7)
    )
    found = codec.decode(values)
    assert bad_indexes(found) == [1, 2, 3]
    assert "another message" in found.bad[0].reason
    assert found.rows["n"].to_pylist() == [5]


def test_protobuf_of_several_messages_needs_a_name() -> None:
    with pytest.raises(BadInput, match="Order, Other"):
        ProtobufFormat(descriptors_of_set(descriptor_set()), None)
    with pytest.raises(BadInput, match=r"no message 'shop\.Nobody'"):
        ProtobufFormat(descriptors_of_set(descriptor_set()), "shop.Nobody")
    with pytest.raises(BadInput, match="protoc"):
        descriptors_of_set(b"\xff\xff")


# Arrow and raw -------------------------------------------------------------------------------------------------------


def test_arrow_values_hold_many_rows_and_bad_ones_none() -> None:
    codec = ArrowFormat(pa.schema([("a", pa.int64()), ("b", pa.string())]))
    table = pa.table({"a": [1, 2], "b": ["x", None]})
    [value] = codec.encode(table).to_pylist()
    [other] = ArrowFormat(pa.schema([("z", pa.int64())])).encode(pa.table({"z": [1]})).to_pylist()
    found = codec.decode(binary(value, None, b"junk", value[:-20], other, value))
    assert bad_indexes(found) == [1, 2, 3, 4]
    assert found.rows.to_pylist() == table.to_pylist() * 2
    assert found.values is not None
    assert found.values.tolist() == [0, 0, 5, 5]


def test_raw_is_the_value_itself() -> None:
    codec: Format = RawFormat()
    found = codec.decode(binary(b"a", None))
    assert found.rows.to_pylist() == [{"value": b"a"}, {"value": None}]
    assert codec.encode(found.rows).to_pylist() == [b"a", None]


@pytest.mark.parametrize(
    "codec", [JsonFormat(schema_of({"a": "int64"})), ArrowFormat(schema_of({"a": "int64"})), RawFormat()]
)
def test_rows_of_other_columns_are_not_encoded(codec: Format) -> None:
    with pytest.raises(BadInput, match="columns"):
        codec.encode(pa.table({"other": [1]}))


def test_no_values_are_no_rows() -> None:
    for codec in (JsonFormat(JSON), AvroFormat(json.dumps(AVRO)), ArrowFormat(JSON), RawFormat()):
        found = codec.decode(binary())
        assert found.rows.num_rows == 0
        assert found.rows.schema.equals(codec.schema)
        assert not found.bad


# Options -------------------------------------------------------------------------------------------------------------


def test_description_has_the_columns_and_not_the_place_of_the_registry(tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(AVRO))
    here = FormatOptions(
        "avro", schema_file="order.avsc", schema_registry=RegistryOptions("http://here", "u", {"env": "P"})
    )
    there = FormatOptions("avro", schema_file="order.avsc", schema_registry=RegistryOptions("http://there"))
    before = describe_format(here, tmp_path)
    assert before == describe_format(there, tmp_path)
    (tmp_path / "order.avsc").write_text(json.dumps({**AVRO, "name": "Other"}))
    assert before != describe_format(here, tmp_path)


def test_missing_schema_file_is_a_mistake_of_the_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"schema_file: .*nowhere.avsc cannot be read"):
        open_format(FormatOptions("avro", schema_file="nowhere.avsc"), tmp_path)
    with pytest.raises(SpecError, match="needs schema_file"):
        open_format(FormatOptions("avro"), tmp_path)
