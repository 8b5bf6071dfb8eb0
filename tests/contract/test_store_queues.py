"""What every state store promises of queues, and of transactions over queues and tables."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shuffle.errors import BadInput, CommitConflict, Expired, OutOfRange, SequenceError, TooLarge
from shuffle.limits import TRANSACTION_APPENDS_MAX
from shuffle.statestore import Queue, StateClient
from shuffle.statestore.request import CommitRequest
from tests.contract.accounts import NUMBERS, WAIT_MS, keys, numbers, queued, rows, scanned, write
from tests.daemons import wait_until


def test_append_and_read_by_position(client: StateClient, queue: Queue) -> None:
    assert queue.bounds() == [(0, 0), (0, 0)]
    assert queue.append(0, numbers(10, 11, 12)) == (0, 3)
    assert queue.append(0, numbers(13)) == (3, 4)
    assert queue.append(1, numbers(20)) == (0, 1)
    assert queue.bounds() == [(0, 4), (0, 1)]
    assert queue.read(0, 0)[0].to_pydict() == {"n": [10, 11, 12, 13]}
    for begin in range(5):
        rows, after = queue.read(0, begin)
        assert (rows["n"].to_pylist(), after) == ([10, 11, 12, 13][begin:], 4)
    rows, after = queue.read(0, 1, max_rows=2)
    assert (rows["n"].to_pylist(), after) == ([11, 12], 3)
    assert queue.append(0, numbers()) == (4, 4)
    assert client.queue(queue.name).read(1, 0)[0].schema == NUMBERS


def test_read_is_cut_by_size_but_always_gives_a_row(queue: Queue) -> None:
    for _ in range(4):
        queue.append(0, numbers(*range(1_000)))
    rows, after = queue.read(0, 0, max_bytes=1)
    assert (rows.num_rows, after) == (1, 1)
    rows, after = queue.read(0, 500, max_bytes=10_000)
    assert rows.nbytes <= 10_000
    assert 500 + rows.num_rows == after
    positions, begin = [], 0
    while begin < 4_000:
        rows, after = queue.read(0, begin, max_rows=700, max_bytes=3_000)
        positions += rows["n"].to_pylist()
        begin = after
    assert positions == list(range(1_000)) * 4
    with pytest.raises(BadInput):
        queue.read(0, 0, max_rows=0)


def test_trimmed_rows_are_gone_and_positions_stay(queue: Queue) -> None:
    queue.append(0, numbers(*range(10)))
    queue.trim(0, 4)
    assert queue.bounds()[0] == (4, 10)
    assert queued(queue, 0, 4) == list(range(4, 10))
    with pytest.raises(OutOfRange, match="trimmed") as caught:
        queue.read(0, 3)
    assert (caught.value.queue, caught.value.partition, caught.value.begin, caught.value.end) == (queue.name, 0, 4, 10)
    queue.trim(0, 2)
    assert queue.bounds()[0] == (4, 10)
    queue.trim(0, 10)
    assert queue.bounds()[0] == (10, 10)
    assert queue.read(0, 10) == (NUMBERS.empty_table(), 10)
    assert queue.append(0, numbers(99)) == (10, 11)
    assert queued(queue, 0, 10) == [99]


def test_positions_outside_are_refused(queue: Queue) -> None:
    queue.append(0, numbers(1))
    for attempt in (
        lambda: queue.read(0, 2),
        lambda: queue.read(0, -1),
        lambda: queue.trim(0, 2),
        lambda: queue.append(2, numbers(1)),
        lambda: queue.append(-1, numbers(1)),
        lambda: queue.read(2, 0),
    ):
        with pytest.raises(OutOfRange):
            attempt()
    assert queue.append(0, numbers(2)) == (1, 2)


def test_long_poll_returns_when_rows_come(client: StateClient, other: StateClient, queue: Queue) -> None:
    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(queue.read, 0, 0, wait_ms=WAIT_MS)
        writer = other.queue(queue.name)
        writer.append(1, numbers(7))
        time.sleep(0.05)
        assert not polled.done()
        began_s = time.monotonic()
        writer.append(0, numbers(1, 2))
        rows, after = polled.result(WAIT_MS / 1000)
        assert time.monotonic() - began_s < WAIT_MS / 2000
    assert (rows["n"].to_pylist(), after) == ([1, 2], 2)


def test_long_poll_without_rows_ends_in_time(queue: Queue) -> None:
    began_s = time.monotonic()
    assert queue.read(0, 0, wait_ms=100) == (NUMBERS.empty_table(), 0)
    assert 0.09 < time.monotonic() - began_s < 5


def test_repeated_append_of_a_producer_appears_once(client: StateClient, queue: Queue) -> None:
    assert queue.append(0, numbers(1, 2), producer="p", sequence=5) == (0, 2)
    assert queue.append(0, numbers(3), producer="p", sequence=6) == (2, 3)
    assert queue.append(0, numbers(1, 2), producer="p", sequence=5) == (0, 2)
    assert queue.append(0, numbers(4), producer="other", sequence=5) == (3, 4)
    assert queue.append(1, numbers(5), producer="p", sequence=5) == (0, 1)
    assert queued(queue, 0) == [1, 2, 3, 4]
    with pytest.raises(SequenceError) as caught:
        queue.append(0, numbers(9), producer="p", sequence=4)
    assert (caught.value.producer, caught.value.sequence) == ("p", 4)
    with pytest.raises(BadInput, match="go together"):
        queue.append(0, numbers(9), producer="p")
    assert queued(queue, 0) == [1, 2, 3, 4]


def test_sequence_out_of_order_inside_a_transaction_leaves_no_trace(
    client: StateClient, queue: Queue, table: str
) -> None:
    with client.transaction() as tx:
        tx.write(table, rows(("a", 1, 1)))
        tx.append(queue.name, 0, numbers(1), producer="p", sequence=5)
        tx.append(queue.name, 0, numbers(2), producer="p", sequence=3)
        with pytest.raises(SequenceError):
            tx.commit()
    assert scanned(client, table) == []
    assert queue.bounds() == [(0, 0), (0, 0)]


@pytest.mark.parametrize("sequence", [2**63, -(2**63) - 1])
def test_sequence_beyond_its_range_is_refused_and_the_store_lives(queue: Queue, sequence: int) -> None:
    with pytest.raises(BadInput):
        queue.append(0, numbers(1), producer="p", sequence=sequence)
    assert queue.append(0, numbers(1), producer="p", sequence=1) == (0, 1)


def test_transaction_over_tables_and_queues_is_whole_or_absent(
    client: StateClient, other: StateClient, table: str, queue: Queue
) -> None:
    queue.append(0, numbers(*range(5)))
    with client.transaction() as tx:
        tx.write(table, rows(("a", 1, 1)))
        tx.append(queue.name, 0, numbers(5, 6))
        tx.append(queue.name, 1, numbers(7))
        tx.append(queue.name, 0, numbers(8))
        tx.trim(queue.name, 0, 2)
        assert tx.commit().appended == ((5, 7), (0, 1), (7, 8))
    assert queue.bounds() == [(2, 8), (0, 1)]
    with client.transaction() as tx:
        tx.lookup(table, keys(("a", 1)))
        write(other, table, ("a", 1, 2))
        tx.append(queue.name, 0, numbers(100))
        tx.trim(queue.name, 0, 8)
        with pytest.raises(CommitConflict):
            tx.commit()
    assert queue.bounds() == [(2, 8), (0, 1)]
    assert queued(queue, 0, 2) == [2, 3, 4, 5, 6, 8]


def test_staged_rows_are_invisible_until_published(client: StateClient, queue: Queue, table: str) -> None:
    first, second = queue.stage(numbers(3, 4)), queue.stage(numbers(6))
    assert queue.bounds() == [(0, 0), (0, 0)]
    with client.transaction() as tx:
        tx.append(queue.name, 0, numbers(1, 2))
        tx.publish(queue.name, 0, first)
        tx.append(queue.name, 0, numbers(5))
        tx.publish(queue.name, 0, second)
        tx.write(table, rows(("a", 1, 1)))
        assert tx.commit().appended == ((0, 2), (2, 4), (4, 5), (5, 6))
    assert queued(queue, 0) == [1, 2, 3, 4, 5, 6]
    assert queue.append(0, numbers(7)) == (6, 7)
    assert queued(queue, 0, 3) == [4, 5, 6, 7]
    with client.transaction() as tx:
        tx.publish(queue.name, 1, first)
        tx.write(table, rows(("a", 1, 2)))
        with pytest.raises(Expired) as caught:
            tx.commit()
    assert caught.value.staged_id == first
    assert scanned(client, table) == [("a", 1, 1)]


def test_staged_rows_published_twice_in_one_transaction_are_refused(client: StateClient, queue: Queue) -> None:
    staged = queue.stage(numbers(1))
    with client.transaction() as tx:
        tx.publish(queue.name, 0, staged)
        tx.publish(queue.name, 1, staged)
        with pytest.raises(BadInput, match="twice"):
            tx.commit()
    with client.transaction() as tx:
        tx.publish(queue.name, 1, staged)
        tx.commit()
    assert queue.bounds() == [(0, 0), (0, 1)]


def test_staging_nothing_publishes_nothing(client: StateClient, queue: Queue) -> None:
    queue.append(0, numbers(1, 2))
    staged = queue.stage(numbers())
    with client.transaction() as tx:
        tx.publish(queue.name, 0, staged)
        assert tx.commit().appended == ((2, 2),)
    assert queue.append(0, numbers(3)) == (2, 3)
    queue.trim(0, 2)
    assert queued(queue, 0, 2) == [3]


def test_staged_rows_that_nobody_publishes_are_collected(client: StateClient, queue: Queue) -> None:
    def staged_count() -> int:
        return int(client.stats()["total"]["staged"])

    before = staged_count()
    short, long, unwanted = queue.stage(numbers(1), ttl_ms=200), queue.stage(numbers(2)), queue.stage(numbers(3))
    queue.discard(unwanted)
    wait_until(lambda: staged_count() == before + 1, "the garbage is collected")
    with client.transaction() as tx:
        tx.publish(queue.name, 0, short)
        with pytest.raises(Expired):
            tx.commit()
    with client.transaction() as tx:
        tx.publish(queue.name, 0, long)
        tx.commit()
    assert queued(queue, 0) == [2]


def test_staging_and_committing_side_by_side(client: StateClient, queue: Queue) -> None:
    """Staged rows are written outside the one writer, whose housekeeping looks at the same list."""

    def stage(times: int) -> None:
        for _ in range(times):
            queue.stage(numbers(1), ttl_ms=100)

    def append(times: int) -> None:
        for _ in range(times):
            queue.append(0, numbers(1))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, 40) for work in (stage, append, stage, stage)]:
            done.result()
    assert queue.bounds()[0] == (0, 40)


def test_concurrent_appends_share_out_the_positions(client: StateClient, other: StateClient, queue: Queue) -> None:
    def append(one: StateClient, first: int) -> list[tuple[int, int]]:
        mine = one.queue(queue.name)
        return [mine.append(0, numbers(first + i, first + i)) for i in range(25)]

    with ThreadPoolExecutor(4) as pool:
        ranges = [positions for part in pool.map(append, [client, other] * 2, range(0, 400, 100)) for positions in part]
    assert sorted(ranges) == [(begin, begin + 2) for begin in range(0, 200, 2)]
    values = queued(queue, 0)
    assert values[0::2] == values[1::2]
    assert sorted(values[0::2]) == [first + i for first in range(0, 400, 100) for i in range(25)]


def test_transaction_of_very_many_appends_is_answered_or_refused_before_it_happens(
    client: StateClient, queue: Queue
) -> None:
    appends = 6_000
    with client.transaction() as tx:
        for n in range(appends):
            tx.append(queue.name, n % 2, numbers(n))
        assert len(tx.commit().appended) == appends
    assert queue.bounds() == [(0, appends // 2)] * 2
    one = queue.encode_append(0, numbers(1), None, None)
    with pytest.raises(TooLarge, match="appends"):
        client.store.commit(CommitRequest(appends=[one] * (TRANSACTION_APPENDS_MAX + 1)))
    assert queue.bounds() == [(0, appends // 2)] * 2
