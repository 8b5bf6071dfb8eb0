"""Many small appends through an ``Appender``: in order, each once, and nobody is told less than the truth."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

from shuffle.errors import BadInput, CommitUnknown, SchemaMismatch, ShuffleError, UnknownTable
from shuffle.statestore import Queue, StateClient
from tests.contract.accounts import NUMBERS, new_name


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())}, schema=NUMBERS)


@pytest.fixture
def queue(client: StateClient) -> Queue:
    return client.create_queue(new_name("queue"), NUMBERS, partitions=2)


def read(queue: Queue, partition: int = 0) -> list[int]:
    rows, _ = queue.read(partition, 0)
    values: list[int] = rows["n"].to_pylist()
    return values


def test_pieces_are_appended_in_order_and_know_their_positions(queue: Queue) -> None:
    with queue.appender(1) as appender:
        futures = [appender.append(numbers(*range(n, n + n % 3))) for n in range(200)]
    expected = [value for n in range(200) for value in range(n, n + n % 3)]
    assert read(queue, 1) == expected
    assert read(queue, 0) == []
    for n, future in enumerate(futures):
        begin, end = future.result(timeout=0)
        assert expected[begin:end] == list(range(n, n + n % 3))


def test_what_gathers_is_appended_together(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    append = queue.append

    def counted(partition: int, rows: pa.RecordBatch, producer: str, sequence: int) -> tuple[int, int]:
        sizes.append(rows.num_rows)
        return append(partition, rows, producer, sequence)

    monkeypatch.setattr(queue, "append", counted)
    with queue.appender(0, linger_ms=5_000) as appender:
        futures = [appender.append(numbers(n)) for n in range(50)]
        assert not any(future.done() for future in futures)
        appender.flush()  # Nobody has to wait for five seconds.
        assert [future.result(timeout=0) for future in futures] == [(n, n + 1) for n in range(50)]
    assert sizes == [50]


def test_threads_may_share_one(queue: Queue) -> None:
    with queue.appender(0, linger_ms=0) as appender:

        def append(first: int) -> None:
            for n in range(first, first + 100):
                appender.append(numbers(n))

        threads = [threading.Thread(target=append, args=(first,)) for first in (0, 100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read(queue)
    assert sorted(found) == list(range(300))
    assert [n for n in found if n < 100] == list(range(100))


def test_rows_that_do_not_fit_are_refused_alone(queue: Queue) -> None:
    with queue.appender(0) as appender:
        first = appender.append(numbers(1))
        with pytest.raises(SchemaMismatch):
            appender.append(pa.table({"other": [1]}))
        second = appender.append(numbers(2))
    assert (first.result(), second.result()) == ((0, 1), (1, 2))
    with pytest.raises(BadInput, match="closed"):
        appender.append(numbers(3))
    with pytest.raises(BadInput, match="no partition 2: they go from 0 to 1"):
        queue.appender(2)
    with pytest.raises(BadInput, match="linger_ms"):
        queue.appender(0, linger_ms=-1)


def test_an_error_that_remains_reaches_everybody(client: StateClient, queue: Queue) -> None:
    appender = queue.appender(0, linger_ms=5_000)
    waiting = [appender.append(numbers(n)) for n in range(3)]
    client.drop_queue(queue.name)
    with pytest.raises(UnknownTable):
        appender.flush()
    for future in waiting:
        with pytest.raises(UnknownTable):
            future.result(timeout=0)
    with pytest.raises(UnknownTable):
        appender.append(numbers(4))
    with pytest.raises(ShuffleError):
        appender.close()


def test_a_lost_response_is_no_second_append(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    append: Callable[..., tuple[int, int]] = queue.append
    losses = iter([True, True, False, True, False, False, False])

    def losing(*arguments: object) -> tuple[int, int]:
        positions = append(*arguments)
        if next(losses, False):
            raise CommitUnknown("the connection is gone")
        return positions

    monkeypatch.setattr(queue, "append", losing)
    with queue.appender(0, linger_ms=0) as appender:
        for n in range(5):
            assert appender.append(numbers(n)).result(timeout=30) == (n, n + 1)
    assert read(queue) == [0, 1, 2, 3, 4]
