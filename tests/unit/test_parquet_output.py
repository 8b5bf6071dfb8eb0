"""The Parquet sink over a real folder: names, sub-folders, what is left of a killed one, and what is refused."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from shuffle.errors import PositionLost, ServiceUnavailable, SinkRefused, SpecError
from shuffle.reducer.outputs import parquet
from shuffle.reducer.outputs.parquet import ParquetSink
from shuffle.reducer.outputs.sink import SinkPlace
from shuffle.spec.config import load_spec
from shuffle.spec.outputs import ParquetOutputSpec

ROWS = pa.table(
    {
        "n": [1, 2, 3, 4],
        "day": [datetime.date(2026, 11, 17), datetime.date(2026, 11, 18), None, datetime.date(2026, 11, 17)],
        "place": ["a/b", "ö", "ö", "a/b"],
    }
)


def sink(folder: Path, schema: pa.Schema = ROWS.schema, partition: int = 0, **config: Any) -> ParquetSink:
    made = ParquetOutputSpec(str(folder), **config)
    return ParquetSink(SinkPlace(made.config, folder, "job", partition, schema))


def opened(folder: Path, **config: Any) -> ParquetSink:
    made = sink(folder, **config)
    assert made.open() is None
    return made


def test_batch_is_one_file_named_by_its_range(tmp_path: Path) -> None:
    opened(tmp_path / "out").publish(ROWS, 10, 14)
    assert os.listdir(tmp_path / "out") == ["job-0-000000000010-000000000014.parquet"]
    assert pq.read_table(tmp_path / "out").equals(ROWS)


def test_batch_that_is_published_again_is_there_once(tmp_path: Path) -> None:
    opened(tmp_path).publish(ROWS, 0, 4)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    opened(tmp_path).publish(ROWS, 0, 4)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_partitions_of_the_outbox_do_not_share_files(tmp_path: Path) -> None:
    for partition in range(2):
        made = sink(tmp_path, partition=partition)
        made.open()
        made.publish(ROWS, 0, 4)
    assert pq.read_table(tmp_path).num_rows == 8


def test_columns_become_sub_folders_that_others_can_read(tmp_path: Path) -> None:
    opened(tmp_path, partition_by=("day", "place")).publish(ROWS, 0, 4)
    folders = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*"))
    assert folders == [
        "day=2026-11-17/place=a%2Fb",
        "day=2026-11-18/place=%C3%B6",
        f"day={parquet.NULL_FOLDER}/place=%C3%B6",
    ]
    keys = pa.schema([("day", pa.date32()), ("place", pa.string())])
    found = ds.dataset(tmp_path, partitioning=ds.partitioning(keys, flavor="hive")).to_table(columns=ROWS.column_names)
    assert found.sort_by("n").to_pylist() == ROWS.to_pylist()


def test_batch_of_which_some_files_are_there_is_completed(tmp_path: Path) -> None:
    opened(tmp_path, partition_by=("place",)).publish(ROWS, 0, 4)
    files = sorted(tmp_path.glob("*/*.parquet"))
    files[0].unlink()
    opened(tmp_path, partition_by=("place",)).publish(ROWS, 0, 4)
    assert sorted(tmp_path.glob("*/*.parquet")) == files


def test_what_a_killed_instance_left_is_no_file_and_goes(tmp_path: Path) -> None:
    left = tmp_path / ".job-0-000000000000-000000000004.parquet.abc.tmp"
    left.write_bytes(b"half of a file")
    opened(tmp_path).publish(ROWS, 0, 4)
    assert pq.read_table(tmp_path).equals(ROWS)
    assert not left.exists()


def test_files_of_an_earlier_processor_of_that_name_are_refused(tmp_path: Path) -> None:
    sink(tmp_path / "new").check_new()
    opened(tmp_path, partition_by=("place",)).publish(ROWS, 0, 4)
    sink(tmp_path, partition=1).check_new()
    with pytest.raises(PositionLost, match="files of an earlier processor of this name"):
        sink(tmp_path).check_new()


def test_column_that_is_not_emitted_is_a_mistake_of_the_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"output\.partition_by: country: the rows have the columns n"):
        sink(tmp_path, partition_by=("country",))
    with pytest.raises(SpecError, match="at least one of which must stay"):
        sink(tmp_path, partition_by=("n", "day", "place"))


def test_too_many_sub_folders_are_refused(tmp_path: Path) -> None:
    rows = pa.table({"n": list(range(parquet.FOLDERS_MAX + 1)), "m": [0] * (parquet.FOLDERS_MAX + 1)})
    made = sink(tmp_path, schema=rows.schema, partition_by=("n",))
    made.open()
    with pytest.raises(SinkRefused, match="1001 different values of n in one batch"):
        made.publish(rows, 0, rows.num_rows)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_refused_and_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((SinkRefused, ServiceUnavailable), match="cannot be written"):
        sink(tmp_path / "file").open()
    made = opened(tmp_path / "out")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(ServiceUnavailable, match="No space left"):
        made.publish(ROWS, 0, 4)


def test_any_file_system_of_arrow_can_be_named(tmp_path: Path) -> None:
    made = ParquetSink(SinkPlace(ParquetOutputSpec(f"file://{tmp_path}/x").config, tmp_path, "job", 0, ROWS.schema))
    made.open()
    made.publish(ROWS, 0, 4)
    assert pq.read_table(tmp_path / "x").equals(ROWS)


SPEC = """\
processor: job
state: ./job.state
input: {queue: logs}
mapper: {class: "jobs:ByUser"}
reducer: {class: "jobs:Echo", count: 2}
output: {parquet: ./out, OPTIONS}
"""


def test_spec_names_a_folder_beside_it_and_when_files_end(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        SPEC.replace("OPTIONS", "partition_by: [day], batch_age: 1m, batch_rows_max: 500, compression: lz4")
    )
    output = load_spec(path).output
    assert isinstance(output, ParquetOutputSpec)
    assert (output.parquet, output.partition_by, output.compression) == (str(tmp_path / "out"), ("day",), "lz4")
    assert output.limits == (500, 64 << 20, 60_000)
    path.write_text(SPEC.replace("./out, OPTIONS", '"s3://bucket/x"'))
    output = load_spec(path).output
    assert isinstance(output, ParquetOutputSpec)
    assert output.parquet == "s3://bucket/x"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("partition_by: [a, a]", "a list of different names"),
        ("partition_by: {a: b}", "a single value is needed"),
        ("batch_age: soon", "'soon'"),
        ("batch_rows_max: 0", "0 is not between 1 and 100000000"),
        ("compression: rar", "'rar' is none of"),
        ("colour: red", "unknown key"),
    ],
)
def test_mistake_in_an_option_is_named_with_its_place(tmp_path: Path, option: str, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SPEC.replace("OPTIONS", option))
    with pytest.raises(SpecError, match=said) as caught:
        load_spec(path)
    assert "job.yaml:6: output." in caught.value.message
