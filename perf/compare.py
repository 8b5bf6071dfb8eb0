"""The same work on this project, Spark and Flink, on one machine in one run: how fast, and at what cost?

Two jobs on the activity logs, every row with a user:

- *count*: count and latest time per (user, cluster), exactly once, on this project alone, on this project under Spark
  (``reduce_stream``), on Spark Structured Streaming alone and on Flink's SQL;
- *repartition*: full rows by their key, on this project (with reducers that keep no state) and on Spark.

Every system has both cores, two partitions of everything, and reads the same rows in the form that it reads best. Each
is warmed up once, then all take turns, ``--rounds`` times; medians are compared. While one runs, the JVMs of the
others are stopped (see ``perf.yardsticks.compare_peer``). Each result is compared with the same
independent count before its time counts (see ``perf.yardsticks.compare_systems``, also for what the clocks measure).

- ``count_vs_spark``, ``count_vs_flink``: MB/s of this project alone over theirs;
- ``cpu_vs_spark``: processor seconds per GB of the count, over Spark's;
- ``repartition_vs_spark``: MB/s over Spark's.

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
from perf.common.workload_files import Input, write_forms
from perf.yardsticks import flink
from perf.yardsticks.compare_peer import PeerFailed
from perf.yardsticks.compare_systems import FILES_PER_BATCH, MAPPERS, FlinkCount, Ours, Run, Spark
from shuffle.errors import ShuffleError
from shuffle.examples.workload import Workload

ROWS_DEFAULT = 18_000_000
BATCH_ROWS_DEFAULT = 1_000_000
READ_ROWS = 100_000
MINUTES_DEFAULT = 6.0
LIMITS = {
    "count_vs_spark": ">= 5",
    "count_vs_flink": ">= 5",
    "cpu_vs_spark": "<= 0.33",
    "repartition_vs_spark": ">= 5",
}
OURS, UNDER_SPARK, SPARK, FLINK = "this project", "this project under Spark", "Spark", "Flink"
COUNT, REPARTITION = "count", "repartition"

Key = tuple[str, str]
"""The name of a job and the name of a system."""
Runs = dict[Key, list[Run]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("compare", "The same work on this project, Spark and Flink.")
    parser.add_argument("--rows", type=int, default=ROWS_DEFAULT, help=f"default: {ROWS_DEFAULT:,}")
    parser.add_argument(
        "--batch-rows", type=int, default=BATCH_ROWS_DEFAULT, help=f"of Spark's micro-batches: {BATCH_ROWS_DEFAULT:,}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each system is measured (default: 3)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES_DEFAULT,
        help=f"no round begins after this ({MINUTES_DEFAULT:g})",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skew", choices=["thesis", "uniform"], default="thesis", help="how often each user occurs")
    parser.add_argument("--without", action="append", default=[], choices=["spark", "flink"], help="leave one out")
    parser.add_argument("--need-flink", action="store_true", help="fail if Flink cannot be had")
    compare_pictures.add_argument(parser)
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="shuffle-compare-"))
    try:
        runs, cold, details = measure(args, folder)
    except (PeerFailed, flink.NoFlink) as error:
        raise ShuffleError(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(args, runs, cold, details)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> tuple[Runs, dict[Key, Run], dict[str, Any]]:
    python = flink_python(args)
    deadline_s = time.monotonic() + 60 * args.minutes
    workload = Workload(seed=args.seed, skew=args.skew, with_user_share=1.0)
    say("writing the input …")
    given = write_forms(
        folder, workload, args.rows, MAPPERS, READ_ROWS, args.batch_rows // FILES_PER_BATCH, python is not None
    )
    with ExitStack() as stack:
        jobs, parts = systems(args, given, folder, stack, python)
        # The first run of each system starts its processes and compiles its code; it shows how long that takes.
        cold = {key: run_and_report(key, "warming up", job) for key, job in jobs.items()}
        runs: Runs = {key: [] for key in jobs}
        rounds = 0
        while rounds < args.rounds and (not rounds or time.monotonic() < deadline_s):
            rounds += 1
            for key, job in jobs.items():
                runs[key].append(run_and_report(key, f"round {rounds}", job))
        made_of = {name: run_and_report((COUNT, FLINK), name, job).mb_per_s for name, job in parts.items()}
    details: dict[str, Any] = {
        "rows": args.rows,
        "row_bytes": given.row_bytes,
        "rounds": rounds,
        "skew": args.skew,
        "spark_batch_rows": args.batch_rows,
        **made_of,
    }
    return runs, cold, details


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


def systems(
    args: argparse.Namespace, given: Input, folder: Path, stack: ExitStack, python: Path | None
) -> tuple[dict[Key, Callable[[], Run]], dict[str, Callable[[], Run]]]:
    """The jobs of each system, in the order in which they take turns; and the parts of Flink's job, each by itself."""
    ours = Ours(given, folder, stack)
    jobs: dict[Key, Callable[[], Run]] = {(COUNT, OURS): ours.count}
    parts: dict[str, Callable[[], Run]] = {}
    if "spark" not in args.without:
        spark = Spark(given, folder, stack, ours)
        jobs[COUNT, SPARK] = spark.count
        jobs[COUNT, UNDER_SPARK] = lambda: spark.reduce_stream(args.batch_rows)
        jobs[REPARTITION, SPARK] = spark.repartition
    jobs[REPARTITION, OURS] = ours.repartition
    if python is not None:
        counted = FlinkCount(given, folder, stack, python)
        jobs[COUNT, FLINK] = counted.count
        parts["flink_count_discarded_mb_per_s"] = lambda: counted.run("count_discarded")
        parts["flink_only_reading_mb_per_s"] = lambda: counted.run("read")
    return jobs, parts


