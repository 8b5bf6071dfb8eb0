"""Queries on a real cluster: speculation starts tasks twice, and an executor is killed with its tasks.

Spark never runs two attempts of a task on one host, and all of a ``local-cluster`` is one host. So this is a standalone
cluster, with two workers on two addresses of this machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest

from shuffle.examples.local import LocalSystem
from shuffle.examples.processes import command_line, process_tree
from shuffle.examples.spark_pipeline import Mappers
from shuffle.examples.workload import SCHEMA, Workload, difference, oracle
from shuffle.statestore import StateClient

ROWS = 8_000
WAIT_S = 240


def spec_of(name: str, **reducer: Any) -> dict[str, Any]:
    return {
        "processor": name,
        "input": {"queue": f"logs-{name}"},
        "mapper": {"class": "examples.activity:ParseLogs"},
        "reducer": {"class": "examples.activity:CountByUser", "count": 2, **reducer},
        "lease_ttl": "1s",
        "metrics": False,
    }


class Cluster:
    """A master and two workers of one core each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.master = f"spark://127.0.0.1:{port}"
        ports = ["--port", str(port), "--webui-port", "0"]
        self.processes = [self._start("master.Master", "--host", "127.0.0.1", *ports)]
        for host in ("127.0.0.1", "127.0.0.2"):
            size = ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / host)]
            self.processes.append(self._start("worker.Worker", "--host", host, "--webui-port", "0", *size, self.master))

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        home = Path(pyspark.__file__).parent
        with (self._folder / "cluster.log").open("ab") as log:
            return subprocess.Popen(
                [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments],
                cwd=self._folder,
                env={**os.environ, "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def executors(self) -> list[int]:
        found = [pid for worker in self.processes[1:] for pid in process_tree(worker.pid)]
        return [pid for pid in found if any("CoarseGrained" in part for part in command_line(pid))]

    def close(self) -> None:
        for process in self.processes:
            kill_tree(process)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    for pid in reversed(process_tree(process.pid) if process.poll() is None else []):
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    yield running
    running.close()


def wait_for(mark: Path, driver: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not mark.exists():
        assert driver.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tasks_started_twice_and_an_executor_killed_change_nothing(
    cluster: Cluster,
    system: LocalSystem,
    state: StateClient,
    start_mappers: Callable[[dict[str, Any], int], Mappers],
    tmp_path: Path,
) -> None:
    rows = Workload(with_user_share=1.0).rows(0, ROWS)
    for name in ("twice", "once"):
        state.create_queue(f"logs-{name}", schema=SCHEMA, partitions=1).append(0, rows)
    slow = {"class": "tests.spark.cluster_driver:SlowCount", "config": {"folder": str(tmp_path)}}
    specs = [start_mappers(spec_of(name, **more), 1).spec for name, more in (("twice", slow), ("once", {}))]
    log = tmp_path / "driver.log"
    arguments = [cluster.master, *map(str, specs), system.address, str(tmp_path)]
    with ExitStack() as stack:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.cluster_driver", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            stdout=stack.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
        )
        stack.callback(kill_tree, driver)
        wait_for(tmp_path / "writing-twice", driver, log)
        os.kill(cluster.executors()[0], signal.SIGKILL)
        assert driver.wait(WAIT_S) == 0, log.read_text()[-3000:]
    assert (tmp_path / "reducing-twice").exists(), "nothing was speculated"
    assert str(difference(oracle([rows]), state.scan("activity-speculated").read_all())).startswith("exactly-once: OK")
    queue = state.queue("speculated")
    found = pa.concat_tables([queue.read(partition, 0, max_rows=10 * ROWS)[0] for partition in range(2)])
    order = [(name, "ascending") for name in rows.column_names]
    assert found.sort_by(order).equals(rows.sort_by(order).combine_chunks().cast(found.schema))
