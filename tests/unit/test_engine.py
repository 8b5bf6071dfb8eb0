"""The engine on a real database and real files: groups of commits, faults between the steps, and opening again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import (
    BadInput,
    CommitConflict,
    ConstraintViolated,
    DiskFull,
    ShuffleError,
    StoreError,
    TooBusy,
    TooLarge,
    UnknownTable,
)
from shuffle.limits import LOGGED_ROWS_MIN
from shuffle.statestore.codec.schema import TableSchema
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.engine import commit_checks
from shuffle.statestore.engine.engine import Engine
from shuffle.statestore.key_range import KeyRange
from shuffle.statestore.request import (
    Append,
    CommitRequest,
    Committed,
    CreateTable,
    Drop,
    Precondition,
    Publish,
    ReadSet,
    TableWrite,
    Trim,
)
from tests.engine_store import NUMBERS, Store, append, key, payload, write


def test_commits_of_one_group_are_checked_in_order(opened: Callable[..., Store]) -> None:
    store = opened()
    table, _ = store.create()
    version = store.engine.version
    first = CommitRequest(ReadSet(version, [key(table, 1)]), [write(table, {1: 10})])
    late = CommitRequest(ReadSet(version, [key(table, 1)]), [write(table, {1: 20, 2: 20})])
    phantom = CommitRequest(ReadSet(version, ranges=[KeyRange(b"", None)]), [write(table, {3: 30})])
    blind = CommitRequest(writes=[write(table, {1: 40})])
    reader = CommitRequest(ReadSet(version + 2, [key(table, 1)]))
    results = [*store.group(first, late, phantom, blind), *store.group(reader)]
    assert [type(result) for result in results] == [Committed, CommitConflict, CommitConflict, Committed, Committed]
    assert [results[0].version, results[3].version] == [version + 1, version + 2]
    assert store.rows() == {1: 40}


def test_expected_rows_are_those_of_the_commits_before_it_in_the_group(opened: Callable[..., Store]) -> None:
    store = opened()
    table, _ = store.create()
    store.commit(CommitRequest(writes=[write(table, {1: 10, 2: 10})]))

    def expecting(expected: dict[int, int], **changes: Any) -> CommitRequest:
        rows = write(table, expected)
        return CommitRequest(preconditions=[Precondition(table.table_id, rows.keys, rows.values)], **changes)

    absent = Precondition(table.table_id, key(table, 1), pa.nulls(1, pa.binary()))
    delete = TableWrite(table.table_id, key(table, 1), pa.nulls(1, pa.binary()))
    results = store.group(
        CommitRequest(preconditions=[absent], writes=[write(table, {5: 50})]),
        expecting({1: 10, 2: 10}, writes=[write(table, {1: 20})]),
        expecting({1: 10}, writes=[write(table, {5: 50})]),
        expecting({1: 20}, writes=[delete]),
        expecting({1: 20}),
        CommitRequest(preconditions=[absent], writes=[write(table, {3: 30})]),
        expecting({2: 10, 3: 30}),
        CommitRequest(preconditions=[Precondition(99, key(table, 1), key(table, 1))]),
        CommitRequest(preconditions=[Precondition(table.table_id, pa.array([b"x"], pa.binary()), key(table, 1))]),
    )
    refused = [index for index, result in enumerate(results) if isinstance(result, CommitConflict)]
    assert refused == [0, 2, 4]
    assert isinstance(results[7], UnknownTable)
    assert isinstance(results[8], BadInput)
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
    store.disk.free = commit_checks.DISK_RESERVE_BYTES
    deletion = TableWrite(table.table_id, key(table, 1), pa.nulls(1, pa.binary()))
    results = store.group(
        CommitRequest(writes=[write(table, {2: 2})]),
        append(queue_id, 0, 2),
        CommitRequest(writes=[deletion], trims=[Trim(queue_id, 0, 1)]),
    )
    assert [type(result) for result in results] == [DiskFull, DiskFull, Committed]
    assert store.rows() == {}
    assert store.engine.bounds(queue_id)[0] == (1, 1)
    with pytest.raises(DiskFull, match="free some room"):
        store.engine.check_room(1)
    store.disk.free = None
    assert store.commit(append(queue_id, 0, 3)).appended == ((1, 2),)


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
        CommitRequest(ReadSet("x", [good])),  # type: ignore[arg-type]
        CommitRequest(ReadSet(0, [], [KeyRange(None, None)])),  # type: ignore[arg-type]
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
    results = store.group(*bad, good)
    assert [index for index, result in enumerate(results[:-1]) if not isinstance(result, ShuffleError)] == []
    assert isinstance(results[-1], Committed)
    assert store.rows() == {7: 7, 8: 8}
    assert store.engine.bounds(queue_id) == [(0, 0), (0, 0)]


def test_sizes_are_bounded(opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    table, queue_id = store.create()
    monkeypatch.setattr("shuffle.statestore.codec.segment.BATCH_BYTES_MAX", 100)
    with pytest.raises(TooLarge) as caught:
        store.commit(append(queue_id, 0, *range(50)))
    assert (caught.value.queue, caught.value.limit) == ("q", 100)
    monkeypatch.setattr("shuffle.statestore.engine.catalogue.VALUE_BYTES_MAX", 2)
    with pytest.raises(TooLarge, match="'t'"):
        store.commit(CommitRequest(writes=[write(table, {1: 1})]))
    monkeypatch.setattr(commit_checks, "TRANSACTION_ROWS_MAX", 1)
    with pytest.raises(TooLarge, match="split it"):
        store.commit(CommitRequest(writes=[write(table, {1: 1, 2: 2})]))


def test_reads_too_old_to_be_checked_are_refused(opened: Callable[..., Store]) -> None:
    store = opened()
    table, _ = store.create()
    stale = CommitRequest(ReadSet(store.engine.version, [key(table, 99)]), [write(table, {9: 9})])
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


@pytest.mark.parametrize("method", ["_check_commit", "_add_append"])
def test_commit_that_cannot_be_prepared_is_refused_alone(
    opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """An error while one commit is checked or added to the group is the result of that commit alone."""
    store = opened()
    table, queue_id = store.create()
    store.stage(queue_id, "beef", 5, 6)
    before = store.engine.version
    bad = CommitRequest(writes=[write(table, {9: 9})], appends=[Append(queue_id, 1, [payload(9)])])
    original = getattr(Engine, method)

    def failing(engine: Engine, given: Any, *rest: Any) -> Any:
        if given is bad or given is bad.appends[0]:
            raise ZeroDivisionError("a mistake")
        return original(engine, given, *rest)

    monkeypatch.setattr(Engine, method, failing)
    first, last = (CommitRequest(writes=[write(table, {n: 7})]) for n in (1, 2))
    results = store.group(first, CommitRequest(appends=[Publish(queue_id, 0, "beef")]), bad, last)
    assert [type(result) for result in results] == [Committed, Committed, StoreError, Committed]
    assert [result.version - before for result in results if isinstance(result, Committed)] == [1, 2, 3]
    assert isinstance(results[2], StoreError)
    assert "ZeroDivisionError: a mistake" in results[2].message
    store.commit(CommitRequest(ReadSet(before, [key(table, 9)]), [write(table, {3: 7})]))
    for again in (False, True):
        store = opened(store) if again else store
        assert store.rows() == {1: 7, 2: 7, 3: 7}
        assert [store.queued(queue_id, partition) for partition in (0, 1)] == [[5, 6], []]


def test_commit_that_read_in_the_future_is_refused(opened: Callable[..., Store]) -> None:
    """Of such a version nothing is known that could contradict it: it would skip the check for conflicts."""
    store = opened()
    table, _ = store.create()
    store.commit(CommitRequest(writes=[write(table, {1: 1})]))
    for version in (store.engine.version + 1, 2**62):
        with pytest.raises(BadInput, match="has not been yet"):
            store.commit(CommitRequest(ReadSet(version, [key(table, 1)]), [write(table, {1: 2})]))
    assert store.rows() == {1: 1}


def test_logs_that_take_too_much_memory_refuse_large_writes_and_nothing_else(opened: Callable[..., Store]) -> None:
    store = opened()
    table, queue_id = store.create()
    large = CommitRequest(writes=[write(table, dict.fromkeys(range(LOGGED_ROWS_MIN), 1))])
    store.commit(large)
    store.engine.logs.bytes_max = 1
    with pytest.raises(TooBusy, match="nothing was written"):
        store.commit(CommitRequest(writes=[write(table, {1: 2})]))
    store.commit(append(queue_id, 0, 7))
    store.engine.logs.bytes_max = None
    store.commit(CommitRequest(writes=[write(table, {1: 2})]))
    assert store.engine.logs.current(table.table_id) is not None
