"""What do many partitions with little in each cost, in one process and in as many processes as there are partitions?

Each partition of a queue has a mapper of its own. The mappers are hosted by one process (``mapper.per_process``), and
then each by its own. Every second each partition gets an append of a few rows, for ``--seconds``; memory and processor
time are those of the mappers' processes alone, from the moment when all are up to the last commit. The result is
compared with what was appended.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.common import report
from perf.common.keyed_rows import SCHEMA, TABLE, KeyedRows
from perf.common.progress import Buckets, committed
from perf.yardsticks.compare_usage import private_bytes
from shuffle.durable.tables import mappers_group, reducers_group
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.local import LocalSystem, workers
from shuffle.statestore import StateClient

NAME = "partitions"
PARTITIONS_DEFAULT = 200
REDUCERS = 2
ROWS_PER_APPEND = 20
KEYS = 1_000
BATCH_BYTES_MAX = 1 << 20
UP_TIMEOUT_S = 900.0
DONE_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
POLL_S = 0.1

LIMITS = {"memory_ratio": "<= 0.1", "cpu_ratio": "<= 0.3"}


@dataclass(frozen=True)
class Measured:
    """What the processes of the mappers took."""

    processes: int
    memory_bytes: int
    """The private memory of all of them at the end."""
    cpu_s: float
    idle_cores: float
    """The cores that they keep busy while nothing is appended."""
    rows: int
    up_s: float

    @property
    def us_per_row(self) -> float:
        return 1e6 * self.cpu_s / self.rows


def spec_of(partitions: int, per_process: int) -> dict[str, object]:
    return {
        "processor": NAME,
        "input": {"queue": NAME},
        "mapper": {
            "class": "perf.common.keyed_rows:ByKey",
            "per_process": per_process,
            "memory": per_process * 2 * BATCH_BYTES_MAX,
            "batch_bytes_max": BATCH_BYTES_MAX,
        },
        "reducer": {"class": "perf.common.keyed_rows:CountByKey", "count": REDUCERS},
        "metrics": False,
    }


def measure(folder: Path, partitions: int, per_process: int, seconds: int, seed: int) -> Measured:
    with LocalSystem(folder) as system, system.connect() as state:
        state.create_queue(NAME, schema=SCHEMA, partitions=partitions)
        began_s = time.monotonic()
        controller = system.run(system.write_spec(spec_of(partitions, per_process)), "--no-check")
        try:
            wait_until_up(system, state, controller, partitions)
            up_s = time.monotonic() - began_s
            pids = sorted(set(workers(controller.pid, "mapper").values()))
            before_s = cpu_seconds(pids)
            time.sleep(seconds)
            idle_s = cpu_seconds(pids)
            rows = trickle(system, state, controller, partitions, seconds, seed)
            return Measured(
                processes=len(pids),
                memory_bytes=sum(private_bytes(pid) for pid in pids),
                cpu_s=cpu_seconds(pids) - idle_s,
                idle_cores=(idle_s - before_s) / seconds,
                rows=rows,
                up_s=up_s,
            )
        finally:
            controller.terminate()
            try:
                controller.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                controller.kill()
                controller.wait()


def cpu_seconds(pids: Sequence[int]) -> float:
    return sum(processes.cpu_seconds(pid) for pid in pids)


def wait_until_up(
    system: LocalSystem, state: StateClient, controller: subprocess.Popen[bytes], partitions: int
) -> None:
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    wanted = {mappers_group(NAME): partitions, reducers_group(NAME): REDUCERS}
    while any(len(state.leases.members(group)) < count for group, count in wanted.items()):
        if controller.poll() is not None or time.monotonic() > deadline_s:
            raise ShuffleError(f"the workers did not all start:\n{system.log_tail(NAME, 30)}")
        time.sleep(POLL_S)
    time.sleep(5.0)  # Requests that find nothing are held longer and longer; after a while they are as long as ever.


def trickle(
    system: LocalSystem,
    state: StateClient,
    controller: subprocess.Popen[bytes],
    partitions: int,
    seconds: int,
    seed: int,
) -> int:
    """Append a few rows to each partition every second, and wait until all are committed; returns how many there
    were."""
    made = KeyedRows(seed, KEYS)
    buckets = Buckets(partitions, REDUCERS, ["key"])
    queue = state.queue(NAME)
    began_s = time.monotonic()
    for second in range(seconds):
        time.sleep(max(0.0, began_s + second - time.monotonic()))
        with state.transaction() as tx:
            for partition in range(partitions):
                begin = second * ROWS_PER_APPEND
                batch = made.rows(begin, begin + ROWS_PER_APPEND, partition)
                tx.append(queue.name, partition, batch)
                buckets.add(partition, batch)
            tx.commit()
    buckets.close()
    deadline_s = time.monotonic() + DONE_TIMEOUT_S
    while committed(state, NAME, buckets) < buckets.rows:
        if controller.poll() is not None or time.monotonic() > deadline_s:
            raise ShuffleError(f"not done:\n{system.log_tail(NAME, 30)}")
        time.sleep(POLL_S)
    check_counts(state, partitions * seconds * ROWS_PER_APPEND)
    return partitions * seconds * ROWS_PER_APPEND


def check_counts(state: StateClient, rows: int) -> None:
    """Raise unless the table counts exactly the rows that were appended."""
    with state.snapshot() as snapshot:
        counted = sum(sum(batch["count"].to_pylist()) for batch in snapshot.scan(TABLE))
    if counted != rows:
        raise ShuffleError(f"{rows} rows were appended and {counted} counted")


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser(NAME, "Many partitions with little in each: one process against one for each partition.")
    parser.add_argument("--partitions", type=int, default=PARTITIONS_DEFAULT)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    found: dict[str, Measured] = {}
    for name, per_process in (("one", args.partitions), ("each", 1)):
        folder = Path(tempfile.mkdtemp(prefix="shuffle-partitions-"))
        try:
            found[name] = measure(folder, args.partitions, per_process, args.seconds, args.seed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{found[name].processes} processes: {found[name].us_per_row:.1f} µs a row", file=sys.stderr, flush=True)
    one, each = found["one"], found["each"]
    bars = {
        "memory_ratio": one.memory_bytes / each.memory_bytes,
        "cpu_ratio": one.us_per_row / each.us_per_row,
    }
    details = {"partitions": args.partitions, "rows": one.rows, "rows_per_append": ROWS_PER_APPEND}
    for name, measured in found.items():
        details |= {
            f"{name}_processes": measured.processes,
            f"{name}_memory_mb": measured.memory_bytes / 1e6,
            f"{name}_us_per_row": measured.us_per_row,
            f"{name}_idle_cores": measured.idle_cores,
            f"{name}_up_s": measured.up_s,
        }
    report.publish("partitions: one process over one for each", bars, details, args.json, LIMITS)
    return 0


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