def run_and_report(key: Key, what: str, job: Callable[[], Run]) -> Run:
    """Run one job once, and print its speed."""
    run = job()
    say(f"{what}: {key[0]}, {key[1]}: {run.mb_per_s:.0f} MB/s")
    return run


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- what comes of it ------------------------------------------------------------------------------------------------


def publish(args: argparse.Namespace, runs: Runs, cold: Mapping[Key, Run], details: dict[str, Any]) -> None:
    found = summary(runs, cold)
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

    wanted: list[tuple[str, str, str, Callable[[Run], float]]] = [
        ("count_vs_spark", COUNT, SPARK, lambda run: run.mb_per_s),
        ("count_vs_flink", COUNT, FLINK, lambda run: run.mb_per_s),
        ("cpu_vs_spark", COUNT, SPARK, lambda run: run.cpu_s_per_gb),
        ("repartition_vs_spark", REPARTITION, SPARK, lambda run: run.mb_per_s),
    ]
    return {name: ratio(job, other, figure) for name, job, other, figure in wanted if (job, other) in runs}


def summary(runs: Runs, cold: Mapping[Key, Run]) -> list[dict[str, Any]]:
    """A row for each job and system."""
    return [
        {
            "job": job,
            "system": system,
            "mb_per_s": report.spread([run.mb_per_s for run in of]),
            "rows_per_s": report.median(run.rows_per_s for run in of),
            "cpu_s_per_gb": report.median(run.cpu_s_per_gb for run in of),
            "memory_peak_mb": report.median(run.memory_peak_bytes / 1e6 for run in of),
            "written_per_byte": report.median(run.written_per_byte for run in of),
            "start_up_s": cold[job, system].start_up_s,
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
            f"{speed['median']:.0f}",
            f"{speed['min']:.0f}–{speed['max']:.0f}",
            f"{row['cpu_s_per_gb']:.1f}",
            f"{row['memory_peak_mb']:,.0f}",
            f"{row['written_per_byte']:.4f}",
            f"{row['start_up_s']:.1f}",
        )
    return made


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
