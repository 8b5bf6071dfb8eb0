"""What every state store promises, checked against the one in this process and the one behind a daemon."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import (
    BadInput,
    CommitConflict,
    ConstraintViolated,
    Expired,
    NullKey,
    OutOfRange,
    SchemaMismatch,
    SequenceError,
    ShuffleError,
    TableExists,
    TooLarge,
    UnknownTable,
)
from shuffle.limits import KEY_BYTES_MAX, TRANSACTION_APPENDS_MAX, VALUE_BYTES_MAX
from statestore import Member, Queue, StateClient, Transaction
from statestore.request import CommitRequest
from tests.daemons import StoreProcess, wait_until

WAIT_MS = 20_000
"""A long poll that ends only because of what it waits for."""

NUMBERS = pa.schema([("n", pa.int64())])


@pytest.fixture(scope="module", params=["embedded", "daemon", "daemon without its files"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Any]]:
    """Makes clients of one store: the same one where it is in this process, different ones of the daemon."""
    folder = tmp_path_factory.mktemp("store") / "state"
    if request.param == "embedded":
        with StateClient.open(folder) as client:
            yield lambda: client
        return
    with StoreProcess(folder) as daemon:
        made: list[StateClient] = []

        def connect() -> StateClient:
            made.append(StateClient.connect(daemon.address, local_files=request.param == "daemon"))
            return made[-1]

        yield connect
        for client in made:
            client.close()
        assert daemon.stop() == 0


@pytest.fixture(scope="module")
def client(opened: Callable[[], StateClient]) -> StateClient:
    return opened()


@pytest.fixture(scope="module")
def other(opened: Callable[[], StateClient]) -> StateClient:
    return opened()


_counter = itertools.count()


@pytest.fixture
def table(client: StateClient) -> str:
    """An empty table of its own for each test."""
    name = f"accounts-{next(_counter)}"
    client.create_table(
        name,
        key=pa.schema([("owner", pa.string()), ("n", pa.int64())]),
        value=pa.schema([("balance", pa.int64()), ("note", pa.string())]),
        constraints={"solvent": "balance >= 0"},
    )
    return name


@pytest.fixture
def queue(client: StateClient) -> Queue:
    return client.create_queue(f"logs-{next(_counter)}", schema=NUMBERS, partitions=2)


def rows(*tuples: tuple[str, int, int | None]) -> pa.Table:
    owners, numbers, balances = zip(*tuples, strict=True)
    return pa.table(
        {
            "owner": pa.array(owners, pa.string()),
            "n": pa.array(numbers, pa.int64()),
            "balance": pa.array(balances, pa.int64()),
            "note": pa.nulls(len(tuples), pa.string()),
        }
    )


def keys(*tuples: tuple[str, int]) -> pa.Table:
    return pa.table(
        {
            "owner": pa.array([owner for owner, _ in tuples], pa.string()),
            "n": pa.array([n for _, n in tuples], pa.int64()),
        }
    )


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def write(client: StateClient, table: str, *tuples: tuple[str, int, int | None]) -> int:
    with client.transaction() as tx:
        tx.write(table, rows(*tuples))
        return tx.commit().version


def balances(found: pa.Table) -> list[tuple[str, int, int | None]]:
    return [(row["owner"], row["n"], row["balance"]) for row in found.to_pylist()]


def scanned(reads: Any, table: str, **options: Any) -> list[tuple[str, int, int | None]]:
    return balances(reads.scan(table, **options).read_all())


def queued(queue: Queue, partition: int, begin: int = 0, **options: Any) -> list[int]:
    return queue.read(partition, begin, **options)[0]["n"].to_pylist()  # type: ignore[no-any-return]


def open_moments(client: StateClient) -> int:
    return int(client.stats()["total"]["open_moments"])


# --- the catalogue ---


def test_table_and_queue_are_listed_and_described(client: StateClient, table: str, queue: Queue) -> None:
    assert table in [schema.name for schema in client.tables()]
    assert queue.name in [schema.name for schema in client.queues()]
    found = client.table(table)
    assert found.key.names == ["owner", "n"]
    assert found.constraints == {"solvent": "balance >= 0"}
    assert (queue.schema, queue.partitions) == (NUMBERS, 2)


def test_creating_twice_is_an_error_unless_it_is_the_same_and_asked_for(client: StateClient) -> None:
    name = f"twice-{next(_counter)}"
    key, value = pa.schema([("k", pa.int64())]), pa.schema([("v", pa.int64())])
    first = client.create_table(name, key, value)
    assert client.create_table(name, key, value, if_not_exists=True).table_id == first.table_id
    with pytest.raises(TableExists, match="exists already"):
        client.create_table(name, key, value)
    with pytest.raises(TableExists, match="another schema"):
        client.create_table(name, key, pa.schema([("v", pa.string())]), if_not_exists=True)
    with pytest.raises(TableExists, match="not a queue"):
        client.create_queue(name, schema=NUMBERS, partitions=1)


def test_dropped_table_is_gone_and_its_successor_is_empty(client: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 10))
    schema = client.table(table)
    client.drop_table(table)
    with pytest.raises(UnknownTable) as caught:
        client.lookup(table, keys(("a", 1)))
    assert caught.value.table == table
    with pytest.raises(UnknownTable):
        client.drop_table(table)
    client.create_table(table, schema.key, schema.value)
    assert scanned(client, table) == []


def test_table_made_anew_by_another_client_is_found(client: StateClient, other: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 10))
    schema = other.table(table)
    other.drop_table(table)
    other.create_table(table, schema.key, schema.value)
    if client is not other:
        with pytest.raises(UnknownTable):
            write(client, table, ("b", 1, 1))
    # The refusal has told this client that what it knew of the table is out of date.
    write(client, table, ("b", 1, 1))
    assert scanned(client, table) == [("b", 1, 1)]


def test_dropped_queue_is_gone(client: StateClient, queue: Queue) -> None:
    queue.append(0, numbers(1, 2))
    client.drop_queue(queue.name)
    with pytest.raises(UnknownTable):
        client.queue(queue.name)
    with pytest.raises(UnknownTable):
        queue.read(0, 0)
    with pytest.raises(UnknownTable):
        queue.append(0, numbers(3))


def test_transaction_of_very_many_appends_is_answered_or_refused_before_it_happens(
    client: StateClient, queue: Queue
) -> None:
    appends = 6_000
    with client.transaction() as tx:
        for n in range(appends):
            tx.append(queue.name, n % 2, numbers(n))
        assert len(tx.commit().appended) == appends
    assert queue.bounds() == [(0, appends // 2)] * 2
    one = queue.encoded(0, numbers(1), None, None)
    with pytest.raises(TooLarge, match="appends"):
        client.store.commit(CommitRequest(appends=[one] * (TRANSACTION_APPENDS_MAX + 1)))
    assert queue.bounds() == [(0, appends // 2)] * 2


def test_queue_made_anew_by_another_client_is_found_and_the_old_handle_stays_refused(
    client: StateClient, other: StateClient, queue: Queue
) -> None:
    queue.append(0, numbers(1, 2))
    other.drop_queue(queue.name)
    other.create_queue(queue.name, schema=NUMBERS, partitions=2)
    for _ in range(2):
        # The rows at its positions are others now.
        with pytest.raises(UnknownTable):
            queue.read(0, 0)
    client.queue(queue.name).append(0, numbers(3))
    assert client.queue(queue.name).read(0, 0)[0]["n"].to_pylist() == [3]


def test_dropping_a_table_leaves_its_neighbours_alone(client: StateClient) -> None:
    names = [f"neighbour-{next(_counter)}" for _ in range(3)]
    for name in names:
        client.create_table(name, key=pa.schema([("k", pa.int64())]), value=pa.schema([("v", pa.int64())]))
        with client.transaction() as tx:
            tx.write(name, pa.table({"k": range(5_000), "v": range(5_000)}))
            tx.commit()
    client.drop_table(names[1])
    assert [client.scan(name).read_all().num_rows for name in (names[0], names[2])] == [5_000, 5_000]
    client.create_table(names[1], key=pa.schema([("k", pa.int64())]), value=pa.schema([("v", pa.int64())]))
    assert client.scan(names[1]).read_all().num_rows == 0


# --- tables ---


def test_lookup_keeps_the_order_of_the_keys_and_leaves_out_missing_ones(client: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 10), ("b", 2, 20), ("c", 3, None))
    found = client.lookup(table, keys(("c", 3), ("x", 1), ("a", 1), ("a", 2), ("c", 3)))
    assert balances(found) == [("c", 3, None), ("a", 1, 10), ("c", 3, None)]
    assert found.schema.names == ["owner", "n", "balance", "note"]
    assert client.lookup(table, keys()).num_rows == 0


def test_write_replaces_and_delete_removes(client: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 10), ("a", 2, 20))
    with client.transaction() as tx:
        tx.write(table, rows(("a", 1, 11), ("a", 1, 12)))
        tx.delete(table, keys(("a", 2), ("never", 0)))
        tx.commit()
    assert scanned(client, table) == [("a", 1, 12)]


def test_scan_by_range_prefix_limit_and_backwards(client: StateClient, table: str) -> None:
    written = [("a", -2, 0), ("a", 7, 1), ("ab", 0, 2), ("b", -1, 3), ("b", 5, 4), ("é", 1, 5)]
    write(client, table, *reversed(written))
    assert scanned(client, table) == written
    assert scanned(client, table, reverse=True) == written[::-1]
    assert scanned(client, table, begin=("a", 7), end=("b", 5)) == written[1:4]
    assert scanned(client, table, begin=("a", 7), end=("b", 5), reverse=True) == written[1:4][::-1]
    assert scanned(client, table, begin={"owner": "ab"}) == written[2:]
    assert scanned(client, table, end=("b",)) == written[:3]
    assert scanned(client, table, prefix=("a",)) == written[:2]
    assert scanned(client, table, prefix=("a",), partial=True) == written[:3]
    assert scanned(client, table, prefix=("b",), reverse=True, limit=1) == [written[4]]
    assert scanned(client, table, limit=2) == written[:2]
    assert scanned(client, table, limit=0) == []
    assert scanned(client, table, begin=("zzz",), end=("a",)) == []
    projected = client.scan(table, columns=["balance"], limit=3).read_all()
    assert projected.to_pydict() == {"balance": [0, 1, 2]}


def test_scan_of_many_chunks_is_whole_in_both_directions(client: StateClient) -> None:
    name = f"many-{next(_counter)}"
    client.create_table(name, key=NUMBERS, value=pa.schema([("v", pa.string())]))
    count = 40_000
    with client.transaction() as tx:
        tx.write(name, pa.table({"n": range(count), "v": [f"{i}" for i in range(count)]}))
        tx.commit()
    assert client.scan(name).read_all()["n"].to_pylist() == list(range(count))
    backwards = client.scan(name, reverse=True, limit=30_000).read_all()
    assert backwards["n"].to_pylist() == list(range(count - 1, 9_999, -1))
    assert backwards["v"][0].as_py() == str(count - 1)


def test_scan_reads_one_moment_however_slowly_it_is_read(client: StateClient) -> None:
    name = f"slow-{next(_counter)}"
    client.create_table(name, key=NUMBERS, value=pa.schema([("v", pa.int64())]))
    with client.transaction() as tx:
        tx.write(name, pa.table({"n": range(5_000), "v": [0] * 5_000}))
        tx.commit()
    reader = client.scan(name)
    first = reader.read_next_batch()
    with client.transaction() as tx:
        tx.write(name, pa.table({"n": range(5_000), "v": [1] * 5_000}))
        tx.commit()
    rest = reader.read_all()
    assert first.num_rows + rest.num_rows == 5_000
    assert set(rest["v"].to_pylist()) == {0}


# --- snapshots ---


def test_snapshot_stays_as_it_was_while_writers_go_on(client: StateClient, table: str) -> None:
    second = f"{table}-second"
    schema = client.table(table)
    client.create_table(second, schema.key, schema.value)
    write(client, table, ("a", 1, 10))
    with client.snapshot() as before:
        for balance in (20, 30):
            with client.transaction() as tx:
                tx.write(table, rows(("a", 1, balance), ("b", 1, balance)))
                tx.write(second, rows(("a", 1, balance)))
                tx.commit()
            assert balances(before.lookup(table, keys(("a", 1), ("b", 1)))) == [("a", 1, 10)]
            assert scanned(before, table) == [("a", 1, 10)]
            assert scanned(before, second) == []
        with client.snapshot() as after:
            assert scanned(after, table) == [("a", 1, 30), ("b", 1, 30)]
            assert after.version > before.version
    with pytest.raises(BadInput, match="closed"):
        before.lookup(table, keys(("a", 1)))


def test_closed_snapshots_finished_scans_and_ended_transactions_hold_nothing(client: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 10))
    held = open_moments(client)
    with client.snapshot(), client.transaction() as tx:
        tx.lookup(table, keys(("a", 1)))
        assert open_moments(client) == held + 2
    scanned(client, table)
    with client.transaction() as tx:
        scanned(tx, table)
        tx.commit()
    assert open_moments(client) == held


# --- transactions ---


def test_transaction_sees_its_own_writes_and_nobody_else_does(client: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 1), ("b", 1, 1), ("c", 1, 1))
    with client.transaction() as tx:
        tx.write(table, rows(("b", 1, 2), ("bb", 1, 2), ("z", 1, 2)))
        tx.delete(table, keys(("c", 1)))
        assert balances(tx.lookup(table, keys(("b", 1), ("c", 1), ("z", 1)))) == [("b", 1, 2), ("z", 1, 2)]
        seen = [("a", 1, 1), ("b", 1, 2), ("bb", 1, 2), ("z", 1, 2)]
        assert scanned(tx, table) == seen
        assert scanned(tx, table, reverse=True, limit=3) == seen[:0:-1]
        assert scanned(tx, table, begin=("b",), end=("c",)) == seen[1:3]
        tx.write(table, rows(("c", 1, 3)))
        assert balances(tx.lookup(table, keys(("c", 1)))) == [("c", 1, 3)]
        assert scanned(client, table) == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]
        tx.commit()
    assert scanned(client, table) == [*seen[:3], ("c", 1, 3), ("z", 1, 2)]


def test_own_deletions_of_whole_chunks_are_skipped(client: StateClient) -> None:
    name = f"holes-{next(_counter)}"
    client.create_table(name, key=NUMBERS, value=pa.schema([]))
    with client.transaction() as tx:
        tx.write(name, numbers(*range(6_000)))
        tx.commit()
    with client.transaction() as tx:
        tx.delete(name, numbers(*range(10, 5_990)))
        tx.write(name, numbers(-1, 3_000, 7_000))
        expected = [-1, *range(10), 3_000, *range(5_990, 6_000), 7_000]
        assert tx.scan(name).read_all()["n"].to_pylist() == expected
        assert tx.scan(name, reverse=True).read_all()["n"].to_pylist() == expected[::-1]


def test_aborted_and_abandoned_transactions_change_nothing(client: StateClient, table: str) -> None:
    with client.transaction() as tx:
        tx.write(table, rows(("a", 1, 1)))
    tx = client.transaction()
    tx.write(table, rows(("a", 1, 2)))
    tx.abort()
    with pytest.raises(BadInput, match="aborted already"):
        tx.commit()
    assert scanned(client, table) == []


def test_transaction_cannot_be_committed_twice(client: StateClient, table: str) -> None:
    with client.transaction() as tx:
        tx.write(table, rows(("a", 1, 1)))
        tx.commit()
        with pytest.raises(BadInput, match="committed already"):
            tx.commit()
        with pytest.raises(BadInput, match="committed already"):
            tx.lookup(table, keys(("a", 1)))


def test_key_read_and_then_written_by_another_is_refused(client: StateClient, other: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 1))
    with client.transaction() as tx:
        tx.lookup(table, keys(("a", 1)))
        write(other, table, ("a", 1, 2))
        tx.write(table, rows(("a", 1, 100)))
        with pytest.raises(CommitConflict, match="nothing was written"):
            tx.commit()
    assert scanned(client, table) == [("a", 1, 2)]


def test_absent_key_read_and_then_inserted_by_another_is_refused(
    client: StateClient, other: StateClient, table: str
) -> None:
    with client.transaction() as tx:
        assert tx.lookup(table, keys(("a", 1))).num_rows == 0
        write(other, table, ("a", 1, 2))
        tx.write(table, rows(("a", 1, 100)))
        with pytest.raises(CommitConflict):
            tx.commit()
    assert scanned(client, table) == [("a", 1, 2)]


def test_write_skew_is_refused(client: StateClient, other: StateClient, table: str) -> None:
    """Each reads both rows and empties the other's account: one after the other, only one of them may."""
    write(client, table, ("a", 1, 50), ("b", 1, 50))
    first, second = client.transaction(), other.transaction()
    for tx, owner in ((first, "a"), (second, "b")):
        if sum(tx.lookup(table, keys(("a", 1), ("b", 1)))["balance"].to_pylist()) >= 100:
            tx.write(table, rows((owner, 1, 0)))
    first.commit()
    with pytest.raises(CommitConflict):
        second.commit()
    assert scanned(client, table) == [("a", 1, 0), ("b", 1, 50)]


