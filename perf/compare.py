"""The same work on this project, Spark and Flink, on one machine in one run: how fast, and at what cost?

- *count*: count and latest time per (user, cluster) of the activity logs, every row with a user, exactly once, on this
  project alone, on this project under Spark (``reduce_stream``), on Spark Structured Streaming alone, on its real-time
  mode (which has a shuffle in memory of its own) and on Flink's SQL;
- *repartition*: full rows by their key, on this project (with reducers that keep no state) and on Spark;
- *many_reducers*: the count with 20 reducers, on Spark with 20 partitions, on Flink with a parallelism of 20;
- *large_state*: the number of orders and their sum for each of 3 million customers, over 12 million orders.

``--jobs`` chooses among them. Every system has both cores and, where nothing else is said, two partitions of all;
it reads the same rows in the form that it reads best. Systems are warmed up once, then all take turns, ``--rounds``
times; medians are compared. The large state comes last, ``--large-rounds`` times, warmed up with some of the rows.
While one runs, the JVMs of the others are stopped (see ``perf.yardsticks.compare_peer``). Each result is compared with
the same independent count before its time counts (see ``perf.yardsticks.compare_systems``, also for what the clocks
measure).

- ``count_vs_spark``, ``count_vs_spark_realtime``, ``count_vs_flink``: MB/s of this project alone over theirs;
- ``cpu_vs_spark``: processor seconds per GB of the count, over Spark's;
- ``repartition_vs_spark``, ``many_reducers_vs_spark``, ``many_reducers_vs_flink``, ``large_state_vs_spark``,
  ``large_state_vs_flink``: MB/s over theirs;
- ``large_state_written``: bytes that this project writes to storage for a byte of the orders, until it has nothing more
  to write; the copy of the orders in the input queue is not counted.

MB are those of the rows as Arrow data, with all columns, whatever a system reads of them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from perf.common import compare_pictures, report
from perf.common.orders import CUSTOMERS_DEFAULT, Orders
from perf.common.questions import ORDERS
from perf.common.workload_files import Input, write_forms
from perf.yardsticks import flink
from perf.yardsticks.compare_others import FILES_PER_BATCH, FlinkCount, FlinkProcess, Spark, SparkProcess, SparkRealTime
from perf.yardsticks.compare_peer import PeerFailed
from perf.yardsticks.compare_systems import MAPPERS, Ours, Prepared, Run, count_afresh
from perf.yardsticks.realtime_source import NoJavac
from shuffle.errors import ShuffleError
from shuffle.examples.workload import Workload

ROWS_DEFAULT = 12_000_000
REALTIME_ROWS_DEFAULT = 12_000_000
LARGE_ROWS_DEFAULT = 12_000_000
BATCH_ROWS_DEFAULT = 1_000_000
WARMING_ROWS = 1_000_000
"""How many orders the others get to warm up: all of them would take minutes, and a compiler has seen enough by then."""
READ_ROWS = 100_000
MINUTES_DEFAULT = 4.0
REDUCERS_MANY = 20
LIMITS = {
    "count_vs_spark": ">= 8",
    "count_vs_spark_realtime": ">= 8",
    "count_vs_flink": ">= 8",
    "cpu_vs_spark": "<= 0.2",
    "repartition_vs_spark": ">= 8",
    "large_state_vs_spark": ">= 6",
    "large_state_vs_flink": ">= 4",
    "large_state_written": "<= 0.35",
}
OURS, UNDER_SPARK, SPARK, FLINK = "this project", "this project under Spark", "Spark", "Flink"
REALTIME = "Spark, real-time mode"
COUNT, REPARTITION, MANY, LARGE = "count", "repartition", "many_reducers", "large_state"
JOBS = (COUNT, REPARTITION, MANY, LARGE)

Key = tuple[str, str]
"""The name of a job and the name of a system."""
Runs = dict[Key, list[Run]]
Job = Callable[[], Run]


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="shuffle-compare-"))
    try:
        runs, details = measure(args, folder)
    except (PeerFailed, flink.NoFlink) as error:
        raise ShuffleError(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(args, runs, details)
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = report.parser("compare", "The same work on this project, Spark and Flink.")
    parser.add_argument("--jobs", type=chosen, default=JOBS, help=f"which of {','.join(JOBS)} (default: all)")
    parser.add_argument("--rows", type=int, default=ROWS_DEFAULT, help=f"log lines ({ROWS_DEFAULT:,})")
    parser.add_argument(
        "--realtime-rows",
        type=int,
        default=REALTIME_ROWS_DEFAULT,
        help=f"how many of them Spark's real-time mode gets ({REALTIME_ROWS_DEFAULT:,})",
    )
    parser.add_argument("--large-rows", type=int, default=LARGE_ROWS_DEFAULT, help=f"orders ({LARGE_ROWS_DEFAULT:,})")
    parser.add_argument("--keys", type=int, default=CUSTOMERS_DEFAULT, help=f"customers ({CUSTOMERS_DEFAULT:,})")
    parser.add_argument(
        "--batch-rows", type=int, default=BATCH_ROWS_DEFAULT, help=f"of Spark's micro-batches: {BATCH_ROWS_DEFAULT:,}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each system is measured (default: 3)")
    parser.add_argument("--large-rounds", type=int, default=1, help="the same for the large state (default: 1)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES_DEFAULT,
        help=f"no round begins after this, the large state apart ({MINUTES_DEFAULT:g})",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skew", choices=["thesis", "uniform"], default="thesis", help="how often each user occurs")
    without = ["spark", "realtime", "flink"]
    parser.add_argument("--without", action="append", default=[], choices=without, help="leave one out")
    parser.add_argument("--need-flink", action="store_true", help="fail if Flink cannot be had")
    compare_pictures.add_argument(parser)
    return parser


def chosen(text: str) -> tuple[str, ...]:
    """The jobs that are named, in the order in which they are run."""
    names = text.split(",")
    unknown = sorted(set(names) - set(JOBS))
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no job {unknown[0]!r}; there are {', '.join(JOBS)}")
    return tuple(name for name in JOBS if name in names)


def measure(args: argparse.Namespace, folder: Path) -> tuple[Runs, dict[str, Any]]:
    python = flink_python(args)
    details: dict[str, Any] = {}
    runs: Runs = {}
    with ExitStack() as stack:
        peers = Peers(
            None if "spark" in args.without else SparkProcess("spark_alone", folder, stack),
            None if python is None else FlinkProcess(python, folder, stack),
        )
        if set(args.jobs) != {LARGE}:
            found, more = measure_logs(args, folder, peers)
            runs |= found
            details |= more
        if LARGE in args.jobs:
            found, more = measure_orders(args, folder, peers)
            runs |= found
            details |= more
    return runs, details


class Peers:
    """The processes of the other systems, which stay warm from one job to the next; None for one that is left out."""

    def __init__(self, spark: SparkProcess | None, flink: FlinkProcess | None) -> None:
        self.spark = spark
        self.flink = flink
        self.forms = [form for form, peer in (("parquet", spark), ("csv", flink)) if peer is not None]


def flink_python(args: argparse.Namespace) -> Path | None:
    if "flink" in args.without:
        return None
    try:
        return flink.installed()
    except flink.NoFlink as error:
        if args.need_flink:
            raise
        say(f"without Flink: {error}")
        return None


def measure_logs(args: argparse.Namespace, folder: Path, peers: Peers) -> tuple[Runs, dict[str, Any]]:
    """The jobs on the activity logs."""
    deadline_s = time.monotonic() + 60 * args.minutes
    workload = Workload(seed=args.seed, skew=args.skew, with_user_share=1.0)
    say("writing the logs …")
    file_rows = args.batch_rows // FILES_PER_BATCH
    given = write_forms(folder / "logs", workload, args.rows, MAPPERS, READ_ROWS, file_rows, peers.forms)
    with ExitStack() as stack:
        jobs = log_jobs(args, given, Ours(Prepared(given), folder, stack), peers, folder)
        jobs |= realtime_jobs(args, workload, folder, stack)
        # The first run of each system starts its processes and compiles its code; it shows how long that takes.
        cold = {key: run_and_report(key, "warming up", job) for key, job in jobs.items() if is_warmed_up(key)}
        runs, rounds = take_turns(jobs, args.rounds, deadline_s)
    details: dict[str, Any] = {
        "rows": args.rows,
        "row_bytes": given.row_bytes,
        "rounds": rounds,
        "skew": args.skew,
        "spark_batch_rows": args.batch_rows,
        "start_up_s": {f"{job}, {system}": run.start_up_s for (job, system), run in cold.items()},
    }
    if (COUNT, FLINK) in jobs and peers.flink is not None:
        details |= flink_parts(FlinkCount(given, peers.flink), COUNT)
    return runs, details


def is_warmed_up(key: Key) -> bool:
    """Whether the first run of a job does not count. Real-time mode does not count its first batch; the other jobs run
    on processes that have done much the same before."""
    return key[0] in (COUNT, REPARTITION) and key[1] != REALTIME


def log_jobs(args: argparse.Namespace, given: Input, ours: Ours, peers: Peers, folder: Path) -> dict[Key, Job]:
    """The jobs of each system, in the order in which they take turns."""
    jobs: dict[Key, Job] = {(COUNT, OURS): ours.count}
    if peers.spark is not None:
        spark = Spark(given, folder, peers.spark, ours)
        jobs[COUNT, SPARK] = spark.count
        jobs[COUNT, UNDER_SPARK] = spark.reduce_stream
        jobs[REPARTITION, SPARK] = spark.repartition
        jobs[MANY, SPARK] = lambda: spark.count(REDUCERS_MANY)
    jobs[REPARTITION, OURS] = ours.repartition
    jobs[MANY, OURS] = lambda: ours.count(REDUCERS_MANY)
    if peers.flink is not None:
        counted = FlinkCount(given, peers.flink)
        jobs[COUNT, FLINK] = counted.count
        jobs[MANY, FLINK] = lambda: counted.count(REDUCERS_MANY)
    return {key: job for key, job in jobs.items() if key[0] in args.jobs}


def realtime_jobs(args: argparse.Namespace, workload: Workload, folder: Path, stack: ExitStack) -> dict[Key, Job]:
    """The count on Spark's real-time mode, over the first of the same rows: with many of them it would take long."""
    if COUNT not in args.jobs or {"spark", "realtime"} & set(args.without):
        return {}
    rows = min(args.rows, args.realtime_rows)
    own = folder / "realtime"
    given = write_forms(own, workload, rows, MAPPERS, READ_ROWS, READ_ROWS, ["arrow"])
    try:
        return {(COUNT, REALTIME): SparkRealTime(given, own, stack).count}
    except NoJavac as error:
        say(f"without Spark's real-time mode: {error}")
        return {}


