"""The reader of a partition of Kafka on a real broker: what every reader promises, and every kind of gap."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition

from shuffle.errors import OutOfRange, ServiceUnavailable, SpecError
from shuffle.ids import Token
from shuffle.mapper.reader import START, PartitionReader
from shuffle.mapper.readers.kafka import client
from shuffle.mapper.readers.kafka.positions import Position, decode, encode
from tests.kafka import inputs
from tests.kafka.inputs import JSON, kafka_input
from tests.kafka.topics import Topics
from tests.waiting import wait_until
from tools.kafka import Broker

GONE = r"offsets 10 to 39 are gone .* would begin at 40"
SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


def values(begin: int, end: int) -> list[bytes]:
    return [json.dumps({"n": n, "s": f"row {n}"}).encode() for n in range(begin, end)]


def expected(begin: int, end: int) -> list[dict[str, Any]]:
    return [{"n": n, "s": f"row {n}"} for n in range(begin, end)]


def read_all(
    reader: PartitionReader, rows_max: int, token: Token = START, begin: int = 0
) -> list[tuple[list[dict[str, Any]], Token]]:
    """Batches with the token after each, until three reads in a row find nothing."""
    batches: list[tuple[list[dict[str, Any]], Token]] = []
    empty = 0
    while empty < 3:
        rows, token = reader.read(begin, begin + rows_max, token)
        begin += rows.num_rows
        empty = 0 if rows.num_rows else empty + 1
        if rows.num_rows:
            decoded = reader.decode(rows)
            assert not decoded.bad
            batches.append((decoded.rows.to_pylist(), token))
    return batches


def read_often(reader: PartitionReader, token: Token, times: int) -> None:
    """Read where nothing is to be found, until that raises."""
    for _ in range(times):
        rows, _ = reader.read(5, 100, token)
        assert rows.num_rows == 0, "there is nothing to be found here"


def in_a_row(batches: list[tuple[list[dict[str, Any]], Token]]) -> list[dict[str, Any]]:
    return [row for rows, _ in batches for row in rows]


@pytest.fixture(params=[True, False], ids=["fast", "plain-client"], autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the fast path, and without."""
    monkeypatch.setattr(inputs, "FAST_PATH", request.param)


@pytest.fixture(params=["plain", "lz4", "gaps"])
def filled(request: pytest.FixtureRequest, topics: Topics) -> str:
    """A topic with a hundred rows."""
    name = topics.create()
    if request.param == "gaps":
        for begin in range(0, 100, 10):
            topics.write_in_transaction(name, [b"aborted"] * 3, commit=False)
            topics.write_in_transaction(name, values(begin, begin + 10))
        topics.write_in_transaction(name, [b"aborted"] * 3, commit=False)
    else:
        topics.write(name, values(0, 100), compression_type="none" if request.param == "plain" else request.param)
    return name


@pytest.fixture
def reader(broker: Broker, filled: str) -> Any:
    one = kafka_input(broker.address, filled, **JSON).open(0)
    yield one
    one.close()


@pytest.mark.parametrize("rows_max", [1, 7, 1000])
def test_all_rows_once_in_order(reader: PartitionReader, rows_max: int) -> None:
    batches = read_all(reader, rows_max)
    assert all(len(rows) <= rows_max for rows, _ in batches)
    assert in_a_row(batches) == expected(0, 100)
    assert reader.schema.equals(SCHEMA)


def test_same_rows_after_each_token_with_other_batch_boundaries(reader: PartitionReader) -> None:
    done = 0
    for rows, token in read_all(reader, 13):
        done += len(rows)
        assert in_a_row(read_all(reader, 29, token, done)) == expected(done, 100)


def test_start_is_where_reading_begins_and_trim_deletes_nothing(reader: PartitionReader) -> None:
    rows, token = reader.read(0, 10, reader.start())
    assert rows.num_rows == 10
    for _ in range(2):
        reader.trim(10, token)
    assert in_a_row(read_all(reader, 50, token, 10)) == expected(10, 100)
    assert in_a_row(read_all(reader, 50)) == expected(0, 100)