@pytest.mark.parametrize("reverse", [False, True])
def test_phantom_in_a_scanned_range_is_refused(
    client: StateClient, other: StateClient, table: str, reverse: bool
) -> None:
    write(client, table, ("a", 1, 1), ("c", 1, 1), ("e", 1, 1))
    with client.transaction() as tx:
        scanned(tx, table, begin=("b",), end=("d",), reverse=reverse)
        write(other, table, ("bb", 1, 1))
        tx.write(table, rows(("z", 1, 1)))
        with pytest.raises(CommitConflict, match="range"):
            tx.commit()
    with client.transaction() as tx:
        scanned(tx, table, begin=("b",), end=("d",), reverse=reverse)
        write(other, table, ("d", 1, 1), ("a", 2, 1))
        tx.write(table, rows(("z", 1, 1)))
        tx.commit()


def test_row_deleted_from_a_scanned_range_is_refused(client: StateClient, other: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 1))
    with client.transaction() as tx:
        scanned(tx, table)
        with other.transaction() as deletion:
            deletion.delete(table, keys(("a", 1)))
            deletion.commit()
        tx.write(table, rows(("b", 1, 1)))
        with pytest.raises(CommitConflict):
            tx.commit()


def test_limited_scan_conflicts_only_with_what_it_saw(client: StateClient, other: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 1), ("b", 1, 1), ("c", 1, 1))
    with client.transaction() as tx:
        assert scanned(tx, table, limit=2) == [("a", 1, 1), ("b", 1, 1)]
        write(other, table, ("c", 1, 5))
        tx.write(table, rows(("z", 1, 1)))
        tx.commit()
    with client.transaction() as tx:
        scanned(tx, table, limit=2)
        write(other, table, ("aa", 1, 5))
        tx.write(table, rows(("z", 1, 2)))
        with pytest.raises(CommitConflict):
            tx.commit()


