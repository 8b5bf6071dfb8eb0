"""What every state store promises of its catalogue, sorted tables and snapshots."""

from __future__ import annotations

import pyarrow as pa
import pytest

from shuffle.errors import BadInput, TableExists, UnknownTable
from shuffle.statestore import Queue, StateClient
from tests.contract.accounts import NUMBERS, balances, keys, new_name, numbers, open_views, rows, scanned, write


def test_table_and_queue_are_listed_and_described(client: StateClient, table: str, queue: Queue) -> None:
    assert table in [schema.name for schema in client.tables()]
    assert queue.name in [schema.name for schema in client.queues()]
    schema = client.table(table)
    assert schema.key.names == ["owner", "n"]
    assert schema.constraints == {"solvent": "balance >= 0"}
    assert (queue.schema, queue.partitions) == (NUMBERS, 2)


def test_creating_twice_is_an_error_unless_it_is_the_same_and_asked_for(client: StateClient) -> None:
    name = new_name("twice")
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
    # After the refusal this client has forgotten its handle of the table, which was out of date.
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
    names = [new_name("neighbour") for _ in range(3)]
    for name in names:
        client.create_table(name, key=pa.schema([("k", pa.int64())]), value=pa.schema([("v", pa.int64())]))
        with client.transaction() as tx:
            tx.write(name, pa.table({"k": range(5_000), "v": range(5_000)}))
            tx.commit()
    client.drop_table(names[1])
    assert [client.scan(name).read_all().num_rows for name in (names[0], names[2])] == [5_000, 5_000]
    client.create_table(names[1], key=pa.schema([("k", pa.int64())]), value=pa.schema([("v", pa.int64())]))
    assert client.scan(names[1]).read_all().num_rows == 0


def test_lookup_keeps_the_order_of_the_keys_and_leaves_out_missing_ones(client: StateClient, table: str) -> None:
    write(client, table, ("a", 1, 10), ("b", 2, 20), ("c", 3, None))
    existing = client.lookup(table, keys(("c", 3), ("x", 1), ("a", 1), ("a", 2), ("c", 3)))
    assert balances(existing) == [("c", 3, None), ("a", 1, 10), ("c", 3, None)]
    assert existing.schema.names == ["owner", "n", "balance", "note"]
    assert client.lookup(table, keys()).num_rows == 0


def test_cached_lookup_follows_the_row_and_decodes_it_only_when_it_changed(
    client: StateClient, other: StateClient, table: str
) -> None:
    assert client.cached_lookup(table, ("a", 1)).num_rows == 0
    for balance in (10, 20):
        write(other, table, ("a", 1, balance), ("a", 2, 0))
        row = client.cached_lookup(table, ("a", 1))
        assert row == client.lookup(table, keys(("a", 1)))
        assert balances(row) == [("a", 1, balance)]
        write(other, table, ("a", 1, balance), ("a", 2, 1))
        assert client.cached_lookup(table, ["a", 1]) is row, "the same bytes were not decoded again"
    with other.transaction() as tx:
        tx.delete(table, keys(("a", 1)))
        tx.commit()
    assert client.cached_lookup(table, ("a", 1)).num_rows == 0


def test_cached_lookup_notices_a_table_that_was_created_anew(client: StateClient, other: StateClient) -> None:
    name = new_name("anew")
    for value in (1, 2):
        other.create_table(name, key=pa.schema([("k", pa.int64())]), value=pa.schema([("v", pa.int64())]))
        with other.transaction() as tx:
            tx.write(name, pa.table({"k": [7], "v": [value]}))
            tx.commit()
        assert client.cached_lookup(name, (7,)).to_pylist() == [{"k": 7, "v": value}]
        other.drop_table(name)
    with pytest.raises(UnknownTable):
        client.cached_lookup(name, (7,))


@pytest.mark.parametrize("key", [(), ("a",), ("a", 1, 2), ("a", "b"), (1, 1), ("a", None), ("a", 2**64)])
def test_cached_lookup_of_what_is_no_key_is_refused(client: StateClient, table: str, key: tuple[object, ...]) -> None:
    with pytest.raises(BadInput):
        client.cached_lookup(table, key)


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
    name = new_name("many")
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
    name = new_name("slow")
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
    held = open_views(client)
    with client.snapshot(), client.transaction() as tx:
        tx.lookup(table, keys(("a", 1)))
        assert open_views(client) == held + 2
    scanned(client, table)
    with client.transaction() as tx:
        scanned(tx, table)
        tx.commit()
    assert open_views(client) == held