def test_position_after_the_last_row_is_the_end_over_all_markers(
    reader: PartitionReader, broker: Broker, filled: str, topics: Topics
) -> None:
    token = read_all(reader, 1000)[-1][1]
    _, token = reader.read(100, 200, token)
    assert decode(token).offset == topics.end(filled)
    source = kafka_input(broker.address, filled, **JSON)
    ends = source.ends()
    assert ends is not None
    assert source.reached(0, token, ends[0])
    assert not source.reached(0, reader.start(), ends[0])
    assert source.rows_left({0: token}) == {0: 0}
    assert source.rows_left({}) == {0: topics.end(filled)}
    assert reader.lag_rows(token) == 0


def test_read_waits_for_a_record_and_no_longer(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    reader = kafka_input(broker.address, name, **JSON).open(0)
    rows, token = reader.read(0, 10, START)
    assert rows.num_rows == 0
    reader.wait_ms = 10_000
    topics.write(name, values(0, 1))
    began_s = time.monotonic()
    rows, token = reader.read(0, 10, token)
    assert rows.num_rows == 1
    assert time.monotonic() - began_s < 5
    reader.interrupt()
    reader.read(1, 10, token)
    assert time.monotonic() - began_s < 5
    reader.close()


def test_rows_of_an_open_transaction_are_read_once_it_is_committed(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, values(0, 1))
    producer = topics.transaction(name, values(1, 2))
    topics.write(name, values(2, 3))
    source = kafka_input(broker.address, name, **JSON)
    reader = source.open(0)
    [(rows, token)] = read_all(reader, 10)
    assert rows == expected(0, 1)
    ends = source.ends()
    assert ends is not None
    assert source.reached(0, token, ends[0]), "what waits behind an open transaction is not there yet"
    producer.commit_transaction(30)
    reader.wait_ms = 2_000
    assert in_a_row(read_all(reader, 10, token, 1)) == expected(1, 3)
    reader.close()


def test_bytes_of_a_batch_are_bounded(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, [b"x" * 1_000] * 5_000)
    reader = kafka_input(broker.address, name).open(0)
    reader.batch_bytes_max = 100_000
    rows, _ = reader.read(0, 100_000, START)
    assert rows.num_rows <= 1_100, "one round of messages may be too many"
    reader.close()


def test_raw_rows_have_everything_of_a_record(broker: Broker, topics: Topics) -> None:
    name = topics.create(partitions=2)
    before_ms = int(time.time() * 1000)
    topics.write(name, [b"v", None, b""], 1, keys=[b"k", None, b""], headers=[("h", b"1"), ("h", None)])
    topics.write(name, [b"w"], 1)
    reader = kafka_input(broker.address, name).open(1)
    rows, _ = reader.read(0, 10, START)
    found = reader.decode(rows).rows.to_pylist()
    assert [(row["key"], row["value"]) for row in found] == [(b"k", b"v"), (None, None), (b"", b""), (None, b"w")]
    assert [(row["topic"], row["partition"], row["offset"]) for row in found] == [(name, 1, n) for n in range(4)]
    assert found[0]["headers"] == [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
    assert not found[3]["headers"]
    assert all(before_ms <= row["timestamp"].timestamp() * 1000 <= time.time() * 1000 for row in found)
    assert rows.schema.equals(reader.schema)
    reader.close()


def test_metadata_stands_beside_decoded_columns_also_when_some_are_bad(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, [b'{"n": 1}', b"junk", None, b'{"n": 2}'], keys=[b"a", b"b", b"c", b"d"])
    reader = kafka_input(broker.address, name, metadata=["key", "offset", "topic"], **JSON).open(0)
    rows, _ = reader.read(0, 10, START)
    decoded = reader.decode(rows)
    assert decoded.rows.schema.equals(reader.schema)
    assert decoded.rows.to_pylist() == [
        {"n": 1, "s": None, "_key": b"a", "_topic": name, "_offset": 0},
        {"n": 2, "s": None, "_key": b"d", "_topic": name, "_offset": 3},
    ]
    assert [one.index for one in decoded.bad] == [1, 2]
    assert decoded.bad[0].reason.startswith(f"{name}[0] at offset 1 cannot be decoded: it is not JSON")
    assert decoded.bad[1].reason.startswith(f"{name}[0] at offset 2 cannot be decoded: the message has no value")
    reader.close()


# Where it begins -----------------------------------------------------------------------------------------------------


def test_start_is_what_the_spec_says(broker: Broker, topics: Topics) -> None:
    name = topics.create(partitions=2)
    topics.write(name, values(0, 5))
    time.sleep(0.05)
    middle_ms = int(time.time() * 1000)
    time.sleep(0.05)
    topics.write(name, values(5, 9))

    def start(how: Any, partition: int = 0) -> int:
        reader = kafka_input(broker.address, name, start=how).open(partition)
        try:
            return decode(reader.start()).offset
        finally:
            reader.close()

    assert start("earliest") == 0
    assert start("latest") == 9
    assert start({"timestamp": middle_ms}) == 5
    assert start({"timestamp": middle_ms}, 1) == 0
    assert start({"timestamp": int(time.time() * 1000) + 60_000}) == 9
    assert start({"offsets": {0: 3}}) == 3
    assert start({"offsets": {0: 3}}, 1) == 0
    with pytest.raises(SpecError, match=r"has offsets from 0 to 9, and it is to be read from 10"):
        start({"offsets": {0: 10}})


# What is refused -----------------------------------------------------------------------------------------------------


def test_compacted_topic_is_refused_with_the_reason(broker: Broker, topics: Topics) -> None:
    name = topics.create(cleanup_policy="compact,delete")
    with pytest.raises(SpecError, match=rf"{name} is compacted .* read again"):
        kafka_input(broker.address, name).check_start(dict)


def test_records_that_are_gone_are_named_at_the_start_and_while_reading(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, values(0, 50))
    source = kafka_input(broker.address, name, **JSON)
    reader = source.open(0)
    _, token = reader.read(0, 10, START)
    topics.delete_records(name, 0, 40)
    with pytest.raises(SpecError, match=GONE):
        source.check_start(lambda: {0: token})
    other = source.open(0)
    with pytest.raises(OutOfRange, match=GONE):
        read_often(other, token, 3)
    rows, _ = other.read(0, 100, START)
    assert rows.num_rows == 10, "a new processor begins at the first record there is"
    reader.close()
    other.close()


def test_position_behind_the_end_is_an_error(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, values(0, 5))
    source = kafka_input(broker.address, name, **JSON)
    reader = source.open(0)
    behind = encode(decode(reader.start())._replace(offset=100))
    with pytest.raises(OutOfRange, match="next record to read is 100, and the topic ends at 5"):
        read_often(reader, behind, 3)
    reader.close()


def test_topic_made_anew_is_refused(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, values(0, 5))
    source = kafka_input(broker.address, name, **JSON)
    reader = source.open(0)
    reader.wait_ms = 100
    [(_, token)] = read_all(reader, 100)
    topics.delete(name)
    wait_until(lambda: name not in topics.admin.list_topics(timeout=10).topics)
    wait_until(lambda: _created(topics, name))
    topics.write(name, values(0, 50))
    with pytest.raises(SpecError, match="deleted and made anew"):
        read_often(reader, token, 50)
    with pytest.raises(SpecError, match="deleted and made anew"):
        source.check_start(lambda: {0: token})
    reader.close()


def _created(topics: Topics, name: str) -> bool:
    try:
        topics.create(name)
    except Exception:  # It is still being deleted.
        return False
    return True


def test_deleted_topic_is_an_error_that_names_it(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, values(0, 5))
    reader = kafka_input(broker.address, name, **JSON).open(0)
    reader.wait_ms = 100
    [(_, token)] = read_all(reader, 100)
    topics.delete(name)
    with pytest.raises(SpecError, match=f"no topic '{name}'"):
        read_often(reader, token, 300)
    reader.close()


def test_topic_that_is_not_there_is_named(broker: Broker) -> None:
    with pytest.raises(SpecError, match="there is no topic 'nowhere'"):
        kafka_input(broker.address, "nowhere").partition_count()
    with pytest.raises(SpecError, match="no topic has a name that the pattern"):
        kafka_input(broker.address, None, pattern="no-such-.*").partition_count()


def test_several_topics_keep_their_numbers_when_one_of_them_grows(broker: Broker, topics: Topics) -> None:
    prefix = topics.create()
    names = [topics.create(f"{prefix}-{letter}", 2) for letter in "ab"]
    source = kafka_input(broker.address, None, pattern=f"{prefix}-.*")
    first = source.partitions()
    assert first == kafka_input(broker.address, names[::-1]).partitions()
    assert json.loads(first or "")["names"] == [[names[0], 0], [names[0], 1], [names[1], 0], [names[1], 1]]
    topics.grow(names[0], 3)
    source.known_partitions = first
    wait_until(lambda: source.partition_count() == 5)
    assert json.loads(source.partitions() or "")["names"][4] == [names[0], 2]
    topics.write(names[0], [b"x"], 2)
    source.known_partitions = source.partitions()
    late = kafka_input(broker.address, None, pattern=f"{prefix}-.*", start="latest")
    late.known_partitions = source.known_partitions
    with closing(late.open(4)) as reader:
        assert decode(reader.start()).offset == 0, "a partition that came later is read from its first record on"


def test_fewer_partitions_than_before_are_refused(broker: Broker, topics: Topics) -> None:
    name = topics.create(partitions=1)
    source = kafka_input(broker.address, name)
    source.known_partitions = json.dumps({"first": 2, "names": [[name, 0], [name, 1]]})
    with pytest.raises(SpecError, match=rf"{name}\[1\] is not there any more"):
        source.partition_count()


# Trouble -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_broker_away_is_said_and_waited_for(own_broker: Broker) -> None:
    topics = Topics(own_broker.address)
    name = topics.create()
    topics.write(name, values(0, 5))
    source = kafka_input(own_broker.address, name, **JSON)
    reader = source.open(0)
    reader.wait_ms = 1_000
    [(rows, token)] = read_all(reader, 10)
    own_broker.kill()
    with pytest.raises(ServiceUnavailable, match=r"Kafka: .*; waiting for it"):
        read_often(reader, token, 30)
    source.known_partitions = json.dumps({"first": 1, "names": [[name, 0]]})
    assert source.partition_count() == 1, "what is known is enough"
    assert source.rows_left({0: token}) == {}
    own_broker.restart()
    Topics(own_broker.address).write(name, values(5, 8))
    found: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + 60
    while len(found) < 3 and time.monotonic() < deadline_s:
        try:
            rows, token = reader.read(5, 10, token)
        except ServiceUnavailable:
            continue
        found += reader.decode(rows).rows.to_pylist()
    assert found == expected(5, 8)
    reader.close()


def test_nobody_at_the_address_is_said_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALL_S_MAX", 2.0)
    source = kafka_input("127.0.0.1:1", "orders")
    with pytest.raises(ServiceUnavailable, match="waiting for it"):
        source.partition_count()


def test_setting_that_the_client_refuses_is_a_mistake_without_its_value(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("very secret")
    properties = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": {"file": "secret"}}
    with pytest.raises(SpecError, match=r"properties: .*security\.protocol") as caught:
        kafka_input("", "orders", tmp_path, properties=properties).partition_count()
    assert "very secret" not in str(caught.value)


def test_progress_is_told_to_the_group(broker: Broker, topics: Topics) -> None:
    name = topics.create()
    topics.write(name, values(0, 5))
    reader = kafka_input(broker.address, name, group="watched", **JSON).open(0)
    [(_, token)] = read_all(reader, 10)
    reader.trim(5, token)
    watcher = Consumer({"bootstrap.servers": broker.address, "group.id": "watched"})
    place = TopicPartition(name, 0)
    wait_until(lambda: watcher.committed([place], timeout=10)[0].offset == 5, "the group knows the offset")
    assert watcher.committed([place], timeout=10)[0].offset == 5
    watcher.close()
    reader.close()
    reader.trim(5, encode(Position(b"\0" * 16, 7)))  # Late: nobody is there any more, and nothing happens.