def test_range_of_own_writes_is_still_read_from_the_store(client: StateClient, other: StateClient, table: str) -> None:
    """What hides behind an own write or an own deletion was read as well."""
    write(client, table, ("a", 1, 1))
    with client.transaction() as tx:
        tx.delete(table, keys(("a", 1)))
        assert scanned(tx, table) == []
        write(other, table, ("m", 1, 5))
        with pytest.raises(CommitConflict):
            tx.commit()


def test_blind_writes_never_conflict(client: StateClient, other: StateClient, table: str) -> None:
    first, second = client.transaction(), other.transaction()
    first.write(table, rows(("a", 1, 1)))
    second.write(table, rows(("a", 1, 2)))
    assert second.commit().version < first.commit().version
    assert scanned(client, table) == [("a", 1, 1)]


def test_transaction_that_only_reads_is_checked_too(client: StateClient, other: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 1))
    with client.transaction() as tx:
        tx.lookup(table, keys(("a", 1)))
        write(other, table, ("b", 1, 1))
        tx.commit()
    with client.transaction() as tx:
        tx.lookup(table, keys(("a", 1)))
        write(other, table, ("a", 1, 2))
        with pytest.raises(CommitConflict):
            tx.commit()


def test_expected_rows_are_compared_when_the_transaction_commits(
    client: StateClient, other: StateClient, table: str
) -> None:
    write(client, table, ("a", 1, 1), ("b", 1, None))
    with client.transaction() as tx:
        tx.expect(table, rows(("a", 1, 1), ("b", 1, None)))
        tx.expect_absent(table, keys(("c", 1)))
        tx.write(table, rows(("a", 1, 2), ("c", 1, 2)))
        tx.commit()
    assert scanned(client, table) == [("a", 1, 2), ("b", 1, None), ("c", 1, 2)]
    for expected in (("a", 1, 1), ("a", 1, None), ("z", 1, 1), ("b", 1, 0)):
        with client.transaction() as tx:
            tx.expect(table, rows(("c", 1, 2), expected))
            tx.write(table, rows(("a", 1, 99)))
            with pytest.raises(CommitConflict, match="not the one it expects"):
                tx.commit()
    with client.transaction() as tx:
        tx.expect_absent(table, keys(("z", 1), ("c", 1)))
        tx.append(client.create_queue(f"logs-{next(_counter)}", schema=NUMBERS, partitions=1).name, 0, numbers(1))
        with pytest.raises(CommitConflict):
            tx.commit()
    assert scanned(client, table) == [("a", 1, 2), ("b", 1, None), ("c", 1, 2)]


