"""What does a bucket with ten times the rows of each other one cost the others, when its reducer cannot keep up?

Four mappers, eight reducers, rows appended at a set rate. At first all buckets get the same number of rows. Then one of
them gets ten times as many, and the others as many as before. Its reducer can process half of them, so its rows fill
the windows, and go to the spill while it reads the older ones from there.

- ``others_ratio``: rows per second that the other reducers commit while it is hot, over before.
- ``others_behind_s``: rows appended for the others and not committed when the last were appended, in seconds of input.
- ``lost``, ``duplicated``: rows, by an independent count of the input.
- ``spill_left_bytes``: the bytes of spill files that are left at the end.
- ``append_late_s``: the longest time by which an append was late. If it is large, the machine was too slow for the
  rate, and the others' rows were not there to be read.

With ``--without-spill`` the windows fill and reading stops: the figure must then be much lower, or it measures nothing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from perf.common import report
from perf.common.progress import Buckets, committed_by_reducer
from perf.parts.straggler_parts import (
    MAPPERS,
    MB,
    POLL_S,
    PROCESSOR,
    REDUCERS,
    TIMEOUT_S,
    Workers,
    wait_for_empty_spill,
    write_spec,
)
from shuffle import hash_partition
from shuffle.api import WorkerSpec
from shuffle.errors import ShuffleError
from shuffle.examples.activity import COLUMNS, KEY_COLUMNS, TABLE, CountByUser
from shuffle.examples.local import LocalSystem
from shuffle.examples.workload import SCHEMA, Workload, difference, oracle_part, oracle_sum
from shuffle.statestore import StateClient, Transaction

HOT = 3
HOT_TIMES = 10
"""The number of rows of the hot bucket for each row of another bucket."""
TAKEN_SHARE = 0.5
"""The share of the hot bucket's rows that its reducer can process."""
ROWS_PER_S_DEFAULT = 120_000
APPEND_ROWS = 10_000
"""The number of rows in one append, of all buckets together; while one is hot, its additional rows come on top."""
EVEN_S, HOT_S = 10.0, 20.0
SETTLE_S = 2.0
"""The time in seconds after a change that is not counted."""
BATCHES_PER_MAPPER = 4


class PacedCount(CountByUser):
    """``CountByUser``, with one reducer that processes only a set number of rows per second."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient) -> None:
        super().__init__(config, spec, state)
        self._rows_per_s = float(config["rows_per_s"]) if spec.index == config["paced_index"] else None

    def reduce(self, rows: pa.Table) -> Transaction | None:
        if self._rows_per_s is not None:
            time.sleep(rows.num_rows / self._rows_per_s)
        return super().reduce(rows)


class Input:
    """The whole input, known in advance: a few batches that are used in turn, first even ones and then hot ones."""

    def __init__(self, seed: int, even_appends: int, hot_appends: int) -> None:
        self.even_appends = even_appends
        self.appends = even_appends + hot_appends
        """The number of appends to each mapper's partition."""
        workload = Workload(seed=seed, with_user_share=1.0, skew="uniform")
        self._even = [
            [workload.rows(n * APPEND_ROWS, (n + 1) * APPEND_ROWS, mapper) for n in range(BATCHES_PER_MAPPER)]
            for mapper in range(MAPPERS)
        ]
        self._hot = [[_heated(batch) for batch in batches] for batches in self._even]
        self.buckets = Buckets(MAPPERS, REDUCERS, KEY_COLUMNS)
        parts = []
        for mapper in range(MAPPERS):
            for number in range(self.appends):
                batch = self.batch(mapper, number)
                self.buckets.add(mapper, batch)
                parts.append(oracle_part(batch))
        self.buckets.close()
        self.oracle = oracle_sum(parts)

    def batch(self, mapper: int, number: int) -> pa.Table:
        batches = self._even if number < self.even_appends else self._hot
        return batches[mapper][number % BATCHES_PER_MAPPER]


def _heated(batch: pa.Table) -> pa.Table:
    """``batch`` with each of the hot bucket's rows ``HOT_TIMES`` times."""
    indexes = hash_partition(batch, by=KEY_COLUMNS, reducers=REDUCERS).partition_indexes
    hot = batch.filter(pa.array(indexes == HOT))
    return pa.concat_tables([batch, *[hot] * (HOT_TIMES - 1)]).combine_chunks()


class Feeder:
    """Appends the input at its rate: a thread for each partition, which take turns."""

    def __init__(self, state: StateClient, made: Input, rows_per_s: float) -> None:
        self._queue = state.queue("logs")
        self._input = made
        self._period_s = MAPPERS * APPEND_ROWS / rows_per_s
        self._threads = [
            threading.Thread(target=self._run, args=(mapper,), name=f"append-{mapper}", daemon=True)
            for mapper in range(MAPPERS)
        ]
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._begin_s = 0.0
        self._appends = [0] * MAPPERS
        self.late_s_max = 0.0

    def start(self) -> None:
        self._begin_s = time.monotonic()
        for thread in self._threads:
            thread.start()

    @property
    def is_hot(self) -> bool:
        return self._is_after(self._input.even_appends)

    @property
    def is_done(self) -> bool:
        return self._is_after(self._input.appends)

    def _is_after(self, appends: int) -> bool:
        if self._failure is not None:
            raise ShuffleError(f"the input could not be appended: {self._failure}")
        return min(self._appends) >= appends

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _run(self, mapper: int) -> None:
        try:
            for number in range(self._input.appends):
                due_s = self._begin_s + (number + mapper / MAPPERS) * self._period_s
                if self._stopping.wait(max(0.0, due_s - time.monotonic())):
                    return
                self.late_s_max = max(self.late_s_max, time.monotonic() - due_s)
                self._queue.append(mapper, self._input.batch(mapper, number))
                self._appends[mapper] = number + 1
        except ShuffleError as error:
            self._failure = error


