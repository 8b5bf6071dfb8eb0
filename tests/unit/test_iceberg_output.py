"""The Iceberg sink over a real table, with a catalog in a file: rows and position in one snapshot, and the fence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from shuffle.errors import ServiceUnavailable, SinkRefused, SpecError, SplitBrain
from shuffle.reducer.outputs.iceberg import RETRIES, IcebergSink
from shuffle.reducer.outputs.sink import SinkPlace
from shuffle.spec.config import load_spec
from shuffle.spec.outputs import IcebergOutputSpec

ROWS = pa.table({"n": [1, 2, 3], "day": ["a", "b", "a"]})

pytestmark = pytest.mark.filterwarnings("default")
"""The library and its own libraries warn about themselves."""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "lake").mkdir()
    return {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/lake"}


def sink(settings: dict[str, str], partition: int = 0, schema: pa.Schema = ROWS.schema) -> IcebergSink:
    made = IcebergOutputSpec("job.totals", catalog=settings)
    return IcebergSink(SinkPlace(made.config, Path(), "job", partition, schema))


def table(settings: dict[str, str]) -> Any:
    return load_catalog("default", **settings).load_table("job.totals")


def numbers(settings: dict[str, str]) -> list[int]:
    return sorted(table(settings).scan().to_arrow()["n"].to_pylist())


def test_rows_and_position_are_there_together(settings: dict[str, str]) -> None:
    made = sink(settings)
    assert made.open() is None
    made.publish(ROWS.schema.empty_table(), 0, 0)
    assert sink(settings).open() == 0, "the position alone can be published"
    made.publish(ROWS, 0, 3)
    made.publish(ROWS, 3, 6)
    assert sink(settings).open() == 6
    assert numbers(settings) == [1, 1, 2, 2, 3, 3]


def test_instance_that_opened_before_another_one_published_is_fenced(settings: dict[str, str]) -> None:
    first, second = sink(settings), sink(settings)
    first.open()
    first.publish(ROWS, 0, 3)
    assert second.open() == 3
    second.publish(ROWS, 3, 6)
    with pytest.raises(SplitBrain, match="another instance of the exporter has published"):
        first.publish(ROWS, 3, 6)
    assert first.open() == 6
    assert numbers(settings) == [1, 1, 2, 2, 3, 3]


def test_commit_between_the_look_and_the_append_is_refused_and_not_repeated_by_the_library(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sink(settings), sink(settings)
    first.open()
    second.open()
    append = first._table.append

    def late(*args: Any, **kwargs: Any) -> None:
        monkeypatch.undo()
        second._seen = None
        table_of_second = second._table
        table_of_second.append(ROWS, snapshot_properties={"shuffle.job.0": "3"})
        append(*args, **kwargs)

    monkeypatch.setattr(first._table, "append", late)
    with pytest.raises(SplitBrain):
        first.publish(ROWS, 0, 3)
    assert numbers(settings) == [1, 2, 3]


def test_partitions_of_the_outbox_and_other_writers_do_not_disturb_each_other(settings: dict[str, str]) -> None:
    made = [sink(settings, partition) for partition in range(2)]
    assert [one.open() for one in made] == [None, None]
    for turn in range(3):
        for one in made:
            one.publish(ROWS, 3 * turn, 3 * turn + 3)
        table(settings).append(ROWS)
    assert [sink(settings, partition).open() for partition in range(2)] == [9, 9]
    assert len(numbers(settings)) == 27


def test_positions_outlive_the_expiry_of_older_snapshots(settings: dict[str, str]) -> None:
    made = [sink(settings, partition) for partition in range(2)]
    for one in made:
        one.open()
        one.publish(ROWS, 0, 3)
    found = table(settings)
    old = [one.snapshot_id for one in found.snapshots() if one.snapshot_id != found.current_snapshot().snapshot_id]
    found.maintenance.expire_snapshots().by_ids(old).commit()
    assert len(table(settings).snapshots()) == 1
    assert [sink(settings, partition).open() for partition in range(2)] == [3, 3]


def test_table_that_others_have_made_loses_the_librarys_own_retries(settings: dict[str, str]) -> None:
    catalog = load_catalog("default", **settings)
    catalog.create_namespace("job")
    catalog.create_table("job.totals", schema=ROWS.schema)
    sink(settings).open()
    assert table(settings).properties[RETRIES] == "0"


def test_rows_that_do_not_fit_the_table_are_refused(settings: dict[str, str]) -> None:
    sink(settings).open()
    other = pa.table({"n": ["x"], "day": ["a"]})
    made = sink(settings, schema=other.schema)
    made.open()
    with pytest.raises(SinkRefused, match="writing to it"):
        made.publish(other, 0, 1)
    assert numbers(settings) == []


def test_catalog_that_is_away_is_waited_for(settings: dict[str, str]) -> None:
    with pytest.raises(ServiceUnavailable, match="opening it"):
        sink({**settings, "uri": "sqlite:////nowhere/at/all.db"}).open()


def test_spec_names_table_and_catalog(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = """\
processor: job
state: ./job.state
input: {queue: logs}
mapper: {class: "jobs:ByUser"}
reducer: {class: "jobs:Echo", count: 2}
output: {iceberg: job.totals, catalog: {type: rest, uri: "https://catalog", token: {file: ./token}}}
"""
    path.write_text(text)
    output = load_spec(path).output
    assert isinstance(output, IcebergOutputSpec)
    assert output.limits == (1_000_000, 64 << 20, 10_000)
    with pytest.raises(SpecError, match="token"):
        IcebergSink(SinkPlace(output.config, tmp_path, "job", 0, ROWS.schema))
    path.write_text(text.replace("job.totals", "totals"))
    with pytest.raises(SpecError, match=r"6: output\.iceberg: 'totals' is not a table: write it as namespace\.table"):
        load_spec(path)
