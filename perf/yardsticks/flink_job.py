"""Flink's SQL in a process of its own, for ``perf.compare``. Run by the Python of Flink's own environment.

The count runs in a cluster inside this process's JVM, with RocksDB state, incremental checkpoints every second and
exactly-once mode; with mini-batches and two-phase aggregation, which make it faster and are off by default; and with
object reuse. It reads CSV, the fastest of what the package on PyPI can read.

The result goes to the ``print`` sink, which prints every change of every key. Standard output of the JVM is replaced by
a buffer in memory, so that printing costs no system call, and the buffer is written to a file when the clock has
stopped. Sinks that upsert into a database are not in the package.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyflink.common import Configuration
from pyflink.java_gateway import get_gateway
from pyflink.table import EnvironmentSettings, TableEnvironment

from perf.yardsticks.compare_peer import serve

CORES = 2
SETTINGS = {
    "parallelism.default": str(CORES),
    "state.backend.type": "rocksdb",
    "execution.checkpointing.interval": "1 s",
    "execution.checkpointing.mode": "EXACTLY_ONCE",
    "execution.checkpointing.incremental": "true",
    "pipeline.object-reuse": "true",
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "1 s",
    "table.exec.mini-batch.size": "1000000",
    "table.optimizer.agg-phase-strategy": "TWO_PHASE",
    "taskmanager.memory.managed.size": "512 mb",
    "taskmanager.memory.network.max": "256 mb",
    # The number of rows read is requested over REST several times a second.
    "metrics.fetcher.update-interval": "100 ms",
}
SOURCE = """
    CREATE TABLE logs (`timestamp` BIGINT, cluster STRING, `user` STRING, `method` STRING, message STRING)
    WITH ('connector' = 'filesystem', 'path' = '{path}', 'format' = 'csv', 'csv.disable-quote-character' = 'true')
"""
SINK = """
    CREATE TABLE {name} (`user` STRING, cluster STRING, last_access BIGINT, `count` BIGINT)
    WITH ('connector' = '{connector}')
"""
COUNT = "INSERT INTO {sink} SELECT `user`, cluster, MAX(`timestamp`), COUNT(*) FROM logs GROUP BY `user`, cluster"
READ = "INSERT INTO {sink} SELECT `user`, cluster, `timestamp`, `timestamp` FROM logs"
JOBS = {
    "count": COUNT.format(sink="printed"),
    "count_discarded": COUNT.format(sink="discarded"),
    "read": READ.format(sink="discarded"),
}


class Jobs:
    """The requests of this process. All run in one thread: Flink's planner belongs to the thread that made it."""

    def __init__(self, folder: Path, csv: Path, rest_port: int) -> None:
        settings = Configuration()
        changing = {
            "execution.checkpointing.dir": (folder / "flink-checkpoints").as_uri(),
            "io.tmp.dirs": str(folder),
            "rest.port": str(rest_port),
            "rest.bind-port": str(rest_port),
        }
        for name, value in {**SETTINGS, **changing}.items():
            settings.set_string(name, value)
        made = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(settings).build()
        self._tables = TableEnvironment.create(made)
        self._tables.execute_sql(SOURCE.format(path=csv.as_uri()))
        self._tables.execute_sql(SINK.format(name="printed", connector="print"))
        self._tables.execute_sql(SINK.format(name="discarded", connector="blackhole"))
        self._jvm = get_gateway().jvm
        self._printed = self._jvm.java.io.ByteArrayOutputStream(1 << 20)
        self._jvm.System.setOut(self._jvm.java.io.PrintStream(self._printed))

    def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["job"] == "printed":
            return self.printed(request["to"])
        self._printed.reset()
        self._tables.execute_sql(JOBS[request["job"]]).wait()
        return {"end_s": time.time()}

    def printed(self, to: str) -> Mapping[str, Any]:
        """Write what the last job has printed to a file."""
        self._jvm.System.out.flush()
        file = self._jvm.java.io.FileOutputStream(to)
        self._printed.writeTo(file)
        file.close()
        return {"bytes": self._printed.size()}


if __name__ == "__main__":
    sys.exit(serve(Jobs(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
