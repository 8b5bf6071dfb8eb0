"""The store killed while a query runs: the query waits and goes on, and nothing is lost or doubled."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from shuffle.statestore import StateClient
from shuffle.statestore.wire.announcement import served_at

ROOT = Path(__file__).resolve().parent.parent.parent


def start_store(folder: Path, listen: str) -> tuple[subprocess.Popen[bytes], str]:
    # One that was killed has left its address behind.
    (folder / "daemon.json").unlink(missing_ok=True)
    daemon = subprocess.Popen([sys.executable, "-m", "statestore", "--path", str(folder), "--listen", listen], cwd=ROOT)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if (address := served_at(folder)) is not None:
            return daemon, address
        time.sleep(0.05)
    daemon.kill()
    raise AssertionError("the store did not start")


def wait_for_batches(query: StreamingQuery, batches: int) -> None:
    deadline_s = time.monotonic() + 100
    while time.monotonic() < deadline_s:
        last = query.lastProgress
        if last is not None and last["batchId"] >= batches:
            return
        query.awaitTermination(0.2)
    raise AssertionError(f"no {batches} batches in time")


def test_store_killed_and_restarted_while_the_sink_writes(spark: SparkSession, tmp_path: Path) -> None:
    daemon, address = start_store(tmp_path / "store", "127.0.0.1:0")
    try:
        rows = spark.readStream.format("rate").option("rowsPerSecond", 2_000).load()
        to = rows.writeStream.format("shuffle").options(
            state=address, queue="rated", partitions=2, timeout="40s", checkpointLocation=str(tmp_path / "checkpoint")
        )
        query = to.start()
        wait_for_batches(query, 2)
        daemon.kill()
        daemon.wait()
        time.sleep(1.0)
        daemon, _ = start_store(tmp_path / "store", address.removeprefix("grpc://"))
        wait_for_batches(query, query.lastProgress["batchId"] + 2)
        query.stop()
        with StateClient.connect(address) as state:
            queue = state.queue("rated")
            tables = [queue.read(partition, 0, max_rows=10_000_000)[0] for partition in range(2)]
        values = sorted(pa.concat_tables(tables)["value"].to_pylist())
        assert values == list(range(len(values)))
        assert values

        daemon.kill()
        daemon.wait()
        query = to.option("timeout", "1s").start()
        with pytest.raises(
            StreamingQueryException, match="waited for 1 s; start it again, or raise the option 'timeout'"
        ):
            query.awaitTermination(60)
    finally:
        daemon.kill()
        daemon.wait()
