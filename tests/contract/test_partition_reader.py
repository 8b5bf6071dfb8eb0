"""What every PartitionReader promises, on each of those there are, and on one whose positions have gaps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shuffle.ids import Token
from shuffle.mapper.reader import START, Input, PartitionReader
from shuffle.mapper.readers.checked import CheckedInput
from shuffle.mapper.readers.folder import FolderReader
from shuffle.mapper.readers.queue import QueueReader, decode_position, encode_position
from shuffle.statestore import StateClient

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])
ROWS = pa.table({"n": list(range(100)), "s": [f"row {n}" for n in range(100)]}, schema=SCHEMA)


class GapReader(PartitionReader):
    """Positions rise by ten, as offsets do in systems that drop or compact records; and some reads find only a gap."""

    schema = SCHEMA

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        position = decode_position(token) if token else 0
        if position % 10:  # In the gap: no rows, but a token further on.
            return SCHEMA.empty_table(), encode_position(position // 10 * 10 + 10)
        begin = position // 10
        rows = ROWS.slice(begin, max(1, end_row_index - begin_row_index))
        return rows, encode_position((begin + rows.num_rows - 1) * 10 + 1 if rows.num_rows else position)

    def trim(self, row_index: int, token: Token) -> None: ...


class LettersInput(Input):
    """An input of a user's own, whose tokens are as long as the way that was gone."""

    def partition_count(self) -> int:
        return 1

    def open(self, partition: int) -> PartitionReader:
        return LettersReader()


class LettersReader(PartitionReader):
    schema = SCHEMA

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        rows = ROWS.slice(len(token), min(11, end_row_index - begin_row_index))
        return rows, Token(token + b"x" * rows.num_rows)

    def trim(self, row_index: int, token: Token) -> None: ...


def write_files(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True)
    for number, (begin, end) in enumerate([(0, 30), (30, 30), (30, 31), (31, 100)]):
        rows = ROWS.slice(begin, end - begin)
        path = folder / f"{number:04d}.{kind}"
        if kind == "parquet":
            pq.write_table(rows, path, row_group_size=7)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
        elif kind == "arrows":
            with pa.ipc.new_stream(path, SCHEMA) as stream:
                stream.write_table(rows, max_chunksize=9)
        else:
            with pa.ipc.new_file(path, SCHEMA) as file:
                file.write_table(rows, max_chunksize=9)


@pytest.fixture(params=["queue", "parquet", "arrow", "arrows", "jsonl", "gaps", "own"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PartitionReader]:
    if request.param == "gaps":
        yield GapReader()
    elif request.param == "own":
        with StateClient.open(tmp_path / "store") as client:
            opened = CheckedInput(LettersInput({}, client, tmp_path), "spec:1: input.class")
            yield opened.open(0)
    elif request.param == "queue":
        with StateClient.open(tmp_path / "store") as client:
            queue = client.create_queue("in", schema=SCHEMA, partitions=2)
            for begin in range(0, 100, 17):
                queue.append(1, ROWS.slice(begin, 17))
            yield QueueReader(client, "in", 1)
    else:
        write_files(tmp_path / "in" / "p0", request.param)
        one = FolderReader(tmp_path / "in" / "p0")
        yield one
        one.close()


def read_all(
    reader: PartitionReader, rows_max: int, token: Token = START, begin: int = 0
) -> list[tuple[pa.Table, Token]]:
    """Batches with the token after each, until three reads in a row find nothing."""
    batches: list[tuple[pa.Table, Token]] = []
    empty = 0
    while empty < 3:
        rows, token = reader.read(begin, begin + rows_max, token)
        begin += rows.num_rows
        empty = 0 if rows.num_rows else empty + 1
        if rows.num_rows:
            batches.append((rows, token))
    return batches


@pytest.mark.parametrize("rows_max", [1, 7, 1000])
def test_all_rows_once_in_order(reader: PartitionReader, rows_max: int) -> None:
    batches = read_all(reader, rows_max)
    assert all(rows.num_rows <= rows_max for rows, _ in batches)
    assert pa.concat_tables(rows for rows, _ in batches).combine_chunks() == ROWS


def test_schema_is_that_of_the_rows(reader: PartitionReader) -> None:
    rows, _ = reader.read(0, 5, START)
    assert rows.schema.equals(reader.schema)
    assert reader.schema.equals(SCHEMA)


def test_same_rows_after_each_token_with_other_batch_boundaries(reader: PartitionReader) -> None:
    done = 0
    for rows, token in read_all(reader, 13):
        done += rows.num_rows
        rest = [again for again, _ in read_all(reader, 29, token, done)]
        assert pa.concat_tables([SCHEMA.empty_table(), *rest]).combine_chunks() == ROWS.slice(done).combine_chunks()


def test_start_is_where_reading_begins(reader: PartitionReader) -> None:
    rows, _ = reader.read(0, 3, reader.start())
    assert rows["n"].to_pylist()[0] == 0


def test_trim_can_be_repeated_and_leaves_what_is_after_it(reader: PartitionReader) -> None:
    rows, token = reader.read(0, 10, START)
    for _ in range(2):
        reader.trim(rows.num_rows, token)
    rest = [again for again, _ in read_all(reader, 50, token, rows.num_rows)]
    assert pa.concat_tables(rest).combine_chunks() == ROWS.slice(rows.num_rows).combine_chunks()


def test_end_of_the_input_is_no_rows(reader: PartitionReader) -> None:
    token = read_all(reader, 1000)[-1][1]
    for _ in range(3):
        rows, token = reader.read(100, 200, token)
        assert rows.num_rows == 0
        assert rows.schema.equals(SCHEMA)
