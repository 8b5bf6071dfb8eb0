"""Two queries on a cluster with speculation on, run by ``test_cluster``.

    python cluster_driver.py MASTER REDUCE_SPEC READ_SPEC STATE_ADDRESS FOLDER

The first attempt of one task of each query is far too slow, so that Spark starts another beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from shuffle import AggregateReducer, Count, Max
from shuffle.jobs.aggregates import Aggregate
from shuffle.spark_connector import reduce_stream
from shuffle.statestore import Transaction

SLOW_S = 8.0


def linger(folder: str, name: str) -> None:
    """The first attempt of task 0 waits, until it is killed or for long; the others leave a note that they ran."""
    context: Any = TaskContext.get()
    if context.partitionId() == 0 and context.attemptNumber() == 0 and not (Path(folder) / name).exists():
        (Path(folder) / name).touch()
        time.sleep(SLOW_S)
    elif context.partitionId() == 0 and context.attemptNumber() > 0:
        (Path(folder) / f"{name}-twice").touch()


class SlowCount(AggregateReducer):
    table = "activity-speculated"
    key = ("user", "cluster")
    aggregates: ClassVar[Mapping[str, Aggregate]] = {"last_access": Max("timestamp"), "count": Count()}

    def reduce(self, rows: pa.Table) -> Transaction | None:
        linger(str(self.config["folder"]), "reducing")
        return super().reduce(rows)


def main() -> None:
    master, reduce_spec, read_spec, state, folder = sys.argv[1:]
    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.speculation", "true")
        .config("spark.speculation.interval", "100ms")
        .config("spark.speculation.quantile", "0.1")
        .config("spark.speculation.multiplier", "1.1")
        .config("spark.speculation.minTaskRuntime", "300ms")
        .getOrCreate()
    )

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            linger(folder, "writing")
            yield batch

    reduced = reduce_stream(spark, reduce_spec, f"{folder}/reduced", trigger={"availableNow": True})
    reduced.awaitTermination()
    rows = spark.readStream.format("shuffle").option("spec", read_spec).load()
    written = (
        rows.mapInArrow(slowly, rows.schema)
        .writeStream.format("shuffle")
        .options(state=state, queue="speculated", partitions=2, checkpointLocation=f"{folder}/written")
        .trigger(availableNow=True)
        .start()
    )
    written.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
