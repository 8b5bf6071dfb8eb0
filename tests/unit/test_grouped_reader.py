"""One reader for several partitions: the same rows in the same order, whoever reads them, and however often."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shuffle.durable.read_order import READS_KEY, READS_VALUE, ReadBatch, ReadOrder, decode_entry, encode_entry
from shuffle.errors import BadInput, CorruptData, OutOfRange, SpecError
from shuffle.formats.base import BadValue, Decoded
from shuffle.ids import MapperIndex, Token
from shuffle.mapper.reader import PartitionReader
from shuffle.mapper.readers.grouped import GroupedInput, GroupedReader, GroupToken
from shuffle.mapper.readers.queue import QueueInput
from shuffle.statestore import StateClient

SCHEMA = pa.schema([("n", pa.int64())])
PARTITIONS = 5


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "state") as opened:
        opened.create_queue("logs", schema=SCHEMA, partitions=PARTITIONS)
        opened.create_table("p/reads", key=READS_KEY, value=READS_VALUE)
        yield opened


def grouped(client: StateClient, per_mapper: int = 3) -> GroupedInput:
    return GroupedInput(QueueInput({"queue": "logs", "start": "beginning"}, client, Path()), per_mapper, "p")


def append(client: StateClient, partition: int, *numbers: int) -> None:
    client.queue("logs").append(partition, pa.table({"n": list(numbers)}, schema=SCHEMA))


def read_all(reader: PartitionReader, token: Token, rows_max: int = 100) -> tuple[list[int], Token]:
    found: list[int] = []
    while True:
        rows, after = reader.read(0, rows_max, token)
        if not rows.num_rows and after == token:
            return found, token
        assert rows.num_rows <= rows_max
        found += rows["n"].to_pylist()
        token = after


def entries(client: StateClient) -> list[tuple[int, int]]:
    return [(row["mapper_index"], row["entry"]) for row in client.scan("p/reads").read_all().to_pylist()]


def test_every_partition_is_read_by_one_mapper(client: StateClient) -> None:
    for partition in range(PARTITIONS):
        append(client, partition, partition * 10, partition * 10 + 1)
    source = grouped(client)
    assert source.partition_count() == 2
    found = []
    for mapper in range(2):
        reader = source.open(mapper)
        numbers, _ = read_all(reader, reader.start())
        found += numbers
    assert sorted(found) == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]


def test_another_instance_reads_the_same_rows_in_the_same_order(client: StateClient) -> None:
    source = grouped(client)
    first = source.open(0)
    start = first.start()
    token, order = start, []
    for number in range(12):
        append(client, (number * 2) % 3, number)
        rows, token = first.read(0, 100, token)
        order += rows["n"].to_pylist()
    assert order == list(range(12))
    # All of them are in the partitions by now: without the entries they would come partition by partition.
    assert read_all(source.open(0), start)[0] == order
    for rows_max in (1, 2, 5):
        assert read_all(source.open(0), start, rows_max)[0] == order


def test_instance_goes_on_where_the_entries_of_another_end(client: StateClient) -> None:
    source = grouped(client)
    one, other = source.open(0), source.open(0)
    start = one.start()
    append(client, 0, 1, 2)
    numbers, at = read_all(one, start)
    append(client, 1, 3)
    again, after = read_all(other, start)
    assert again == [*numbers, 3]
    append(client, 2, 4)
    # The first instance has not seen the entry of the other, and would write one of its own in its place.
    assert read_all(one, at)[0] == [3, 4]
    assert read_all(source.open(0), start)[0] == [1, 2, 3, 4]
    assert after != at


def test_only_one_of_two_instances_writes_an_entry(client: StateClient) -> None:
    order = ReadOrder(client, "p", MapperIndex(0))
    assert order.append(0, (ReadBatch(1, 2),))
    assert not ReadOrder(client, "p", MapperIndex(0)).append(0, (ReadBatch(2, 7),))
    assert ReadOrder(client, "p", MapperIndex(1)).append(0, (ReadBatch(2, 7),))
    assert order.load(0, 10) == {0: ((1, 2),)}


def test_trim_deletes_rows_and_entries_that_nobody_needs(client: StateClient) -> None:
    source = grouped(client)
    reader = source.open(0)
    token = reader.start()
    for partition in (0, 2, 1):
        append(client, partition, partition)
        rows, token = reader.read(0, 100, token)
        assert rows.num_rows == 1
    assert entries(client) == [(0, 0), (0, 1), (0, 2)]
    reader.trim(3, token)
    reader.trim(3, token)
    assert entries(client) == []
    assert client.queue("logs").bounds()[:3] == [(1, 1)] * 3
    append(client, 1, 7)
    assert read_all(source.open(0), token)[0] == [7]


def test_instance_that_was_left_behind_is_told_that_entries_are_gone(client: StateClient) -> None:
    source = grouped(client)
    reader, left_behind = source.open(0), source.open(0)
    start = token = reader.start()
    for number in range(2):
        append(client, number, number)
        _, token = reader.read(0, 100, token)
    reader.trim(2, token)
    append(client, 2, 2)
    reader.read(0, 100, token)
    with pytest.raises(OutOfRange, match=r"entry 0 .* was deleted"):
        left_behind.read(0, 100, start)


def test_whoever_only_looks_leaves_no_entry(client: StateClient) -> None:
    append(client, 0, 1)
    reader = grouped(client).open_to_look(0)
    rows, _ = reader.read(0, 10, reader.start())
    assert rows["n"].to_pylist() == [1]
    assert entries(client) == []


def test_no_partition_starves(client: StateClient) -> None:
    source = grouped(client)
    reader = source.open(0)
    token, found = reader.start(), []
    for _ in range(6):
        for partition in range(3):
            append(client, partition, partition, partition)
        rows, token = reader.read(0, 2, token)
        found += rows["n"].to_pylist()
    assert set(found) == {0, 1, 2}


def test_ends_rows_left_and_lag_are_those_of_the_partitions(client: StateClient) -> None:
    source = grouped(client)
    reader = source.open(0)
    append(client, 0, 1, 2)
    append(client, 4, 5)
    ends = source.ends()
    assert ends is not None
    start = reader.start()
    assert not source.reached(0, start, ends[0])
    assert source.rows_left({0: start}) == {0: 2, 1: 1}
    assert reader.lag_rows(start) == 2
    _, token = read_all(reader, start)
    assert source.reached(0, token, ends[0])
    assert not source.reached(1, Token(b""), ends[1])
    assert reader.lag_rows(token) == 0
    assert source.describe() == "groups of 3 of its 5 partitions, queue logs"


@pytest.mark.parametrize("token", [b"x", b"\0" * 18, GroupToken(1, 0, (Token(b"a"),)).encode() + b"x"])
def test_token_of_something_else_is_refused(client: StateClient, token: bytes) -> None:
    with pytest.raises(BadInput, match="not that of a group"):
        grouped(client).open(0).read(0, 1, Token(token))


def test_positions_that_do_not_fit_into_a_token_are_refused_with_what_to_do() -> None:
    with pytest.raises(SpecError, match="set a smaller"):
        GroupToken(0, 0, (Token(b"x" * 200),) * 100).encode()


def test_entry_survives_its_encoding_and_damage_is_found() -> None:
    entry = (ReadBatch(3, 7), ReadBatch(0, 2**31))
    assert decode_entry(encode_entry(entry)) == entry
    for damaged in (b"", encode_entry(entry)[:-1]):
        with pytest.raises(CorruptData):
            decode_entry(damaged)


class Fixed(PartitionReader):
    """Rows of another schema."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(self._name, pa.int64())])

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        return self.schema.empty_table(), token

    def trim(self, row_index: int, token: Token) -> None: ...


