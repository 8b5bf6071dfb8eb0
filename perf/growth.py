"""How does the cost of a row grow with the number of mappers, reducers and keys, the size of rows and of batches?

Cost is processor time per million rows, by role. For each point all processes are up and idle before the rows appear:
the rows are staged in advance and published by one transaction, and the clock runs from then to the last commit. So the
start of processes is not measured, and many mappers can be measured even on a small machine.

For each curve the role whose cost grows most along it is named, with the rows of a commit, since these share the fixed
costs. ``thesis`` is the activity job as in the thesis (most lines without a user, which the mappers drop): the
extrapolation to 450 mappers, 10 reducers and 3.5 GB/s is made from its costs by role.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Table

from perf.common import compare_pictures, report
from perf.common.keyed_rows import ROW_BYTES, KeyedRows
from perf.common.progress import Buckets, committed
from perf.common.workload_files import in_turn
from perf.parts.growth_load import Load, extrapolated
from perf.yardsticks.compare_usage import private_bytes
from shuffle.durable.tables import mappers_group, reducers_group
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.activity import KEY_COLUMNS
from shuffle.examples.local import LocalSystem, workers
from shuffle.examples.workload import Workload
from shuffle.statestore import StateClient

POLL_S = 0.05
UP_TIMEOUT_S = 240.0
DONE_TIMEOUT_S = 240.0
STAGED_TTL_MS = 600_000
STOP_TIMEOUT_S = 60.0
BATCH_ROWS = 100_000
KEYS = 25_000
BYTES_PER_POINT = 230_000_000
ROWS_PER_POINT = 2_000_000
THESIS_ROWS = 6_000_000
PROCESSES_MAX = 8
"""The most processes of one role: more workers than this share them (``per_process``), each mapper with as much memory
as it has alone."""
BATCHES_PER_POINT = 400
"""The number of batches of a point with small batches: enough to measure the cost of one."""

SHORT: Mapping[str, tuple[int, ...]] = {
    "mappers": (1, 4, 16),
    "reducers": (1, 4, 16),
    "keys": (1_000, 1_000_000),
    "row_bytes": (10, 115, 10_000),
    "batch_rows": (1_000, 100_000),
}
FULL: Mapping[str, tuple[int, ...]] = {
    "mappers": (1, 2, 4, 8, 16, 32, 64),
    "reducers": (1, 2, 4, 8, 16, 32, 64),
    "keys": (1_000, 10_000, 100_000, 1_000_000, 10_000_000),
    "row_bytes": (10, 115, 1_000, 10_000, 100_000),
    "batch_rows": (100, 1_000, 10_000, 100_000),
}
ROLES = ("store", "mapper", "reducer")


@dataclass(frozen=True)
class Point:
    """One point on one curve: the settings of one run."""

    axis: str
    value: int
    mappers: int = 2
    reducers: int = 2
    keys: int = KEYS
    row_bytes: int = ROW_BYTES
    batch_rows: int = BATCH_ROWS

    @property
    def rows(self) -> int:
        if self.axis == "thesis":
            return THESIS_ROWS
        rows = min(ROWS_PER_POINT, BYTES_PER_POINT // self.row_bytes, self.batch_rows * BATCHES_PER_POINT)
        return max(rows, self.mappers)

    def batches(self, seed: int) -> Iterable[tuple[int, pa.Table]]:
        if self.axis == "thesis":
            return in_turn(Workload(seed=seed), self.rows, self.mappers, self.batch_rows)
        # No larger than what a read may return, whatever the rows' size.
        rows = max(1, min(self.batch_rows, 16_000_000 // self.row_bytes))
        return KeyedRows(seed, self.keys, self.row_bytes).in_turn(self.rows, self.mappers, rows)

    @property
    def job(self) -> tuple[str, str, list[str]]:
        """The classes of mapper and reducer, and the columns of the key."""
        if self.axis == "thesis":
            return "examples.activity:ParseLogs", "examples.activity:DeclaredCountByUser", KEY_COLUMNS
        reducer = "perf.common.keyed_rows:CountByKey" if self.axis == "keys" else "perf.common.jobs:KeepNothing"
        return "perf.common.keyed_rows:ByKey", reducer, ["key"]


@dataclass(frozen=True)
class Cost:
    """The measured cost of one point."""

    point: Point
    rows: int
    input_bytes: int
    shuffled_rows: int
    seconds: float
    cpu_s: Mapping[str, float]
    commits: int
    memory_bytes: Mapping[str, float]
    """The average memory of one process of each role, in bytes."""
    written_bytes: int

    def cost(self, role: str) -> float:
        """The cost that is compared along a curve: that of a row, or that of a byte where the size of rows grows."""
        return self.cpu_s[role] / (self.input_bytes if self.point.axis == "row_bytes" else self.rows)

    def us_per_row(self, role: str | None = None) -> float:
        cpu_s = sum(self.cpu_s.values()) if role is None else self.cpu_s[role]
        return 1e6 * cpu_s / self.rows

    def as_details(self) -> dict[str, Any]:
        return {
            "value": self.point.value,
            "rows": self.rows,
            "seconds": self.seconds,
            "us_per_row": self.us_per_row(),
            **{f"{role}_us_per_row": self.us_per_row(role) for role in ROLES},
            "cpu_s_per_gb": 1e9 * sum(self.cpu_s.values()) / self.input_bytes,
            "rows_per_commit": self.shuffled_rows / max(1, self.commits),
            **{f"{role}_memory_mb": size / 1e6 for role, size in self.memory_bytes.items()},
        }


def points(args: argparse.Namespace) -> list[Point]:
    chosen = FULL if args.full else SHORT
    found = [Point("thesis", 0)]
    for axis, values in chosen.items():
        for value in values:
            there: dict[str, Any] = {axis: value}
            found.append(Point(axis, value, **there))
    return [point for point in found if not args.only or point.axis in args.only]


# --- one point -------------------------------------------------------------------------------------------------------


def measure(folder: Path, point: Point, seed: int) -> Cost:
    with LocalSystem(folder) as system, system.connect() as state:
        name = "growth"
        mapper, reducer, key = point.job
        staged, buckets, given = stage(state, name, point, key, seed)
        rows_max = max(point.batch_rows, 1)
        per_process = -(-point.mappers // PROCESSES_MAX)
        spec = {
            "processor": name,
            "input": {"queue": name},
            "mapper": {
                "class": mapper,
                "memory": f"{64 * per_process}MiB",
                "batch_rows_max": rows_max,
                "per_process": per_process,
            },
            "reducer": {
                "class": reducer,
                "count": point.reducers,
                "per_process": -(-point.reducers // PROCESSES_MAX),
                "fetch_rows_max": rows_max,
                "batch_rows_max": min(5 * rows_max, 500_000),
            },
            "metrics": False,
        }
        controller = system.run(system.write_spec(spec), "--no-check")
        try:
            wait_until_up(system, state, name, controller, point)
            return run(system, state, controller, point, staged, buckets, given)
        finally:
            controller.terminate()
            try:
                controller.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                controller.kill()
                controller.wait()


Staged = list[tuple[int, str]]


def stage(
    state: StateClient, queue: str, point: Point, key: list[str], seed: int
) -> tuple[Staged, Buckets, tuple[int, int]]:
    """Stage all rows. Returns their staged ids, the reducer of each row, and the number of rows and bytes."""
    buckets = Buckets(point.mappers, point.reducers, key)
    staged: Staged = []
    rows = size_bytes = 0
    for partition, batch in point.batches(seed):
        if not staged:
            state.create_queue(queue, schema=batch.schema, partitions=point.mappers)
        staged.append((partition, state.queue(queue).stage(batch, STAGED_TTL_MS)))
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        buckets.add(partition, batch if point.axis != "thesis" else batch.filter(pc.is_valid(batch["user"])))
    return staged, buckets.close(), (rows, size_bytes)


def wait_until_up(
    system: LocalSystem, state: StateClient, name: str, controller: subprocess.Popen[bytes], point: Point
) -> None:
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    wanted = {mappers_group(name): point.mappers, reducers_group(name): point.reducers}
    while any(len(state.leases.members(group)) < count for group, count in wanted.items()):
        if controller.poll() is not None or time.monotonic() > deadline_s:
            raise ShuffleError(f"the workers did not all start:\n{system.log_tail(name, 30)}")
        time.sleep(POLL_S)
    time.sleep(1.0)  # connections are made, and nothing is left to do


def run(
    system: LocalSystem,
    state: StateClient,
    controller: subprocess.Popen[bytes],
    point: Point,
    staged: Staged,
    buckets: Buckets,
    given: tuple[int, int],
) -> Cost:
    """Publish the staged rows, and wait until the last of them is committed."""
    pids = {"store": [system.store_pid]}
    pids |= {role: sorted(set(workers(controller.pid, role).values())) for role in ("mapper", "reducer")}
    everyone = [pid for of in pids.values() for pid in of]
    commits_before = state.stats()["total"]["commits"]
    written_before = sum(processes.written_bytes(pid) for pid in everyone)
    cpu_before = {role: sum(processes.cpu_seconds(pid) for pid in of) for role, of in pids.items()}
    begin_s = time.monotonic()
    with state.transaction() as tx:
        for partition, staged_id in staged:
            tx.publish("growth", partition, staged_id)
        tx.commit()
    while committed(state, "growth", buckets) < buckets.rows:
        if controller.poll() is not None or time.monotonic() - begin_s > DONE_TIMEOUT_S:
            raise ShuffleError(f"{point.axis} {point.value}: not done:\n{system.log_tail('growth', 30)}")
        time.sleep(POLL_S)
    seconds = time.monotonic() - begin_s
    cpu_after = {role: sum(processes.cpu_seconds(pid) for pid in of) for role, of in pids.items()}
    return Cost(
        point=point,
        rows=given[0],
        input_bytes=given[1],
        shuffled_rows=buckets.rows,
        seconds=seconds,
        cpu_s={role: cpu_after[role] - cpu_before[role] for role in pids},
        commits=state.stats()["total"]["commits"] - commits_before,
        memory_bytes={role: sum(private_bytes(pid) for pid in of) / len(of) for role, of in pids.items()},
        written_bytes=sum(processes.written_bytes(pid) for pid in everyone) - written_before,
    )


# --- all of them -----------------------------------------------------------------------------------------------------


def bends(costs: Sequence[Cost]) -> str:
    """A sentence that names the role whose cost grows along a curve, or says that the cost does not grow."""
    totals = [sum(cost.cost(role) for role in ROLES) for cost in costs]
    dearest, cheapest = costs[totals.index(max(totals))], costs[totals.index(min(totals))]
    if max(totals) < 1.25 * min(totals):
        return "flat"
    grown = {role: dearest.cost(role) - cheapest.cost(role) for role in ROLES}
    role = max(grown, key=lambda name: grown[name])
    share = grown[role] / (max(totals) - min(totals))
    commit_rows = [cost.shuffled_rows / max(1, cost.commits) for cost in (cheapest, dearest)]
    return (
        f"the {role}: {share:.0%} of what {dearest.point.value:,} costs more than {cheapest.point.value:,}; "
        f"a commit has {commit_rows[1]:,.0f} rows there, {commit_rows[0]:,.0f} here"
    )


def table(curves: Mapping[str, Sequence[Cost]]) -> Table:
    made = Table(title="growth: processor µs per row", title_justify="left")
    for name in ("axis", "value", "all", *ROLES, "CPU s/GB", "rows/commit"):
        made.add_column(name, justify="left" if name == "axis" else "right")
    for axis, costs in curves.items():
        for cost in costs:
            found = cost.as_details()
            by_role = (f"{cost.us_per_row(role):.3f}" for role in ROLES)
            rest = (f"{found['cpu_s_per_gb']:.1f}", f"{found['rows_per_commit']:,.0f}")
            made.add_row(axis, f"{cost.point.value:,}", f"{cost.us_per_row():.3f}", *by_role, *rest)
        made.add_section()
    return made


def load_of(cost: Cost) -> Load:
    """The measured costs that the extrapolation is made from."""
    return Load(
        input_bytes=cost.input_bytes,
        rows=cost.rows,
        shuffled_rows=cost.shuffled_rows,
        cpu_s=cost.cpu_s,
        memory_bytes=cost.memory_bytes,
        commits=cost.commits,
        written_bytes=cost.written_bytes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("growth", "How does the cost of a row grow, and what with?")
    parser.add_argument("--full", action="store_true", help="all points of every curve (five minutes instead of two)")
    parser.add_argument("--only", action="append", default=[], choices=[*FULL, "thesis"], help="only this curve")
    parser.add_argument("--seed", type=int, default=1)
    compare_pictures.add_argument(parser)
    args = parser.parse_args(argv)
    curves: dict[str, list[Cost]] = {}
    for point in points(args):
        folder = Path(tempfile.mkdtemp(prefix="shuffle-growth-"))
        try:
            cost = measure(folder, point, args.seed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{point.axis} {point.value:,}: {cost.us_per_row():.2f} µs a row", file=sys.stderr, flush=True)
        curves.setdefault(point.axis, []).append(cost)
    bars = {
        f"{axis}_growth": costs[-1].us_per_row() / costs[0].us_per_row()
        for axis, costs in curves.items()
        if axis in ("mappers", "reducers", "keys")
    }
    details: dict[str, Any] = {f"bends_{axis}": bends(costs) for axis, costs in curves.items() if len(costs) > 1}
    if "thesis" in curves:
        details["extrapolated"] = extrapolated(load_of(curves["thesis"][0]))
    found = {axis: [cost.as_details() for cost in costs] for axis, costs in curves.items()}
    series = {"kind": "growth", "curves": found}
    report.show(table(curves))
    report.publish("growth", bars, {**details, "curves": found}, args.json, None, series)
    compare_pictures.draw_and_report(series, args.pictures)
    return 0


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
