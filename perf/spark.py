"""What does the Spark connector cost, and what does it save?

All in one Spark session on the activity logs, every row with a user. Each query runs a few micro-batches; the first,
which starts Python workers and compiles, is not counted.

- ``source_ratio``: the source's MB/s into ``noop``, its rows mapped and waiting in the mappers' windows, over those of
  a bare Python data source that yields such Arrow batches from memory;
- ``sink_ratio``: the MB/s of that bare source into the sink, over the bare source into a bare Arrow writer that
  discards the rows;
- ``reduce_stream_speed_ratio``: the keyed count and latest time through ``reduce_stream`` (queue, mappers, shuffle and
  state table) over the same by Spark alone (Parquet files, ``groupBy``, its own shuffle and state store);
- ``reduce_stream_vs_standalone``: the same through ``reduce_stream`` over the same spec with ``shuffle run``, which has
  reducers of its own; both clocks run from the first commit that is seen to the last;
- ``reduce_stream_bytes_ratio``: bytes written to storage by all processes for a byte of input, through
  ``reduce_stream``; ``spark_bytes_ratio`` is the same for Spark alone, with its shuffle files, state store and
  checkpoint; ``reduce_stream_vs_spark_bytes`` is the first divided by the second.

Each pair is run ``--rounds`` times in turn, and the medians are compared. Both counts are checked against an oracle.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from perf.common import report
from perf.common.progress import Buckets, CommitClock, fill_with, forget, watched
from perf.yardsticks.spark_bare import BareSource
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.activity import COLUMNS, KEY_COLUMNS, TABLE
from shuffle.examples.generate import fill
from shuffle.examples.local import PROJECT, LocalSystem
from shuffle.examples.spark_pipeline import Mappers
from shuffle.examples.workload import Workload, difference, oracle
from shuffle.spark_connector import reduce_stream
from shuffle.spark_connector.source.processor import Processor
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.spec.config import load_spec
from shuffle.statestore import StateClient

MB = 1_000_000
MAPPERS = 2
REDUCERS = 2
SLICE_ROWS = 50_000
QUERY_TIMEOUT_S = 300
KEYED_MEMORY = "128MiB"
"""The size of a mapper's window in the keyed count, as in ``perf.compare``."""
LIMITS = {
    "source_ratio": ">= 0.9",
    "sink_ratio": ">= 0.9",
    "reduce_stream_bytes_ratio": "<= 0.1",
    "reduce_stream_speed_ratio": ">= 3",
    "reduce_stream_vs_standalone": ">= 0.6",
}


@dataclass
class Bench:
    """One Spark session, one store, and the measurements so far."""

    spark: SparkSession
    system: LocalSystem
    state: StateClient
    batches: int
    batch_rows: int
    keyed_batches: int
    figures: dict[str, list[float]] = field(default_factory=dict)
    _names: int = 0

    @property
    def rows(self) -> int:
        return self.batches * self.batch_rows

    def name(self, what: str) -> str:
        self._names += 1
        return f"{what}-{self._names}"

    def folder(self, what: str) -> str:
        return str(self.system.folder / self.name(what))

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def bare(self) -> DataFrame:
        return (
            self.spark.readStream.format("bare")
            .options(batches=self.batches, rows=self.batch_rows, partitions=REDUCERS, slice=SLICE_ROWS)
            .load()
        )

    def run(self, frame: DataFrame, sink: str, **options: Any) -> list[dict[str, Any]]:
        query = (
            frame.writeStream.format(sink)
            .options(checkpointLocation=self.folder("checkpoint"), **options)
            .trigger(availableNow=True)
            .start()
        )
        return finished(query)


def finished(query: StreamingQuery) -> list[dict[str, Any]]:
    if not query.awaitTermination(QUERY_TIMEOUT_S):
        query.stop()
        raise ShuffleError(f"a query took more than {QUERY_TIMEOUT_S} s")
    return [json.loads(progress.json) for progress in query.recentProgress]


def seconds_after_first(progress: Sequence[dict[str, Any]]) -> float:
    """The time in seconds from the end of the first micro-batch to the end of the last."""

    def end(one: dict[str, Any]) -> float:
        began = dt.datetime.fromisoformat(one["timestamp"].replace("Z", "+00:00")).timestamp()
        return began + float(one["durationMs"]["triggerExecution"]) / 1000

    worked = [one for one in progress if "addBatch" in one["durationMs"]]
    if len(worked) < 2:
        raise ShuffleError("the query had one micro-batch only: there is nothing to measure after the first")
    return end(worked[-1]) - end(worked[0])


def mb_per_s(bench: Bench, progress: Sequence[dict[str, Any]], bytes_total: int) -> float:
    worked = sum(1 for one in progress if "addBatch" in one["durationMs"])
    return bytes_total * (worked - 1) / worked / seconds_after_first(progress) / MB


