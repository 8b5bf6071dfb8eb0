"""What do the other workers notice when a mapper or a reducer is down, and how soon does it catch up afterwards?

The thesis's experiments: the activity job under a steady load, first with one mapper down for a while, then with one
reducer down. A worker that goes down is paused (SIGSTOP) and killed at the end of the outage, as in the thesis, or with
``--how kill`` killed (SIGKILL) at its beginning; either way a new instance is started when the outage ends. All workers
are started one by one, without a controller, which would start a dead one again at once.

The input is paced at half of this machine's capacity. That is measured first, with all processes running as later on:
rows are appended as fast as the mappers read them, and the rows that all reducers have committed are counted.

    mapper_down_others    input rows/s of the other mappers that all reducers have committed, during over before
    mapper_catch_up_s     from the start of the mapper's new process until it reads rows no later than before the outage
    reducer_down_others   rows/s committed by the other reducers, during over before

At the end the input stops, everything is committed, and the table is compared with an independent count.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perf.common import pictures, report
from perf.common.paced import PacedInput
from perf.common.sampling import PERIOD_S, Sampler, Series
from perf.common.timed import read_lags
from shuffle.errors import ShuffleError
from shuffle.examples.activity import COLUMNS, TABLE
from shuffle.examples.local import LocalSystem
from shuffle.examples.workload import Difference, Workload, difference
from shuffle.limits import MIB

PROCESSOR = "failures"
QUEUE = "paced"
APPEND_ROWS = 20_000
UNREAD_ROWS_MAX = 400_000
"""The most unread rows of one partition while the capacity is measured: more than a mapper reads between two
samples."""

START_TIMEOUT_S = 60.0
WARM_UP_S, CAPACITY_S = 5.0, 10.0
SETTLE_S = 5.0
BEFORE_S = 20.0
AFTER_S_MIN = 20.0
CALM_S = 3.0
"""The time in seconds for which everything must be as before the outage until the outage counts as over."""
LAG_NORMAL_S_MIN = 0.5
"""The read lag in seconds below which a mapper is never late: it is the time between two samples of everything else."""

MEMORY_SHARE = 0.4
"""The share of the machine's memory that all windows together may take. They hold the rows of an outage without
spilling."""
MB = 1_000_000


@dataclass(frozen=True)
class Outage:
    """One worker, down from ``begin_s`` to ``end_s``; observed from ``before_s`` to ``after_s``."""

    role: str
    index: int
    before_s: float
    begin_s: float
    end_s: float
    after_s: float


class Experiment:
    """A running processor, its input, and the threads that sample its workers."""

    def __init__(self, args: argparse.Namespace, system: LocalSystem, state: Any) -> None:
        self.args = args
        self._system = system
        self._state = state
        workload = Workload(seed=args.seed)
        self.memory_bytes = int(MEMORY_SHARE * report.machine()["memory_bytes"] / args.mappers)
        self.input = PacedInput(state, QUEUE, workload, args.mappers, APPEND_ROWS)
        self.sampler = Sampler(state, PROCESSOR, args.mappers, args.reducers)
        self._workers: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._spec = Path()

    # -- the processor ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._spec = self._system.write_spec(
            {
                "processor": PROCESSOR,
                "input": {"queue": QUEUE},
                "mapper": {
                    "class": "perf.common.timed:TimedParseLogs",
                    "memory": f"{self.memory_bytes // MIB}MiB",
                    "config": {"folder": str(self._system.folder)},
                },
                "reducer": {"class": "examples.activity:CountByUser", "count": self.args.reducers},
            }
        )
        counts = {"mapper": self.args.mappers, "reducer": self.args.reducers}
        for role, count in counts.items():
            for index in range(count):
                self._start(role, index)
        self.wait_until(
            lambda: all(self.sampler.seen(role) == count for role, count in counts.items()), START_TIMEOUT_S, "starting"
        )

    def _start(self, role: str, index: int) -> None:
        self._workers[role, index] = self._system.worker(self._spec, role, index)

    def wait_until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not done():
            self.watch(0.1)
            if time.monotonic() > deadline_s:
                logs = "\n".join(self._system.log_tail(f"{role}-{index}", 3) for role, index in self._workers)
                raise ShuffleError(f"{what} took more than {timeout_s:.0f} s:\n{logs}")

    def watch(self, seconds: float, down: tuple[str, int] | None = None) -> None:
        """Let time pass. A worker that ends by itself, or an input that fails, ends the experiment."""
        end_s = time.monotonic() + seconds
        while True:
            for (role, index), worker in self._workers.items():
                if worker.poll() is not None and (role, index) != down:
                    log = self._system.log_tail(f"{role}-{index}")
                    raise ShuffleError(f"{role} {index} ended with {worker.returncode}:\n{log}")
            if self.input.failure is not None:
                raise self.input.failure
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.5))

    # -- load ---------------------------------------------------------------------------------------------------------

    def done_rows(self, at_s: float) -> float:
        """The number of input rows, of all mappers together, that all reducers have committed."""
        return float(sum(series.at("done_rows", at_s) for series in self.sampler.mappers))

    def capacity_rows_per_s(self) -> float:
        """The input rows per second that this machine can append, map, shuffle and commit at the same time."""
        mappers = self.sampler.mappers
        self.input.append_while(lambda p: self.input.appended_rows(p) - mappers[p].last("read_rows") < UNREAD_ROWS_MAX)
        self.watch(WARM_UP_S)
        begin_s = time.monotonic()
        self.watch(CAPACITY_S)
        end_s = begin_s + CAPACITY_S - PERIOD_S
        found = (self.done_rows(end_s) - self.done_rows(begin_s)) / (end_s - begin_s)
        self.input.rest()
        self.wait_until(self.is_drained, START_TIMEOUT_S, "committing what the capacity was measured with")
        return found

    def check_room(self, rows_per_s: float) -> None:
        """Raise if the disk has no room for the input of an outage: while a reducer is down, and nothing is spilled,
        none of it can be trimmed."""
        input_bytes = rows_per_s * self.input.row_bytes * (self.args.minutes * 60 + AFTER_S_MIN)
        free_bytes = shutil.disk_usage(self._system.folder).free
        if input_bytes > 0.9 * free_bytes:
            raise ShuffleError(
                f"the input of one outage has {input_bytes / 1e9:.1f} GB, and {self._system.folder} has room for "
                f"{free_bytes / 1e9:.1f} GB: take fewer --minutes or --rows-per-s, or set TMPDIR to a larger disk"
            )

    def is_drained(self) -> bool:
        return all(
            series.last("done_rows") >= self.input.appended_rows(partition)
            for partition, series in enumerate(self.sampler.mappers)
        )

    # -- outages ------------------------------------------------------------------------------------------------------

    def outage(self, role: str, index: int) -> Outage:
        """Take one worker down and start it again, under load; returns when everything is as before."""
        minutes, paused = self.args.minutes, self.args.how == "pause"
        before_s = time.monotonic()
        self.watch(BEFORE_S)
        worker = self._workers[role, index]
        worker.send_signal(signal.SIGSTOP if paused else signal.SIGKILL)
        begin_s = time.monotonic()
        self.watch(minutes * 60, down=(role, index))
        worker.kill()
        worker.wait()
        end_s = time.monotonic()
        self._start(role, index)
        self.watch(AFTER_S_MIN)
        windows_before = max(self._window_bytes(before_s, begin_s))
        calm_s = AFTER_S_MIN + 2 * minutes * 60
        self.wait_until(
            lambda: max(self._window_bytes(time.monotonic() - CALM_S, time.monotonic())) <= windows_before,
            calm_s,
            f"catching up after {role} {index} was down",
        )
        self.watch(CALM_S)
        return Outage(role, index, before_s, begin_s, end_s, time.monotonic())

    def _window_bytes(self, begin_s: float, end_s: float) -> list[float]:
        """The samples of all windows in that time; unknown ones count as infinite."""
        found = [x for series in self.sampler.mappers for x in series.between("window_bytes", begin_s, end_s)]
        return [float(x) for x in np.nan_to_num(found, nan=np.inf)] or [np.inf]

    def verdict(self) -> Difference:
        self.input.rest()
        self.wait_until(self.is_drained, START_TIMEOUT_S, "committing the rest")
        return difference(self.input.oracle(), self._state.scan(TABLE).read_all().select(COLUMNS))


# -- what came of it --------------------------------------------------------------------------------------------------


def others_ratio(all_series: Sequence[Series], name: str, outage: Outage) -> float:
    """The rate of a counter of the other workers during the outage, over their rate before it. The first sample of each
    period is left out."""
    others = [series for index, series in enumerate(all_series) if index != outage.index]
    during = sum(series.rate(name, outage.begin_s + PERIOD_S, outage.end_s) for series in others)
    return during / sum(series.rate(name, outage.before_s + PERIOD_S, outage.begin_s) for series in others)


def mapper_figures(outage: Outage, lags: Sequence[tuple[Any, Any]], mappers: Sequence[Series]) -> dict[str, float]:
    times_s, lags_s = lags[outage.index]
    before = lags_s[(times_s >= outage.before_s) & (times_s < outage.begin_s)]
    after = times_s >= outage.end_s
    normal_s = max(float(before.max(initial=0.0)), LAG_NORMAL_S_MIN)
    back = times_s[after & (lags_s <= normal_s)]
    if not len(back):
        raise ShuffleError(f"mapper {outage.index} did not catch up within {outage.after_s - outage.end_s:.0f} s")
    others = [lag[(t >= outage.begin_s) & (t < outage.end_s)] for m, (t, lag) in enumerate(lags) if m != outage.index]
    window = mappers[outage.index].between("window_bytes", outage.end_s, outage.after_s)
    return {
        "catch_up_s": float(back[0] - outage.end_s),
        "first_read_s": float(times_s[after][0] - outage.end_s),
        "lag_before_s": report.median(before),
        "lag_before_s_max": float(before.max(initial=0.0)),
        "lag_s_max": float(lags_s[after].max()),
        "others_lag_s": report.median(np.concatenate(others)),
        "others_lag_s_max": float(np.concatenate(others).max()),
        "window_mb_max": float(np.nanmax(window)) / MB,
    }


def reducer_figures(outage: Outage, mappers: Sequence[Series], reducers: Sequence[Series]) -> dict[str, float]:
    """How many bytes the rows of the reducer took in the windows, and when they were gone again."""
    windows = [series.between("window_bytes", outage.before_s, outage.begin_s) for series in mappers]
    before = np.nanmax(np.concatenate(windows))
    back = [
        min(
            time_s
            for time_s, window in zip(series.times_s, series.values["window_bytes"], strict=False)
            if time_s >= outage.end_s and window <= before
        )
        for series in mappers
    ]
    during = [series.between("window_bytes", outage.begin_s, outage.after_s) for series in mappers]
    me = reducers[outage.index]
    return {
        "windows_back_s": max(back) - outage.end_s,
        "window_before_mb_max": float(before) / MB,
        "window_mb_max": float(np.nanmax(np.concatenate(during))) / MB,
        "mb_per_s_before": me.rate("reduced_bytes", outage.before_s, outage.begin_s) / MB,
        "mb_per_s_after_max": float(np.max(np.diff(me.at("reduced_bytes", np.arange(outage.end_s, outage.after_s)))))
        / MB,
    }


def drawn_series(outages: Sequence[Outage], experiment: Experiment, lags: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """The series for the pictures, one value a second, in seconds from the first moment observed."""
    zero_s = outages[0].before_s
    grid_s = np.arange(zero_s, outages[-1].after_s, 1.0)

    def rates(series: Series, name: str, unit: float) -> list[float]:
        return [round(float(x) / unit, 3) for x in np.diff(series.at(name, grid_s))]

    def windows(series: Series) -> list[float | None]:
        # The nearest sample, not one in between: next to an unknown one everything would be unknown.
        nearest = np.searchsorted(series.times_s, grid_s).clip(0, len(series.times_s) - 1)
        found = np.array(series.values["window_bytes"])[nearest] / MB
        return [None if np.isnan(x) else round(float(x), 3) for x in found]

    def worst_lags(times_s: Any, lags_s: Any) -> list[float | None]:
        second = np.floor(times_s - zero_s).astype(int)
        found = [lags_s[second == n] for n in range(len(grid_s))]
        return [round(float(x.max()), 4) if len(x) else None for x in found]

    return {
        "kind": "failures",
        "how": experiment.args.how,
        "outages": [
            {
                "role": o.role,
                "index": o.index,
                **{name: round(getattr(o, name) - zero_s, 2) for name in ("before_s", "begin_s", "end_s", "after_s")},
            }
            for o in outages
        ],
        "reducer_mb_per_s": [rates(series, "reduced_bytes", MB) for series in experiment.sampler.reducers],
        "mapper_rows_per_s": [rates(series, "done_rows", 1.0) for series in experiment.sampler.mappers],
        "window_mb": [windows(series) for series in experiment.sampler.mappers],
        "read_lag_s": [worst_lags(*lag) for lag in lags],
    }


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    """Run the experiments; returns bars, details and series."""
    with LocalSystem(folder) as system, system.connect() as state:
        experiment = Experiment(args, system, state)
        with experiment.sampler, experiment.input as paced:
            experiment.start()
            capacity = experiment.capacity_rows_per_s() if args.rows_per_s is None else None
            rate = args.rows_per_s if capacity is None else args.load * capacity
            experiment.check_room(rate)
            paced.at_rate(rate)
            experiment.watch(SETTLE_S)
            outages = [experiment.outage("mapper", args.mapper), experiment.outage("reducer", args.reducer)]
            late_s_max = paced.late_s_max
            verdict = experiment.verdict()
        lags = [read_lags(folder, mapper) for mapper in range(args.mappers)]
    mappers, reducers = experiment.sampler.mappers, experiment.sampler.reducers
    mapper = mapper_figures(outages[0], lags, mappers)
    reducer = reducer_figures(outages[1], mappers, reducers)
    bars = {
        "mapper_down_others": others_ratio(mappers, "done_rows", outages[0]),
        "mapper_catch_up_s": mapper["catch_up_s"],
        "reducer_down_others": others_ratio(reducers, "reduced_rows", outages[1]),
        "lost": verdict.lost,
        "duplicated": verdict.duplicated,
    }
    details = {
        "mappers": args.mappers,
        "reducers": args.reducers,
        "outage_s": args.minutes * 60,
        "how": args.how,
        "capacity_rows_per_s": capacity if capacity is not None else "not measured",
        "rows_per_s": rate,
        "input_mb_per_s": rate * paced.row_bytes / MB,
        "input_late_s_max": late_s_max,
        "memory_mib": experiment.memory_bytes // MIB,
        "mapper_down": mapper,
        "reducer_down": reducer,
        "verdict": str(verdict),
    }
    series = drawn_series(outages, experiment, lags)
    return bars, details, {**series, "mapper_catch_up_s": round(mapper["catch_up_s"], 2)}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser("failures", "A mapper and a reducer down for a while, under a steady load.")
    parser.add_argument("--minutes", type=float, default=1.0, help="length of an outage (default: 1; in the thesis 10)")
    parser.add_argument(
        "--how", choices=["pause", "kill"], default="pause", help="pause and kill at the end, or kill at the beginning"
    )
    parser.add_argument("--rows-per-s", type=float, help="input rate (default: half of what this machine can do)")
    parser.add_argument("--load", type=float, default=0.5, help="of what this machine can do (default: 0.5)")
    parser.add_argument("--mappers", type=int, default=8)
    parser.add_argument("--reducers", type=int, default=4)
    parser.add_argument("--mapper", type=int, default=0, help="the mapper that goes down (default: 0)")
    parser.add_argument("--reducer", type=int, default=0, help="the reducer that goes down (default: 0)")
    parser.add_argument("--seed", type=int, default=1)
    pictures.add_argument(parser)
    args = parser.parse_args(argv)
    if not (args.minutes > 0 and 0 < args.load <= 1 and (args.rows_per_s is None or args.rows_per_s > 0)):
        parser.error("--minutes and --rows-per-s are above 0, --load is above 0 and at most 1")
    if args.mappers < 2 or args.reducers < 2:
        parser.error("there must be others when one is down: at least 2 mappers and 2 reducers")
    if not (0 <= args.mapper < args.mappers and 0 <= args.reducer < args.reducers):
        parser.error("--mapper and --reducer count from 0 and are below --mappers and --reducers")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    folder = Path(tempfile.mkdtemp(prefix="shuffle-perf-"))
    try:
        bars, details, series = measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    limits = {
        "mapper_down_others": ">= 0.95",
        "mapper_catch_up_s": "<= 10",
        "reducer_down_others": ">= 0.95",
        "lost": "0",
        "duplicated": "0",
    }
    report.publish("failures: one worker down at half load", bars, details, args.json, limits, series)
    pictures.draw_and_report(series, args.pictures)
    return 0


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
