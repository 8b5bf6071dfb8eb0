"""Runs a processor over a queue that was filled before, and polls the store for its progress.

The clock of a run starts with the first commit that is seen and stops with the last, so that the start of processes is
not measured; rows that were committed when it started are not counted.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle import hash_partition
from shuffle.errors import ShuffleError
from shuffle.examples.local import LocalSystem
from shuffle.statestore import StateClient

POLL_S = 0.1
"""The time in seconds between two polls of the positions. Each poll is a call to the store, and uses the same cores as
the shuffle."""
POLL_END_S = 0.01
"""The time in seconds between two polls near the end of the run, whose time must be exact."""
NEAR_END = 0.9
RUN_TIMEOUT_S = 300.0


class Buckets:
    """The shuffle indexes of the rows that each mapper has for each reducer, to count the rows that are committed.

    They are computed independently of the system, so a run that ends with all of them committed has sent every row to
    the reducer that its key belongs to, and none twice.
    """

    def __init__(self, mappers: int, reducers: int, key: Sequence[str]) -> None:
        self._reducers = reducers
        self._key = list(key)
        self._parts: dict[tuple[int, int], list[Any]] = {}
        self._ends = [0] * mappers
        self._indexes: dict[tuple[int, int], Any] = {}

    def add(self, mapper: int, batch: pa.Table) -> None:
        """Add rows to which this mapper will give shuffle indexes, in this order."""
        indexes = hash_partition(batch, by=self._key, reducers=self._reducers).partition_indexes
        for reducer in range(self._reducers):
            found = np.flatnonzero(indexes == reducer) + self._ends[mapper]
            self._parts.setdefault((mapper, reducer), []).append(found.astype(np.uint32))
        self._ends[mapper] += batch.num_rows

    def close(self) -> Buckets:
        self._indexes = {pair: np.concatenate(parts) for pair, parts in self._parts.items()}
        self._parts = {}
        return self

    @property
    def rows(self) -> int:
        return sum(self._ends)

    def rows_of(self, reducer: int) -> int:
        return sum(len(indexes) for (_, owner), indexes in self._indexes.items() if owner == reducer)

    def committed(self, table: pa.Table) -> int:
        """The number of rows that are committed according to the reducers' table."""
        return sum(self.committed_by_reducer(table))

    def committed_by_reducer(self, table: pa.Table) -> list[int]:
        found = [0] * self._reducers
        for row in table.to_pylist():
            reducer = row["reducer_index"]
            for mapper, last in enumerate(np.frombuffer(row["committed_row_indices"], dtype="<i8")):
                indexes = self._indexes.get((mapper, reducer))
                if indexes is not None and last >= 0:
                    found[reducer] += int(np.searchsorted(indexes, np.uint32(last), side="right"))
        return found


@dataclass(frozen=True)
class Watched:
    """The times and rows of one run of a processor. Times are those of the wall clock, in seconds."""

    started_s: float
    begin_s: float
    """The time at which a commit was first seen."""
    end_s: float
    """The time at which the last commit was seen."""
    rows: int
    """The number of rows committed between ``begin_s`` and ``end_s``."""
    rows_first: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def start_up_s(self) -> float:
        return self.begin_s - self.started_s


def watched(
    system: LocalSystem,
    state: StateClient,
    spec: Mapping[str, Any],
    buckets: Buckets,
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda _controller: None,
    on_first: Callable[[], None] = lambda: None,
) -> Watched:
    """Run ``spec`` until its input is drained and every row is committed; calls ``on_first`` at the first commit."""
    name = spec["processor"]
    path = system.write_spec(spec)
    started_s = time.time()
    controller = system.run(path, "--until-drained", "--no-check")
    on_start(controller)
    first: tuple[float, int] | None = None
    last: tuple[float, int] = (started_s, 0)
    while controller.poll() is None:
        if time.time() - started_s > RUN_TIMEOUT_S:
            raise ShuffleError(f"{name} is not drained after {RUN_TIMEOUT_S:.0f} s:\n{system.log_tail(name)}")
        done = committed(state, name, buckets)
        if done > last[1]:
            last = (time.time(), done)
            if first is None:
                first = last
                on_first()
        time.sleep(POLL_END_S if NEAR_END * buckets.rows <= done < buckets.rows else POLL_S)
    if controller.returncode != 0:
        raise ShuffleError(f"{name} ended with {controller.returncode}:\n{system.log_tail(name, 30)}")
    done = committed(state, name, buckets)
    if done != buckets.rows:
        raise ShuffleError(f"{name} drained with {done} of {buckets.rows} rows committed")
    if first is None or last[1] == first[1]:
        raise ShuffleError("everything was committed before the clock could start: take more rows")
    return Watched(started_s, first[0], last[0], last[1] - first[1], first[1])


class CommitClock:
    """The clock of ``watched`` for a processor that the caller runs, for instance under Spark."""

    def __init__(self, state: StateClient, processor: str, buckets: Buckets) -> None:
        self._state, self._processor, self._buckets = state, processor, buckets
        self._started_s = time.time()
        self._seen: list[tuple[float, int]] = []
        """The times at which more rows were seen to be committed, and how many were by then."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="commit-clock", daemon=True)

    def __enter__(self) -> CommitClock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        done = 0
        while not self._stopping.wait(POLL_END_S if NEAR_END * self._buckets.rows <= done else POLL_S):
            now = committed(self._state, self._processor, self._buckets)
            if now > done:
                done = now
                self._seen.append((time.time(), done))

    def watched(self) -> Watched:
        """What was seen, after the end of the block. Every row must be committed."""
        if not self._seen or self._seen[-1][1] != self._buckets.rows:
            raise ShuffleError(f"{self._processor} ended with {self._seen[-1:]} of {self._buckets.rows} rows committed")
        (begin_s, rows_first), (end_s, rows) = self._seen[0], self._seen[-1]
        if rows == rows_first:
            raise ShuffleError("everything was committed before the clock could start: take more rows")
        return Watched(self._started_s, begin_s, end_s, rows - rows_first, rows_first)


def committed(state: StateClient, processor: str, buckets: Buckets) -> int:
    return sum(committed_by_reducer(state, processor, buckets))


def committed_by_reducer(state: StateClient, processor: str, buckets: Buckets) -> list[int]:
    try:
        positions = state.scan(f"{processor}/reducers").read_all()
    except ShuffleError as error:
        if error.code != "unknown_table":
            raise
        positions = pa.table({})  # the controller has not created it yet
    return buckets.committed_by_reducer(positions)


def fill_with(state: StateClient, queue: str, schema: pa.Schema, batches: Iterable[tuple[int, pa.Table]]) -> int:
    """Create a queue with these (partition, rows). Returns the bytes of the rows as Arrow data."""
    held = list(batches)
    state.create_queue(queue, schema=schema, partitions=1 + max(partition for partition, _ in held))
    to = state.queue(queue)
    for partition, batch in held:
        to.append(partition, batch)
    return sum(batch.nbytes for _, batch in held)


def forget(state: StateClient, processor: str, queue: str | None, table: str = "") -> None:
    """Drop what a finished run has left in the store, its input ``queue`` too, and empty the user's table.

    The user's table is not dropped, because a process that has used it, such as a worker of Spark, expects it to exist.
    """
    for found in state.tables():
        if found.name.startswith(f"{processor}/"):
            state.drop_table(found.name)
        elif found.name == table:
            keys = state.scan(table).read_all().select(found.key.names)
            with state.transaction() as tx:
                tx.delete(table, keys)
                tx.commit()
    if queue is not None:
        state.drop_queue(queue)
