"""The stores that keep the contract: the one in this process, the one behind a daemon with and without its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from shuffle.statestore import Queue, StateClient
from tests.contract.accounts import NUMBERS, new_name
from tests.daemons import StoreProcess


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


@pytest.fixture
def table(client: StateClient) -> str:
    """An empty table of its own for each test."""
    name = new_name("accounts")
    client.create_table(
        name,
        key=pa.schema([("owner", pa.string()), ("n", pa.int64())]),
        value=pa.schema([("balance", pa.int64()), ("note", pa.string())]),
        constraints={"solvent": "balance >= 0"},
    )
    return name


@pytest.fixture
def queue(client: StateClient) -> Queue:
    return client.create_queue(new_name("logs"), schema=NUMBERS, partitions=2)
