"""The fast path beside the plain client on a real broker: the same rows and positions, whatever is in a topic."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pytest

from shuffle.mapper.reader import START, PartitionReader
from shuffle.mapper.readers.kafka.positions import decode
from shuffle.mapper.readers.kafka.reader import KafkaReader
from tests.kafka.inputs import kafka_input
from tests.kafka.topics import Topics
from tools.kafka import Broker


def read_raw(reader: PartitionReader, rows_max: int = 10_000) -> tuple[list[dict[str, Any]], int]:
    """All rows, and the offset after them."""
    rows: list[dict[str, Any]] = []
    token, empty = START, 0
    while empty < 3:
        table, token = reader.read(len(rows), len(rows) + rows_max, token)
        rows += reader.decode(table).rows.to_pylist()
        empty = 0 if table.num_rows else empty + 1
    return rows, decode(token).offset


def both(broker: Broker, name: str, rows_max: int = 10_000) -> tuple[Any, Any]:
    found = []
    for fast_path in (True, False):
        with closing(kafka_input(broker.address, name, fast_path=fast_path).open(0)) as reader:
            found.append(read_raw(reader, rows_max))
            assert isinstance(reader, KafkaReader)
            assert (reader._fast is not None) == fast_path
            if fast_path:
                assert reader._fast_from_s == 0.0, "it was read by the plain client"
    return found[0], found[1]


def mixed(count: int, seed: int) -> tuple[list[bytes | None], list[bytes | None]]:
    chance = random.Random(seed)
    values = [chance.choice([None, b"", b"v" * chance.randrange(300)]) for _ in range(count)]
    return values, [chance.choice([None, b"", b"k" * chance.randrange(100)]) for _ in range(count)]


@pytest.mark.parametrize("compression", ["none", "gzip", "lz4", "zstd"])
def test_rows_are_those_of_the_plain_client(broker: Broker, topics: Topics, compression: str) -> None:
    name = topics.create()
    topics.write(name, [b"x" * (n % 300) for n in range(2_000)], compression_type=compression)
    topics.write(name, [b"y"] * 500, keys=[b"%d" % n for n in range(500)], compression_type=compression)
    values, keys = mixed(500, 3)
    topics.write(name, values, keys=keys, compression_type=compression)
    topics.write(name, [b"z"] * 100, headers=[("a", b"1"), ("b", None)], compression_type=compression)
    topics.write_in_transaction(name, [b"never"] * 50, commit=False)
    topics.write_in_transaction(name, [b"t"] * 50)
    for rows_max in (10_000, 77):
        fast, plain = both(broker, name, rows_max)
        assert len(plain[0]) == 3_150
        assert fast == plain


def test_times_of_the_broker_are_those_of_the_plain_client(broker: Broker, topics: Topics) -> None:
    name = topics.create(message_timestamp_type="LogAppendTime")
    topics.write(name, [b"x"] * 100)
    fast, plain = both(broker, name)
    assert fast == plain
    assert fast[0][0]["timestamp"] is not None


def test_transactions_that_overlap_are_read_as_the_plain_client_does(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    chance = random.Random(1)
    open_ones = [topics.transaction(name, [b"%d" % n] * 5) for n in range(4)]
    for turn in range(12):
        producer = open_ones.pop(chance.randrange(len(open_ones)))
        topics.write(name, [b"plain %d" % turn] * chance.randrange(3))
        (producer.commit_transaction if chance.random() < 0.5 else producer.abort_transaction)(30)
        open_ones.append(topics.transaction(name, [b"again %d" % turn] * chance.randrange(1, 6)))
    for producer in open_ones:
        producer.abort_transaction(30)
    fast, plain = both(broker, name)
    assert plain[0]
    assert fast == plain
    assert fast[1] == topics.end(name)


def test_what_the_fast_path_does_not_read_is_read_by_the_plain_client(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, [b"x" * 100] * 500)
    topics.write(name, [b"s" * 100] * 500, compression_type="snappy")
    with closing(kafka_input(broker.address, name).open(0)) as reader:
        rows, end = read_raw(reader)
        assert isinstance(reader, KafkaReader)
        assert reader._fast_from_s > 0
    assert [row["value"][:1] for row in rows] == [b"x"] * 500 + [b"s"] * 500
    assert [row["offset"] for row in rows] == list(range(1_000))
    assert end == 1_000


def test_connection_that_breaks_goes_on_with_the_plain_client(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, [b"%d" % n for n in range(3_000)])
    with closing(kafka_input(broker.address, name).open(0)) as reader:
        assert isinstance(reader, KafkaReader)
        first, token = reader.read(0, 1_000, START)
        assert reader._fast is not None
        assert reader._fast._socket is not None
        reader._fast._socket.close()
        values = first["value"].to_pylist()
        while len(values) < 3_000:
            table, token = reader.read(len(values), len(values) + 500, token)
            values += table["value"].to_pylist()
    assert values == [b"%d" % n for n in range(3_000)]


def test_fast_path_is_not_tried_where_the_connection_is_not_plain(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    properties = {"bootstrap.servers": broker.address, "security.protocol": "SSL"}
    source = kafka_input("", name, properties=properties)
    source.known_partitions = f'{{"first": 1, "names": [["{name}", 0]]}}'
    with closing(source.open(0)) as reader:
        assert isinstance(reader, KafkaReader)
        assert reader._fast is None
