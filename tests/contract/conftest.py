"""The stores that keep the contract: the one in this process, and the one behind a daemon.

Of a daemon, its files can be read by its clients or not; and it has a lane that they use, has one that they leave
alone, or has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from shuffle.statestore import Queue, StateClient
from tests.contract.accounts import NUMBERS, new_name
from tests.daemons import StoreProcess

DAEMONS: dict[str, tuple[list[str], dict[str, bool]]] = {
    "daemon": ([], {}),
    "daemon without its files": ([], {"local_files": False}),
    "daemon without a lane": (["--no-lane"], {}),
    "daemon without a lane or its files": (["--no-lane"], {"local_files": False}),
    "daemon whose lane is not used": ([], {"lane": False, "local_files": False}),
}
"""The options of the daemon's command, and those of its clients."""


@pytest.fixture(scope="module", params=["embedded", *DAEMONS])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Any]]:
    """Makes clients of one store: the same one where it is in this process, different ones of the daemon."""
    folder = tmp_path_factory.mktemp("store") / "state"
    if request.param == "embedded":
        with StateClient.open(folder) as client:
            yield lambda: client
        return
    options, how = DAEMONS[request.param]
    with StoreProcess(folder, options=options) as daemon:
        made: list[StateClient] = []

        def connect() -> StateClient:
            made.append(StateClient.connect(daemon.address, **how))
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
