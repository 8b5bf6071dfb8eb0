"""What every state store promises of transactions: serializable, whole or absent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from shuffle.errors import BadInput, CommitConflict, NullKey, SchemaMismatch
from shuffle.statestore import StateClient
from tests.contract.accounts import NUMBERS, balances, keys, new_name, numbers, rows, scanned, write


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
    name = new_name("holes")
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
        tx.append(client.create_queue(new_name("logs"), schema=NUMBERS, partitions=1).name, 0, numbers(1))
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
