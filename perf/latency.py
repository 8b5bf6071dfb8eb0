"""How long does a row take from ``append`` acknowledged to the reducer's commit acknowledged?

The activity job at a paced 1,000 rows/s, in appends of 10 rows to the partitions in turn: 100 appends a second. The
producer notes when the store has acknowledged each append; the reducer notes when the store has acknowledged the commit
that the rows were in. Both use the machine's monotonic clock, which all processes share. Every row is one measurement:
those of one append may go to several reducers, and count by the commit they were in themselves.

After that the same with 10,000 appends of one row a second, through an ``Appender`` for each partition
(``small_appends_p99_ms``; ``--small-appends 0`` leaves it out).

The floor is the least that the parts can take, measured in the same run before and after the load: one synced append,
two small Flight calls (the mapper's read of the queue, the reducer's GetRows) and one synced commit, one after the
other.

The benchmark itself takes processor time, too, so the rows are made before the clock starts. ``cpu_ms_per_append`` says
which processes used the processors.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from perf.common import report
from perf.yardsticks import raw_flight
from shuffle.api import WorkerSpec
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.activity import CountByUser
from shuffle.examples.local import LocalSystem, workers
from shuffle.examples.workload import SCHEMA, Workload
from shuffle.statestore import StateClient, Transaction
from shuffle.support import flight

PROCESSOR = "latency"
QUEUE = "paced"
APPEND_COLUMN = "append"
INPUT_SCHEMA = SCHEMA.append(pa.field(APPEND_COLUMN, pa.int64()))
"""Log lines, each with the number of the append it came in."""
DRAIN_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0
WARM_S = 2.0
FLOOR_ROUNDS = 200

FLOOR_QUEUE, FLOOR_TABLE = "floor_queue", "floor_table"
FLOOR_KEY = pa.schema([("name", pa.string())])
FLOOR_VALUE = pa.schema([("value", pa.int64())])

_RECORD = np.dtype([("append", "<i8"), ("rows", "<i8"), ("acknowledged_ns", "<i8")])


class TimedCountByUser(CountByUser):
    """The activity job's reducer, which also notes when the commit of each append's rows was acknowledged."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient) -> None:
        super().__init__(config, spec, state)
        path = Path(config["folder"]) / f"reducer-{spec.index}-{spec.guid}.bin"
        self._notes = path.open("ab", buffering=0)

    def reduce(self, rows: pa.Table) -> Transaction | None:
        tx = super().reduce(rows)
        assert tx is not None
        commit = tx.commit

        def timed_commit(*args: Any, **kwargs: Any) -> Any:
            answer = commit(*args, **kwargs)
            self._note(rows, time.monotonic_ns())
            return answer

        tx.commit = timed_commit  # type: ignore[method-assign]
        return tx

    def _note(self, rows: pa.Table, acknowledged_ns: int) -> None:
        appends, counts = np.unique(rows[APPEND_COLUMN].to_numpy(), return_counts=True)
        records = np.empty(len(appends), dtype=_RECORD)
        records["append"], records["rows"], records["acknowledged_ns"] = appends, counts, acknowledged_ns
        self._notes.write(records.tobytes())


@dataclass(frozen=True)
class Load:
    """The settings of the paced input."""

    rows_per_s: int
    rows_per_append: int
    partitions: int
    seed: int
    with_appender: bool = False
    """Whether appends go through appenders: more of them a second than one after the other would be."""

    @property
    def period_s(self) -> float:
        return self.rows_per_append / self.rows_per_s


def made_rows(load: Load, appends: int) -> list[pa.RecordBatch]:
    """The rows of each append, with its number."""
    rows = Workload(seed=load.seed, with_user_share=1.0).rows(0, appends * load.rows_per_append)
    numbers = pa.array(np.repeat(np.arange(appends), load.rows_per_append), pa.int64())
    rows = rows.append_column(INPUT_SCHEMA.field(APPEND_COLUMN), numbers).combine_chunks()
    # Each batch has memory of its own, as a producer's would have, and is not a slice of all rows.
    return [
        pa.concat_batches([rows.slice(begin, load.rows_per_append).to_batches()[0]])
        for begin in range(0, rows.num_rows, load.rows_per_append)
    ]


def paced_appends(state: StateClient, load: Load, made: Sequence[pa.RecordBatch], first: int) -> dict[int, int]:
    """Append at the set rate. Returns for each append, numbered from ``first``, when it was acknowledged, in ns."""
    if load.with_appender:
        return appender_appends(state, load, made, first)
    queue = state.queue(QUEUE)
    acknowledged: dict[int, int] = {}
    begin = time.monotonic()
    for number, rows in enumerate(made):
        time.sleep(max(0.0, begin + number * load.period_s - time.monotonic()))
        queue.append((first + number) % load.partitions, rows)
        acknowledged[first + number] = time.monotonic_ns()
    return acknowledged


