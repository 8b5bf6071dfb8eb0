"""A paced input: log lines appended to a queue at a set rate, counted by the oracle as they go.

Each partition has a thread that appends one batch, of always the same number of rows, every so often. A few batches
are made in advance and used in turn: making rows costs as much as shuffling them, and is not what is measured. The
column of ``perf.common.timed`` is set anew in each append.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from perf.common.timed import APPENDED_COLUMN
from shuffle.errors import ShuffleError
from shuffle.examples.workload import SCHEMA, Workload, oracle_part, oracle_sum
from shuffle.statestore import StateClient

INPUT_SCHEMA = SCHEMA.append(pa.field(APPENDED_COLUMN, pa.int64()))
BATCHES_PER_PARTITION = 4
_LOOK_S = 0.02


class PacedInput:
    """Appends from ``start`` to the end of the ``with`` block, once a rate is set."""

    def __init__(self, state: StateClient, queue: str, workload: Workload, partitions: int, append_rows: int) -> None:
        state.create_queue(queue, schema=INPUT_SCHEMA, partitions=partitions, if_not_exists=True)
        self._queue = state.queue(queue)
        self._partitions = partitions
        self._append_rows = append_rows
        self._batches = [
            [workload.rows(n * append_rows, (n + 1) * append_rows, p) for n in range(BATCHES_PER_PARTITION)]
            for p in range(partitions)
        ]
        self._appends = [0] * partitions
        self._period_s: float | None = None
        self._until: Callable[[int], bool] = lambda partition: True
        self._begin_s = 0.0
        self._appending = [threading.Lock() for _ in range(partitions)]
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.late_s_max = 0.0
        """The longest time in seconds by which an append was late since the rate was set."""
        self.failure: Exception | None = None

    @property
    def row_bytes(self) -> float:
        """The average size of a row as Arrow data, the column with the time of its append included."""
        nbytes = int(sum(batch.nbytes for batch in self._batches[0]))
        return nbytes / (BATCHES_PER_PARTITION * self._append_rows) + 8

    def appended_rows(self, partition: int) -> int:
        return self._appends[partition] * self._append_rows

    def append_while(self, has_room: Callable[[int], bool]) -> None:
        """Append to a partition as fast as possible whenever ``has_room(partition)``."""
        self._until, self._period_s = has_room, 0.0

    def at_rate(self, rows_per_s: float) -> None:
        """Append ``rows_per_s`` over all partitions, in equal shares and equal steps."""
        self._begin_s = time.monotonic()
        self.late_s_max = 0.0
        self._until, self._period_s = lambda partition: True, self._partitions * self._append_rows / rows_per_s

    def rest(self) -> None:
        """Stop appending until a rate is set again. No append is under way when this returns."""
        self._period_s = None
        for lock in self._appending:
            with lock:
                pass

    def oracle(self) -> pa.Table:
        """The expected result of the activity job for all rows appended so far. Call it while the input rests."""
        parts = []
        for partition, batches in enumerate(self._batches):
            for number, batch in enumerate(batches):
                times = len(range(number, self._appends[partition], BATCHES_PER_PARTITION))
                if times:
                    part = oracle_part(batch)
                    count = pc.multiply(part["count"], times)
                    parts.append(part.set_column(part.schema.get_field_index("count"), "count", count))
        return oracle_sum(parts)

    def __enter__(self) -> PacedInput:
        for partition in range(self._partitions):
            thread = threading.Thread(target=self._run, args=(partition,), name=f"append-{partition}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, partition: int) -> None:
        paced_since_s, due_s = -1.0, 0.0
        while not self._stopping.is_set():
            period_s = self._period_s
            if period_s is None or not self._until(partition):
                self._stopping.wait(_LOOK_S)
                continue
            if period_s:
                if paced_since_s != self._begin_s:
                    # Partitions take turns instead of appending all at the same moment.
                    paced_since_s, due_s = self._begin_s, self._begin_s + period_s * partition / self._partitions
                if self._stopping.wait(max(0.0, due_s - time.monotonic())):
                    return
                self.late_s_max = max(self.late_s_max, time.monotonic() - due_s)
                due_s += period_s
            try:
                with self._appending[partition]:
                    if self._period_s is not None:
                        self._append(partition)
            except ShuffleError as error:
                self.failure = error
                return

    def _append(self, partition: int) -> None:
        rows = self._batches[partition][self._appends[partition] % BATCHES_PER_PARTITION]
        appended_ns = pa.array(np.full(rows.num_rows, time.monotonic_ns()), pa.int64())
        self._queue.append(partition, rows.append_column(INPUT_SCHEMA.field(APPENDED_COLUMN), appended_ns))
        self._appends[partition] += 1
