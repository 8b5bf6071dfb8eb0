"""Clients that a chaos run kills: they read large responses of the store in every way there is, until they are killed.

None of them writes, so the result of the job does not depend on them. But their death might end a thread of the store:
``lost_threads`` returns at the end whether any process has lost a thread that others depend on.
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
"""The queue of rows that the clients read, which nobody trims."""

VALUES = "ballast_values"
"""The table whose rows make a response nearly as large as one over the lane may be."""

VALUE_BYTES = 60_000
BALLAST_BATCHES = 32
BATCH_BYTES = 512 * 1024
READ_BYTES = 8 * 1024 * 1024
"""The bytes that a client requests at once: more than a socket buffers, so that it is nearly always in the middle of a
response."""

SNAPSHOTS_MAX = 20
RETRY_S = 0.05
PAUSE_S = 0.05
"""The pause in seconds between two responses, which leaves the processors to the job."""

VITAL = {"session-reaper", "store-lane", "store-writer"}
"""The names of the threads that a store must have."""

_KEYS = pa.table({"n": pa.array(range(SMALL_BATCH_ROWS_MAX), pa.int64())})

DEATH = b"a thread that others depend on has died"
"""The text that every process logs before it ends because one of its threads has died."""


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
        # Over the wire, although the files are on this machine; with a new client now and then, as after a restart.
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
    """The threads that the store has lost, and every process whose log says that a thread has died."""
    missing = sorted(VITAL - set(client.stats()["threads"]))
    logs = [path.name for path in sorted(folder.glob("*.log")) if DEATH in path.read_bytes()]
    return [f"the store has no thread {name}" for name in missing] + [f"a thread died, see {name}" for name in logs]