def appender_appends(state: StateClient, load: Load, made: Sequence[pa.RecordBatch], first: int) -> dict[int, int]:
    """The same through one appender for each partition."""
    queue = state.queue(QUEUE)
    acknowledged: dict[int, int] = {}

    def note(number: int, positions: Future[tuple[int, int]]) -> None:
        if positions.exception() is None:
            acknowledged[number] = time.monotonic_ns()

    with ExitStack() as stack:
        appenders = [stack.enter_context(queue.appender(partition)) for partition in range(load.partitions)]
        begin = time.monotonic()
        for number, rows in enumerate(made):
            early_s = begin + number * load.period_s - time.monotonic()
            if early_s > 0:
                time.sleep(early_s)
            positions = appenders[(first + number) % load.partitions].append(rows)
            positions.add_done_callback(partial(note, first + number))
    return acknowledged


def commits(folder: Path) -> np.ndarray[Any, Any]:
    """The records of all reducers: an append, the number of its rows in a commit, and the time of that commit."""
    found = []
    for path in sorted(folder.glob("reducer-*.bin")):
        data = path.read_bytes()
        found.append(np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], dtype=_RECORD))
    return np.concatenate(found) if found else np.empty(0, dtype=_RECORD)


def row_latencies_ms(notes: np.ndarray[Any, Any], acknowledged: Mapping[int, int]) -> list[float]:
    """The latency in milliseconds of each row of the appends in ``acknowledged``."""
    first, last = min(acknowledged), max(acknowledged)
    notes = notes[(notes["append"] >= first) & (notes["append"] <= last)]
    appended_ns = np.array([acknowledged[append] for append in notes["append"].tolist()])
    took_ms: list[float] = np.repeat((notes["acknowledged_ns"] - appended_ns) / 1e6, notes["rows"]).tolist()
    return took_ms


def cpu_by_role(system: LocalSystem, controller_pid: int) -> dict[str, float]:
    """The processor time in seconds so far of all processes of each role."""
    found = {"producer": time.process_time(), "store": processes.cpu_seconds(system.store_pid)}
    for role in ("mapper", "reducer"):
        found[role] = sum(processes.cpu_seconds(pid) for pid in workers(controller_pid, role).values())
    return found


def wait_until(
    done: Any, timeout_s: float, what: str, system: LocalSystem, controller: subprocess.Popen[bytes]
) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if controller.poll() is not None:
            raise ShuffleError(f"the run ended with {controller.returncode}:\n{system.log_tail(PROCESSOR, 30)}")
        if time.monotonic() > deadline:
            raise ShuffleError(f"{what} took more than {timeout_s:.0f} s:\n{system.log_tail(PROCESSOR)}")
        time.sleep(0.05)


def floor_ms(state: StateClient, load: Load) -> dict[str, list[float]]:
    """The time in milliseconds of each part of the floor, in each round."""
    workload = Workload(seed=load.seed, with_user_share=1.0)
    state.create_queue(FLOOR_QUEUE, schema=SCHEMA, partitions=1, if_not_exists=True)
    state.create_table(FLOOR_TABLE, key=FLOOR_KEY, value=FLOOR_VALUE, if_not_exists=True)
    queue = state.queue(FLOOR_QUEUE)
    rows = workload.rows(0, load.rows_per_append)
    parts: dict[str, list[float]] = {"append": [], "flight": [], "commit": []}
    stream = raw_flight.Stream(workload, 0, load.rows_per_append, load.rows_per_append, 1)
    with raw_flight.servers([stream]) as (address,):
        client = flight.connect(address)
        for number in range(FLOOR_ROUNDS + 20):
            times = [time.monotonic()]
            queue.append(0, rows)
            times.append(time.monotonic())
            raw_flight.get(client, 0)
            raw_flight.get(client, 0)
            times.append(time.monotonic())
            with state.transaction() as tx:
                tx.write(FLOOR_TABLE, pa.table({"name": ["floor"], "value": pa.array([number], pa.int64())}))
                tx.commit()
            times.append(time.monotonic())
            if number >= 20:  # the first rounds warm up connections
                for name, took in zip(parts, np.diff(times), strict=True):
                    parts[name].append(float(took) * 1000)
    return parts


@dataclass
class Measured:
    """The measurements of one run."""

    latencies_ms: list[float]
    floor_ms: dict[str, list[float]]
    commits: int
    """The number of commits of all reducers during the measured time."""
    cpu_ms_per_append: dict[str, float]