# --- the processor behind the source and reduce_stream ---------------------------------------------------------------


def spec_of(name: str, queue: str, memory: str) -> dict[str, Any]:
    return {
        "processor": name,
        "input": {"queue": queue},
        "mapper": {"class": "examples.activity:ParseLogs", "memory": memory, "batch_rows_max": SLICE_ROWS * REDUCERS},
        "reducer": {"class": "examples.activity:CountByUser", "count": REDUCERS},
        "metrics": False,
    }


def mappers_of(bench: Bench, name: str, memory: str) -> Mappers:
    return Mappers(bench.system, bench.system.write_spec(spec_of(name, name, memory)), MAPPERS)


def wait_mapped(mappers: Mappers, rows: int) -> None:
    """Wait until all rows are in the windows."""
    spec = load_spec(mappers.spec)
    processor = Processor(StoreHandle(spec.state, 30.0), spec.processor)
    deadline_s = time.monotonic() + QUERY_TIMEOUT_S
    while sum(found.last_row_index + 1 for found in processor.produced().values()) < rows:
        if time.monotonic() > deadline_s:
            raise ShuffleError("the mappers did not come to the end of the input")
        time.sleep(0.1)


def filled(bench: Bench, name: str, rows: int) -> tuple[int, list[tuple[int, pa.Table]]]:
    """Fill a queue; returns its bytes, and its rows with their partitions."""
    batches: list[tuple[int, pa.Table]] = []
    size_bytes = fill(
        bench.state,
        name,
        Workload(with_user_share=1.0),
        rows,
        MAPPERS,
        SLICE_ROWS,
        on_batch=lambda partition, batch: batches.append((partition, batch)),
    )
    return size_bytes, batches


# --- the pairs -------------------------------------------------------------------------------------------------------


def measure_source(bench: Bench) -> None:
    name = bench.name("source")
    size_bytes, _ = filled(bench, name, bench.rows)
    bench.note("bare_source_mb_per_s", mb_per_s(bench, bench.run(bench.bare(), "noop"), size_bytes))
    mappers = mappers_of(bench, name, "4GiB")
    try:
        wait_mapped(mappers, bench.rows)
        stream = bench.spark.readStream.format("shuffle").options(
            spec=str(mappers.spec), maxRowsPerTrigger=bench.batch_rows
        )
        bench.note("source_mb_per_s", mb_per_s(bench, bench.run(stream.load(), "noop"), size_bytes))
    finally:
        mappers.close()
        bench.state.drop_queue(name)


def measure_sink(bench: Bench) -> None:
    size_bytes = Workload(with_user_share=1.0).rows(0, SLICE_ROWS).nbytes * bench.rows // SLICE_ROWS
    bench.note("bare_sink_mb_per_s", mb_per_s(bench, bench.run(bench.bare(), "bare"), size_bytes))
    name = bench.name("sink")
    to = {"state": bench.system.address, "queue": name, "partitions": 2}
    bench.note("sink_mb_per_s", mb_per_s(bench, bench.run(bench.bare(), "shuffle", **to), size_bytes))
    written = sum(end - begin for begin, end in bench.state.queue(name).bounds())
    if written != bench.rows:
        raise ShuffleError(f"the sink wrote {written} rows of {bench.rows}")
    bench.state.drop_queue(name)


def measure_keyed(bench: Bench) -> None:
    """The keyed count three times: by Spark alone, through ``reduce_stream``, and by this project alone."""
    name = bench.name("keyed")
    size_bytes, batches = filled(bench, name, bench.keyed_batches * bench.batch_rows)
    rows = [batch for _, batch in batches]
    buckets = Buckets(MAPPERS, REDUCERS, KEY_COLUMNS)
    for partition, batch in batches:
        buckets.add(partition, batch)
    buckets.close()
    expected = oracle(rows)
    files = Path(bench.folder("parquet"))
    files.mkdir()
    count = bench.keyed_batches
    for number in range(count):
        part = rows[number * len(rows) // count : (number + 1) * len(rows) // count]
        pq.write_table(pa.concat_tables(part), files / f"{number}.parquet")
    spark_alone(bench, files, buckets.rows, size_bytes)
    through_reduce_stream(bench, name, buckets, expected, size_bytes)
    forget(bench.state, name, name, TABLE)
    again = bench.name("keyed")
    fill_with(bench.state, again, rows[0].schema, batches)
    seen = watched(bench.system, bench.state, spec_of(again, again, KEYED_MEMORY), buckets)
    bench.note("standalone_mb_per_s", seen.rows / buckets.rows * size_bytes / seen.seconds / MB)
    checked(bench, expected)
    forget(bench.state, again, again, TABLE)


def checked(bench: Bench, expected: pa.Table) -> None:
    verdict = difference(expected, bench.state.scan(TABLE).read_all().select(COLUMNS))
    if not verdict.exact:
        raise ShuffleError(f"the result is wrong, so its time does not count: {verdict}")


def spark_alone(bench: Bench, files: Path, rows_all: int, size_bytes: int) -> None:
    schema = bench.spark.read.parquet(str(files)).schema
    rows = bench.spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(files))
    counted = rows.groupBy("user", "cluster").agg(F.max("timestamp").alias("last_access"), F.count("*").alias("count"))
    table = bench.name("counted").replace("-", "_")
    before = processes.tree_written_bytes(os.getpid())
    query = (
        counted.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", bench.folder("checkpoint"))
        .queryName(table)
        .trigger(availableNow=True)
        .start()
    )
    progress = finished(query)
    bench.note("spark_bytes_per_byte", (processes.tree_written_bytes(os.getpid()) - before) / size_bytes)
    bench.note("spark_mb_per_s", mb_per_s(bench, progress, size_bytes))
    if sum(one["numInputRows"] for one in progress) != rows_all:
        raise ShuffleError("Spark did not read all rows")


