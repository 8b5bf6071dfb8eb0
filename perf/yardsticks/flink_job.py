"""Flink's SQL in a process of its own, for ``perf.compare``. Run by the Python of Flink's own environment.

The count runs in a cluster inside this process's JVM, with RocksDB state, incremental checkpoints every second and
exactly-once mode; with mini-batches and two-phase aggregation, which make it faster and are off by default; and with
object reuse. It reads CSV, the fastest of what the package on PyPI can read.

The result goes to the ``print`` sink, which prints every change of every key. Standard output of the JVM is replaced by
a large buffer before a file in memory, so that printing costs hardly a system call. Sinks that upsert into a database
are not in the package.
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
    CREATE TEMPORARY TABLE {name} ({columns})
    WITH ('connector' = 'filesystem', 'path' = '{path}', 'format' = 'csv', 'csv.disable-quote-character' = 'true')
"""
SINK = "CREATE TEMPORARY TABLE {name} ({columns}) WITH ('connector' = '{connector}')"
QUESTIONS = {
    "count": {
        "columns": "`timestamp` BIGINT, cluster STRING, `user` STRING, `method` STRING, message STRING",
        "result": "`user` STRING, cluster STRING, last_access BIGINT, `count` BIGINT",
        "count": "SELECT `user`, cluster, MAX(`timestamp`), COUNT(*) FROM {rows} GROUP BY `user`, cluster",
        "read": "SELECT `user`, cluster, `timestamp`, `timestamp` FROM {rows}",
    },
    "large_state": {
        "columns": "ordered_at BIGINT, customer STRING, amount BIGINT, product STRING, channel STRING, city STRING",
        "result": "customer STRING, orders BIGINT, spent BIGINT",
        "count": "SELECT customer, COUNT(*), SUM(amount) FROM {rows} GROUP BY customer",
        "read": "SELECT customer, amount, amount FROM {rows}",
    },
}
"""For each question the columns of its rows and of its result, and the query; ``read`` is only the reading of it."""
SINKS = {"count": "print", "count_discarded": "blackhole", "read": "blackhole"}
PRINT_BUFFER_BYTES = 1 << 20


class Jobs:
    """The requests of this process. All run in one thread: Flink's planner belongs to the thread that made it."""

    def __init__(self, folder: Path, printed: Path, rest_port: int) -> None:
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
        self._jvm = get_gateway().jvm
        self._printed = printed
        self._declared: dict[str, str] = {}
        """The names of the tables that are declared, by the SQL that declares them."""

    def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["job"] == "printed":
            self._jvm.System.out.flush()
            return {"bytes": self._printed.stat().st_size}
        query = self._query(request)
        self._tables.get_config().set("parallelism.default", str(request["parallelism"]))
        file = self._jvm.java.io.FileOutputStream(str(self._printed))
        buffer = self._jvm.java.io.BufferedOutputStream(file, PRINT_BUFFER_BYTES)
        self._jvm.System.setOut(self._jvm.java.io.PrintStream(buffer))
        self._tables.execute_sql(query).wait()
        return {"end_s": time.time()}

    def _query(self, request: Mapping[str, Any]) -> str:
        """The SQL of a job, whose tables are declared when they are first needed."""
        question, sink = request["question"], SINKS[request["job"]]
        told = QUESTIONS[question]
        path = Path(request["csv"]).as_uri()
        # A question may be asked of several inputs.
        rows = self._declared_as(f"{question}_rows", SOURCE, columns=told["columns"], path=path)
        to = self._declared_as(f"{question}_{sink}", SINK, columns=told["result"], connector=sink)
        query = told["read" if request["job"] == "read" else "count"].format(rows=rows)
        return f"INSERT INTO {to} {query}"

    def _declared_as(self, name: str, sql: str, **filled: str) -> str:
        """The name of a table that is declared by this SQL, which is done when it is first needed."""
        wanted = sql.format(name="", **filled)
        if wanted not in self._declared:
            self._declared[wanted] = f"{name}_{len(self._declared)}"
            self._tables.execute_sql(sql.format(name=self._declared[wanted], **filled))
        return self._declared[wanted]


if __name__ == "__main__":
    sys.exit(serve(Jobs(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