def test_expectation_holds_for_the_moment_of_the_commit_and_not_of_its_call(
    client: StateClient, other: StateClient, table: str
) -> None:
    first, second = client.transaction(), client.transaction()
    first.expect(table, rows(("a", 1, 1)))
    second.expect_absent(table, keys(("a", 1)))
    write(other, table, ("a", 1, 1))
    first.write(table, rows(("a", 1, 2)))
    first.commit()
    with pytest.raises(CommitConflict):
        second.commit()
    assert scanned(client, table) == [("a", 1, 2)]


def test_of_many_that_expect_the_same_row_exactly_one_commits(
    client: StateClient, other: StateClient, table: str
) -> None:
    """As with two instances of one reducer: whoever comes first wins, also when both are of one group."""
    write(client, table, ("position", 1, 0))

    def advance(one: StateClient, to: int) -> bool:
        with one.transaction() as tx:
            tx.expect(table, rows(("position", 1, to - 1)))
            tx.write(table, rows(("position", 1, to)))
            try:
                tx.commit()
            except CommitConflict:
                return False
            return True

    with ThreadPoolExecutor(8) as pool:
        for to in range(1, 20):
            won = list(pool.map(lambda one, to=to: advance(one, to), [client, other] * 4))
            assert won.count(True) == 1
    assert scanned(client, table) == [("position", 1, 19)]


