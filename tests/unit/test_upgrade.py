"""A store that an earlier version has written: told apart, refused with what to do, and brought up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shuffle.durable.mapper_state import MAPPERS_KEY, MapperState, lookup_state
from shuffle.durable.reducer_state import REDUCERS_KEY, ReducerState
from shuffle.durable.upgrade import refuse_old_tables, upgrade
from shuffle.errors import BadInput, SpecError
from shuffle.ids import InputIndex, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.statestore import StateClient

OLD_MAPPERS = pa.schema(
    [
        ("input_unread_row_index", pa.int64()),
        ("shuffle_unread_row_index", pa.int64()),
        ("continuation_token", pa.binary()),
    ]
)
OLD_REDUCERS = pa.schema([pa.field("committed_row_indices", pa.binary(), nullable=False)])
META = (
    pa.schema([pa.field("name", pa.string(), nullable=False)]),
    pa.schema([pa.field("value", pa.string(), nullable=False)]),
)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    """With the tables of a processor of two mappers and one reducer, as they were before there were generations."""
    with StateClient.open(tmp_path / "store") as client:
        client.create_table("job/meta", *META)
        client.create_table("job/mappers", MAPPERS_KEY, OLD_MAPPERS)
        client.create_table("job/reducers", REDUCERS_KEY, OLD_REDUCERS)
        with client.transaction() as tx:
            mappers: list[list[Any]] = [[0, 1], [7, 9], [17, 19], [b"a", b"b"]]
            tx.write("job/mappers", pa.table(mappers, schema=pa.schema([*MAPPERS_KEY, *OLD_MAPPERS])))
            committed = np.array([16, 11], dtype="<i8").tobytes()
            tx.write("job/reducers", pa.table([[0], [committed]], schema=pa.schema([*REDUCERS_KEY, *OLD_REDUCERS])))
            tx.commit()
        yield client


def check_upgraded(client: StateClient) -> None:
    refuse_old_tables(client, "job")
    assert lookup_state(client, "job", MapperIndex(1)) == MapperState(InputIndex(9), ShuffleIndex(19), Token(b"b"))
    found = client.lookup("job/reducers", ReducerState.key(ReducerIndex(0)))
    assert ReducerState.from_rows(found, 2) == ReducerState((ShuffleIndex(16), ShuffleIndex(11)))
    assert client.scan("job/meta").read_all().num_rows == 0
    assert not upgrade(client, "job"), "there is nothing left to do"


def test_old_tables_are_refused_with_what_to_do(client: StateClient) -> None:
    with pytest.raises(SpecError, match="shuffle upgrade SPEC"):
        refuse_old_tables(client, "job")
    refuse_old_tables(client, "another")


def test_old_tables_are_brought_up_to_date(client: StateClient) -> None:
    assert upgrade(client, "job")
    check_upgraded(client)


def test_nothing_is_changed_while_the_processor_runs(client: StateClient) -> None:
    client.leases.register("job/mappers", "m0", {}, 60_000)
    with pytest.raises(BadInput, match="stop them"):
        upgrade(client, "job")
    assert client.table("job/mappers").value.names == OLD_MAPPERS.names


@pytest.mark.parametrize("calls_before", range(5))
def test_upgrade_that_died_between_two_steps_is_finished_by_the_next(
    client: StateClient, monkeypatch: pytest.MonkeyPatch, calls_before: int
) -> None:
    """It dies before each of its changes of the catalogue, and before its last transaction."""
    calls = 0

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > calls_before:
                raise KeyboardInterrupt
            return function(*arguments, **named)

        return called

    with monkeypatch.context() as patched:
        for name in ("drop_table", "create_table"):
            patched.setattr(client, name, mortal(getattr(client, name)))
        transaction = client.transaction
        patched.setattr(client, "transaction", lambda: mortal(transaction)() if calls >= 4 else transaction())
        with pytest.raises(KeyboardInterrupt):
            upgrade(client, "job")
    with pytest.raises(SpecError, match="shuffle upgrade SPEC"):
        refuse_old_tables(client, "job")
    assert upgrade(client, "job")
    check_upgraded(client)
