"""The Kafka sink against a real broker: rows and position in one transaction, fencing, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import PublishUnknown, ServiceUnavailable, SinkRefused, SpecError, SplitBrain
from shuffle.partition.key_group import key_groups
from shuffle.reducer.outputs import kafka
from shuffle.reducer.outputs.kafka import KafkaSink
from shuffle.reducer.outputs.sink import SinkPlace
from shuffle.spec.kafka_output import output_options
from shuffle.spec.outputs import KafkaOutputSpec
from tests.kafka.topics import Topics
from tests.waiting import wait_until
from tools.kafka import Broker

ROWS = pa.table({"user": ["ann", "bob", None], "n": [1, 2, 3], "trace": ["x", None, "z"]})


def sink(address: str, topic: str, schema: pa.Schema = ROWS.schema, partition: int = 0, **options: Any) -> KafkaSink:
    mistakes: list[str] = []
    given = {"topic": topic, "properties": {"bootstrap.servers": address}, **options}
    made = output_options(given, lambda path, what: mistakes.append(f"{path}: {what}"))
    assert made is not None, mistakes
    return KafkaSink(SinkPlace(KafkaOutputSpec(made).config, Path(), topic, partition, schema))


def values(topics: Topics, topic: str, partition: int = 0) -> list[Any]:
    return [json.loads(message.value()) for message in topics.read(topic, partition)]


def test_rows_and_position_are_there_together(broker: Broker, topics: Topics) -> None:
    topic = topics.create()
    made = sink(broker.address, topic)
    assert made.open() is None
    made.publish(ROWS, 0, 3)
    again = sink(broker.address, topic)
    assert again.open() == 3
    assert [row["n"] for row in values(topics, topic)] == [1, 2, 3]
    again.close()
    made.close()


def test_position_alone_can_be_published(broker: Broker, topics: Topics) -> None:
    topic = topics.create()
    made = sink(broker.address, topic)
    made.open()
    made.publish(ROWS.schema.empty_table(), 17, 17)
    made.keep_alive()
    again = sink(broker.address, topic)
    assert again.open() == 17
    assert topics.read(topic) == []
    for one in (made, again):
        one.close()


def test_second_instance_fences_the_first_and_ends_its_transaction(broker: Broker, topics: Topics) -> None:
    topic = topics.create()
    first = sink(broker.address, topic)
    first.open()
    first.publish(ROWS, 0, 3)
    first._producer.begin_transaction()
    first._produce(ROWS)
    first._producer.flush(10)
    second = sink(broker.address, topic)
    assert second.open() == 3, "what the first had open is not part of the position"
    assert len(topics.read(topic)) == 3, "and holds up no reader"
    with pytest.raises(SplitBrain, match="another instance of the exporter has taken over"):
        with first._errors("committing", PublishUnknown):
            first._producer.commit_transaction(10)
    with pytest.raises(SplitBrain):
        first.publish(ROWS, 3, 6)
    second.publish(ROWS, 3, 6)
    assert len(topics.read(topic)) == 6
    for one in (first, second):
        one.close()


def test_partitions_of_the_outbox_have_positions_of_their_own(broker: Broker, topics: Topics) -> None:
    topic = topics.create()
    for partition in range(2):
        made = sink(broker.address, topic, partition=partition)
        made.open()
        made.publish(ROWS, 0, 3 + partition)
        made.close()
    again = [sink(broker.address, topic, partition=partition) for partition in range(2)]
    assert [one.open() for one in again] == [3, 4]
    for one in again:
        one.close()


def test_keys_headers_and_partitions_of_records(broker: Broker, topics: Topics) -> None:
    topic = topics.create(partitions=4)
    options = {"key": "user", "headers": {"trace": "trace", "number": "n"}, "partitioning": "xxhash64"}
    made = sink(broker.address, topic, **options)
    made.open()
    made.publish(ROWS, 0, 3)
    made.close()
    expected = key_groups(ROWS, ["user"], 4).tolist()
    found = {message.key(): message for p in range(4) for message in topics.read(topic, p)}
    assert [found[key].partition() for key in (b"ann", b"bob", None)] == expected
    assert found[b"ann"].headers() == [("trace", b"x"), ("number", b"1")]
    assert found[b"bob"].headers() == [("trace", None), ("number", b"2")]


def test_value_has_only_the_columns_that_are_named(broker: Broker, topics: Topics) -> None:
    topic = topics.create()
    rows = pa.table({"value": [b"\x00", b"\xff"], "k": ["a", "b"]})
    made = sink(broker.address, topic, rows.schema, key="k", columns=["value"], format="raw")
    made.open()
    made.publish(rows, 0, 2)
    made.close()
    assert [(message.key(), message.value()) for message in topics.read(topic)] == [(b"a", b"\x00"), (b"b", b"\xff")]


def test_keys_go_where_kafkas_own_clients_put_them(broker: Broker, topics: Topics) -> None:
    topic, other = topics.create(partitions=5), topics.create(partitions=5)
    keys = [f"key-{number}" for number in range(40)]
    made = sink(broker.address, topic, pa.schema([("k", pa.string())]), key="k")
    made.open()
    made.publish(pa.table({"k": keys}), 0, 40)
    made.close()
    topics.write(other, keys, -1, keys, partitioner="murmur2")  # type: ignore[arg-type]
    found = [{message.key() for message in topics.read(topic, p)} for p in range(5)]
    assert found == [{message.key() for message in topics.read(other, p)} for p in range(5)]


def test_several_key_columns_are_a_json_object(broker: Broker, topics: Topics) -> None:
    topic = topics.create()
    made = sink(broker.address, topic, key=["user", "n"], format="arrow")
    assert made._format.is_batched
    made = sink(broker.address, topic, key=["user", "n"])
    made.open()
    made.publish(ROWS, 0, 3)
    made.close()
    assert [json.loads(message.key()) for message in topics.read(topic)][1] == {"user": "bob", "n": 2}


def test_record_that_is_too_large_is_refused_and_nothing_of_its_batch_is_there(broker: Broker, topics: Topics) -> None:
    topic = topics.create(max_message_bytes="1000")
    made = sink(broker.address, topic, pa.schema([("t", pa.string())]))
    made.open()
    with pytest.raises(SinkRefused, match="MSG_SIZE_TOO_LARGE"):
        made.publish(pa.table({"t": ["small", "x" * 5_000]}), 0, 2)
    made.close()
    again = sink(broker.address, topic, pa.schema([("t", pa.string())]))
    assert again.open() is None
    assert topics.read(topic) == []
    again.close()


def test_topic_that_is_not_there_is_refused(broker: Broker) -> None:
    made = sink(broker.address, "nowhere")
    with pytest.raises(SinkRefused, match="nowhere"):
        made.open()
    made.close()


def test_column_that_is_not_emitted_is_a_mistake_of_the_spec() -> None:
    with pytest.raises(SpecError, match=r"output\.kafka\.key: country: the rows have the columns user"):
        sink("127.0.0.1:1", "t", key="country")
    with pytest.raises(SpecError, match="client refuses its settings"):
        sink("127.0.0.1:1", "t", properties={"bootstrap.servers": "x", "compression.type": "rar"}).open()


def test_broker_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "CALL_S_MAX", 1.0)
    made = sink("127.0.0.1:1", "t")
    with pytest.raises(ServiceUnavailable, match="opening the transactional producer"):
        made.open()
    made.close()


def opened_at_last(made: Any) -> int | None:
    """Open a sink again and again, as an exporter does: a broker takes its time to find its groups again."""
    deadline_s = time.monotonic() + 240
    while True:
        try:
            position: int | None = made.open()
            return position
        except ServiceUnavailable:
            if time.monotonic() > deadline_s:
                raise


@pytest.mark.long
def test_broker_that_dies_in_between_leaves_nothing_twice(
    own_broker: Broker, topics_of: Callable[[Broker], Topics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "CALL_S_MAX", 20.0)
    topics = topics_of(own_broker)
    topic = topics.create()
    made = sink(own_broker.address, topic)
    made.open()
    made.publish(ROWS, 0, 3)
    wait_until(lambda: len(values(topics, topic)) == 3)  # See docs/outputs.md, "A broker that is alone".
    monkeypatch.setattr(kafka, "CALL_S_MAX", 2.0)
    own_broker.kill()
    with pytest.raises((ServiceUnavailable, PublishUnknown)):
        made.publish(ROWS, 3, 6)
    own_broker.start()
    monkeypatch.setattr(kafka, "CALL_S_MAX", 30.0)
    position = opened_at_last(made)
    assert position in (3, 6)
    if position == 3:
        made.publish(ROWS, 3, 6)
    assert [row["n"] for row in values(topics, topic)] == [1, 2, 3] * 2
    made.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "a b"}, "topic: 'a b' is no name"),
        ({"partitioning": "random"}, "partitioning: 'random' is none of murmur2, xxhash64"),
        ({"partitioning": "xxhash64"}, "name them with key"),
        ({"headers": ["a"]}, "headers: a mapping of names to columns"),
        ({"columns": {}}, "columns: a column, or a list of columns"),
        ({"key": 3}, "key: a column, or a list of columns"),
        ({"schema": {"a": "string"}}, "schema: is not needed with json"),
        ({"format": "avro"}, "avro needs schema_file"),
        ({"colour": "red"}, "colour: unknown key"),
        ({"properties": {"bootstrap.servers": "x", "acks": "1"}}, "properties.acks: cannot be set"),
        ({"properties": {"bootstrap.servers": "x", "sasl.password": "p"}}, "is a secret"),
    ],
)
def test_mistake_in_an_option_is_named(options: dict[str, Any], said: str) -> None:
    mistakes: list[str] = []
    given = {"topic": "t", "properties": {"bootstrap.servers": "x"}, **options}
    assert output_options(given, lambda path, what: mistakes.append(f"{path}: {what}")) is None
    assert said in "\n".join(mistakes)
