"""The simulated disk does what the real one does, and forgets what a real one may forget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import CommitConflict, DiskFull, StoreError
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.engine.engine import Engine
from shuffle.statestore.local.rocks import Rocks
from shuffle.statestore.local.segment_files import SegmentDisk
from shuffle.statestore.request import (
    Append,
    CommitRequest,
    Committed,
    CreateQueue,
    CreateTable,
    Precondition,
    ReadSet,
    TableWrite,
)
from tests.sim.disk import Disk, SimKeys, SimSegments

Open = Callable[[], Any]


@pytest.fixture(params=["real", "simulated"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    opened: Any = Rocks(tmp_path / "rocks") if request.param == "real" else SimKeys(Disk(Random(1)))
    yield opened
    opened.close()


@pytest.fixture(params=["real", "simulated"])
def segments(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    opened: Any = SegmentDisk(tmp_path / "segments") if request.param == "real" else SimSegments(Disk(Random(1)))
    yield opened
    opened.close()


# what both do


def test_keys_are_read_back_in_order(keys: Any) -> None:
    keys.write([([b"b", b"a", b"c"], [b"2", b"1", b"3"]), ([b"b"], [None])])
    keys.sync()
    view = keys.view()
    assert view.get_many([b"a", b"b", b"c"]) == [b"1", None, b"3"]
    assert list(view.scan(b"a", b"c")) == [(b"a", b"1")]
    assert list(view.scan(b"a", None)) == [(b"a", b"1"), (b"c", b"3")]
    assert list(view.scan(b"a", b"d", reverse=True)) == [(b"c", b"3"), (b"a", b"1")]


def test_view_of_keys_does_not_change(keys: Any) -> None:
    keys.write([([b"a"], [b"1"])])
    before = keys.view()
    keys.write([([b"a"], [b"2"])])
    assert before.get_many([b"a"]) == [b"1"]
    assert keys.view().get_many([b"a"]) == [b"2"]
    assert keys.get_many([b"a", b"b"]) == [b"2", None]


def test_segment_is_written_behind_what_is_committed(segments: Any) -> None:
    segments.create("one.seg", b"head")
    segments.append("one.seg", 4, [b"lost"])
    segments.append("one.seg", 4, [b"kept", memoryview(b"!")])
    segments.sync("one.seg")
    assert list(segments.names()) == ["one.seg"]
    assert bytes(segments.map("one.seg", 9)) == b"headkept!"
    segments.truncate("one.seg", 4)
    assert segments.size("one.seg") == 4


def test_segment_that_was_removed_is_gone(segments: Any) -> None:
    segments.create("one.seg", b"head")
    segments.remove("one.seg")
    segments.remove("one.seg")
    assert list(segments.names()) == []


def test_segment_that_was_set_aside_is_not_among_the_others(segments: Any) -> None:
    for _ in range(2):
        segments.create("one.seg", b"head")
        segments.create("two.seg", b"head")
        segments.set_aside("one.seg")
        assert list(segments.names()) == ["two.seg"]


# what a crash may do


def test_crash_leaves_a_prefix_of_the_unsynced_batches() -> None:
    seen = set()
    for seed in range(50):
        disk = Disk(Random(seed))
        opened = SimKeys(disk)
        opened.write([([b"a"], [b"1"])])
        opened.sync()
        opened.write([([b"b"], [b"2"])])
        opened.write([([b"c"], [b"3"])])
        disk.crash()
        seen.add(tuple(sorted(disk.keys)))
    assert seen == {(b"a",), (b"a", b"b"), (b"a", b"b", b"c")}


def test_crash_tears_unsynced_bytes_and_spares_synced_ones() -> None:
    sizes = set()
    for seed in range(50):
        disk = Disk(Random(seed))
        opened = SimSegments(disk)
        opened.create("one.seg", b"head")
        opened.append("one.seg", 4, [b"synced"])
        opened.sync("one.seg")
        opened.append("one.seg", 10, [b"unsynced"])
        disk.crash()
        assert disk.files["one.seg"].startswith(b"headsynced")
        sizes.add(len(disk.files["one.seg"]))
    assert len(sizes) > 3


def test_full_disk_leaves_the_segment_as_it_was() -> None:
    disk = Disk(Random(1))
    opened = SimSegments(disk)
    opened.create("one.seg", b"head")
    opened.sync("one.seg")
    disk.fail_next = "append"
    with pytest.raises(DiskFull):
        opened.append("one.seg", 4, [b"more"])
    assert opened.size("one.seg") == 4


# the rules of the store on it


def test_expected_rows_are_compared_with_what_the_simulated_disk_holds() -> None:
    disk = Disk(Random(1))
    engine = Engine(SimKeys(disk), SimSegments(disk), 0)

    def commit(request: CommitRequest) -> Any:
        group = engine.prepare([request], engine.version)
        engine.persist(group)
        engine.apply(group)
        return group.results[0]

    commit(CommitRequest(catalogue=CreateTable(TableSchema("t", pa.schema([("n", pa.int64())]), pa.schema([]), {}))))
    table = Table(engine.catalogue.table_named("t").schema)  # type: ignore[union-attr]
    keys, values = table.encode_rows(pa.table({"n": [1]}))
    there = Precondition(table.table_id, keys, values)
    absent = Precondition(table.table_id, keys, pa.nulls(1, pa.binary()))
    assert isinstance(commit(CommitRequest(preconditions=[there])), CommitConflict)
    commit(CommitRequest(preconditions=[absent], writes=[TableWrite(table.table_id, keys, values)]))
    disk.crash()
    engine = Engine(SimKeys(disk), SimSegments(disk), 0)
    assert isinstance(commit(CommitRequest(preconditions=[absent])), CommitConflict)
    assert isinstance(commit(CommitRequest(preconditions=[there])), Committed)


# found by the simulator


def test_transaction_that_met_a_failing_disk_commits_when_it_is_run_again() -> None:
    """Nothing else commits in between: the version that is read stays the one before the failed group."""
    disk = Disk(Random(1))
    engine = Engine(SimKeys(disk), SimSegments(disk), 0)
    schema = TableSchema("table", pa.schema([("key", pa.int64())]), pa.schema([("value", pa.int64())]), {})
    queue = QueueSchema("queue", pa.schema([("row", pa.int64())]), 1)
    for change in (CreateTable(schema), CreateQueue(queue)):
        group = engine.prepare([CommitRequest(catalogue=change)], engine.version)
        engine.persist(group)
        engine.apply(group)
    table = Table(engine.catalogue.table_named("table").schema)  # type: ignore[union-attr]
    queue_id = engine.catalogue.queue_named("queue").schema.queue_id  # type: ignore[union-attr]
    rows = pa.record_batch({"row": pa.array([1], pa.int64())})
    keys, values = table.encode_rows(pa.table({"key": pa.array([1]), "value": pa.array([2])}))
    version = engine.version

    def request() -> CommitRequest:
        return CommitRequest(
            reads=ReadSet(version, [keys]),
            writes=[TableWrite(table.table_id, keys, values)],
            appends=[Append(queue_id, 0, [rows.serialize()])],
        )

    disk.fail_next = "segment sync"
    failing = engine.prepare([request()], version)
    with pytest.raises(StoreError):
        engine.persist(failing)
    again = engine.prepare([request()], version)
    engine.persist(again)
    engine.apply(again)
    assert again.results[0].appended == ((0, 1),)
    assert engine.version == version + 1