class Run:
    def __init__(self, system: LocalSystem, state: StateClient, folder: Path, options: Any) -> None:
        self._system = system
        self._state = state
        self._folder = folder
        self._options = options
        appends_per_s = options.rows_per_s / APPEND_ROWS / MAPPERS
        self._input = Input(options.seed, round(EVEN_S * appends_per_s), round(HOT_S * appends_per_s))

    def measure(self) -> tuple[dict[str, float], dict[str, Any]]:
        self._state.create_queue("logs", schema=SCHEMA, partitions=MAPPERS)
        self._workers = workers = Workers(self._folder, self._spec())
        feeder = Feeder(self._state, self._input, self._options.rows_per_s)
        try:
            self._start()
            feeder.start()
            before = self._rate_until(lambda: feeder.is_hot)
            during = self._rate_until(lambda: feeder.is_done)
            behind = self._others_total() - self._others()
            spilled = self._state.scan(f"{PROCESSOR}/spills").read_all().to_pylist()
            hot_behind = self._total(HOT) - self._committed()[HOT]
            self._wait_for(lambda: sum(self._committed()) == sum(map(self._total, range(REDUCERS))))
            left_bytes = wait_for_empty_spill(self._state, self._folder)
            peak_bytes = workers.peak_bytes
        finally:
            feeder.close()
            workers.close()
        verdict = difference(self._input.oracle, self._state.scan(TABLE).read_all().select(COLUMNS))
        others_per_s = self._options.rows_per_s * (REDUCERS - 1) / REDUCERS
        bars = {
            "others_ratio": float(during / before),
            "others_behind_s": float(behind / others_per_s),
            "lost": verdict.lost,
            "duplicated": verdict.duplicated,
            "spill_left_bytes": left_bytes,
        }
        details = {
            "verdict": str(verdict),
            "append_late_s": feeder.late_s_max,
            "rows_per_s_appended_for_the_others": others_per_s,
            "rows_per_s_committed_before": float(before),
            "rows_per_s_committed_while_hot": float(during),
            "hot_rows_per_s_appended": others_per_s / (REDUCERS - 1) * HOT_TIMES,
            "hot_rows_behind_at_the_end": int(hot_behind),
            "spilled_mb": sum(row["bytes"] for row in spilled if row["reducer_index"] == HOT) / MB,
            "spilled_mb_for_others": sum(row["bytes"] for row in spilled if row["reducer_index"] != HOT) / MB,
            "peak_mb": peak_bytes / MB,
        }
        return bars, details

    def _spec(self) -> Path:
        hot_per_s = self._options.rows_per_s / REDUCERS * HOT_TIMES
        config = {"paced_index": HOT, "rows_per_s": TAKEN_SHARE * hot_per_s}
        reducer = {"class": "perf.hot_bucket:PacedCount", "config": config}
        return write_spec(self._system, reducer, False if self._options.without_spill else {"compression": "none"})

    def _start(self) -> None:
        self._workers.start_all()
        groups = [f"{PROCESSOR}/mappers", f"{PROCESSOR}/reducers"]
        self._wait_for(lambda: sum(len(self._state.leases.members(group)) for group in groups) == MAPPERS + REDUCERS)

    def _wait_for(self, done: Any) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not done():
            if time.monotonic() > deadline_s:
                raise ShuffleError(f"not at its end after {TIMEOUT_S:.0f} s: {self._committed()}")
            self._workers.check()
            time.sleep(POLL_S)

    def _committed(self) -> list[int]:
        return committed_by_reducer(self._state, PROCESSOR, self._input.buckets)

    def _total(self, reducer: int) -> int:
        return self._input.buckets.rows_of(reducer)

    def _others(self) -> int:
        return sum(rows for reducer, rows in enumerate(self._committed()) if reducer != HOT)

    def _others_total(self) -> int:
        return sum(self._total(reducer) for reducer in range(REDUCERS) if reducer != HOT)

    def _rate_until(self, done: Any) -> float:
        """The rows per second that the other reducers commit, from ``SETTLE_S`` after now on."""
        time.sleep(SETTLE_S)
        begin_s, begin = time.monotonic(), self._others()
        self._wait_for(done)
        return (self._others() - begin) / (time.monotonic() - begin_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("hot_bucket", "What one bucket at ten times the rate of the others costs those.")
    rate_help = f"of all buckets before one is hot (default: {ROWS_PER_S_DEFAULT:,})"
    parser.add_argument("--rows-per-s", type=int, default=ROWS_PER_S_DEFAULT, help=rate_help)
    parser.add_argument("--without-spill", action="store_true", help="with spilling turned off, for comparison")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="shuffle-perf-"))
    try:
        with LocalSystem(folder) as system, system.connect() as state:
            bars, details = Run(system, state, folder, options).measure()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    limits = {
        "others_ratio": ">= 0.95",
        "others_behind_s": "<= 1",
        "lost": "0",
        "duplicated": "0",
        "spill_left_bytes": "0",
    }
    report.publish("hot_bucket: one bucket of eight at ten times the rate", bars, details, options.json, limits)
    return 0


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
