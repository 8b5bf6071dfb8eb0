"""Rows that were set aside, as a user meets them: in the last line of a run, in the metrics, and replayed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pyarrow as pa

from shuffle.statestore import StateClient
from tests.daemons import environment
from tests.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
JOB = """
import pathlib
import pyarrow.compute as pc
from shuffle import AggregateReducer, Count, HashMapper

fixed = pathlib.Path(__file__).with_name("fixed")

def refuse(rows, n):
    if not fixed.exists() and pc.any(pc.equal(rows["n"], n)).as_py():
        raise ValueError(f"cannot take {n}")

class ByUser(HashMapper):
    key = ["user"]

    def where(self, rows):
        refuse(rows, 50)
        return None

class CountUsers(AggregateReducer):
    table = "counts"
    key = ["user"]
    aggregates = {"count": Count()}

    def reduce(self, rows):
        refuse(rows, 60)
        return super().reduce(rows)
"""


def write_spec(folder: Path) -> Path:
    (folder / "letters_job.py").write_text(JOB)
    path = folder / "job.yaml"
    path.write_text(
        "processor: job\nstate: ./job.state\ninput: {queue: logs}\n"
        'mapper: {class: "letters_job:ByUser", trim_period: 100ms, on_error: dead_letter}\n'
        'reducer: {class: "letters_job:CountUsers", count: 1, on_error: dead_letter}\n'
    )
    with StateClient.open(folder / "job.state") as client:
        client.create_queue("logs", schema=SCHEMA, partitions=1)
        rows = pa.table({"user": [f"u{n % 3}" for n in range(100)], "n": list(range(100))}, schema=SCHEMA)
        client.queue("logs").append(0, rows)
    return path


def shuffle(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shuffle.cli", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=2 * WAIT_S, check=False)


def counted(folder: Path) -> int:
    with StateClient.open(folder / "job.state") as client:
        return sum(client.scan("counts").read_all()["count"].to_pylist())


def test_run_counts_what_was_set_aside_and_replay_counts_every_row_once(tmp_path: Path) -> None:
    spec = str(write_spec(tmp_path))
    ended = shuffle("run", spec, "--until-drained", "--no-check")
    assert ended.returncode == 0, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "; 2 dead letters (job/mapper_dead_letters, job/reducer_dead_letters)" in last
    assert "shuffle dead-letters job.yaml show" in last
    status = json.loads(shuffle("status", spec, "--json").stdout)
    assert [queue["rows"] for queue in status["dead_letters"]] == [1, 1]
    shown = shuffle("dead-letters", spec, "show").stdout
    assert "mapper 0, input row 50\n  ValueError: cannot take 50\n" in shown
    assert '{"user": "u0", "n": 60}' in shown
    assert counted(tmp_path) == 98
    (tmp_path / "fixed").touch()
    replayed = shuffle("dead-letters", spec, "replay")
    assert replayed.returncode == 0, replayed.stderr
    assert "1 rows are in the input again, 1 were reduced, 0 were refused again" in replayed.stdout
    again = shuffle("run", spec, "--until-drained", "--no-check")
    assert again.returncode == 0, again.stderr
    assert "dead letter" not in again.stderr
    assert counted(tmp_path) == 100


def test_run_that_is_stopped_counts_them_too_and_so_do_the_metrics(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    command = [sys.executable, "-m", "shuffle.cli", "run", str(spec), "--no-check"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        name = "shuffle_dead_letters_total"
        lines = [f'{name}{{index="0",processor="job",role="{role}"}} 1.0' for role in ("mapper", "reducer")]
        wait_until(lambda: all(line in metrics(tmp_path) for line in lines), lambda: metrics(tmp_path))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "stopped; the next `shuffle run` goes on from here; 2 dead letters" in errors.splitlines()[-1]


def metrics(folder: Path) -> str:
    """Of all workers that are registered, where the store is served already."""
    client = StateClient.serving(folder / "job.state")
    if client is None:
        return ""
    with client:
        members = client.leases.members("job/mappers") + client.leases.members("job/reducers")
    return "".join(
        urllib.request.urlopen(member.attributes["metrics"], timeout=10).read().decode() for member in members
    )
