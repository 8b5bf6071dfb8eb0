"""A Spark driver that copies a processor's rows to a queue, and dies where it is told to. Run by ``test_driver_kills``.

    python killed_driver.py STATE_ADDRESS PROCESSOR FOLDER MOMENT

MOMENT is ``before`` or ``after``: the commit of the sink for batch 1 kills the driver, JVM and all, with ``kill -9``,
just before or just after it publishes. With ``worker`` a Python worker is killed while it writes, once, and the query
runs to its end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from shuffle.spark_connector.datasource import ShuffleDataSource
from shuffle.spark_connector.options import Options
from shuffle.spark_connector.sink.staging import StagedMessage
from shuffle.spark_connector.sink.writer import QueueStreamWriter, queue_target

BATCH_ROWS = 1_000


class DeadlyWriter(QueueStreamWriter):
    moment = ""
    pids: tuple[int, ...] = ()
    folder = Path()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        message = super().write(iterator)
        if self.moment == "worker" and not (self.folder / "worker-died").exists():
            (self.folder / "worker-died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        if self.moment == "before" and batchId == 1:
            self._kill_driver()
        super().commit(messages, batchId)
        if self.moment == "after" and batchId == 1:
            self._kill_driver()

    def _kill_driver(self) -> None:
        # This very process too: it is a child of the driver, and would publish before it noticed.
        for pid in (*self.pids, os.getpid()):
            os.kill(pid, signal.SIGKILL)


class DeadlySource(ShuffleDataSource):
    @classmethod
    def name(cls) -> str:
        return "deadly"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        own = {"moment", "pids", "folder"}
        given = {name: value for name, value in self._given.items() if name not in own}
        writer = DeadlyWriter(queue_target(Options.check("write stream", given), schema))
        writer.moment = self._given["moment"]
        writer.pids = tuple(int(pid) for pid in self._given["pids"].split(","))
        writer.folder = Path(self._given["folder"])
        return writer


def copy(spark: SparkSession, state: str, processor: str, folder: str, moment: str) -> StreamingQuery:
    spark.dataSource.register(DeadlySource)
    jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
    rows = (
        spark.readStream.format("shuffle")
        .options(state=state, processor=processor, maxRowsPerTrigger=BATCH_ROWS, metadataColumns="shuffle_index")
        .load()
    )
    return (
        rows.writeStream.format("deadly")
        .options(state=state, queue=f"{processor}-copy", partitions=3, partitionBy="user", timeout="30s")
        .options(moment=moment, pids=f"{jvm},{os.getpid()}", folder=folder, checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )


def main() -> None:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    copy(builder.config("spark.driver.memory", "512m").getOrCreate(), *sys.argv[1:]).awaitTermination()


if __name__ == "__main__":
    main()
