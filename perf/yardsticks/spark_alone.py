"""Spark Structured Streaming in a process of its own, for ``perf.compare``: alone, and with this project's reducers.

Alone it reads Parquet, which it reads best: only the columns that a query needs are read, several rows at a time. Its
state is kept by its RocksDB provider. Micro-batches are sized by the caller, to take about a second each.

A count is checked by reading the query's state store back, through Spark's own reader of it: that is what the query
has made durable. Of a repartition Spark itself counts the rows behind the shuffle.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from perf.yardsticks.compare_peer import serve
from shuffle.spark_connector.reduce import reduce_frame

CORES = 2
HEAP = "2g"
QUERY_TIMEOUT_S = 300
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
KEY_COLUMNS = ["user", "cluster"]


def aggregates(question: str) -> tuple[list[str], list[Column]]:
    """The key of a question and what is computed for each; columns are named as in its result."""
    if question == "count":
        return KEY_COLUMNS, [F.max("timestamp").alias("last_access"), F.count("*").alias("count")]
    return ["customer"], [F.count("*").alias("orders"), F.sum("amount").alias("spent")]


def session(folder: Path, slots: int = CORES, settings: Mapping[str, str] | None = None) -> SparkSession:
    builder = SparkSession.builder.master(f"local[{slots}]")
    for name, value in (settings or {}).items():
        builder = builder.config(name, value)
    spark = (
        builder.appName("perf.compare")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        # The JVM is stopped while others are measured, and its timers must not conclude that an executor is dead.
        .config("spark.network.timeout", "1h")
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.driver.memory", HEAP)
        .config("spark.sql.shuffle.partitions", str(CORES))
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


class Jobs:
    """The requests of this process."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._spark = session(folder, settings=settings)
        self._queries = 0
        self._checkpoint = folder
        self._counted: list[str] = []
        """The columns of the last count."""

    def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        job = {
            "count": self.count,
            "repartition": self.repartition,
            "reduce_stream": self.reduce_stream,
            "counted": self.counted,
        }
        return job[request["job"]](request)

    def count(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer a question with a ``groupBy`` over as many partitions as are asked for."""
        key, computed = aggregates(request["question"])
        counted = self._rows(request).groupBy(*key).agg(*computed)
        self._counted = counted.columns
        self._spark.conf.set("spark.sql.shuffle.partitions", request["partitions"])
        return timed(finished(self._start(counted, "update")))

    def counted(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write what the last count has left in its state store to the file ``to``."""
        return {"rows": write_state(self._spark, self._checkpoint, self._counted, request["to"])}

    def repartition(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Repartition full rows by the hash of their key, to a sink that discards them. Rows are counted after the
        shuffle."""
        shuffled = self._rows(request).repartition(CORES, *KEY_COLUMNS)
        progress = finished(self._start(shuffled.observe("behind", F.count("*").alias("rows")), "append"))
        behind = sum(one["observedMetrics"]["behind"]["rows"] for one in worked(progress))
        return {**timed(progress), "rows_behind": behind}

    def reduce_stream(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run this project's reducers as Spark's tasks with ``reduce_stream``. The caller sees what is committed."""
        query = self._start(reduce_frame(self._spark, request["spec"]), "append")
        return {"batches": len(worked(finished(query)))}

    def _rows(self, request: Mapping[str, Any]) -> DataFrame:
        schema = self._spark.read.parquet(request["parquet"]).schema
        files = self._spark.readStream.schema(schema).option("maxFilesPerTrigger", request["files_per_batch"])
        return files.parquet(request["parquet"])

    def _start(self, frame: DataFrame, mode: str) -> StreamingQuery:
        writer = frame.writeStream.format("noop").outputMode(mode)
        checkpoint = str(self._next_checkpoint())
        return writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()

    def _next_checkpoint(self) -> Path:
        if self._queries:
            shutil.rmtree(self._checkpoint, ignore_errors=True)
        self._queries += 1
        self._checkpoint = self._folder / f"checkpoint-{self._queries}"
        return self._checkpoint


def write_state(spark: SparkSession, checkpoint: Path, columns: Sequence[str], to: str) -> int:
    """Write what a count has made durable in its state store to a Parquet file, with these names; returns the rows."""
    state = spark.read.format("statestore").load(str(checkpoint))
    kinds = ("key", "value")
    fields = [f"{kind}.{field.name}" for kind in kinds for field in state.schema[kind].dataType.fields]  # type: ignore[attr-defined]
    table = state.select(*(F.col(field).alias(name) for field, name in zip(fields, columns, strict=True))).toArrow()
    pq.write_table(table, to)
    return int(table.num_rows)


def finished(query: StreamingQuery) -> list[dict[str, Any]]:
    if not query.awaitTermination(QUERY_TIMEOUT_S):
        query.stop()
        raise TimeoutError(f"a query took more than {QUERY_TIMEOUT_S} s")
    return [json.loads(progress.json) for progress in query.recentProgress]


def worked(progress: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The micro-batches that had rows."""
    return [one for one in progress if "addBatch" in one["durationMs"]]


def rows_read(one: dict[str, Any]) -> int:
    return int(one["numInputRows"])


def end_s(one: dict[str, Any]) -> float:
    """When a micro-batch ended, in seconds of the wall clock."""
    began = dt.datetime.fromisoformat(one["timestamp"].replace("Z", "+00:00")).timestamp()
    return began + float(one["durationMs"]["triggerExecution"]) / 1000


def timed(progress: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The times of the end of the first micro-batch and of the last, in seconds of the wall clock, and the rows."""
    batches = worked(progress)
    if len(batches) < 2:
        raise ValueError("the query had one micro-batch only: there is nothing to measure after the first")
    return {
        "begin_s": end_s(batches[0]),
        "end_s": end_s(batches[-1]),
        "batches": len(batches),
        "rows_first": rows_read(batches[0]),
        "rows": sum(rows_read(one) for one in batches),
    }


def main() -> int:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return serve(Jobs(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