def measure_orders(args: argparse.Namespace, folder: Path, peers: Peers) -> tuple[Runs, dict[str, Any]]:
    """The large state."""
    say("writing the orders …")
    workload = Orders(args.seed, args.keys)
    file_rows = args.batch_rows // FILES_PER_BATCH
    own = folder / "orders"
    given = write_forms(own, workload, args.large_rows, MAPPERS, READ_ROWS, file_rows, peers.forms, ORDERS)
    few_rows = min(args.large_rows, WARMING_ROWS)
    few = write_forms(
        folder / "few", workload, few_rows, MAPPERS, READ_ROWS, few_rows // (2 * FILES_PER_BATCH), peers.forms, ORDERS
    )
    prepared = Prepared(given)
    jobs: dict[Key, Job] = {(LARGE, OURS): lambda: count_afresh(prepared, folder)}
    if peers.spark is not None:
        jobs[LARGE, SPARK] = Spark(given, folder, peers.spark, None).count
        run_and_report((LARGE, SPARK), "warming up", Spark(few, folder, peers.spark, None).count)
    if peers.flink is not None:
        jobs[LARGE, FLINK] = FlinkCount(given, peers.flink).count
        run_and_report((LARGE, FLINK), "warming up", FlinkCount(few, peers.flink).count)
    runs, rounds = take_turns(jobs, args.large_rounds)
    details = {
        "large_rows": args.large_rows,
        "large_row_bytes": given.row_bytes,
        "large_keys": given.expected.num_rows,
        "large_rounds": rounds,
    }
    return runs, details