def measure(folder: Path, load: Load, reducers: int, seconds: float) -> Measured:
    warm_count, count = int(WARM_S / load.period_s), int(seconds / load.period_s)
    made = made_rows(load, 2 * warm_count + count)
    with LocalSystem(folder) as system, system.connect() as state:
        state.create_queue(QUEUE, schema=INPUT_SCHEMA, partitions=load.partitions)
        floor = floor_ms(state, load)
        spec = {
            "processor": PROCESSOR,
            "input": {"queue": QUEUE},
            "mapper": {"class": "examples.activity:ParseLogs"},
            "reducer": {
                "class": "perf.latency:TimedCountByUser",
                "count": reducers,
                "config": {"folder": str(folder)},
            },
            "metrics": False,
        }
        controller = system.run(system.write_spec(spec))

        def all_committed(appends: int) -> bool:
            return int(commits(folder)["rows"].sum()) >= appends * load.rows_per_append

        paced_appends(state, load, made[:warm_count], 0)
        wait_until(lambda: all_committed(warm_count), START_TIMEOUT_S, "start-up", system, controller)
        paced_appends(state, load, made[warm_count : 2 * warm_count], warm_count)
        first = 2 * warm_count
        before = cpu_by_role(system, controller.pid)
        acknowledged = paced_appends(state, load, made[first:], first)
        after = cpu_by_role(system, controller.pid)
        wait_until(lambda: all_committed(len(made)), DRAIN_TIMEOUT_S, "draining", system, controller)
        controller.terminate()
        controller.wait(DRAIN_TIMEOUT_S)
        notes = commits(folder)
        floor_after = floor_ms(state, load)
    latencies = row_latencies_ms(notes, acknowledged)
    if len(latencies) != count * load.rows_per_append:
        raise ShuffleError(f"{count * load.rows_per_append} rows were appended and {len(latencies)} measured")
    return Measured(
        latencies,
        {name: times + floor_after[name] for name, times in floor.items()},
        len(np.unique(notes[notes["append"] >= first]["acknowledged_ns"])),
        {role: (after[role] - before[role]) * 1000 / count for role in before},
    )


def measured_alone(load: Load, reducers: int, seconds: float) -> Measured:
    """``measure`` in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="shuffle-perf-"))
    try:
        return measure(folder, load, reducers, seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("latency", "From append acknowledged to reducer commit acknowledged, at a paced rate.")
    parser.add_argument("--rows-per-s", type=int, default=1000)
    parser.add_argument("--rows-per-append", type=int, default=10)
    parser.add_argument("--mappers", type=int, default=2)
    parser.add_argument("--reducers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--small-appends", type=int, default=10_000, help="appends of one row a second, after the others"
    )
    args = parser.parse_args(argv)
    load = Load(args.rows_per_s, args.rows_per_append, args.mappers, args.seed)
    measured = measured_alone(load, args.reducers, args.seconds)
    found = report.percentiles(measured.latencies_ms)
    floor = measured.floor_ms
    floor_p50 = report.median(np.sum([floor["append"], floor["flight"], floor["commit"]], axis=0))
    bars = {"p50_over_floor": found["p50"] / floor_p50, "p99_ms": found["p99"]}
    details = {
        "p50_ms": found["p50"],
        "p90_ms": found["p90"],
        "max_ms": max(measured.latencies_ms),
        "floor_p50_ms": floor_p50,
        "floor_parts_p50_ms": {name: report.median(times) for name, times in floor.items()},
        "rows_per_s": args.rows_per_s,
        "rows_per_append": args.rows_per_append,
        "rows": len(measured.latencies_ms),
        "commits": measured.commits,
        "cpu_ms_per_append": measured.cpu_ms_per_append,
        "mappers": args.mappers,
        "reducers": args.reducers,
    }
    if args.small_appends:
        small_load = Load(args.small_appends, 1, args.mappers, args.seed, with_appender=True)
        small = measured_alone(small_load, args.reducers, args.seconds / 2)
        percentiles = report.percentiles(small.latencies_ms)
        bars["small_appends_p99_ms"] = percentiles["p99"]
        details["small_appends"] = {
            "p50_ms": percentiles["p50"],
            "appends_per_s": args.small_appends,
            "commits": small.commits,
            "cpu_ms_per_append": small.cpu_ms_per_append,
        }
    limits = {"p50_over_floor": "<= 1.7", "p99_ms": "<= 10", "small_appends_p99_ms": "<= 25"}
    report.publish("latency: append acknowledged to commit acknowledged", bars, details, args.json, limits)
    return 0


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
