"""Every state store refuses mistakes with a typed error that names the table and column, and stays usable."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import BadInput, ConstraintViolated, NullKey, SchemaMismatch, ShuffleError, TooLarge, UnknownTable
from shuffle.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from shuffle.statestore import Queue, StateClient, Transaction
from tests.contract.accounts import NUMBERS, keys, new_name, numbers, rows, scanned, write


def refused(
    client: StateClient, table: str, error_type: type[ShuffleError], attempt: Callable[[], Any], /, **fields: Any
) -> ShuffleError:
    """``attempt`` raises ``error_type`` with these fields, changes nothing, and the client works afterwards."""
    before = scanned(client, table)
    with pytest.raises(error_type) as caught:
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
    narrow = new_name("narrow")
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
    monkeypatch.setattr("shuffle.statestore.client.queue.BATCH_BYTES_MAX", 1_000_000)
    name = new_name("blobs")
    blobs = client.create_queue(name, schema=pa.schema([("b", pa.binary())]), partitions=1)
    large = pa.table({"b": [bytes(1_000_000)]})
    refused(client, table, TooLarge, lambda: blobs.append(0, large), queue=name, limit=1_000_000)
    refused(client, table, TooLarge, lambda: blobs.stage(large), queue=name)
    assert blobs.bounds() == [(0, 0)]


def test_oversized_transaction_is_refused(client: StateClient, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shuffle.statestore.client.transaction.TRANSACTION_ROWS_MAX", 10)
    many = rows(*[("a", n, 1) for n in range(11)])
    error = refused(client, table, TooLarge, transact(client, lambda tx: tx.write(table, many)), table=table)
    assert "split it" in error.message


def test_transaction_of_very_many_parts_is_whole(client: StateClient, table: str, queue: Queue) -> None:
    """More sections than fit into the header of a request."""
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
            new_name("bad"),
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


@pytest.mark.parametrize("number", [True, 1.5, -1, 2**63, 2**70, "1", None])
def test_what_is_no_position_is_refused_by_all(client: StateClient, table: str, queue: Queue, number: Any) -> None:
    queue.append(0, numbers(1))
    trims = (lambda: queue.trim(0, number), transact(client, lambda tx: tx.trim(queue.name, 0, number)))
    partitions = (
        lambda: queue.trim(number, 0),
        lambda: queue.append(number, numbers(2)),
        transact(client, lambda tx: tx.append(queue.name, number, numbers(2))),
        transact(client, lambda tx: tx.publish(queue.name, number, "f" * 32)),
    )
    for attempt in (*trims, *partitions):
        refused(client, table, BadInput, attempt)
    if number not in (-1, None):  # a sequence may be negative, or missing
        refused(client, table, BadInput, lambda: queue.append(0, numbers(2), producer="p", sequence=number))
    assert queue.bounds()[0] == (0, 1)


@pytest.mark.parametrize("producer", ["", "p" * 256, "\ud800", 7, b"p"])
def test_what_is_no_producer_is_refused_by_all(client: StateClient, table: str, queue: Queue, producer: Any) -> None:
    refused(client, table, BadInput, lambda: queue.append(0, numbers(1), producer=producer, sequence=1))
    assert queue.bounds()[0] == (0, 0)


def test_rows_that_are_broken_are_refused_by_all(client: StateClient, table: str) -> None:
    """Such a batch once killed every process that read it."""
    name = new_name("texts")
    texts = client.create_queue(name, schema=pa.schema([("s", pa.string())]), partitions=1)
    offsets = np.array([0, 4, 8], np.int32)
    column = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(b"12345678")])
    broken = pa.record_batch([column], schema=texts.schema)
    offsets[:] = [0, 1_000_000, 8]
    refused(client, table, BadInput, lambda: texts.append(0, broken), queue=name)
    refused(client, table, BadInput, lambda: texts.stage(broken), queue=name)
    assert texts.bounds() == [(0, 0)]


def test_numbers_of_numpy_are_numbers_for_all(queue: Queue, client: StateClient) -> None:
    zero, one = np.int32(0), np.int64(1)
    queue.append(zero, numbers(2, 3), producer="p", sequence=one)
    rows, after = queue.read(zero, one, max_rows=one)
    assert (rows.num_rows, after) == (1, 2)
    with client.transaction() as tx:
        tx.trim(queue.name, zero, one)
        tx.commit()
    queue.trim(zero, np.int64(2))
    assert queue.bounds()[0] == (2, 2)
