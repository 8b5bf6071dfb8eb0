"""The client of a schema registry over real HTTP: what it asks, what it keeps, and what becomes of trouble."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from shuffle.errors import ServiceUnavailable, SpecError
from shuffle.formats import registry as registry_module
from shuffle.formats.avro import AvroFormat
from shuffle.formats.opening import FormatOptions, RegistryOptions, open_format
from shuffle.formats.registry import SchemaRegistry
from shuffle.formats.secrets import resolved, secret_mistake
from shuffle.support.retry import passes_by_itself
from tests.schema_registry import Registry


def record(*fields: str) -> str:
    return '{"type": "record", "name": "R", "fields": [' + ", ".join(fields) + "]}"


N = '{"name": "n", "type": "int"}'
N_LONG = '{"name": "n", "type": "long"}'
S = '{"name": "s", "type": "string", "default": "none"}'


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as started:
        yield started


def test_schema_is_asked_for_once(registry: Registry) -> None:
    schema_id = registry.add("orders-value", record(N))
    client = SchemaRegistry(registry.url + "/")
    assert client.by_id(schema_id) == client.by_id(schema_id)
    assert registry.requests == ["/schemas/ids/1"]
    found = client.by_version("orders-value", 1)
    assert (found.text, found.kind, found.schema_id) == (record(N), "AVRO", 1)


def test_unknown_schema_is_none_and_asked_for_again(registry: Registry) -> None:
    client = SchemaRegistry(registry.url)
    assert client.by_id(1) is None
    registry.add("late", record(N))
    assert client.by_id(1) is not None
    with pytest.raises(SpecError, match="no version 7 of 'late'"):
        client.by_version("late", 7)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_registry_in_trouble_is_waited_for(registry: Registry, status: int) -> None:
    registry.fail_with = status
    with pytest.raises(ServiceUnavailable, match=str(status)) as caught:
        SchemaRegistry(registry.url).by_id(1)
    assert passes_by_itself(caught.value)


def test_registry_that_is_away_or_slow_is_waited_for(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceUnavailable, match="cannot be reached"):
        SchemaRegistry("http://127.0.0.1:1").by_id(1)
    monkeypatch.setattr(registry_module, "ANSWER_S_MAX", 0.2)
    registry.delay.clear()
    with pytest.raises(ServiceUnavailable, match="cannot be reached"):
        SchemaRegistry(registry.url).by_id(1)


def test_what_answers_but_is_no_registry_is_a_mistake(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SchemaRegistry(registry.url)
    registry.add("a", record(N))
    for body in (b"<html>", b"[]", b"{}"):
        registry.body = body
        with pytest.raises(SpecError, match="no schema registry"):
            client.by_id(1)
    monkeypatch.setattr(registry_module, "ANSWER_BYTES_MAX", 10)
    registry.body = b"x" * 100
    with pytest.raises(SpecError, match="over 10 bytes"):
        client.by_id(1)
    with pytest.raises(SpecError, match="begins with http"):
        SchemaRegistry("file:///etc/passwd")


def test_password_is_sent_and_never_in_an_error() -> None:
    with Registry("me", "very secret") as registry:
        registry.add("a", record(N))
        assert SchemaRegistry(registry.url, "me", "very secret").by_id(1) is not None
        with pytest.raises(SpecError, match="401") as caught:
            SchemaRegistry(registry.url, "me", "very wrong").by_id(1)
        assert "very wrong" not in str(caught.value)


# Formats with a registry ---------------------------------------------------------------------------------------------


def test_values_of_several_schemas_get_the_columns_of_the_spec(registry: Registry) -> None:
    old, new = registry.add("o", record(N)), registry.add("o", record(S, N_LONG))
    other = registry.add("o", record('{"name": "n", "type": "string"}'))
    client = SchemaRegistry(registry.url)
    writers = {one: AvroFormat(client.by_id(one).text, client, one) for one in (old, new, other)}  # type: ignore[union-attr]
    values = [
        writers[old].encode(pa.table({"n": [1]}))[0].as_py(),
        writers[new].encode(pa.table({"s": ["x"], "n": [2]}))[0].as_py(),
        b"\0\0\0\0\x63abc",
        writers[old].encode(pa.table({"n": [3]}))[0].as_py(),
        writers[other].encode(pa.table({"n": ["four"]}))[0].as_py(),
        b"junk",
        writers[new].encode(pa.table({"s": ["y"], "n": [2**40]}))[0].as_py(),
    ]
    given = RegistryOptions(registry.url, subject="o", version=2)
    found = open_format(FormatOptions("avro", schema_registry=given), Path()).decode(pa.array(values, pa.binary()))
    assert [one.index for one in found.bad] == [2, 4, 5]
    assert "no schema 99" in found.bad[0].reason
    assert "string there, and int64" in found.bad[1].reason
    assert found.rows.to_pylist() == [
        {"s": "none", "n": 1},
        {"s": "x", "n": 2},
        {"s": "none", "n": 3},
        {"s": "y", "n": 2**40},
    ]
    assert found.values is not None
    assert found.values.tolist() == [0, 1, 3, 6]


def test_encoded_rows_name_the_schema_of_the_version(registry: Registry) -> None:
    registry.add("o", record(S))
    registry.add("o", record(N))
    codec = open_format(
        FormatOptions("avro", schema_registry=RegistryOptions(registry.url, subject="o", version=2)), Path()
    )
    values = codec.encode(pa.table({"n": [5, 6]}))
    assert [value[:5] for value in values.to_pylist()] == [b"\0\0\0\0\x02"] * 2
    assert codec.decode(values).rows.to_pylist() == [{"n": 5}, {"n": 6}]


def test_registry_that_goes_away_is_trouble_and_not_a_bad_value(registry: Registry) -> None:
    registry.add("o", record(N))
    codec = open_format(
        FormatOptions("avro", schema_registry=RegistryOptions(registry.url, subject="o", version=1)), Path()
    )
    registry.fail_with = 503
    with pytest.raises(ServiceUnavailable):
        codec.decode(pa.array([b"\0\0\0\0\x05\x02"], pa.binary()))


def test_protobuf_schema_comes_from_the_registry(registry: Registry) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="o.proto", package="shop", syntax="proto3")
    file.message_type.add(name="Order").field.add(name="n", number=1, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    serialized = base64.b64encode(file.SerializeToString()).decode()
    registry.add("o", "message Order { int64 n = 1; }", "PROTOBUF", serialized)
    codec = open_format(
        FormatOptions("protobuf", schema_registry=RegistryOptions(registry.url, subject="o", version=1)), Path()
    )
    values = codec.encode(pa.table({"n": [1, 2**50]}, schema=codec.schema))
    assert values[0].as_py() == b"\0\0\0\0\x01\0\x08\x01"
    assert codec.decode(values).rows["n"].to_pylist() == [1, 2**50]


# Secrets -------------------------------------------------------------------------------------------------------------


def test_secret_is_where_the_spec_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "from the environment")
    (tmp_path / "secret").write_text("from a file\n")
    assert resolved({"env": "REGISTRY_PASSWORD"}, tmp_path, "p") == "from the environment"
    assert resolved({"file": "secret"}, tmp_path, "p") == "from a file"
    assert resolved("plain", tmp_path, "p") == "plain"
    assert resolved(True, tmp_path, "p") == "true"
    with pytest.raises(SpecError, match="p: the environment variable NOWHERE is not set"):
        resolved({"env": "NOWHERE"}, tmp_path, "p")
    with pytest.raises(SpecError, match="cannot be read: FileNotFoundError"):
        resolved({"file": "nowhere"}, tmp_path, "p")


@pytest.mark.parametrize("value", [{"env": "A", "file": "b"}, {"vault": "x"}, {}, {"env": 1}, ["a"], None])
def test_secret_that_is_nowhere_is_a_mistake(value: object) -> None:
    assert secret_mistake(value)
    assert json.dumps(value)