def test_partitions_of_different_schemas_are_refused() -> None:
    everyone: Any = range
    with pytest.raises(SpecError, match="different schemas"):
        GroupedReader([Fixed("a"), Fixed("b")], None, everyone)


def test_reader_that_waits_can_be_interrupted(client: StateClient) -> None:
    reader = grouped(client).open(0)
    reader.wait_ms = 600_000
    reader.interrupt()
    rows, _ = reader.read(0, 10, reader.start())
    assert rows.num_rows == 0


class Doubling(PartitionReader):
    """Texts that are numbers, each decoded into two rows; others are bad."""

    schema = SCHEMA

    def __init__(self, name: str, texts: list[str]) -> None:
        self.name = name
        self.texts = texts

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        at = int(token or b"0")
        found = self.texts[at : at + end_row_index - begin_row_index]
        return pa.table({"text": pa.array(found, pa.string())}), Token(str(at + len(found)).encode())

    def trim(self, row_index: int, token: Token) -> None: ...

    def decode(self, rows: pa.Table) -> Decoded:
        texts = rows["text"].to_pylist()
        good = [(index, int(text)) for index, text in enumerate(texts) if text.isdigit() for _ in range(2)]
        bad = [BadValue(index, f"{self.name}: {text}") for index, text in enumerate(texts) if not text.isdigit()]
        numbers = pa.table({"n": pa.array([n for _, n in good], pa.int64())}, schema=SCHEMA)
        return Decoded(numbers, bad, np.array([index for index, _ in good], dtype=np.int64))


def test_rows_are_decoded_by_the_reader_of_their_partition_and_bad_ones_keep_their_numbers() -> None:
    readers = [Doubling("a", ["1", "x"]), Doubling("b", ["2"]), Doubling("c", ["y", "3"])]
    reader = GroupedReader(readers, None, lambda tokens: [0, 1, 2])
    rows, _ = reader.read(0, 10, reader.start())
    assert rows.num_rows == 5
    decoded = reader.decode(rows)
    assert decoded.rows.equals(pa.table({"n": [1, 1, 2, 2, 3, 3]}, schema=SCHEMA))
    assert decoded.values is not None
    assert decoded.values.tolist() == [0, 0, 2, 2, 4, 4]
    assert [(one.index, one.reason) for one in decoded.bad] == [(1, "a: x"), (3, "c: y")]
    some = reader.decode(rows.slice(2, 2))
    assert (some.rows["n"].to_pylist(), [one.reason for one in some.bad]) == ([2, 2], ["c: y"])


def test_rows_of_readers_that_decode_nothing_are_as_they_were_read(client: StateClient) -> None:
    append(client, 0, 1, 2)
    reader = grouped(client).open(0)
    rows, _ = reader.read(0, 10, reader.start())
    assert rows.schema.equals(SCHEMA)
    decoded = reader.decode(rows)
    assert decoded.rows is rows
    assert (decoded.values, list(decoded.bad)) == (None, [])