def test_expectation_of_another_shape_is_refused_and_binds_nobody(client: StateClient, table: str) -> None:
    with client.transaction() as tx:
        with pytest.raises(SchemaMismatch):
            tx.expect(table, numbers(1))
        with pytest.raises(NullKey):
            tx.expect_absent(table, pa.table({"owner": pa.array([None], pa.string()), "n": [1]}))
        tx.expect(table, rows(("a", 1, 1)).slice(0, 0))
        tx.write(table, rows(("a", 1, 1)))
        tx.commit()
    with pytest.raises(BadInput, match="committed already"):
        tx.expect(table, rows(("a", 1, 1)))


def test_concurrent_increments_lose_nothing(client: StateClient, other: StateClient, table: str) -> None:
    write(client, table, ("sum", 0, 0))

    def increment(one: StateClient, times: int) -> int:
        conflicts = 0
        while times:
            with one.transaction() as tx:
                [row] = tx.lookup(table, keys(("sum", 0))).to_pylist()
                tx.write(table, rows(("sum", 0, row["balance"] + 1)))
                try:
                    tx.commit()
                    times -= 1
                except CommitConflict:
                    conflicts += 1
        return conflicts

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, [client, other, client, other], [20] * 4))
    assert scanned(client, table) == [("sum", 0, 80)]


