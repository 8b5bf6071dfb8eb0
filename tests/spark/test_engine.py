"""Spark as the cluster: workers as tasks of a real ``local-cluster``, one executor killed on the way, Ctrl-C at the
end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shuffle.examples.activity import KEY, VALUE
from shuffle.examples.generate import fill
from shuffle.examples.local import LocalSystem
from shuffle.examples.processes import command_line, process_tree
from shuffle.examples.workload import Workload, difference, oracle
from shuffle.statestore import StateClient
from shuffle.user_code.poison import DEAD_LETTER_SCHEMA, dead_letters

ROWS = 200_000
WAIT_S = 120


def executors(pid: int) -> list[int]:
    return [child for child in process_tree(pid) if any("CoarseGrained" in part for part in command_line(child))]


def counted(state: StateClient) -> int:
    return int(pc.sum(state.scan("activity").read_all()["count"]).as_py() or 0)


def wait_until(happened: Callable[[], bool], controller: subprocess.Popen[bytes], log: Path, what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not happened():
        assert controller.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline_s, f"{what}: {log.read_text()[-3000:]}"
        time.sleep(0.05)


def test_workers_run_as_tasks_come_back_when_their_executor_is_killed_and_end_with_ctrl_c(tmp_path: Path) -> None:
    # A store of its own: the table has the same name as in other tests.
    with LocalSystem(tmp_path) as system, system.connect() as state:
        rows: list[pa.Table] = []
        fill(state, "logs", Workload(seed=3), ROWS, 2, on_batch=lambda _, batch: rows.append(batch))
        state.create_table("activity", key=KEY, value=VALUE)
        # One row was set aside before: the last line must not pass over it.
        state.create_queue("clustered/mapper_dead_letters", schema=DEAD_LETTER_SCHEMA, partitions=1)
        where: dict[str, Any] = {"worker": 0, "mappers": [0], "positions": [0]}
        letter = dead_letters(processor="clustered", role="mapper", **where, reasons=["bad"], rows=rows[0].slice(0, 1))
        with state.transaction() as tx:
            tx.append("clustered/mapper_dead_letters", 0, letter)
            tx.commit()
        spec = system.write_spec(
            {
                "processor": "clustered",
                "input": {"queue": "logs"},
                "mapper": {
                    "class": "examples.activity:ParseLogs",
                    "memory": "1MiB",
                    "batch_bytes_max": 262_144,
                    "on_error": "dead_letter",
                },
                "reducer": {"class": "examples.activity:CountByUser", "count": 2, "batch_rows_max": 500},
                "lease_ttl": "1s",
                "metrics": False,
            }
        )
        command = ["run", str(spec), "--engine", "spark", "--master", "local-cluster[2,2,1024]", "--no-check"]
        log = tmp_path / "controller.log"
        with log.open("wb") as file:
            controller = subprocess.Popen(
                [sys.executable, "-m", "shuffle.cli", *command],
                cwd=tmp_path,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: counted(state) > 0, controller, log, "nothing was committed")
            os.kill(executors(controller.pid)[0], signal.SIGKILL)
            expected = oracle(rows)
            wanted = pc.sum(expected["count"]).as_py()
            wait_until(lambda: counted(state) >= wanted, controller, log, "not all was committed")
            # To the whole group, as a terminal does it.
            os.killpg(controller.pid, signal.SIGINT)
            assert controller.wait(60) == 128 + signal.SIGINT, log.read_text()[-3000:]
        finally:
            for pid in reversed(process_tree(controller.pid) if controller.poll() is None else []):
                os.kill(pid, signal.SIGKILL)
            controller.wait()
        said = log.read_text()
        assert said.splitlines()[-1] == (
            "clustered: stopped; it goes on from here when it is run again; 1 dead letter "
            f"(clustered/mapper_dead_letters): `shuffle dead-letters {spec.name} show` prints them"
        ), said[-3000:]
        assert "Traceback" not in said
        assert str(difference(expected, state.scan("activity").read_all())).startswith("exactly-once: OK")