def flink_parts(counted: FlinkCount, job: str) -> dict[str, float]:
    """The parts of Flink's job, each by itself, in MB/s: without printing the result, and only reading."""
    parts = {"discarded": "count_discarded", "only_reading": "read"}
    return {
        f"flink_{name}_mb_per_s": run_and_report((job, FLINK), name, lambda part=part: counted.run(part)).mb_per_s  # type: ignore[misc]
        for name, part in parts.items()
    }


def take_turns(jobs: Mapping[Key, Job], rounds_max: int, deadline_s: float = float("inf")) -> tuple[Runs, int]:
    """Run all jobs in turn, and once at least; returns how often."""
    runs: Runs = {key: [] for key in jobs}
    rounds = 0
    while rounds < rounds_max and (not rounds or time.monotonic() < deadline_s):
        rounds += 1
        for key, job in jobs.items():
            runs[key].append(run_and_report(key, f"round {rounds}", job))
    return runs, rounds


def run_and_report(key: Key, what: str, job: Job) -> Run:
    """Run one job once, and print its speed."""
    run = job()
    say(f"{what}: {key[0]}, {key[1]}: {run.mb_per_s:.0f} MB/s, {run.written_per_byte:.4f} bytes written per byte")
    return run


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# --- what comes of it ------------------------------------------------------------------------------------------------