# --- queues ---


def test_append_and_read_by_position(client: StateClient, queue: Queue) -> None:
    assert queue.bounds() == [(0, 0), (0, 0)]
    assert queue.append(0, numbers(10, 11, 12)) == (0, 3)
    assert queue.append(0, numbers(13)) == (3, 4)
    assert queue.append(1, numbers(20)) == (0, 1)
    assert queue.bounds() == [(0, 4), (0, 1)]
    assert queue.read(0, 0)[0].to_pydict() == {"n": [10, 11, 12, 13]}
    for begin in range(5):
        found, after = queue.read(0, begin)
        assert (found["n"].to_pylist(), after) == ([10, 11, 12, 13][begin:], 4)
    found, after = queue.read(0, 1, max_rows=2)
    assert (found["n"].to_pylist(), after) == ([11, 12], 3)
    assert queue.append(0, numbers()) == (4, 4)
    assert client.queue(queue.name).read(1, 0)[0].schema == NUMBERS


def test_read_is_cut_by_size_but_always_gives_a_row(queue: Queue) -> None:
    for _ in range(4):
        queue.append(0, numbers(*range(1_000)))
    found, after = queue.read(0, 0, max_bytes=1)
    assert (found.num_rows, after) == (1, 1)
    found, after = queue.read(0, 500, max_bytes=10_000)
    assert found.nbytes <= 10_000
    assert 500 + found.num_rows == after
    positions, begin = [], 0
    while begin < 4_000:
        found, after = queue.read(0, begin, max_rows=700, max_bytes=3_000)
        positions += found["n"].to_pylist()
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
        found, after = polled.result(WAIT_MS / 1000)
        assert time.monotonic() - began_s < WAIT_MS / 2000
    assert (found["n"].to_pylist(), after) == ([1, 2], 2)


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
        ranges = [found for part in pool.map(append, [client, other] * 2, range(0, 400, 100)) for found in part]
    assert sorted(ranges) == [(begin, begin + 2) for begin in range(0, 200, 2)]
    values = queued(queue, 0)
    assert values[0::2] == values[1::2]
    assert sorted(values[0::2]) == [first + i for first in range(0, 400, 100) for i in range(25)]


# --- leases ---


def test_member_registers_renews_and_leaves(client: StateClient, other: StateClient) -> None:
    group = f"group-{next(_counter)}"
    assert client.leases.members(group) == []
    lease = client.leases.register(group, "m1", {"address": "grpc://a:1"}, ttl_ms=60_000)
    other.leases.register(group, "m0", {}, ttl_ms=60_000)
    assert other.leases.members(group) == [Member("m0", {}), Member("m1", {"address": "grpc://a:1"})]
    assert group in other.leases.groups()
    lease.renew()
    lease.leave()
    assert client.leases.members(group) == [Member("m0", {})]
    with pytest.raises(Expired):
        lease.renew()


