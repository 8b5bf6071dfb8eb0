"""Clients for a chaos run to kill: they take large answers of the store in every way there is, until somebody does.

None of them writes, so that the result of the job does not depend on them. What they may do is take the store with
them: ``lost_threads`` tells at the end whether any process has lost a thread that others depend on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from shuffle.errors import ShuffleError
from shuffle.examples.activity import TABLE
from shuffle.run.launch import die_with_parent
from shuffle.statestore import StateClient
from shuffle.statestore.codec.small_batch import SMALL_BATCH_ROWS_MAX

BALLAST = "ballast"
"""A queue of rows for them to read, which nobody trims."""

VALUES = "ballast_values"
"""A table whose rows make an answer nearly as large as one of the lane may be."""

VALUE_BYTES = 60_000
BALLAST_BATCHES = 32
BATCH_BYTES = 512 * 1024
READ_BYTES = 8 * 1024 * 1024
"""More than a socket has room for, so that a client is nearly always in the middle of an answer."""

SNAPSHOTS_MAX = 20
RETRY_S = 0.05
PAUSE_S = 0.05
"""Between two answers: the job that is looked at needs the machine, too."""

VITAL = {"session-reaper", "store-lane", "store-writer"}
"""The threads that a store must have."""

_KEYS = pa.table({"n": pa.array(range(SMALL_BATCH_ROWS_MAX), pa.int64())})

DEATH = b"a thread that others depend on has died"
"""What every process of ours logs before it ends for that reason."""


def make_ballast(client: StateClient) -> None:
    queue = client.create_queue(BALLAST, schema=pa.schema([("data", pa.binary())]), partitions=1)
    chance = random.Random(1)
    for _ in range(BALLAST_BATCHES):
        queue.append(0, pa.table({"data": [chance.randbytes(BATCH_BYTES)]}))
    client.create_table(VALUES, key=_KEYS.schema, value=pa.schema([("data", pa.binary())]))
    with client.transaction() as tx:
        tx.write(VALUES, _KEYS.append_column("data", pa.array([bytes(VALUE_BYTES)] * SMALL_BATCH_ROWS_MAX)))
        tx.commit()


def run(parent_pid: int, address: str) -> None:
    """Read until killed."""
    die_with_parent(parent_pid)
    ways: list[Callable[[StateClient], None]] = [_read_queue, _look_up, _look_up, _scan_table, _hold_snapshots]
    threads = [threading.Thread(target=_again_and_again, args=(address, way), daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _again_and_again(address: str, way: Callable[[StateClient], None]) -> None:
    pause = threading.Event()
    while True:
        # Over the wire, though the files are here; through a new client now and then, as after a restart.
        with suppress(ShuffleError), StateClient.connect(address, local_files=False) as client:
            for _ in range(50):
                way(client)
                pause.wait(PAUSE_S)
        pause.wait(RETRY_S)


def _read_queue(client: StateClient) -> None:
    queue = client.queue(BALLAST)
    begin, [(_, end)] = 0, queue.bounds()
    while begin < end:
        _, begin = queue.read(0, begin, max_bytes=READ_BYTES)


def _scan_table(client: StateClient) -> None:
    with client.snapshot() as snapshot:
        snapshot.scan(TABLE).read_all()
        snapshot.scan(VALUES).read_all()


def _look_up(client: StateClient) -> None:
    client.lookup(VALUES, _KEYS)


def _hold_snapshots(client: StateClient) -> None:
    held: list[Any] = []
    for _ in range(SNAPSHOTS_MAX):
        held.append(client.snapshot())
        held[-1].scan(VALUES).read_all()
    # Half of them are left to the end of the session.
    for snapshot in held[::2]:
        snapshot.close()


def lost_threads(client: StateClient, folder: Path) -> list[str]:
    """What is missing in the store, and every process whose log tells of a thread that died."""
    missing = sorted(VITAL - set(client.stats()["threads"]))
    told = [path.name for path in sorted(folder.glob("*.log")) if DEATH in path.read_bytes()]
    return [f"the store has no thread {name}" for name in missing] + [f"a thread died, see {name}" for name in told]
