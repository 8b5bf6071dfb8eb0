"""The activity job with Spark around it: from JSON files to a table, and back into Spark.

    python -m shuffle.examples.spark_pipeline

The steps, in a temporary folder:

1. write log lines as JSON files, counting them independently meanwhile; start a state store;
2. Spark reads the files as a stream and writes them to the sink: two queues, created from the DataFrame's schema, their
   partitions by Spark's own hash of user and cluster;
3. mappers and reducers count the lines of one queue, in processes of their own, until it is drained;
4. mappers alone shuffle the lines of the other; Spark reads the shuffled stream, and counts it itself;
5. Spark reads a snapshot of the state table back;
6. both counts are compared with the independent one, key by key.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from shuffle.errors import ShuffleError
from shuffle.examples.activity import COLUMNS, KEY_COLUMNS, TABLE
from shuffle.examples.local import PROJECT, LocalSystem
from shuffle.examples.workload import RESULT_SCHEMA, Difference, Workload, difference, oracle
from shuffle.run import launch

ROWS_DEFAULT = 200_000
FILES = 4
PARTITIONS = 2
REDUCERS = 2
TIMEOUT_S = 300
LINE = "timestamp timestamp_ntz, cluster string, user string, method string, message string"


class Mappers:
    """The mappers of one processor as processes, without its reducers: these are Spark's part."""

    def __init__(self, system: LocalSystem, spec: Path, count: int) -> None:
        self._system = system
        self.spec = spec
        self._processes = {index: self._start(index) for index in range(count)}

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        with (self._system.folder / f"{self.spec.stem}-mapper.log").open("ab") as log:
            return subprocess.Popen(
                launch.command("shuffle.mapper", str(self.spec), "--index", str(index)),
                env=launch.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def kill_and_restart(self, index: int) -> None:
        self._processes[index].kill()
        self._processes[index].wait()
        self._processes[index] = self._start(index)

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def __enter__(self) -> Mappers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def write_json(folder: Path, rows: int, seed: int) -> pa.Table:
    """Step 1: write the files; returns the expected counts."""
    folder.mkdir()
    tables = list(Workload(seed=seed).batches(rows, -(-rows // FILES)))
    for number, table in enumerate(tables):
        with (folder / f"{number}.json").open("w") as file:
            for row in table.to_pylist():
                file.write(json.dumps({**row, "timestamp": row["timestamp"].isoformat()}) + "\n")
    return oracle(tables)


def spec_of(processor: str, queue: str) -> Mapping[str, Any]:
    return {
        "processor": processor,
        "input": {"queue": queue},
        "mapper": {"class": "examples.activity:ParseLogs", "memory": "64MiB"},
        "reducer": {"class": "examples.activity:CountByUser", "count": REDUCERS},
    }


def write_to_queue(spark: SparkSession, system: LocalSystem, queue: str) -> None:
    """Step 2: stream the files into a queue."""
    query = (
        spark.readStream.schema(LINE)
        .json(str(system.folder / "json"))
        .writeStream.format("shuffle")
        .options(state=system.address, queue=queue, partitions=PARTITIONS, partitionBy="user,cluster")
        .option("checkpointLocation", str(system.folder / f"checkpoint-{queue}"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def count_in_processes(system: LocalSystem) -> None:
    """Step 3: count the lines of one queue with mappers and reducers as processes."""
    controller = system.run(system.write_spec(spec_of("activity", "logs")), "--until-drained")
    if controller.wait(TIMEOUT_S) != 0:
        raise ShuffleError(f"the processor ended with {controller.returncode}:\n{system.log_tail('activity', 30)}")


def count_in_spark(spark: SparkSession, system: LocalSystem) -> pa.Table:
    """Step 4: read the shuffled stream of the other queue in Spark, and count it there."""
    with Mappers(system, system.write_spec(spec_of("activity-stream", "logs-stream")), PARTITIONS) as mappers:
        lines = spark.readStream.format("shuffle").option("spec", str(mappers.spec)).load()
        counted = lines.groupBy(*KEY_COLUMNS).agg(F.max("timestamp").alias("last_access"), F.count("*").alias("count"))
        query = (
            counted.writeStream.format("memory")
            .queryName("counted")
            .outputMode("complete")
            .option("checkpointLocation", str(system.folder / "checkpoint-stream"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    return as_result(spark.table("counted"))


def read_table(spark: SparkSession, system: LocalSystem) -> pa.Table:
    """Step 5: read the state table in Spark."""
    return as_result(spark.read.format("shuffle").options(state=system.address, table=TABLE).load())


def as_result(frame: DataFrame) -> pa.Table:
    return frame.select(*COLUMNS).toArrow().cast(RESULT_SCHEMA)


@contextmanager
def spark_session(folder: Path) -> Iterator[SparkSession]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("spark_pipeline")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.local.dir", str(folder / "spark"))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def pipeline(folder: Path, rows: int, seed: int) -> Difference:
    expected = write_json(folder / "json", rows, seed)  # 1
    with LocalSystem(folder) as system, spark_session(folder) as spark:
        for queue in ("logs", "logs-stream"):
            write_to_queue(spark, system, queue)  # 2
            print(f"{rows:,} lines are in the queue {queue}", flush=True)
        count_in_processes(system)  # 3
        print("mappers and reducers have counted them", flush=True)
        streamed = count_in_spark(spark, system)  # 4
        print("Spark has read the shuffled stream", flush=True)
        stored = read_table(spark, system)  # 5
        top = spark.createDataFrame(stored).orderBy("count", ascending=False).limit(5)
        top.show(truncate=False)
        verdicts = [difference(expected, streamed), difference(expected, stored)]  # 6
    return next((verdict for verdict in verdicts if not verdict.exact), verdicts[-1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shuffle.examples.spark_pipeline", description="The activity job with Spark around it, checked."
    )
    parser.add_argument("--rows", type=int, default=ROWS_DEFAULT, help=f"log lines in all (default: {ROWS_DEFAULT:,})")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal log lines (default: 1)")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="shuffle-spark-"))
    try:
        verdict = pipeline(folder, args.rows, args.seed)
    except ShuffleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(verdict)
    return 0 if verdict.exact else 1


if __name__ == "__main__":
    sys.exit(main())