def test_member_that_does_not_renew_vanishes_and_watchers_learn_it(client: StateClient, other: StateClient) -> None:
    group = f"group-{next(_counter)}"
    lease = client.leases.register(group, "m", {}, ttl_ms=300)
    revision, members = other.leases.watch(group, 0, wait_ms=0)
    assert [member.name for member in members] == ["m"]
    began_s = time.monotonic()
    changed, members = other.leases.watch(group, revision, wait_ms=WAIT_MS)
    assert members == []
    assert changed != revision
    assert time.monotonic() - began_s < WAIT_MS / 2000
    with pytest.raises(Expired):
        lease.renew()


def test_watch_returns_on_registration_and_at_the_end_of_its_time(client: StateClient, other: StateClient) -> None:
    group = f"group-{next(_counter)}"
    began_s = time.monotonic()
    revision, members = client.leases.watch(group, -1, wait_ms=WAIT_MS)
    assert members == []
    assert time.monotonic() - began_s < WAIT_MS / 2000, "any other number returns at once"
    assert client.leases.watch(group, revision, wait_ms=50) == (revision, [])
    registered = threading.Timer(0.1, lambda: other.leases.register(group, "m", {"a": "b"}, ttl_ms=60_000))
    registered.start()
    changed, members = client.leases.watch(group, revision, wait_ms=WAIT_MS)
    registered.join()
    assert changed != revision
    assert members == [Member("m", {"a": "b"})]


@pytest.mark.parametrize(
    ("group", "member", "attributes", "ttl_ms"),
    [
        ("", "m", {}, 1000),
        ("g", "", {}, 1000),
        ("g", "m", {}, 0),
        ("g", "m", {}, -1),
        ("g", "m" * 300, {}, 1000),
        ("g", "m", {"big": "x" * 20_000}, 1000),
    ],
)
def test_bad_lease_is_refused(
    client: StateClient, group: str, member: str, attributes: dict[str, str], ttl_ms: int
) -> None:
    with pytest.raises(BadInput):
        client.leases.register(group, member, attributes, ttl_ms)
    assert client.leases.members("g") == []


# --- mistakes: typed, named, and the connection goes on ---


def refused(
    client: StateClient, table: str, kind: type[ShuffleError], attempt: Callable[[], Any], /, **fields: Any
) -> ShuffleError:
    """``attempt`` raises ``kind`` with these fields, changes nothing, and the client works afterwards."""
    before = scanned(client, table)
    with pytest.raises(kind) as caught:
        attempt()
    assert {name: caught.value.fields.get(name) for name in fields} == fields
    assert scanned(client, table) == before
    write(client, table, ("still alive", 0, 1))
    with client.transaction() as tx:
        tx.delete(table, keys(("still alive", 0)))
        tx.commit()
    return caught.value


def transact(client: StateClient, act: Callable[[Any], Any]) -> Callable[[], Any]:
    def run() -> None:
        with client.transaction() as tx:
            act(tx)
            tx.commit()

    return run


def test_wrong_schema_is_refused_by_table_and_column(client: StateClient, table: str, queue: Queue) -> None:
    good = rows(("a", 1, 1))
    text = good.set_column(2, "balance", pa.array(["1"]))
    for given, column in (
        (good.drop_columns(["note"]), "note"),
        (good.append_column("extra", pa.array([1])), "extra"),
        (text, "balance"),
    ):
        attempt = transact(client, partial(Transaction.write, table=table, rows=given))
        refused(client, table, SchemaMismatch, attempt, table=table, column=column)
    narrow = f"narrow-{next(_counter)}"
    client.create_table(narrow, key=NUMBERS, value=pa.schema([("v", pa.timestamp("s"))]))
    refused(client, table, SchemaMismatch, lambda: client.lookup(table, numbers(1)), table=table, column="owner")
    refused(client, table, SchemaMismatch, lambda: queue.append(0, pa.table({"m": [1]})), table=queue.name, column="n")
    refused(client, table, SchemaMismatch, lambda: queue.stage(pa.table({"n": ["x"]})), table=queue.name, column="n")


def test_unknown_table_is_refused_by_name(client: StateClient, table: str) -> None:
    unknown = f"{table}x"
    for attempt in (
        lambda: client.lookup(unknown, keys(("a", 1))),
        lambda: scanned(client, unknown),
        transact(client, lambda tx: tx.write(unknown, rows(("a", 1, 1)))),
        lambda: client.queue(unknown),
        lambda: client.drop_queue(table),
    ):
        refused(client, table, UnknownTable, attempt)
    error = refused(client, table, UnknownTable, lambda: client.table(unknown), table=unknown)
    assert f"did you mean {table!r}" in error.message


