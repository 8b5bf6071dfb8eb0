"""The engine's segment files: written, failing, staged, published, trimmed, damaged, and opened again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from shuffle.errors import BadInput, CorruptData, DiskFull, Expired, TooLarge
from shuffle.limits import STAGED_TTL_MS_MAX
from shuffle.statestore.codec.schema import QueueSchema
from shuffle.statestore.engine import ordered_table, staged
from shuffle.statestore.local import segment_files
from shuffle.statestore.request import Append, CommitRequest, Committed, CreateQueue, Publish, Trim
from tests.engine_store import NUMBERS, Store, append, payload, write


def test_appends_of_one_group_follow_each_other(opened: Callable[..., Store]) -> None:
    store = opened()
    _, queue_id = store.create()
    once = CommitRequest(appends=[Append(queue_id, 0, [payload(3)], "p", 1)])
    results = store.group(append(queue_id, 0, 1, 2), once, once, append(queue_id, 1, 9))
    assert [result.appended[0] for result in results if isinstance(result, Committed)] == [
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
    store.stage(queue_id, "beef", 1, 2, ttl_ms=STAGED_TTL_MS_MAX)
    store.stage(queue_id, "dead", 3, ttl_ms=1)
    store = opened(store)
    assert len(store.engine.staged) == 2, "opened at the beginning of time, when neither was over"
    store.close()
    store = Store(store.folder, now_ms=time.time_ns() // 1_000_000 + 60_000)
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
    store.stage(queue_id, "beef", 1, 2, ttl_ms=STAGED_TTL_MS_MAX)
    [name] = store.files()
    with store.disk.path(name).open("r+b") as file:
        file.truncate(store.disk.size(name) - 8)
    store = opened(store)
    assert store.files() == []
    assert len(store.engine.staged) == 0


def test_staged_rows_are_bounded_in_number_in_bytes_and_in_time(
    opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    _, queue_id = store.create()
    for ttl_ms in (0, -1, STAGED_TTL_MS_MAX + 1):
        with pytest.raises(BadInput, match="wait"):
            store.stage(queue_id, "beef", 1, ttl_ms=ttl_ms)
    monkeypatch.setattr(staged, "STAGED_MAX", 2)
    store.stage(queue_id, "a", 1)
    store.stage(queue_id, "b", 2)
    with pytest.raises(TooLarge, match="2 staged"):
        store.stage(queue_id, "c", 3)
    store.engine.staged.expire("a")
    store.engine.remove_files(store.engine.staged.collect(1))
    store.disk.free = 500
    with pytest.raises(DiskFull, match="half"):
        store.stage(queue_id, "c", *range(1000))
    store.disk.free = None
    store.stage(queue_id, "c", *range(1000))
    assert len(store.files()) == 2, "what was refused has left nothing"


def test_many_partitions_do_not_keep_their_files_open(
    opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "OPEN_FILES_MAX", 3)
    store = opened()
    store.commit(CommitRequest(catalogue=CreateQueue(QueueSchema("wide", NUMBERS, 20))))
    [queue_id] = [queue_id for queue_id, entry in store.engine.catalogue.queues.items() if entry.schema.name == "wide"]
    for number in range(3):
        for partition in range(20):
            store.commit(append(queue_id, partition, number))
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    kept = [link for link in links if os.path.exists(link) and os.readlink(link).startswith(str(store.folder))]
    assert sum(os.readlink(link).endswith(".seg") for link in kept) == 3
    store = opened(store)
    assert [store.queued(queue_id, partition) for partition in range(20)] == [[0, 1, 2]] * 20


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
