"""``output: {queue: …}`` as people use it: what reducers emit is in the queue exactly once, whoever is killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.statestore import StateClient
from tests.process.test_run_processor import children_of, finished, running
from tests.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("n", pa.int64())])
ROWS = 12_000
"""In each of two partitions."""

JOB = """
import time
import pyarrow.compute as pc
from shuffle import Mapper, PartitionedRowset, Reducer

class ByParity(Mapper):
    def map(self, rows):
        return PartitionedRowset(rows, pc.bit_wise_and(rows["n"], 1))

class Echo(Reducer):
    def reduce(self, rows):
        time.sleep(0.01)  # So that there is a middle to be killed in.
        tx = self.state.transaction()
        self.emit(tx, rows)
        return tx
"""
SPEC = """\
processor: job
state: ./job.state
input: {queue: in}
mapper: {class: "echo_job:ByParity", trim_period: 100ms, batch_rows_max: 200}
reducer: {class: "echo_job:Echo", count: 2, batch_rows_max: 100, fetch_rows_max: 100}
output: {queue: out}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "echo_job.py").write_text(JOB)
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def fill(spec: Path, rows: int) -> Counter[int]:
    """Different rows in each partition; what is to come out."""
    with StateClient.open(spec.parent / "job.state") as client:
        client.create_queue("in", schema=SCHEMA, partitions=2)
        for partition in range(2):
            numbers = range(partition * rows, (partition + 1) * rows)
            client.queue("in").append(partition, pa.table([list(numbers)], schema=SCHEMA))
    return Counter(range(2 * rows))


def count(client: StateClient) -> int:
    return sum(end - begin for begin, end in client.queue("out").bounds())


def partitions(client: StateClient) -> list[list[int]]:
    """All rows of the output."""
    found: list[list[int]] = []
    for partition, (position, end) in enumerate(client.queue("out").bounds()):
        found.append([])
        while position < end:
            rows, position = client.queue("out").read(partition, position)
            found[-1] += rows["n"].to_pylist()
    return found


def kill_after_some(client: StateClient, controller: int, victim: str) -> None:
    """Kill a worker once there are more rows than now."""
    seen = count(client)
    wait_until(lambda: count(client) > seen + 200 and victim in children_of(controller))
    os.kill(children_of(controller)[victim], signal.SIGKILL)


def test_rows_are_emitted_exactly_once_by_reducers_that_are_killed(spec: Path) -> None:
    expected = fill(spec, ROWS)
    with StateClient.open(spec.parent / "job.state") as client:
        client.create_queue("out", schema=SCHEMA, partitions=2)
    with running("run", str(spec), "--until-drained", "--no-check") as controller:
        wait_until(lambda: {"reducer 0", "reducer 1", "statestore"} <= children_of(controller.pid).keys())
        with StateClient.open(spec.parent / "job.state") as client:
            for victim in ("reducer 0", "reducer 1", "reducer 0"):
                kill_after_some(client, controller.pid, victim)
            assert 0 < count(client) < expected.total(), "killed in the middle"
        assert controller.wait(2 * WAIT_S) == 0, spec.with_suffix(".out").read_text()
    with StateClient.open(spec.parent / "job.state") as client:
        found = partitions(client)
    assert Counter(found[0]) + Counter(found[1]) == expected
    assert [{n % 2 for n in numbers} for numbers in found] == [{0}, {1}], "reducer i appends to partition i"


def test_run_without_the_queue_is_refused_before_anything_starts(spec: Path) -> None:
    fill(spec, 10)
    ended = finished("run", str(spec), "--until-drained")
    assert ended.returncode == 2, ended.stderr
    assert "job.yaml:6: output.queue: there is no queue 'out'; there are in. Create it before the start" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("on_error", ["stop", "dead_letter"])
def test_emit_without_an_output_ends_the_run_and_sets_no_row_aside(spec: Path, on_error: str) -> None:
    spec.write_text(SPEC.replace("output: {queue: out}\n", "").replace("count: 2", f"count: 2, on_error: {on_error}"))
    fill(spec, 10)
    ended = finished("run", str(spec), "--until-drained")
    assert ended.returncode == 2, ended.stderr
    assert "job.yaml: output: is missing, and echo_job:Echo emits rows" in ended.stderr
    with StateClient.open(spec.parent / "job.state") as client:
        waiting = [queue for queue in client.queues() if queue.name == "job/reducer_dead_letters"]
        assert all(client.queue(queue.name).bounds() == [(0, 0)] for queue in waiting)
