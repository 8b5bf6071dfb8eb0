"""What a reducer knows between its commits, against a real store in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.errors import CommitConflict
from shuffle.reducer.row_cache import KEYS_MAX, CommittedRowCache
from shuffle.statestore import StateClient, Transaction

KEY = pa.schema([pa.field("name", pa.string(), nullable=False)])
VALUE = pa.schema([pa.field("sum", pa.int64())])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "state") as client:
        client.create_table("totals", key=KEY, value=VALUE)
        yield client


def keys(*names: str) -> pa.Table:
    return pa.table([pa.array(names, pa.string())], schema=KEY)


def rows(**sums: int) -> pa.Table:
    return pa.table({"name": pa.array(sums.keys(), pa.string()), "sum": pa.array(sums.values(), pa.int64())})


def seen(transaction: Transaction, *names: str) -> dict[str, int]:
    found = transaction.lookup("totals", keys(*names))
    return dict(zip(found["name"].to_pylist(), found["sum"].to_pylist(), strict=True))


def write(client: StateClient, **sums: int) -> None:
    with client.transaction() as transaction:
        transaction.write("totals", rows(**sums))
        transaction.commit()


def read_and_write(client: StateClient, *read: str, **sums: int) -> dict[str, int]:
    with client.transaction() as transaction:
        found = seen(transaction, *read)
        transaction.write("totals", rows(**sums))
        transaction.commit()
        return found


def test_known_rows_are_learnt_from_what_a_commit_read_and_wrote(store: StateClient) -> None:
    known = CommittedRowCache()
    knowing = store.with_row_cache(known)
    write(store, a=1)
    assert read_and_write(knowing, "a", "b", c=3) == {"a": 1}
    assert len(known) == 3, "a and b were read, b as missing; c was written"
    with knowing.transaction() as transaction:
        assert seen(transaction, "c", "b", "a", "c") == {"c": 3, "a": 1}
        assert transaction._view is None, "nothing was asked of the store"


def test_known_rows_are_not_learnt_without_a_commit(store: StateClient) -> None:
    known = CommittedRowCache()
    with store.with_row_cache(known).transaction() as transaction:
        assert seen(transaction, "a") == {}
        transaction.write("totals", rows(a=1))
        assert seen(transaction, "a") == {"a": 1}, "its own writes it sees all the same"
    assert len(known) == 0


@pytest.mark.parametrize("before", [{"a": 1}, {}], ids=["row", "no row"])
def test_known_row_that_somebody_else_has_written_is_a_conflict_and_forgotten(
    store: StateClient, before: dict[str, int]
) -> None:
    known = CommittedRowCache()
    knowing = store.with_row_cache(known)
    write(store, **{"other": 0, **before})
    assert read_and_write(knowing, "a", b=1) == before
    write(store, a=100)
    with pytest.raises(CommitConflict):
        read_and_write(knowing, "a", b=2)
    assert len(known) == 0
    assert read_and_write(knowing, "a", b=2) == {"a": 100}, "the second attempt sees what is there"


def test_known_rows_and_others_in_one_lookup_keep_the_order_of_the_keys(store: StateClient) -> None:
    knowing = store.with_row_cache(CommittedRowCache())
    write(store, a=1, b=2, c=3)
    read_and_write(knowing, "b", d=4)
    with knowing.transaction() as transaction:
        transaction.write("totals", rows(e=5))
        assert list(seen(transaction, "e", "c", "b", "a").items()) == [("e", 5), ("c", 3), ("b", 2), ("a", 1)]


def test_known_rows_are_forgotten_after_a_large_write(store: StateClient) -> None:
    known = CommittedRowCache()
    knowing = store.with_row_cache(known)
    read_and_write(knowing, "a", a=1)
    assert len(known) == 1
    read_and_write(knowing, **{f"k{i}": i for i in range(KEYS_MAX + 1)})
    assert len(known) == 0


def test_known_rows_stay_below_their_limit_and_the_oldest_go_first() -> None:
    known = CommittedRowCache(bytes_max=1000)
    for number in range(10):
        known.learn({b"%d" % number: bytes(50)})
    assert list(known.among([b"%d" % number for number in range(10)])) == [b"7", b"8", b"9"]
    known.learn({b"7": None})
    known.learn({b"10": bytes(300)})
    assert list(known.among([b"7", b"8", b"9", b"10"])) == [b"7", b"9", b"10"], "what was learnt again is young"
    assert known.forget()
    assert not known.forget()
