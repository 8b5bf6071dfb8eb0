"""The other clients of the store: one that appends the input, and one that reads snapshots of what there is."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pyarrow as pa

from shuffle.errors import CommitConflict, CommitUnknown, ShuffleError, StoreError
from shuffle.statestore.client.client import StateClient
from tests.sim import kernel
from tests.sim.checkers import Checkers
from tests.sim.kernel import Process, World
from tests.sim.workload import EFFECTS_KEY, INPUT, Workload

Connect = Callable[[Process], StateClient]


class Producer:
    """Appends each partition's rows, in bursts and with pauses, each append until it is acknowledged."""

    def __init__(self, world: World, workload: Workload, burst: int, pause_s: float) -> None:
        self._world = world
        self._workload = workload
        self._burst = burst
        self._pause_s = pause_s
        self._producing = 0
        self.sent = [0] * len(workload.partitions)
        """Of each partition: rows that have been sent to the store, whether they were acknowledged yet or not."""
        self.process: Process | None = None

    @property
    def is_done(self) -> bool:
        return self._producing == 0

    def start(self, connect: Connect) -> None:
        process = self.process = Process(self._world, "producer")
        self._producing = len(self._workload.partitions)
        client = connect(process)
        for partition in range(self._producing):
            process.spawn(f"produce-{partition}", functools.partial(self._produce, client, partition))

    def _produce(self, client: StateClient, partition: int) -> None:
        rng = self._world.streams["workload"]
        rows = self._workload.partitions[partition]
        at = sequence = 0
        while at < len(rows):
            chunk = rows[at : at + rng.randint(1, self._burst)]
            table = pa.table(
                [pa.array([row[0] for row in chunk], pa.int64()), pa.array([row[1] for row in chunk], pa.int8())],
                schema=INPUT,
            )
            self.sent[partition] = at + len(chunk)
            while True:
                try:
                    client.queue("input").append(partition, table, producer=f"p{partition}", sequence=sequence)
                    break
                except (StoreError, CommitUnknown, CommitConflict):
                    self._world.mark("the producer repeated an append")
                    kernel.sleep(0.05)
            at += len(chunk)
            sequence += 1
            kernel.sleep(rng.random() * self._pause_s)
        self._producing -= 1


class SnapshotReader:
    """Looks at positions and state of one moment now and then, and shows them to the checkers."""

    def __init__(self, world: World, workload: Workload, checkers: Checkers) -> None:
        self._world = world
        self._workload = workload
        self._checkers = checkers

    def start(self, connect: Connect) -> None:
        process = Process(self._world, "reader")
        client = connect(process)
        process.spawn("read", lambda: self._read(client))

    def _read(self, client: StateClient) -> None:
        mappers, reducers = self._workload.mapper_count, self._workload.reducer_count
        pairs = [(m, r) for m in range(mappers) for r in range(reducers)]
        keys = pa.table(
            [pa.array([m for m, _ in pairs], pa.int32()), pa.array([r for _, r in pairs], pa.int32())],
            schema=EFFECTS_KEY,
        )
        rows = pa.table({"reducer_index": pa.array(range(reducers), pa.int32())})
        while True:
            kernel.sleep(0.7)
            try:
                with client.snapshot() as snapshot:
                    states = snapshot.lookup("job/reducers", rows).to_pylist()
                    effects = snapshot.lookup("effects", keys).to_pylist()
            except ShuffleError:
                continue
            committed = [[-1] * mappers for _ in range(reducers)]
            for row in states:
                raw = row["committed_row_indices"]
                committed[row["reducer_index"]] = [
                    int.from_bytes(raw[at : at + 8], "little", signed=True) if at < len(raw) else -1
                    for at in range(0, 8 * mappers, 8)
                ]
            seen = dict.fromkeys(pairs, (0, 0))
            seen.update({(row["mapper"], row["reducer"]): (row["rows"], row["chain"]) for row in effects})
            self._checkers.on_snapshot(committed, seen)
            self._world.mark("a snapshot was read")
