"""How fast are rows shuffled and committed, compared with Arrow Flight alone, and how much is written for it?

The activity job (``DeclaredCountByUser``) with two mappers and two reducers, every row with a user so that every row
is shuffled. Four things are measured in one run:

- the job itself, with its table of counts (``mb_per_s``);
- the same rows through map, window, GetRows and reduce with a reducer that keeps no state;
- the same again with rows that go through sockets, as between machines, and not through shared memory;
- the same bucket batches through Arrow Flight alone, with as many processes (``flight_ratio`` is the second over this,
  ``flight_ratio_over_sockets`` the third).

The input is in its queue before the clock starts. The clock runs from the first commit to the last, so that the start
of processes is not measured; the rows of the first commit are not counted either. ``shuffle_bytes_ratio`` is what all
processes wrote to storage from the start to the end of the run without state, over the bytes of the rows shuffled.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from perf.common import report
from perf.common.progress import Buckets, Watched, watched
from perf.yardsticks import raw_flight
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.activity import COLUMNS, KEY_COLUMNS, TABLE
from shuffle.examples.generate import fill
from shuffle.examples.local import LocalSystem
from shuffle.examples.workload import Workload, difference, oracle_part, oracle_sum
from shuffle.limits import MIB
from shuffle.statestore import StateClient

MAPPERS = 2
REDUCERS = 2
ROWS_DEFAULT = 24_000_000
BATCH_ROWS = 100_000
READ_ROWS = 200_000
READ_BYTES = 32 * MIB
"""The bytes that a mapper reads at once when it is behind, as it always is here. This is twice the default: a commit
takes what was mapped meanwhile, so larger reads mean fewer commits, and each commit writes at least one page."""
MB = 1_000_000


@dataclass(frozen=True)
class Measured:
    """The measurements of one run of a processor."""

    seen: Watched
    bytes_total: int
    rows_total: int
    written_bytes: int
    cpu_s: float

    @property
    def mb_per_s(self) -> float:
        return self.seen.rows * self.bytes_total / self.rows_total / self.seen.seconds / MB

    @property
    def bytes_ratio(self) -> float:
        return self.written_bytes / self.bytes_total


def measure(
    system: LocalSystem,
    state: StateClient,
    name: str,
    reducer_class: str,
    rows: int,
    seed: int,
    share_memory: bool = True,
) -> Measured:
    """Fill a queue, run a processor over it until it is drained, and check the table if it keeps one."""
    buckets = Buckets(MAPPERS, REDUCERS, KEY_COLUMNS)
    parts: list[pa.Table] = []

    def on_batch(partition: int, batch: pa.Table) -> None:
        buckets.add(partition, batch)
        parts.append(oracle_part(batch))

    workload = Workload(seed=seed, with_user_share=1.0)
    bytes_total = fill(state, name, workload, rows, MAPPERS, BATCH_ROWS, on_batch)
    buckets.close()
    spec = {
        "processor": name,
        "input": {"queue": name},
        "mapper": {"class": "examples.activity:ParseLogs", "batch_rows_max": READ_ROWS, "batch_bytes_max": READ_BYTES},
        "reducer": {"class": reducer_class, "count": REDUCERS, "share_memory": share_memory},
        "metrics": False,
    }
    written_before = processes.tree_written_bytes(os.getpid())
    cpu_before_s = tree_cpu_seconds()
    seen = watched(system, state, spec, buckets)
    measured = Measured(
        seen,
        bytes_total,
        buckets.rows,
        processes.tree_written_bytes(os.getpid()) - written_before,
        tree_cpu_seconds() - cpu_before_s,
    )
    if TABLE in {table.name for table in state.tables()}:
        verdict = difference(oracle_sum(parts), state.scan(TABLE).read_all().select(COLUMNS))
        state.drop_table(TABLE)
        if not verdict.exact:
            raise ShuffleError(f"the result is wrong, so its time does not count: {verdict}")
    state.drop_queue(name)
    return measured


def tree_cpu_seconds() -> float:
    return sum(processes.cpu_seconds(pid) for pid in processes.process_tree(os.getpid()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("throughput", "MB/s of rows shuffled and committed, beside Arrow Flight alone.")
    parser.add_argument("--rows", type=int, default=ROWS_DEFAULT, help=f"rows for each run (default: {ROWS_DEFAULT:,})")
    parser.add_argument("--runs", type=int, default=3, help="repetitions; medians are reported (default: 3)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    workload = Workload(seed=args.seed, with_user_share=1.0)
    activity, alone, over_sockets, raw = [], [], [], []
    for number in range(args.runs):
        folder = Path(tempfile.mkdtemp(prefix="shuffle-perf-"))
        try:
            with LocalSystem(folder) as system, system.connect() as state:
                counted = "examples.activity:DeclaredCountByUser"
                activity.append(measure(system, state, f"activity-{number}", counted, args.rows, args.seed))
                keep_nothing = "perf.common.jobs:KeepNothing"
                alone.append(measure(system, state, f"alone-{number}", keep_nothing, args.rows, args.seed))
                over_sockets.append(
                    measure(system, state, f"sockets-{number}", keep_nothing, args.rows, args.seed, share_memory=False)
                )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        raw.append(raw_flight.bytes_per_s(workload, MAPPERS, REDUCERS, args.rows, BATCH_ROWS) / MB)
    alone_mb_per_s = report.median(run.mb_per_s for run in alone)
    bars = {
        "mb_per_s": report.median(run.mb_per_s for run in activity),
        "flight_ratio": alone_mb_per_s / report.median(raw),
        "flight_ratio_over_sockets": report.median(run.mb_per_s for run in over_sockets) / report.median(raw),
        "shuffle_bytes_ratio": report.median(run.bytes_ratio for run in alone),
        "activity_bytes_ratio": report.median(run.bytes_ratio for run in activity),
    }
    details = {
        "rows": args.rows,
        "row_bytes": activity[0].bytes_total / activity[0].rows_total,
        "mappers": MAPPERS,
        "reducers": REDUCERS,
        "activity": summary(activity),
        "alone": summary(alone),
        "over_sockets": summary(over_sockets),
        "raw_flight_mb_per_s": report.spread(raw),
        "activity_over_flight": bars["mb_per_s"] / report.median(raw),
    }
    limits = {
        "flight_ratio": ">= 0.65",
        "flight_ratio_over_sockets": ">= 0.55",
        "shuffle_bytes_ratio": "<= 0.001",
        "activity_bytes_ratio": "<= 0.02",
    }
    report.publish("throughput: rows shuffled and committed", bars, details, args.json, limits)
    return 0


def summary(runs: Sequence[Measured]) -> dict[str, Any]:
    return {
        "mb_per_s": report.spread([run.mb_per_s for run in runs]),
        "rows_per_s": report.median(run.seen.rows / run.seen.seconds for run in runs),
        "cpu_s_per_gb": report.median(run.cpu_s / run.bytes_total * 1e9 for run in runs),
        "written_bytes": report.median(run.written_bytes for run in runs),
        "start_up_s": report.median(run.seen.start_up_s for run in runs),
        "share_before_clock": report.median(run.seen.rows_first / run.rows_total for run in runs),
    }


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
