"""Every format over a real broker: rows encoded as the output does, written, read as a mapper does, and the same."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from shuffle.formats.opening import FormatOptions, RegistryOptions, open_format
from shuffle.mapper.reader import START
from tests.kafka.inputs import kafka_input
from tests.kafka.topics import Topics
from tests.schema_registry import Registry
from tools.kafka import Broker

ROWS = [{"user": f"user-{n % 7}", "n": n * 10**10} for n in range(500)]
COLUMNS = {"user": "string", "n": "int64"}
AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "user", "type": "string"}, {"name": "n", "type": "long"}],
    }
)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry("reader", "very secret") as started:
        started.add("orders-value", AVRO)
        file = _protobuf()
        serialized = base64.b64encode(file.SerializeToString()).decode()
        started.add("orders-proto", "message Order {}", "PROTOBUF", serialized)
        yield started


def _protobuf() -> descriptor_pb2.FileDescriptorProto:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="o.proto", package="shop", syntax="proto3")
    order = file.message_type.add(name="Order")
    order.field.add(name="user", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    order.field.add(name="n", number=2, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    return file


def options_of(kind: str, folder: Path, registry: Registry) -> dict[str, Any]:
    """The keys of a spec for a format."""
    (folder / "order.avsc").write_text(AVRO)
    (folder / "order.desc").write_bytes(descriptor_pb2.FileDescriptorSet(file=[_protobuf()]).SerializeToString())
    with_registry = {"url": registry.url, "user": "reader", "password": {"env": "REGISTRY_PASSWORD"}, "version": 1}
    return {
        "json": {"format": "json", "schema": COLUMNS},
        "arrow": {"format": "arrow", "schema": COLUMNS},
        "avro": {"format": "avro", "schema_file": "order.avsc"},
        "avro with a registry": {
            "format": "avro",
            "schema_registry": {**with_registry, "subject": "orders-value"},
        },
        "protobuf": {"format": "protobuf", "schema_file": "order.desc"},
        "protobuf with a registry": {
            "format": "protobuf",
            "message": "shop.Order",
            "schema_registry": {**with_registry, "subject": "orders-proto"},
        },
    }[kind]


@pytest.mark.parametrize(
    "kind", ["json", "arrow", "avro", "avro with a registry", "protobuf", "protobuf with a registry"]
)
@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "plain-client"])
def test_rows_come_back_and_bad_ones_are_found(
    broker: Broker,
    topics: Topics,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fast_path: bool,
) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "very secret")
    options = options_of(kind, tmp_path, registry)
    given = dict(options)
    if "schema_registry" in given:
        given["schema_registry"] = RegistryOptions(**given["schema_registry"])
    codec = open_format(FormatOptions(**given), tmp_path)
    parts = [ROWS[:300], ROWS[300:]]
    name = topics.create()
    for number, part in enumerate(parts):
        topics.write(name, codec.encode(pa.Table.from_pylist(part, codec.schema)).to_pylist())
        if number == 0:
            topics.write(name, [b"\xff\xff no such value", None])
    bad_at = 1 if kind == "arrow" else 300
    source = kafka_input(broker.address, name, tmp_path, fast_path=fast_path, metadata=["offset"], **options)
    with closing(source.open(0)) as reader:
        found: list[dict[str, Any]] = []
        bad: list[str] = []
        token, empty = START, 0
        while empty < 3:
            rows, token = reader.read(0, 10_000, token)
            empty = 0 if rows.num_rows else empty + 1
            decoded = reader.decode(rows)
            assert decoded.rows.schema.equals(reader.schema)
            found += decoded.rows.to_pylist()
            bad += [one.reason for one in decoded.bad]
    assert [{"user": row["user"], "n": row["n"]} for row in found] == ROWS
    assert len(bad) == 2
    assert f"{name}[0] at offset {bad_at} cannot be decoded" in bad[0]
    assert f"{name}[0] at offset {bad_at + 1} cannot be decoded: the message has no value" in bad[1]
    offsets = [row["_offset"] for row in found]
    if kind == "arrow":
        assert offsets == [0] * 300 + [3] * 200
    else:
        assert offsets == [*range(300), *range(302, 502)]
