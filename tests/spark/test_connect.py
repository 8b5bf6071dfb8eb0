"""The format over Spark Connect: a client without a JVM of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pyspark.sql import SparkSession

from shuffle import AggregateReducer, Count, Max
from shuffle.examples.local import LocalSystem
from shuffle.examples.workload import SCHEMA, Workload, difference, oracle
from shuffle.jobs.aggregates import Aggregate
from shuffle.statestore import StateClient


class CountApart(AggregateReducer):
    """The activity job with a table of its own."""

    table = "activity-connect"
    key = ("user", "cluster")
    aggregates: ClassVar[Mapping[str, Aggregate]] = {"last_access": Max("timestamp"), "count": Count()}


def test_client_of_spark_connect_reads_writes_and_reduces(
    spark: SparkSession,
    connect_port: int,
    system: LocalSystem,
    state: StateClient,
    tmp_path: Path,
) -> None:
    rows = Workload(seed=9).rows(0, 5_000)
    state.create_queue("logs-connect", schema=SCHEMA, partitions=1).append(0, rows)
    spec = system.write_spec(
        {
            "processor": "connected",
            "input": {"queue": "logs-connect"},
            "mapper": {"class": "examples.activity:ParseLogs"},
            "reducer": {"class": "tests.spark.test_connect:CountApart", "count": 2},
            "metrics": False,
        }
    )
    controller = system.run(spec, "--mappers-only", "--no-check")
    client = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "connect_client.py"),
            f"sc://127.0.0.1:{connect_port}",
            system.address,
            str(spec),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert client.returncode == 0, client.stderr[-3000:]
    controller.terminate()
    assert controller.wait(30) == 0
    answer = json.loads(client.stdout.splitlines()[-1])
    assert answer == {"connect": "pyspark.sql.connect.session", "batch": [60, 60], "progress": True}
    stored = state.scan("connected").read_all().to_pydict()
    assert stored == {"k": list(range(100)), "v": [str(k) for k in range(100)]}
    assert str(difference(oracle([rows]), state.scan("activity-connect").read_all())).startswith("exactly-once: OK")