def publish(args: argparse.Namespace, runs: Runs, details: dict[str, Any]) -> None:
    found = summary(runs, details.pop("start_up_s", {}))
    report.show(table(found))
    series = {"kind": "compare", "systems": found}
    figures = {**details, "systems": found}
    report.publish("compare: ratios of medians", bars(runs), figures, args.json, LIMITS, series)
    compare_pictures.draw_and_report(series, args.pictures)


def bars(runs: Runs) -> dict[str, float]:
    """The bars of the systems that were measured."""

    def ratio(job: str, other: str, figure: Callable[[Run], float]) -> float:
        ours = report.median(figure(run) for run in runs[job, OURS])
        return ours / report.median(figure(run) for run in runs[job, other])

    def speed(run: Run) -> float:
        return run.mb_per_s

    wanted: list[tuple[str, str, str, Callable[[Run], float]]] = [
        ("count_vs_spark", COUNT, SPARK, speed),
        ("count_vs_spark_realtime", COUNT, REALTIME, speed),
        ("count_vs_flink", COUNT, FLINK, speed),
        ("cpu_vs_spark", COUNT, SPARK, lambda run: run.cpu_s_per_gb),
        ("repartition_vs_spark", REPARTITION, SPARK, speed),
        ("many_reducers_vs_spark", MANY, SPARK, speed),
        ("many_reducers_vs_flink", MANY, FLINK, speed),
        ("large_state_vs_spark", LARGE, SPARK, speed),
        ("large_state_vs_flink", LARGE, FLINK, speed),
    ]
    found = {name: ratio(job, other, figure) for name, job, other, figure in wanted if (job, other) in runs}
    if (LARGE, OURS) in runs:
        found["large_state_written"] = report.median(run.written_per_byte for run in runs[LARGE, OURS])
    return found


def summary(runs: Runs, start_up_s: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each job and system. The start-up of a system that was not warmed up is not known."""
    return [
        {
            "job": job,
            "system": system,
            "mb_per_s": report.spread([run.mb_per_s for run in of]),
            "rows_per_s": report.median(run.rows_per_s for run in of),
            "cpu_s_per_gb": report.median(run.cpu_s_per_gb for run in of),
            "memory_peak_mb": report.median(run.memory_peak_bytes / 1e6 for run in of),
            "written_per_byte": report.median(run.written_per_byte for run in of),
            "start_up_s": start_up_s.get(f"{job}, {system}"),
        }
        for (job, system), of in sorted(runs.items())
    ]


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    made = Table(title="compare: the same work, medians (and the range of MB/s)", title_justify="left")
    for name in ("job", "system"):
        made.add_column(name)
    for name in ("rows/s", "MB/s", "range", "CPU s/GB", "memory MB", "written/byte", "start-up s"):
        made.add_column(name, justify="right")
    for row in found:
        speed = row["mb_per_s"]
        made.add_row(
            row["job"],
            row["system"],
            f"{row['rows_per_s']:,.0f}",
            f"{speed['median']:.3g}",
            f"{speed['min']:.3g}–{speed['max']:.3g}",
            f"{row['cpu_s_per_gb']:.1f}",
            f"{row['memory_peak_mb']:,.0f}",
            f"{row['written_per_byte']:.4f}",
            "" if row["start_up_s"] is None else f"{row['start_up_s']:.1f}",
        )
    return made


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