def test_null_key_is_refused_by_column_and_row(client: StateClient, table: str) -> None:
    bad = rows(("a", 1, 1), ("b", 2, 2)).set_column(1, "n", pa.array([1, None], pa.int64()))
    fields = {"table": table, "column": "n", "row": 1}
    refused(client, table, NullKey, transact(client, lambda tx: tx.write(table, bad)), **fields)
    refused(client, table, NullKey, lambda: client.lookup(table, bad.select(["owner", "n"])), **fields)
    refused(client, table, NullKey, transact(client, lambda tx: tx.delete(table, bad.select(["owner", "n"]))), **fields)
    refused(client, table, NullKey, lambda: scanned(client, table, begin=("a", None)), table=table, column="n")


def test_oversized_key_and_value_are_refused_by_row(client: StateClient, table: str) -> None:
    long_key = rows(("a", 1, 1), ("x" * KEY_BYTES_MAX, 1, 1))
    refused(client, table, TooLarge, transact(client, lambda tx: tx.write(table, long_key)), table=table, row=1)
    refused(client, table, TooLarge, lambda: client.lookup(table, long_key.select(["owner", "n"])), table=table, row=1)
    long_value = rows(("a", 1, 1), ("b", 1, 1)).set_column(3, "note", pa.array(["", "x" * VALUE_BYTES_MAX]))
    refused(client, table, TooLarge, transact(client, lambda tx: tx.write(table, long_value)), table=table, row=1)


def test_oversized_batch_is_refused(client: StateClient, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row cannot be cut into smaller batches."""
    monkeypatch.setattr("statestore.client.BATCH_BYTES_MAX", 1_000_000)
    name = f"blobs-{next(_counter)}"
    blobs = client.create_queue(name, schema=pa.schema([("b", pa.binary())]), partitions=1)
    large = pa.table({"b": [bytes(1_000_000)]})
    refused(client, table, TooLarge, lambda: blobs.append(0, large), queue=name, limit=1_000_000)
    refused(client, table, TooLarge, lambda: blobs.stage(large), queue=name)
    assert blobs.bounds() == [(0, 0)]


def test_oversized_transaction_is_refused(client: StateClient, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statestore.transaction.TRANSACTION_ROWS_MAX", 10)
    many = rows(*[("a", n, 1) for n in range(11)])
    error = refused(client, table, TooLarge, transact(client, lambda tx: tx.write(table, many)), table=table)
    assert "split it" in error.message


def test_transaction_of_very_many_parts_is_whole(client: StateClient, table: str, queue: Queue) -> None:
    """More than fit the header of a question."""
    with client.transaction() as tx:
        for n in range(2_000):
            tx.write(table, rows(("a", n, n)))
            tx.append(queue.name, n % 2, numbers(n), producer=f"{n} {'ä' * 100}", sequence=n)
            tx.trim(queue.name, 0, 0)
        appended = tx.commit().appended
    assert appended[:3] == ((0, 1), (0, 1), (1, 2))
    assert scanned(client, table) == [("a", n, n) for n in range(2_000)]
    assert queue.bounds() == [(0, 1_000), (0, 1_000)]


def test_broken_constraint_is_refused_by_row(client: StateClient, table: str, queue: Queue) -> None:
    def overdraw(tx: Any) -> None:
        tx.append(queue.name, 0, numbers(1))
        tx.write(table, rows(("ok", 1, 5), ("unknown", 1, None), ("broke", 1, -1)))

    error = refused(
        client, table, ConstraintViolated, transact(client, overdraw), table=table, constraint="solvent", row=2
    )
    assert "-1" in error.message
    assert queue.bounds() == [(0, 0), (0, 0)]
    with pytest.raises(BadInput, match="balanc"):
        client.create_table(
            f"bad-{next(_counter)}",
            key=NUMBERS,
            value=pa.schema([("balance", pa.int64())]),
            constraints={"c": "balanc>0"},
        )


def test_one_bad_commit_does_not_harm_those_it_waits_with(client: StateClient, other: StateClient, table: str) -> None:
    def commit(n: int) -> bool:
        with (client if n % 2 else other).transaction() as tx:
            tx.write(table, rows(("a", n, -1 if n % 3 == 0 else n)))
            try:
                tx.commit()
            except ConstraintViolated:
                return False
            return True

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(commit, range(60)))
    assert done == [n % 3 != 0 for n in range(60)]
    assert scanned(client, table) == [("a", n, n) for n in range(60) if n % 3]
