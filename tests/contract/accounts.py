"""The rows that the store's contract is tried with: accounts in a table, numbers in a queue."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa

from shuffle.statestore import Queue, StateClient

WAIT_MS = 20_000
"""A long poll that ends only because of what it waits for."""

NUMBERS = pa.schema([("n", pa.int64())])

_counter = itertools.count()


def new_name(kind: str) -> str:
    """A name that no other test of this process uses."""
    return f"{kind}-{next(_counter)}"


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


def balances(rows: pa.Table) -> list[tuple[str, int, int | None]]:
    return [(row["owner"], row["n"], row["balance"]) for row in rows.to_pylist()]


def scanned(reads: Any, table: str, **options: Any) -> list[tuple[str, int, int | None]]:
    return balances(reads.scan(table, **options).read_all())


def queued(queue: Queue, partition: int, begin: int = 0, **options: Any) -> list[int]:
    return queue.read(partition, begin, **options)[0]["n"].to_pylist()  # type: ignore[no-any-return]


def open_views(client: StateClient) -> int:
    return int(client.stats()["total"]["open_moments"])