def through_reduce_stream(bench: Bench, name: str, buckets: Buckets, expected: pa.Table, size_bytes: int) -> None:
    before = processes.tree_written_bytes(os.getpid())
    mappers = mappers_of(bench, name, KEYED_MEMORY)
    try:
        with CommitClock(bench.state, name, buckets) as clock:
            finished(
                reduce_stream(
                    bench.spark, str(mappers.spec), bench.folder("checkpoint"), trigger={"availableNow": True}
                )
            )
    finally:
        mappers.close()
    seen = clock.watched()
    bench.note("reduce_stream_bytes_per_byte", (processes.tree_written_bytes(os.getpid()) - before) / size_bytes)
    bench.note("reduce_stream_mb_per_s", seen.rows / buckets.rows * size_bytes / seen.seconds / MB)
    checked(bench, expected)


# --- all of it -------------------------------------------------------------------------------------------------------


def spark_session(folder: Path) -> SparkSession:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("perf.spark")
        .config("spark.ui.enabled", "false")
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(BareSource)
    return spark


def bars(figures: dict[str, list[float]]) -> dict[str, float]:
    """The bars of what was measured."""
    middle = {name: report.median(values) for name, values in figures.items()}
    over = {
        "source_ratio": ("source_mb_per_s", "bare_source_mb_per_s"),
        "sink_ratio": ("sink_mb_per_s", "bare_sink_mb_per_s"),
        "reduce_stream_vs_spark_bytes": ("reduce_stream_bytes_per_byte", "spark_bytes_per_byte"),
        "reduce_stream_speed_ratio": ("reduce_stream_mb_per_s", "spark_mb_per_s"),
        "reduce_stream_vs_standalone": ("reduce_stream_mb_per_s", "standalone_mb_per_s"),
    }
    found = {bar: middle[ours] / middle[other] for bar, (ours, other) in over.items() if ours in middle}
    if "spark_bytes_per_byte" in middle:
        found["reduce_stream_bytes_ratio"] = middle["reduce_stream_bytes_per_byte"]
        found["spark_bytes_ratio"] = middle["spark_bytes_per_byte"]
    return found


def measure(args: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="shuffle-perf-spark-"))
    try:
        with LocalSystem(folder) as system, system.connect() as state:
            bench = Bench(spark_session(folder), system, state, args.batches, args.batch_rows, args.keyed_batches)
            every: dict[str, Callable[[Bench], None]] = {
                "source": measure_source,
                "sink": measure_sink,
                "keyed": measure_keyed,
            }
            pairs = [measured for name, measured in every.items() if name in args.only.split(",")]
            for _ in range(args.rounds):
                for pair in pairs:
                    pair(bench)
            bench.spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    details = {
        "batches": args.batches,
        "keyed_batches": args.keyed_batches,
        "batch_rows": args.batch_rows,
        "rounds": args.rounds,
        **{name: report.spread(values) for name, values in bench.figures.items()},
    }
    report.publish("the Spark connector", bars(bench.figures), details, args.json, LIMITS)
    return 0


def main() -> int:
    parser = report.parser("spark", "What does the Spark connector cost, and what does it save?")
    parser.add_argument("--batches", type=int, default=6, help="micro-batches of each query (default: 6)")
    parser.add_argument("--keyed-batches", type=int, default=20, help="the same for the keyed count (default: 20)")
    parser.add_argument("--batch-rows", type=int, default=500_000, help="rows of each micro-batch (default: 500,000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each pair is run (default: 3)")
    parser.add_argument("--only", default="source,sink,keyed", help="which of source,sink,keyed (default: all)")
    args = parser.parse_args()
    return report.run_and_report_errors(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
