"""The Delta sink over a real table: rows and position in one commit, the fence, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from shuffle.errors import PublishUnknown, ServiceUnavailable, SinkRefused, SpecError, SplitBrain
from shuffle.reducer.outputs.delta import DeltaSink
from shuffle.reducer.outputs.sink import SinkPlace
from shuffle.spec.config import load_spec
from shuffle.spec.outputs import DeltaOutputSpec

ROWS = pa.table({"n": [1, 2, 3], "day": ["a", "b", "a"]})


def sink(folder: Path, partition: int = 0, schema: pa.Schema = ROWS.schema, **config: Any) -> DeltaSink:
    made = DeltaOutputSpec(str(folder), **config)
    return DeltaSink(SinkPlace(made.config, folder.parent, "job", partition, schema))


def numbers(folder: Path) -> list[int]:
    return sorted(DeltaTable(str(folder)).to_pyarrow_table()["n"].to_pylist())


def test_rows_and_position_are_there_together(tmp_path: Path) -> None:
    made = sink(tmp_path / "t")
    assert made.open() is None
    made.publish(ROWS.schema.empty_table(), 0, 0)
    assert sink(tmp_path / "t").open() == 0, "the position alone can be published"
    made.publish(ROWS, 0, 3)
    made.publish(ROWS, 3, 6)
    assert sink(tmp_path / "t").open() == 6
    assert numbers(tmp_path / "t") == [1, 1, 2, 2, 3, 3]


def test_instance_that_opened_before_another_one_published_is_fenced(tmp_path: Path) -> None:
    first, second = sink(tmp_path / "t"), sink(tmp_path / "t")
    first.open()
    first.publish(ROWS, 0, 3)
    assert second.open() == 3
    second.publish(ROWS, 3, 6)
    with pytest.raises(SplitBrain, match="another commit came first"):
        first.publish(ROWS, 3, 6)
    assert first.open() == 6
    assert numbers(tmp_path / "t") == [1, 1, 2, 2, 3, 3]


def test_partitions_of_the_outbox_do_not_disturb_each_other(tmp_path: Path) -> None:
    made = [sink(tmp_path / "t", partition) for partition in range(2)]
    assert [one.open() for one in made] == [None, None]
    for turn in range(3):
        for one in made:
            one.publish(ROWS, 3 * turn, 3 * turn + 3)
    assert [sink(tmp_path / "t", partition).open() for partition in range(2)] == [9, 9]
    assert len(numbers(tmp_path / "t")) == 18


def test_table_is_created_with_its_partitioning_and_another_one_is_refused(tmp_path: Path) -> None:
    made = sink(tmp_path / "t", partition_by=("day",))
    made.open()
    made.publish(ROWS, 0, 3)
    assert DeltaTable(str(tmp_path / "t")).metadata().partition_columns == ["day"]
    sink(tmp_path / "t").open()
    with pytest.raises(SinkRefused, match="is partitioned by day, and the spec says n"):
        sink(tmp_path / "t", partition_by=("n",)).open()


def test_rows_that_do_not_fit_the_table_are_refused(tmp_path: Path) -> None:
    sink(tmp_path / "t").open()
    for other in (pa.table({"n": ["x"], "day": ["a"]}), pa.table({"z": [1], "day": ["a"]})):
        made = sink(tmp_path / "t", schema=other.schema)
        made.open()
        with pytest.raises(SinkRefused, match="writing to it"):
            made.publish(other, 0, 1)
    assert numbers(tmp_path / "t") == []


def test_place_that_cannot_be_written_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((ServiceUnavailable, PublishUnknown, SinkRefused), match="opening it"):
        sink(tmp_path / "file" / "t").open()


def test_spec_has_settings_of_the_storage_and_secrets_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.yaml"
    text = """\
processor: job
state: ./job.state
input: {queue: logs}
mapper: {class: "jobs:ByUser"}
reducer: {class: "jobs:Echo", count: 2}
output: {delta: "s3://bucket/t", storage_options: {AWS_REGION: eu, AWS_SECRET_ACCESS_KEY: {env: A_SECRET}}}
"""
    path.write_text(text)
    output = load_spec(path).output
    assert isinstance(output, DeltaOutputSpec)
    place = SinkPlace(output.config, tmp_path, "job", 0, ROWS.schema)
    with pytest.raises(SpecError, match="A_SECRET is not set"):
        DeltaSink(place)
    monkeypatch.setenv("A_SECRET", "hidden")
    made = DeltaSink(place)
    assert "hidden" not in made.identity
    assert made._options == {"AWS_REGION": "eu", "AWS_SECRET_ACCESS_KEY": "hidden"}
    path.write_text(text.replace("{env: A_SECRET}", "[1]"))
    with pytest.raises(SpecError, match=r"6: output\.storage_options\.AWS_SECRET_ACCESS_KEY: a single value"):
        load_spec(path)


def test_library_is_imported_by_the_exporter_only() -> None:
    code = (
        "import sys, shuffle.cli, shuffle.run.controller, shuffle.reducer.daemon, shuffle.mapper.daemon,"
        " shuffle.reducer.exporter.daemon;"
        " print([m for m in ('deltalake', 'pyiceberg', 'confluent_kafka') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"
