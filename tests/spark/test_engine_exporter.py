"""``--engine spark`` with places outside of the store: exporters run beside the job, and draining waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from shuffle.statestore import StateClient
from tests.process.test_output import JOB, fill
from tests.process.test_run_processor import children_of
from tests.waiting import wait_until

ROWS = 4_000
"""In each of two partitions."""
RUN_S_MAX = 240

SPEC = """\
processor: job
state: ./job.state
input: {queue: in}
mapper: {class: "echo_job:ByParity", trim_period: 100ms, batch_rows_max: 200, on_error: dead_letter}
reducer: {class: "echo_job:Picky", count: 2, batch_rows_max: 100, fetch_rows_max: 100, on_error: dead_letter}
output: {parquet: ./out, batch_rows_max: 300, batch_age: 50ms}
dead_letters: {parquet: ./letters}
"""
PICKY = """
class Picky(Echo):
    def reduce(self, rows):
        if pc.any(pc.equal(rows["n"], 77)).as_py():
            raise ValueError("not that one")
        return super().reduce(rows)
"""


def exported(folder: Path) -> list[dict[str, object]]:
    return [row for path in folder.glob("*.parquet") for row in pq.read_table(path).to_pylist()]


def test_spark_run_starts_exporters_starts_them_again_and_is_drained_when_all_is_outside(tmp_path: Path) -> None:
    (tmp_path / "echo_job.py").write_text(JOB + PICKY)
    spec = tmp_path / "job.yaml"
    spec.write_text(SPEC)
    expected = fill(spec, ROWS)
    command = ["run", str(spec), "--engine", "spark", "--master", "local[4]", "--until-drained", "--no-check"]
    log = tmp_path / "run.out"
    with log.open("wb") as output:
        controller = subprocess.Popen(
            [sys.executable, "-m", "shuffle.cli", *command],
            cwd=tmp_path,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: len(exported(tmp_path / "out")) > 0, log.read_text, wait_s=RUN_S_MAX)
        os.kill(children_of(controller.pid)["exporter 0-1"], signal.SIGKILL)
        assert controller.wait(RUN_S_MAX) == 0, log.read_text()[-3000:]
    finally:
        controller.kill()
        controller.wait()
    said = log.read_text()
    assert "job: exporter 0-1 died: killed by SIGKILL; starting it again" in said
    assert said.splitlines()[-1] == "job: drained", said[-3000:]
    assert Counter(row["n"] for row in exported(tmp_path / "out")) == expected - Counter([77])
    assert [row["row"] for row in exported(tmp_path / "letters")] == ['{"n": 77}']
    with StateClient.open(tmp_path / "job.state") as client:
        for queue in ("job/outbox", "job/reducer_dead_letters"):
            assert all(begin == end for begin, end in client.queue(queue).bounds()), queue
