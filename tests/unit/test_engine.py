"""The engine on a real database and real files: groups of commits, faults between the steps, and opening again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import (
    BadInput,
    CommitConflict,
    ConstraintViolated,
    CorruptData,
    DiskFull,
    Expired,
    ShuffleError,
    StoreError,
    TooLarge,
    UnknownTable,
)
from statestore import engine as engine_module
from statestore import ordered_table
from statestore.disk import SegmentDisk
from statestore.engine import Engine
from statestore.request import (
    Append,
    CommitRequest,
    Committed,
    CreateQueue,
    CreateTable,
    Drop,
    Expect,
    Publish,
    Reads,
    TableWrite,
    Trim,
)
from statestore.rocks import Rocks
from statestore.schema import QueueSchema, TableSchema
from statestore.segment import decode_batch
from statestore.table import Table
from statestore.validation import KeyRange

NUMBERS = pa.schema([("n", pa.int64())])


class FaultyDisk(SegmentDisk):
    """A real folder that fails when it is told to."""

    failing: str | None = None
    free: int | None = None

    def create(self, name: str, header: bytes) -> None:
        super().create(name, header)
        self._fail("create")

    def append(self, name: str, offset: int, parts: Sequence[bytes | memoryview]) -> int:
        written = super().append(name, offset, parts)
        if offset:
            self._fail("append")
        return written

    def sync(self, name: str) -> None:
        super().sync(name)
        self._fail("sync")

    def free_bytes(self) -> int:
        return super().free_bytes() if self.free is None else self.free

    def _fail(self, step: str) -> None:
        if self.failing == step:
            raise DiskFull(f"no room at {step}")


class FaultyRocks(Rocks):
    failing: str | None = None

    def write(self, puts: Any, cleared: Any = ()) -> int:
        if self.failing == "write":
            raise StoreError("failed before the write")
        return super().write(puts, cleared)

    def sync(self) -> None:
        super().sync()
        if self.failing == "sync":
            raise StoreError("failed after the sync")


class Store:
    """An engine on a folder, driven by hand: one group at a time."""

    def __init__(self, folder: Path, now_ms: int = 0) -> None:
        self.folder = folder
        self.disk = FaultyDisk(folder / "segments")
        self.rocks = FaultyRocks(folder / "rocks")
        self.engine = Engine(self.rocks, self.disk, now_ms)
        self.oldest_version = 0
        self.closed = False

    def group(self, *requests: CommitRequest) -> list[Committed | ShuffleError]:
        group = self.engine.prepare(requests, self.oldest_version)
        self.engine.persist(group)
        self.engine.remove_files(self.engine.apply(group))
        return group.answers

    def commit(self, request: CommitRequest) -> Committed:
        [answer] = self.group(request)
        if isinstance(answer, ShuffleError):
            raise answer
        return answer

    def create(self) -> tuple[Table, int]:
        value = pa.schema([("v", pa.int64())])
        self.commit(CommitRequest(catalogue=CreateTable(TableSchema("t", NUMBERS, value, {"positive": "v > 0"}))))
        self.commit(CommitRequest(catalogue=CreateQueue(QueueSchema("q", NUMBERS, 2))))
        return self.table(), self.engine.catalogue.queue_named("q").schema.queue_id  # type: ignore[union-attr]

    def table(self) -> Table:
        """Without its constraints, so that breaking them reaches the engine."""
        schema = self.engine.catalogue.table_named("t").schema  # type: ignore[union-attr]
        return Table(replace(schema, constraints={}))

    def rows(self) -> dict[int, int]:
        table = self.table()
        wanted = table.range(None, None, None)
        pairs = list(self.rocks.view().scan(wanted.begin, wanted.end))
        keys, values = pa.array([k for k, _ in pairs], pa.binary()), pa.array([v for _, v in pairs], pa.binary())
        found = table.decode_rows(keys, values)
        return dict(zip(found["n"].to_pylist(), found["v"].to_pylist(), strict=True))

    def queued(self, queue_id: int, partition: int, begin: int = 0) -> list[int]:
        found: list[int] = []
        while (span := self.engine.locate(queue_id, partition, begin, 1000, 1 << 20)) is not None:
            mapped = self.disk.map(span.file, span.offset + span.size_bytes)
            start = 0
            for end in span.ends:
                record = mapped.slice(span.offset + start, end - start)
                head, batch = decode_batch(record, NUMBERS, span.file, span.offset + start)
                found += batch.slice(max(begin - span.segment_begin - head.first_row, 0))["n"].to_pylist()
                begin = span.segment_begin + head.first_row + head.rows
                start = end
        return found

    def stage(self, queue_id: int, staged_id: str, *numbers: int, ttl_ms: int = 1000, now_ms: int = 0) -> None:
        payloads = [(len(numbers), payload(*numbers))] if numbers else []
        header = self.engine.catalogue.queue(queue_id).header
        self.engine.staged.add(staged_id, queue_id, header, payloads, ttl_ms, now_ms)

    def files(self) -> list[str]:
        return list(self.disk.names())

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.disk.close()
            self.rocks.close()

    def reopened(self, now_ms: int = 0) -> Store:
        self.close()
        return Store(self.folder, now_ms)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Store | None], Store]]:
    stores: list[Store] = []

    def open_again(store: Store | None = None) -> Store:
        stores.append(Store(tmp_path) if store is None else store.reopened())
        return stores[-1]

    yield open_again
    if stores:
        stores[-1].close()


def payload(*numbers: int) -> pa.Buffer:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())}).serialize()


def append(queue_id: int, partition: int, *numbers: int) -> CommitRequest:
    return CommitRequest(appends=[Append(queue_id, partition, [payload(*numbers)])])


def write(table: Table, values: dict[int, int]) -> TableWrite:
    return TableWrite(table.table_id, *table.encode_rows(pa.table({"n": list(values), "v": list(values.values())})))


def key(table: Table, *numbers: int) -> pa.BinaryArray:
    return table.encode_keys(pa.table({"n": pa.array(numbers, pa.int64())}))[1]


def test_commits_of_one_group_are_checked_in_order(opened: Callable[..., Store]) -> None:
    store = opened()
    table, _ = store.create()
    version = store.engine.version
    first = CommitRequest(Reads(version, [key(table, 1)]), [write(table, {1: 10})])
    late = CommitRequest(Reads(version, [key(table, 1)]), [write(table, {1: 20, 2: 20})])
    phantom = CommitRequest(Reads(version, ranges=[KeyRange(b"", None)]), [write(table, {3: 30})])
    blind = CommitRequest(writes=[write(table, {1: 40})])
    reader = CommitRequest(Reads(version + 2, [key(table, 1)]))
    answers = store.group(first, late, phantom, blind, reader)
    assert [type(answer) for answer in answers] == [Committed, CommitConflict, CommitConflict, Committed, Committed]
    assert [answers[0].version, answers[3].version] == [version + 1, version + 2]
    assert store.rows() == {1: 40}


def test_expected_rows_are_those_of_the_commits_before_it_in_the_group(opened: Callable[..., Store]) -> None:
    store = opened()
    table, _ = store.create()
    store.commit(CommitRequest(writes=[write(table, {1: 10, 2: 10})]))

    def expecting(expected: dict[int, int], **changes: Any) -> CommitRequest:
        wanted = write(table, expected)
        return CommitRequest(expects=[Expect(table.table_id, wanted.keys, wanted.values)], **changes)

    absent = Expect(table.table_id, key(table, 1), pa.nulls(1, pa.binary()))
    delete = TableWrite(table.table_id, key(table, 1), pa.nulls(1, pa.binary()))
    answers = store.group(
        CommitRequest(expects=[absent], writes=[write(table, {5: 50})]),
        expecting({1: 10, 2: 10}, writes=[write(table, {1: 20})]),
        expecting({1: 10}, writes=[write(table, {5: 50})]),
        expecting({1: 20}, writes=[delete]),
        expecting({1: 20}),
        CommitRequest(expects=[absent], writes=[write(table, {3: 30})]),
        expecting({2: 10, 3: 30}),
        CommitRequest(expects=[Expect(99, key(table, 1), key(table, 1))]),
        CommitRequest(expects=[Expect(table.table_id, pa.array([b"x"], pa.binary()), key(table, 1))]),
    )
    refused = [index for index, answer in enumerate(answers) if isinstance(answer, CommitConflict)]
    assert refused == [0, 2, 4]
    assert isinstance(answers[7], UnknownTable)
    assert isinstance(answers[8], BadInput)
    assert store.rows() == {2: 10, 3: 30}


def test_refused_commit_leaves_no_trace_in_its_group(opened: Callable[..., Store]) -> None:
    store = opened()
    table, queue_id = store.create()
    bad = CommitRequest(writes=[write(table, {1: 1, 2: -2})], appends=[Append(queue_id, 0, [payload(1)])])
    good = CommitRequest(writes=[write(table, {3: 3})], appends=[Append(queue_id, 0, [payload(2, 3)])])
    refused, committed = store.group(bad, good)
    assert isinstance(refused, ConstraintViolated)
    assert refused.row == 1
    assert isinstance(committed, Committed)
    assert committed.appended == ((0, 2),)
    assert store.rows() == {3: 3}
    store = opened(store)
    assert store.rows() == {3: 3}
    assert store.queued(queue_id, 0) == [2, 3]


def test_appends_of_one_group_follow_each_other(opened: Callable[..., Store]) -> None:
    store = opened()
    _, queue_id = store.create()
    once = CommitRequest(appends=[Append(queue_id, 0, [payload(3)], "p", 1)])
    answers = store.group(append(queue_id, 0, 1, 2), once, once, append(queue_id, 1, 9))
    assert [answer.appended[0] for answer in answers if isinstance(answer, Committed)] == [
        (0, 2),
        (2, 3),
        (2, 3),
        (0, 1),
    ]
    store = opened(store)
    assert store.group(once)[0].appended == ((2, 3),)
    assert store.queued(queue_id, 0) == [1, 2, 3]


@pytest.mark.parametrize("step", ["create", "append", "sync"])
def test_failed_file_leaves_nothing_and_the_next_group_goes_on(opened: Callable[..., Store], step: str) -> None:
    store = opened()
    table, queue_id = store.create()
    if step != "create":
        store.commit(append(queue_id, 0, 1, 2))
    store.stage(queue_id, "cafe", 7)
    files = store.files()
    store.disk.failing = step
    request = CommitRequest(
        writes=[write(table, {1: 1})],
        appends=[Append(queue_id, 1, [payload(5)]), Append(queue_id, 0, [payload(3)]), Publish(queue_id, 1, "cafe")],
    )
    with pytest.raises(DiskFull):
        store.commit(request)
    assert store.rows() == {}
    assert store.files() == files
    store.disk.failing = None
    begin = 0 if step == "create" else 2
    assert store.commit(request).appended == ((0, 1), (begin, begin + 1), (1, 2))
    assert store.queued(queue_id, 0) == [1, 2, 3][-begin - 1 :]
    assert store.queued(queue_id, 1) == [5, 7]
    store = opened(store)
    assert store.queued(queue_id, 0) == [1, 2, 3][-begin - 1 :]
    assert store.rows() == {1: 1}


@pytest.mark.parametrize("step", ["write", "sync"])
def test_crash_around_the_database_write_is_whole_or_absent(opened: Callable[..., Store], step: str) -> None:
    store = opened()
    table, queue_id = store.create()
    store.commit(append(queue_id, 0, 1, 2))
    files = store.files()
    store.rocks.failing = step
    request = CommitRequest(writes=[write(table, {1: 1})], appends=[Append(queue_id, p, [payload(3)]) for p in (0, 1)])
    group = store.engine.prepare([request], 0)
    with pytest.raises(StoreError):
        store.engine.persist(group)
    assert group.reached_rocks
    store = opened(store)
    if step == "write":
        assert store.rows() == {}
        assert (store.queued(queue_id, 0), store.queued(queue_id, 1)) == ([1, 2], [])
        assert store.files() == files, "the segment that was begun is gone"
        assert store.disk.size(files[0]) == store.engine.partitions[queue_id, 0].segments[0].size_bytes
    else:
        assert store.rows() == {1: 1}
        assert (store.queued(queue_id, 0), store.queued(queue_id, 1)) == ([1, 2, 3], [3])


def test_no_room_refuses_what_grows_and_lets_rows_be_removed(opened: Callable[..., Store]) -> None:
    store = opened()
    table, queue_id = store.create()
    store.commit(CommitRequest(writes=[write(table, {1: 1})], appends=[Append(queue_id, 0, [payload(1)])]))
    store.disk.free = engine_module.DISK_RESERVE_BYTES
    deletion = TableWrite(table.table_id, key(table, 1), pa.nulls(1, pa.binary()))
    answers = store.group(
        CommitRequest(writes=[write(table, {2: 2})]),
        append(queue_id, 0, 2),
        CommitRequest(writes=[deletion], trims=[Trim(queue_id, 0, 1)]),
    )
    assert [type(answer) for answer in answers] == [DiskFull, DiskFull, Committed]
    assert store.rows() == {}
    assert store.engine.bounds(queue_id)[0] == (1, 1)
    with pytest.raises(DiskFull, match="free some room"):
        store.engine.check_room(1)
    store.disk.free = None
    assert store.commit(append(queue_id, 0, 3)).appended == ((1, 2),)


def test_publishing_nothing_does_not_take_the_place_of_a_segment(opened: Callable[..., Store]) -> None:
    store = opened()
    _, queue_id = store.create()
    store.commit(append(queue_id, 0, 1, 2))
    store.stage(queue_id, "cafe")
    assert store.commit(CommitRequest(appends=[Publish(queue_id, 0, "cafe")])).appended == ((2, 2),)
    store = opened(store)
    store.commit(append(queue_id, 0, 3))
    store.commit(CommitRequest(trims=[Trim(queue_id, 0, 2)]))
    store = opened(store)
    assert store.queued(queue_id, 0, 2) == [3]
    assert len(store.files()) == 1


def test_staged_rows_outlive_a_restart_but_not_their_time(opened: Callable[..., Store]) -> None:
    store = opened()
    _, queue_id = store.create()
    store.stage(queue_id, "beef", 1, 2, ttl_ms=10**15)
    store.stage(queue_id, "dead", 3, ttl_ms=1)
    store = opened(store)
    assert len(store.engine.staged) == 2, "opened at the beginning of time, when neither was over"
    store.close()
    store = Store(store.folder, now_ms=2**49)
    try:
        assert [name.split("-")[2] for name in store.files()] == ["beef"]
        with pytest.raises(Expired) as caught:
            store.commit(CommitRequest(appends=[Publish(queue_id, 0, "dead")]))
        assert caught.value.staged_id == "dead"
        assert store.commit(CommitRequest(appends=[Publish(queue_id, 0, "beef")])).appended == ((0, 2),)
        with pytest.raises(Expired):
            store.commit(CommitRequest(appends=[Publish(queue_id, 0, "beef")]))
        assert store.queued(queue_id, 0) == [1, 2]
    finally:
        store.close()


def test_staged_file_that_was_cut_off_is_removed(opened: Callable[..., Store]) -> None:
    store = opened()
    _, queue_id = store.create()
    store.stage(queue_id, "beef", 1, 2, ttl_ms=10**15)
    [name] = store.files()
    with store.disk.path(name).open("r+b") as file:
        file.truncate(store.disk.size(name) - 8)
    store = opened(store)
    assert store.files() == []
    assert len(store.engine.staged) == 0


def test_trim_removes_the_files_of_whole_segments(
    opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_table, "SEGMENT_BYTES_MAX", 1)
    store = opened()
    _, queue_id = store.create()
    for number in range(4):
        store.commit(append(queue_id, 0, number, number))
    assert len(store.files()) == 4
    store.commit(CommitRequest(trims=[Trim(queue_id, 0, 5)]))
    assert len(store.files()) == 2
    assert store.queued(queue_id, 0, 5) == [2, 3, 3]
    store = opened(store)
    assert store.queued(queue_id, 0, 5) == [2, 3, 3]
    assert len(store.files()) == 2


@pytest.mark.parametrize("damage", ["missing", "cut", "middle"])
def test_damaged_segment_is_refused_by_file_and_offset(opened: Callable[..., Store], damage: str) -> None:
    store = opened()
    _, queue_id = store.create()
    store.commit(append(queue_id, 0, 1, 2))
    store.commit(append(queue_id, 0, 3))
    [name] = store.files()
    path = store.disk.path(name)
    size = path.stat().st_size
    store.close()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[: size - 8])
    else:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(bytes(data))
    store = Store(store.folder)
    try:
        with pytest.raises(CorruptData) as caught:
            store.queued(queue_id, 0, 2)
        assert name in str(caught.value.file)
        if damage != "missing":
            assert 0 < caught.value.offset < size
        assert store.commit(append(queue_id, 1, 9)).appended == ((0, 1),), "the others go on"
    finally:
        store.close()


def test_dropped_names_can_be_used_again_but_their_ids_never_are(opened: Callable[..., Store]) -> None:
    store = opened()
    table, queue_id = store.create()
    store.commit(CommitRequest(writes=[write(table, {1: 1})], appends=[Append(queue_id, 0, [payload(1)])]))
    store.commit(CommitRequest(catalogue=Drop("table", "t")))
    store.commit(CommitRequest(catalogue=Drop("queue", "q")))
    assert store.files() == []
    store = opened(store)
    again, queue_again = store.create()
    assert again.table_id not in (table.table_id, queue_id)
    assert queue_again not in (table.table_id, queue_id)
    assert store.rows() == {}
    assert store.engine.bounds(queue_again) == [(0, 0), (0, 0)]
    with pytest.raises(UnknownTable):
        store.commit(CommitRequest(writes=[write(table, {1: 1})]))
    with pytest.raises(UnknownTable):
        store.commit(append(queue_id, 0, 1))


def bad_requests(table: Table, queue_id: int) -> list[CommitRequest]:
    one, nothing = pa.array([b"x"], pa.binary()), pa.nulls(1, pa.binary())
    good = key(table, 1)
    return [
        CommitRequest(writes=[TableWrite(table.table_id, nothing, one)]),
        CommitRequest(writes=[TableWrite(table.table_id, one, one)]),
        CommitRequest(writes=[TableWrite(table.table_id, good, pa.array([], pa.binary()))]),
        CommitRequest(writes=[TableWrite(table.table_id, good, pa.array([b"no row"], pa.binary()))]),
        CommitRequest(writes=[TableWrite([], good, one)]),  # type: ignore[arg-type]
        CommitRequest(Reads("x", [good])),  # type: ignore[arg-type]
        CommitRequest(Reads(0, [], [KeyRange(None, None)])),  # type: ignore[arg-type]
        CommitRequest(appends=[Append(queue_id, 0, [pa.py_buffer(b"not a batch")])]),
        CommitRequest(appends=[Append(queue_id, 0, [payload(1)], "p", "1")]),  # type: ignore[arg-type]
        CommitRequest(appends=[Append(queue_id, 0, [payload(1)], "p", 2**63)]),
        CommitRequest(appends=[Append(queue_id, 0, [payload(1)], "p" * 300, 1)]),
        CommitRequest(appends=[Append(queue_id, [], [payload(1)])]),  # type: ignore[arg-type]
        CommitRequest(appends=[Publish(queue_id, 0, [])]),  # type: ignore[arg-type]
        CommitRequest(trims=[Trim(queue_id, 0, "x")]),  # type: ignore[arg-type]
    ]


def test_commits_that_make_no_sense_are_refused_each_for_itself(opened: Callable[..., Store]) -> None:
    store = opened()
    table, queue_id = store.create()
    store.oldest_version = store.engine.version
    store.commit(CommitRequest(writes=[write(table, {7: 7})]))
    bad = bad_requests(table, queue_id)
    good = CommitRequest(writes=[write(table, {8: 8})])
    answers = store.group(*bad, good)
    assert [index for index, answer in enumerate(answers[:-1]) if not isinstance(answer, ShuffleError)] == []
    assert isinstance(answers[-1], Committed)
    assert store.rows() == {7: 7, 8: 8}
    assert store.engine.bounds(queue_id) == [(0, 0), (0, 0)]


def test_sizes_are_bounded(opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    table, queue_id = store.create()
    monkeypatch.setattr(engine_module, "BATCH_BYTES_MAX", 100)
    with pytest.raises(TooLarge) as caught:
        store.commit(append(queue_id, 0, *range(50)))
    assert (caught.value.queue, caught.value.limit) == ("q", 100)
    monkeypatch.setattr(engine_module, "VALUE_BYTES_MAX", 2)
    with pytest.raises(TooLarge, match="'t'"):
        store.commit(CommitRequest(writes=[write(table, {1: 1})]))
    monkeypatch.setattr(engine_module, "TRANSACTION_ROWS_MAX", 1)
    with pytest.raises(TooLarge, match="split it"):
        store.commit(CommitRequest(writes=[write(table, {1: 1, 2: 2})]))


def test_reads_too_old_to_be_checked_are_refused(opened: Callable[..., Store]) -> None:
    store = opened()
    table, _ = store.create()
    stale = CommitRequest(Reads(store.engine.version, [key(table, 99)]), [write(table, {9: 9})])
    store.commit(CommitRequest(writes=[write(table, {1: 1})]))
    store.oldest_version = store.engine.version
    with pytest.raises(CommitConflict, match="remembered"):
        store.commit(stale)
    store = opened(store)
    store.oldest_version = store.engine.version
    with pytest.raises(CommitConflict, match="remembered"):
        store.commit(stale)


def test_bytes_written_are_counted_by_table_and_queue(opened: Callable[..., Store]) -> None:
    store = opened()
    table, queue_id = store.create()
    store.commit(CommitRequest(writes=[write(table, {1: 1, 2: 2})], appends=[Append(queue_id, 1, [payload(1, 2, 3)])]))
    stats = store.engine.stats()
    assert stats["tables"]["t"]["rows_written"] == 2
    assert stats["tables"]["t"]["log_bytes"] > 0
    assert stats["queues"]["q"]["rows"] == 3
    assert stats["queues"]["q"]["segment_bytes_written"] >= 3 * 8
    assert stats["total"]["segment_bytes"] >= stats["queues"]["q"]["segment_bytes_written"]
    assert stats["total"]["log_bytes"] > 0


def test_bad_input_of_the_catalogue_is_refused(opened: Callable[..., Store]) -> None:
    store = opened()
    store.create()
    schema = TableSchema("u", NUMBERS, pa.schema([("v", pa.int64())]), {"c": "nonsense >"})
    with pytest.raises(BadInput, match="'u'"):
        store.commit(CommitRequest(catalogue=CreateTable(schema)))
    with pytest.raises(BadInput, match="cannot drop"):
        store.commit(CommitRequest(catalogue=Drop("view", "t")))
    with pytest.raises(UnknownTable):
        store.commit(CommitRequest(catalogue=Drop("table", "q")))
