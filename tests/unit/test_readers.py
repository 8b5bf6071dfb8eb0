from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shuffle.errors import BadInput, CorruptData, OutOfRange, SchemaMismatch, SpecError
from shuffle.ids import Token
from shuffle.mapper.reader import START
from shuffle.mapper.readers.folder import FolderReader, encode_file_position, partition_folders
from shuffle.mapper.readers.opening import built_in_input
from shuffle.mapper.readers.queue import QueueReader, decode_position, encode_position
from shuffle.spec.inputs import FolderInputSpec, InputSpec, QueueInputSpec, input_described_as
from shuffle.statestore import StateClient

SCHEMA = pa.schema([("n", pa.int64())])


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": list(values)}, schema=SCHEMA)


def put(folder: Path, name: str, *values: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(numbers(*values), folder / name)


def test_queue_reader_starts_where_the_queue_was_trimmed_to(tmp_path: Path) -> None:
    with StateClient.open(tmp_path) as client:
        queue = client.create_queue("in", schema=SCHEMA, partitions=1)
        queue.append(0, numbers(0, 1, 2))
        queue.trim(0, 2)
        reader = QueueReader(client, "in", 0)
        assert decode_position(reader.start()) == 2
        rows, token = reader.read(0, 10, reader.start())
        assert (rows["n"].to_pylist(), decode_position(token)) == ([2], 3)
        assert (reader.lag_rows(token), reader.lag_rows(reader.start())) == (0, 1)
        with pytest.raises(OutOfRange):
            reader.read(0, 10, encode_position(0))


def test_queue_reader_refuses_a_token_of_another_reader(tmp_path: Path) -> None:
    with StateClient.open(tmp_path) as client:
        client.create_queue("in", schema=SCHEMA, partitions=1)
        with pytest.raises(BadInput, match="was the input of the processor changed"):
            QueueReader(client, "in", 0).read(0, 1, encode_file_position("a.parquet", 3))


def test_folder_reader_sees_files_that_come_later(tmp_path: Path) -> None:
    put(tmp_path / "p", "a.parquet", 0, 1)
    reader = FolderReader(tmp_path / "p")
    rows, token = reader.read(0, 10, START)
    assert reader.read(2, 10, token) == (SCHEMA.empty_table(), token)
    put(tmp_path / "p", "b.parquet", 2)
    rows, token = reader.read(2, 10, token)
    assert rows["n"].to_pylist() == [2]
    assert json.loads(token) == {"file": "b.parquet", "rows": 1}


def test_folder_reader_refuses_a_late_file_with_an_early_name(tmp_path: Path) -> None:
    put(tmp_path / "p", "b.parquet", 0)
    reader = FolderReader(tmp_path / "p")
    _, token = reader.read(0, 10, START)
    put(tmp_path / "p", "a.parquet", 1)
    with pytest.raises(BadInput, match=r"a\.parquet came after b\.parquet"):
        reader.read(1, 10, token)


def test_folder_reader_says_which_file_is_gone(tmp_path: Path) -> None:
    put(tmp_path / "p", "b.parquet", 0)
    with pytest.raises(OutOfRange, match=r"a\.parquet is gone"):
        FolderReader(tmp_path / "p").read(0, 10, encode_file_position("a.parquet", 1))


def test_folder_reader_ignores_hidden_and_half_written_files(tmp_path: Path) -> None:
    put(tmp_path / "p", "b.parquet", 0)
    for name in (".a.parquet", "_SUCCESS", "a.parquet.tmp"):
        (tmp_path / "p" / name).write_bytes(b"not yet")
    rows, _ = FolderReader(tmp_path / "p").read(0, 10, START)
    assert rows["n"].to_pylist() == [0]


def test_folder_reader_names_a_broken_file(tmp_path: Path) -> None:
    put(tmp_path / "p", "a.parquet", 0)
    (tmp_path / "p" / "b.parquet").write_bytes(b"PAR1 not really PAR1")
    reader = FolderReader(tmp_path / "p")
    _, token = reader.read(0, 10, START)
    with pytest.raises(CorruptData, match=r"b\.parquet"):
        reader.read(1, 10, token)


def test_folder_reader_names_a_file_with_other_columns(tmp_path: Path) -> None:
    put(tmp_path / "p", "a.parquet", 0)
    pq.write_table(pa.table({"m": [1]}), tmp_path / "p" / "b.parquet")
    reader = FolderReader(tmp_path / "p")
    _, token = reader.read(0, 10, START)
    with pytest.raises(SchemaMismatch, match=r"b\.parquet.*superfluous: \['m'\], missing: \['n'\]"):
        reader.read(1, 10, token)


def test_json_lines_keep_the_types_of_the_first_file(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.jsonl").write_text('{"n": 1.5}\n')
    (tmp_path / "p" / "b.jsonl").write_text('{"n": 2}\n')
    reader = FolderReader(tmp_path / "p")
    first, token = reader.read(0, 10, START)
    second, _ = reader.read(1, 10, token)
    assert first.schema == second.schema == pa.schema([("n", pa.float64())])


def test_folder_reader_bounds_bytes(tmp_path: Path) -> None:
    put(tmp_path / "p", "a.parquet", *range(1000))
    reader = FolderReader(tmp_path / "p", batch_bytes_max=80)
    rows, _ = reader.read(0, 1000, START)
    assert 8 <= rows.num_rows <= 10


def test_folder_reader_that_waits_can_be_interrupted(tmp_path: Path) -> None:
    put(tmp_path / "p", "a.parquet", 0)
    reader = FolderReader(tmp_path / "p", wait_ms=60_000)
    _, token = reader.read(0, 10, START)
    reader.interrupt()
    assert reader.read(1, 10, token)[0].num_rows == 0


def test_empty_folder_takes_its_schema_from_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "p0").mkdir()
    put(tmp_path / "p1", "a.parquet", 0)
    assert FolderReader(tmp_path / "p0").schema == SCHEMA
    (tmp_path / "p1" / "a.parquet").unlink()
    with pytest.raises(SpecError, match="schema of the input is not known"):
        _ = FolderReader(tmp_path / "p0").schema


def test_built_in_inputs_open_their_partitions(tmp_path: Path) -> None:
    put(tmp_path / "in" / "p0", "a.parquet", 0)
    put(tmp_path / "in" / "p1", "a.parquet", 1)
    (tmp_path / "in" / ".hidden").mkdir()
    with StateClient.open(tmp_path / "store") as client:
        client.create_queue("in", schema=SCHEMA, partitions=3)
        queue = built_in_input(QueueInputSpec("in"), client)
        assert (queue.partition_count(), queue.consumes) == (3, "in")
        assert isinstance(queue.open(2), QueueReader)
        folder = built_in_input(FolderInputSpec(str(tmp_path / "in")), client)
        assert folder.partition_count() == len(partition_folders(tmp_path / "in")) == 2
        assert (folder.consumes, folder.ends(), folder.rows_left({})) == (None, None, {})
        assert folder.open(1).read(0, 10, START)[0]["n"].to_pylist() == [1]
        with pytest.raises(SpecError, match="no partition 2"):
            folder.open(2)


def test_queue_input_alone_reads_its_tokens(tmp_path: Path) -> None:
    with StateClient.open(tmp_path / "store") as client:
        queue = client.create_queue("in", schema=SCHEMA, partitions=2)
        queue.append(1, numbers(0, 1, 2))
        queue.trim(1, 1)
        source = built_in_input(QueueInputSpec("in"), client)
        ends = source.ends()
        assert ends is not None
        assert [source.reached(1, token, ends[1]) for token in (START, encode_position(2), ends[1])] == [
            *(False, False, True)
        ]
        assert source.reached(0, START, ends[0])
        assert source.rows_left({1: encode_position(2)}) == {0: 0, 1: 1}
        assert source.rows_left({}) == {0: 0, 1: 2}


@pytest.mark.parametrize("spec", [QueueInputSpec("a b"), FolderInputSpec("/a folder")])
def test_built_in_input_is_known_by_what_it_calls_itself(tmp_path: Path, spec: InputSpec) -> None:
    with StateClient.open(tmp_path / "store") as client:
        assert input_described_as(built_in_input(spec, client).describe()) == spec
    assert input_described_as('class jobs:Sequence {"rows": 3}') is None
    assert input_described_as("") is None


def test_token_of_a_folder_is_checked(tmp_path: Path) -> None:
    put(tmp_path / "p", "a.parquet", 0)
    with pytest.raises(BadInput):
        FolderReader(tmp_path / "p").read(0, 1, Token(b"\0" * 8))
