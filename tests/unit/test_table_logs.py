"""Logged tables in the engine, on a real database and real files: what becomes of rows whatever fails in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import CommitConflict, DiskFull, ShuffleError
from shuffle.statestore.codec.arrow_bytes import to_list
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.engine import row_log, table_logs
from shuffle.statestore.local.log_keeper import LogKeeper
from shuffle.statestore.local.store_view import StoreView
from shuffle.statestore.request import CommitRequest, Committed, Drop, ReadSet, TableWrite
from tests.engine_store import Store, append, key, write


class LoggedStore(Store):
    """An engine whose tables are logged from a few rows on, with its keeper driven by hand."""

    def view(self) -> StoreView:
        positions = self.engine.partitions
        return StoreView(
            self.rocks.view(), self.engine.logs.views(self.engine.version, lambda table_id: positions[table_id, 0].end)
        )

    @property
    def keeper(self) -> Any:
        return LogKeeper(self.engine, self.rocks, lambda: self.view().logs, self.commit, lambda: 0)

    def compact(self, table: Table) -> None:
        self.keeper._compact(table.table_id, self.view().logs[table.table_id])

    def move(self, table: Table) -> None:
        self.keeper._move(table.table_id, self.view().logs[table.table_id])

    def shown(self, table: Table) -> dict[int, int]:
        """The rows by a scan, and checked by a lookup."""
        begin, end = table.range(None, None, None)
        rows = table.decode_rows(*self.view().scan(table.table_id, begin, end, 10_000, False))
        found = dict(zip(rows["n"].to_pylist(), rows["v"].to_pylist(), strict=True))
        looked_up = self.view().get(table.table_id, key(table, *range(2_000)))
        present = [number for number, value in enumerate(to_list(looked_up)) if value is not None]
        assert present == sorted(number for number in found if number < 2_000)
        return found

    def reopened(self, now_ms: int = 0) -> LoggedStore:
        self.close()
        return LoggedStore(self.folder, now_ms)


Opened = Callable[[], tuple[LoggedStore, Table, int]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    monkeypatch.setattr(table_logs, "LOGGED_ROWS_MIN", 8)
    stores: list[LoggedStore] = []

    def make() -> tuple[LoggedStore, Table, int]:
        store = LoggedStore(tmp_path / "state")
        stores.append(store)
        return store, *store.create()

    yield make
    for store in stores:
        store.close()


def rows(*numbers: int, value: int = 1) -> dict[int, int]:
    return dict.fromkeys(numbers, value)


def put(table: Table, values: dict[int, int]) -> CommitRequest:
    return CommitRequest(writes=[write(table, values)])


def delete(table: Table, *numbers: int) -> CommitRequest:
    keys = key(table, *numbers)
    return CommitRequest(writes=[TableWrite(table.table_id, keys, pa.nulls(len(numbers), pa.binary()))])


LARGE = rows(*range(10))


def test_small_write_before_the_first_large_one_in_its_group_stays_visible(opened: Opened) -> None:
    store, table, _ = opened()
    store.group(put(table, {1000: 7}), put(table, LARGE))
    assert store.shown(table) == {**LARGE, 1000: 7}
    assert store.reopened().shown(table) == {**LARGE, 1000: 7}


@pytest.mark.parametrize("then", ["move", "compact"])
def test_row_deleted_after_a_move_that_failed_stays_deleted(opened: Opened, then: str) -> None:
    store, table, _ = opened()
    store.commit(put(table, LARGE))
    flush = store.rocks.flush

    def fail() -> None:
        flush()
        raise DiskFull("no room")

    store.rocks.flush = fail  # type: ignore[method-assign]
    with pytest.raises(DiskFull):
        store.move(table)
    store.rocks.flush = flush  # type: ignore[method-assign]
    store.commit(delete(table, 5))
    getattr(store, then)(table)
    expected = {number: 1 for number in LARGE if number != 5}
    assert store.shown(table) == expected
    assert store.reopened().shown(table) == expected


def test_log_without_any_rows_left_is_compacted_to_nothing(opened: Opened) -> None:
    store, table, _ = opened()
    store.commit(put(table, LARGE))
    store.commit(delete(table, *LARGE))
    stale = store.view().logs[table.table_id]
    store.commit(put(table, rows(*range(100, 110))))
    store.keeper._compact(table.table_id, stale)
    store.commit(put(table, rows(*range(200, 300))))
    store = store.reopened()
    store.move(table)
    store.commit(put(table, rows(*range(300, 310))))
    expected = rows(*range(100, 110), *range(200, 310))
    assert store.shown(table) == expected
    store = store.reopened()
    assert store.shown(table) == expected
    store.close()


def test_blocks_of_a_compacted_log_are_bounded_by_bytes(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store, table, _ = opened()
    for begin in range(0, 60, 10):
        store.commit(put(table, rows(*range(begin, begin + 10))))
    monkeypatch.setattr(row_log.RowLog.split, "__defaults__", (100,))
    store.compact(table)
    index = store.engine.partitions[table.table_id, 0].segments[-1].index
    assert index is not None
    assert len(index) > 5
    assert store.reopened().shown(table) == rows(*range(60))


def test_reads_are_still_checked_against_a_log_whose_first_group_was_undone(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, table, queue_id = opened()
    store.commit(put(table, {5: 5}))
    version = store.engine.version
    bad = append(queue_id, 0, 1)
    original = type(store.engine)._add_append

    def failing(engine: Any, given: Any, *rest: Any) -> Any:
        if given is bad.appends[0]:
            raise ZeroDivisionError
        return original(engine, given, *rest)

    monkeypatch.setattr(type(store.engine), "_add_append", failing)
    results = store.group(put(table, {1: 1}), put(table, {**LARGE, 5: 6}), bad)
    assert [isinstance(result, Committed) for result in results] == [True, True, False]
    late = put(table, {5: 50})
    late.reads = ReadSet(version, [key(table, 5)], [])
    with pytest.raises(CommitConflict):
        store.commit(late)
    assert store.shown(table) == {**LARGE, 1: 1, 5: 6}


def test_write_without_rows_changes_nothing(opened: Opened) -> None:
    store, table, _ = opened()
    store.commit(put(table, LARGE))
    store.commit(CommitRequest(writes=[TableWrite(table.table_id, [], []), write(table, {50: 1})]))
    assert store.shown(table) == {**LARGE, 50: 1}


def test_append_that_fails_half_way_leaves_keys_and_values_together(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, table, _ = opened()
    store.commit(put(table, LARGE))
    values = store.engine.logs._logs[table.table_id].rows._values

    def fail(added: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(values, "extend", fail)
    [result] = store.group(put(table, {20: 1}))
    assert isinstance(result, ShuffleError)
    monkeypatch.undo()
    store.commit(put(table, {21: 1}))
    assert store.engine.logs.row_count(table.table_id) == 11
    assert to_list(store.view().get(table.table_id, key(table, 20)))[0] is None
    assert to_list(store.view().get(table.table_id, key(table, 21)))[0] is not None


def test_table_dropped_while_it_is_moved_leaves_nothing_in_the_database(opened: Opened) -> None:
    store, table, _ = opened()
    store.commit(put(table, LARGE))
    stale = store.view().logs[table.table_id]
    store.commit(CommitRequest(catalogue=Drop("table", "t")))
    with pytest.raises(CommitConflict):
        store.keeper._move(table.table_id, stale)
    begin, end = table.range(None, None, None)
    assert list(store.rocks.view().scan(begin, end)) == []


@pytest.mark.parametrize("then", ["move", "compact"])
def test_transaction_conflicts_with_what_a_replaced_log_had(opened: Opened, then: str) -> None:
    store, table, _ = opened()
    store.commit(put(table, LARGE))
    version = store.oldest_version = store.engine.version
    store.commit(put(table, {3: 2}))
    getattr(store, then)(table)
    for number, conflicts in ((3, True), (4, False)):
        late = put(table, {number: 9})
        late.reads = ReadSet(version, [key(table, number)], [])
        [result] = store.group(late)
        assert isinstance(result, CommitConflict) == conflicts


def test_transaction_whose_log_was_forgotten_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store, table, _ = opened()
    store.commit(put(table, LARGE))
    version = store.oldest_version = store.engine.version
    monkeypatch.setattr(table_logs, "EARLIER_BYTES_MAX", 1)
    store.compact(table)
    late = put(table, {3: 9})
    late.reads = ReadSet(version, [key(table, 3)], [])
    with pytest.raises(CommitConflict):
        store.commit(late)


def test_view_of_a_log_that_did_not_change_is_used_again(opened: Opened) -> None:
    store, table, queue_id = opened()
    store.commit(put(table, LARGE))
    before = store.view().logs[table.table_id]
    before.in_order()
    store.commit(append(queue_id, 0, 1))
    assert store.view().logs[table.table_id] is before
    store.commit(put(table, {3: 9}))
    assert store.view().logs[table.table_id] is not before


def test_log_of_many_small_blocks_is_moved(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_logs, "SMALL_BLOCKS_MAX", 20)
    store, table, _ = opened()
    store.commit(put(table, LARGE))
    for number in range(30):
        store.commit(put(table, {number: 2}))
    assert store.keeper.keep_one()
    assert not store.engine.logs.is_logged(table.table_id)
    assert store.shown(table) == rows(*range(30), value=2)
    store.commit(put(table, {4: 9}))
    assert not store.engine.logs.is_logged(table.table_id), "small commits go to RocksDB again"
    assert store.reopened().shown(table)[4] == 9
