"""The options of a Kafka input in a spec, and the rules of its partitions and positions, without any broker."""

from __future__ import annotations

from typing import Any

import pytest

from shuffle.errors import BadInput, SpecError
from shuffle.ids import Token
from shuffle.mapper.readers.kafka import client
from shuffle.mapper.readers.kafka.positions import (
    Numbering,
    Partition,
    Position,
    check_offsets,
    decode,
    encode,
    numbered,
)
from shuffle.spec import kafka
from shuffle.spec.kafka import KafkaInputOptions, input_options

SERVERS = {"bootstrap.servers": "broker:9092"}
JSON = {"format": "json", "schema": {"n": "int64"}}


def checked(**given: Any) -> tuple[KafkaInputOptions | None, list[str]]:
    mistakes: list[str] = []
    options = {"topics": "orders", "properties": SERVERS, **given}
    found = input_options(
        {key: value for key, value in options.items() if value is not None},
        lambda path, what: mistakes.append(f"{path}: {what}"),
    )
    return found, mistakes


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({"topics": None}, "topics: give either topics or a pattern"),
        ({"pattern": "x"}, "topics: give either topics or a pattern, not both"),
        ({"topics": ["a", "a"]}, "topics: a topic is named twice"),
        ({"topics": "a b"}, "topics: 'a b' is no name of a topic"),
        ({"topics": 5}, "topics: a topic, or a list"),
        ({"topics": None, "pattern": "("}, "pattern: is no regular expression"),
        ({"properties": {}}, "properties: bootstrap.servers is missing"),
        ({"properties": "x"}, "properties: a mapping"),
        ({"properties": SERVERS | {"sasl.password": "x"}}, "properties.sasl.password: is a secret"),
        ({"properties": SERVERS | {"ssl.key.password": "x"}}, "properties.ssl.key.password: is a secret"),
        ({"properties": SERVERS | {"sasl.oauthbearer.client.secret": "x"}}, "is a secret"),
        ({"properties": SERVERS | {"sasl.password": {"vault": "x"}}}, "properties.sasl.password: a value that is else"),
        ({"properties": SERVERS | {"isolation.level": "x"}}, "properties.isolation.level: cannot be set"),
        ({"properties": SERVERS | {"group.id": "x"}}, "properties.group.id: is the key `group`"),
        ({"start": "now"}, "start: is neither"),
        ({"start": {"timestamp": "soon"}}, "start.timestamp: is neither"),
        ({"start": {"offsets": {"a": 1}}}, "start.offsets: is no mapping"),
        ({"start": {"offsets": {"other": {0: 1}}}}, "start.offsets: 'other' is none of the topics"),
        ({"start": {"offsets": {0: -1}}}, "start.offsets: is no mapping"),
        ({"metadata": ["key"]}, "metadata: is for other formats"),
        ({**JSON, "metadata": ["colour"]}, "metadata: is no list of some of"),
        ({"format": "jsn"}, "format: 'jsn' is none of"),
        ({"format": "json"}, "schema: the columns and their types are needed"),
        ({"format": "json", "schema": {"n": "strng"}}, "schema.n: 'strng' is not a type"),
        ({"format": "avro"}, "format: avro needs schema_file"),
        ({"format": "avro", "schema_registry": {"url": "http://r", "subject": "s"}}, "subject and version go together"),
        (
            {"format": "avro", "schema_registry": {"url": "http://r", "subject": "s", "version": "latest"}},
            "schema_registry.version: a number",
        ),
        (
            {"format": "avro", "schema_file": "x", "schema_registry": {"url": "http://r", "password": "p"}},
            "schema_registry.password: is a secret",
        ),
        ({**JSON, "schema_file": "x"}, "schema_file: is for avro and protobuf"),
        ({**JSON, "message": "x"}, "message: is for protobuf"),
        ({"schema": {"n": "int64"}}, "schema: is for json and arrow"),
        ({"topic": "orders"}, "topic: unknown key"),
    ],
)
def test_mistake_is_named_with_its_place(given: dict[str, Any], mistake: str) -> None:
    found, mistakes = checked(**given)
    assert found is None
    assert [text for text in mistakes if mistake in text], mistakes


def test_options_are_as_given() -> None:
    found, mistakes = checked(
        topics=["b", "a"],
        properties={**SERVERS, "sasl.password": {"env": "PASSWORD"}, "fetch.max.bytes": 5},
        start={"timestamp": "1970-01-01T00:00:01Z"},
        metadata=["key", "offset"],
        **JSON,
    )
    assert not mistakes
    assert found is not None
    assert found.topics == ("a", "b")
    assert found.start == {"timestamp": 1000}
    assert found.properties["sasl.password"] == {"env": "PASSWORD"}
    assert found.value.schema == {"n": "int64"}


def test_offsets_of_the_only_topic_need_not_name_it() -> None:
    found, _ = checked(start={"offsets": {0: 17}})
    assert found is not None
    assert found.start == {"offsets": {"orders": {0: 17}}}


def test_what_is_fixed_for_the_client_cannot_be_set_in_a_spec() -> None:
    assert set(client.FIXED) <= set(kafka.FIXED)


# Positions -----------------------------------------------------------------------------------------------------------


def test_token_comes_back_and_others_are_refused() -> None:
    position = Position(bytes(range(16)), 2**62, 7)
    assert decode(encode(position)) == position
    for token in (b"", b"junk", encode(position)[:-1], b"\x02" + encode(position)[1:]):
        with pytest.raises(BadInput, match="not a position in a topic"):
            decode(Token(token))


def partitions(**counts: int) -> list[Partition]:
    return [Partition(topic, number) for topic, count in counts.items() for number in range(count)]


def test_partitions_keep_their_numbers_when_a_topic_grows_or_another_comes() -> None:
    first = numbered(None, partitions(b=2, a=1))
    assert first.partitions == (Partition("a", 0), Partition("b", 0), Partition("b", 1))
    grown = numbered(Numbering.parse(first.text()), partitions(a=3, b=2, c=1))
    assert grown.partitions[:3] == first.partitions
    assert grown.partitions[3:] == (Partition("a", 1), Partition("a", 2), Partition("c", 0))
    assert grown.first_count == 3
    assert numbered(grown, partitions(a=3, b=2, c=1)) == grown


def test_partition_that_is_missing_is_refused() -> None:
    known = numbered(None, partitions(a=2, b=9))
    with pytest.raises(SpecError, match=r"a\[1\] is not there any more"):
        numbered(known, partitions(a=1, b=9))
    with pytest.raises(SpecError, match=r"b\[0\], .* and 4 more are not there any more"):
        numbered(known, partitions(a=2))


def test_only_positions_that_can_be_gone_on_from_are_accepted() -> None:
    [one] = partitions(a=1)
    ids = {"a": b"x" * 16}
    for offset in (10, 15, 20):
        check_offsets({one: Position(b"x" * 16, offset)}, ids, {one: (10, 20)})
    with pytest.raises(SpecError, match="offsets 3 to 9 are gone"):
        check_offsets({one: Position(b"x" * 16, 3)}, ids, {one: (10, 20)})
    with pytest.raises(SpecError, match="the topic ends at 20"):
        check_offsets({one: Position(b"x" * 16, 21)}, ids, {one: (10, 20)})
    with pytest.raises(SpecError, match="made anew"):
        check_offsets({one: Position(b"y" * 16, 15)}, ids, {one: (10, 20)})
