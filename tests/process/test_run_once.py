"""A processor runs once at a time, and a run does not depend on the run that has started the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.errors import BadInput
from shuffle.run.run_lock import _leased, controllers_group, hold_run_lock
from shuffle.spec.config import ProcessorSpec, load_spec
from shuffle.statestore import StateClient
from shuffle.statestore.local.store_folder import is_open
from tests.daemons import StoreProcess, environment
from tests.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("user", pa.string())])
JOB = """
from shuffle import AggregateReducer, Count, HashMapper

class ByUser(HashMapper):
    key = ["user"]

class Count_one(AggregateReducer):
    table = "one-counts"
    key = ["user"]
    aggregates = {"count": Count()}

class Count_two(Count_one):
    table = "two-counts"
"""


def write_spec(folder: Path, processor: str, state: str = "./job.state") -> Path:
    (folder / "once_job.py").write_text(JOB)
    path = folder / f"{processor}.yaml"
    path.write_text(
        f"processor: {processor}\nstate: {state}\ninput: {{queue: {processor}-logs}}\nlease_ttl: 1s\nmetrics: false\n"
        'mapper: {class: "once_job:ByUser", trim_period: 100ms}\n'
        f'reducer: {{class: "once_job:Count_{processor}", count: 1}}\n'
    )
    return path


def append(client: StateClient, processor: str, rows: int) -> None:
    client.create_queue(f"{processor}-logs", schema=SCHEMA, partitions=1, if_not_exists=True)
    client.queue(f"{processor}-logs").append(0, pa.table({"user": ["u"] * rows}, schema=SCHEMA))


def counted(client: StateClient, processor: str) -> int:
    if f"{processor}-counts" not in {table.name for table in client.tables()}:
        return 0
    return sum(client.scan(f"{processor}-counts").read_all()["count"].to_pylist())


@contextmanager
def running(spec: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "shuffle.cli", "run", str(spec), "--no-check", *options]
    with spec.with_suffix(".out").open("w") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(spec: Path) -> str:
    return spec.with_suffix(".out").read_text()


def run_to_its_end(spec: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shuffle.cli", "run", str(spec), "--no-check", *options]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False)


def is_refused(ended: subprocess.CompletedProcess[str], pid: int) -> bool:
    """Before the one line of the error there may be one that says what was waited for."""
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("waiting for ")]
    return ended.returncode == 2 and len(lines) == 1 and f"is already running, pid {pid}" in lines[0]


@pytest.mark.parametrize("options", [[], ["--mappers-only"]])
def test_second_run_is_refused_at_once_and_after_a_kill_nothing_is_in_the_way(
    tmp_path: Path, options: list[str]
) -> None:
    spec = write_spec(tmp_path, "one")
    with StateClient.open(tmp_path / "job.state") as client:
        append(client, "one", 10)
    with running(spec, *options) as first:
        wait_until(lambda: "1 mappers" in said(spec), lambda: said(spec))
        ended = run_to_its_end(spec)
        assert is_refused(ended, first.pid), ended.stderr
        assert first.poll() is None
        first.send_signal(signal.SIGKILL)
        first.wait()
    again = run_to_its_end(spec, "--until-drained")
    assert again.returncode == 0, again.stderr
    with StateClient.open(tmp_path / "job.state") as client:
        assert counted(client, "one") == 10


def test_second_run_is_refused_beside_a_store_of_its_own_and_its_logs_stay(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "job.state") as store, StateClient.connect(store.address) as client:
        append(client, "one", 10)
        spec = write_spec(tmp_path, "one", store.address)
        with running(spec) as first:
            wait_until(lambda: counted(client, "one") == 10, lambda: said(spec))
            ended = run_to_its_end(spec)
            assert is_refused(ended, first.pid), ended.stderr
            # The same processor by the folder of its store is the same processor.
            by_folder = run_to_its_end(write_spec(tmp_path, "one"))
            assert is_refused(by_folder, first.pid), by_folder.stderr
            first.send_signal(signal.SIGTERM)
            assert first.wait(WAIT_S) == 0
        assert "serving" in (tmp_path / "one.logs" / "mapper-0.log").read_text()


def test_run_takes_over_the_store_of_another_run_that_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "job.state"
    with StateClient.open(folder) as client:
        append(client, "one", 10)
        append(client, "two", 10)
    one, two = write_spec(tmp_path, "one"), write_spec(tmp_path, "two")
    with running(one) as first:
        wait_until(lambda: "1 mappers" in said(one), lambda: said(one))
        with running(two) as second:
            wait_until(lambda: "1 mappers" in said(two), lambda: said(two))
            first.send_signal(signal.SIGTERM)
            assert first.wait(WAIT_S) == 0
            wait_until(lambda: "is gone: serving it" in said(two), lambda: said(two))
            wait_until(lambda: is_open(folder))
            with StateClient.open(folder) as client:
                append(client, "two", 5)
                wait_until(lambda: counted(client, "two") == 15, lambda: said(two))
            second.send_signal(signal.SIGTERM)
            assert second.wait(WAIT_S) == 0
    assert not is_open(folder)


def test_second_processor_on_a_queue_does_not_end_as_if_it_were_drained(tmp_path: Path) -> None:
    with StateClient.open(tmp_path / "job.state") as client:
        append(client, "one", 10)
    assert run_to_its_end(write_spec(tmp_path, "one"), "--until-drained").returncode == 0
    two = write_spec(tmp_path, "two")
    two.write_text(two.read_text().replace("two-logs", "one-logs"))
    ended = run_to_its_end(two, "--until-drained")
    assert ended.returncode == 2
    assert "the queue 'one-logs' is consumed by the processor 'one'" in ended.stderr.splitlines()[-1]
    release = [sys.executable, "-m", "shuffle.cli", "state", "release", str(tmp_path / "job.state"), "one-logs"]
    subprocess.run(release, env=environment(), timeout=WAIT_S, check=True)
    ended = run_to_its_end(two, "--until-drained")
    assert ended.returncode == 2
    assert "partition 0 begins at row 10; " in ended.stderr.splitlines()[-1]


# A store on another machine ------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[tuple[ProcessorSpec, StateClient]]:
    with StateClient.open(tmp_path / "job.state") as client:
        yield load_spec(write_spec(tmp_path, "one", "grpc://elsewhere:1")), client


def test_run_on_another_machine_is_named(elsewhere: tuple[ProcessorSpec, StateClient]) -> None:
    spec, client = elsewhere
    lease = client.leases.register(controllers_group("one"), "x", {"pid": "7", "host": "far"}, ttl_ms=60_000)
    lines: list[str] = []
    with pytest.raises(BadInput, match="already running, pid 7 on far"), _leased(spec, client, lines.append):
        pass
    assert len(lines) == 1
    assert "pid 7 on far runs one, or was killed: waiting for its lease (2 s)" in lines[0]
    lease.leave()
    with _leased(spec, client, lines.append):
        assert [member.attributes["pid"] for member in client.leases.members(controllers_group("one"))] == [
            str(os.getpid())
        ]
        with pytest.raises(BadInput, match=f"already running, pid {os.getpid()} on "), _leased(spec, client, print):
            pass
    assert client.leases.members(controllers_group("one")) == []


def test_lease_of_a_run_that_was_killed_is_waited_for(elsewhere: tuple[ProcessorSpec, StateClient]) -> None:
    spec, client = elsewhere
    client.leases.register(controllers_group("one"), "x", {"pid": "7", "host": "far"}, ttl_ms=500)
    began_s = time.monotonic()
    with _leased(spec, client, lambda line: None):
        assert time.monotonic() - began_s < 3.0


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.state").write_text("a file")
    spec = load_spec(write_spec(tmp_path, "one"))
    with pytest.raises(BadInput, match=r"one\.yaml:2: state: .* cannot be written"), hold_run_lock(spec, print):
        pass
