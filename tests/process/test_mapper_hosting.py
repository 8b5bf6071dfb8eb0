"""Mapper processes that host several mappers: run, killed, at their memory limit, and stopped by one of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shuffle.discovery import MapperAddress, arrange_mappers
from shuffle.statestore import StateClient
from shuffle.support import flight
from tests.process.test_run_processor import children_of, counts_in, finished, running
from tests.waiting import WAIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
MAPPERS = 3
MEMORY_BYTES = 6 << 20
BATCH_BYTES = 256 << 10

JOB = """
from shuffle import AggregateReducer, Count, HashMapper

class ByUser(HashMapper):
    key = ["user"]

class Poisoned(ByUser):
    def where(self, rows):
        if -1 in rows["n"].to_pylist():
            raise ValueError("cannot take -1")
        return None

class CountUsers(AggregateReducer):
    table = "counts"
    key = ["user"]
    aggregates = {"count": Count()}
"""


def write_spec(folder: Path, mapper: str = "", mapper_class: str = "ByUser") -> Path:
    (folder / "hosted_job.py").write_text(JOB)
    path = folder / "job.yaml"
    path.write_text(
        "processor: job\nstate: ./job.state\ninput: {queue: logs}\nlease_ttl_ms: 1000\n"
        f'mapper: {{class: "hosted_job:{mapper_class}", trim_period: 100ms, read_wait_ms: 100, {mapper}}}\n'
        'reducer: {class: "hosted_job:CountUsers", count: 2}\n'
    )
    return path


def append(client: StateClient, rows: int, mappers: range = range(MAPPERS), width: int = 0) -> Counter[str]:
    """To each of the partitions other users; the counts that are to come out of it."""
    counts: Counter[str] = Counter()
    for partition in mappers:
        users = [f"user-{partition}-{i % 23}-{'x' * width}" for i in range(rows)]
        client.queue("logs").append(partition, pa.table({"user": users, "n": list(range(rows))}, schema=SCHEMA))
        counts.update(users)
    return counts


@contextmanager
def opened(folder: Path) -> Iterator[StateClient]:
    with StateClient.open(folder / "job.state") as client:
        yield client


def memory_files(pid: int) -> int:
    """How many exchanges of this process have memory that reducers see."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += "memfd:shuffle-rows" in os.readlink(entry)
        except OSError:
            continue
    return found


def test_run_with_three_mappers_in_one_process_that_is_killed_counts_every_row_once(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "per_process: 3")
    with opened(tmp_path) as client:
        client.create_queue("logs", schema=SCHEMA, partitions=MAPPERS)
        expected = append(client, 3_000)
    workers = {"statestore", "mapper 0-2", "reducer 0", "reducer 1"}
    with running("run", str(spec), "--no-check", "--no-screen") as controller:
        wait_until(lambda: children_of(controller.pid).keys() == workers)
        with opened(tmp_path) as client:
            wait_until(lambda: counts_in(client).total() > 0)
            for _ in range(2):
                killed = children_of(controller.pid)["mapper 0-2"]
                expected += append(client, 2_000, width=600)
                # In the middle of it: rows are on their way, by memory that both sides see.
                wait_until(lambda pid=killed: memory_files(pid) > 0)  # type: ignore[misc]
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda pid=killed: children_of(controller.pid).get("mapper 0-2", pid) != pid)  # type: ignore[misc]
            wait_until(lambda: counts_in(client) == expected)
            addresses = arrange_mappers(client.leases.members("job/mappers"))
            assert sorted(addresses) == list(range(MAPPERS))
            assert len({found[0].address for found in addresses.values()}) == 1
        status = json.loads(finished("status", str(spec), "--json").stdout)
        assert [mapper["live"]["index"] for mapper in status["mappers"]] == list(range(MAPPERS))
        assert [mapper["live"]["next_input_index"] for mapper in status["mappers"]] == [7_000] * MAPPERS
        controller.send_signal(signal.SIGTERM)
        assert controller.wait(WAIT_S) == 0
    with opened(tmp_path) as client:
        assert counts_in(client) == expected
        expected += append(client, 500)
    ended = finished("run", str(spec), "--until-drained")
    assert ended.returncode == 0, ended.stderr
    with opened(tmp_path) as client:
        assert counts_in(client) == expected
        assert client.queue("logs").bounds() == [(7_500, 7_500)] * MAPPERS


class Hosted:
    """A store and one mapper process with all mappers in it, and nobody who fetches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        store = self._start("store", "shuffle.statestore", "--path", "job.state", "--listen", "127.0.0.1:0")
        wait_until(lambda: "serves at " in self.log("store"), "the store serves")
        self.children = [store]
        self.client = StateClient.connect(self.log("store").split("serves at ")[1].split()[0])
        self.client.create_queue("logs", schema=SCHEMA, partitions=MAPPERS)

    def _start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        places = {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}", "SHUFFLE_LOG": "json"}
        with (self.folder / f"{name}.log").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env={**os.environ, **places},
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def start(self, indexes: str) -> subprocess.Popen[bytes]:
        mapper = self._start("mapper", "shuffle.mapper", "job.yaml", "--index", indexes)
        self.children.append(mapper)
        return mapper

    def instances(self) -> list[MapperAddress]:
        return [found[0] for found in arrange_mappers(self.client.leases.members("job/mappers")).values()]

    def statuses(self) -> list[dict[str, Any]]:
        found = []
        for instance in self.instances():
            connection = flight.connect(instance.address)
            body = flight.do_action(connection, "status", instance.guid.encode(), who=instance.address)
            found.append(json.loads(body))
            connection.close()
        return found

    def close(self) -> None:
        self.client.close()
        for child in self.children:
            child.kill()
            child.wait()


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    made = Hosted(tmp_path)
    yield made
    made.close()


def test_memory_limit_holds_over_all_mappers_of_a_process(hosted: Hosted) -> None:
    options = f"memory: {MEMORY_BYTES}, batch_bytes_max: {BATCH_BYTES}"
    write_spec(hosted.folder, options)
    for _ in range(10):
        append(hosted.client, 2_000, width=400)  # Eight megabytes for each, which is four times its share.
    hosted.start("0,1,2")
    wait_until(lambda: len(hosted.instances()) == MAPPERS)
    share = MEMORY_BYTES // MAPPERS
    wait_until(lambda: all(status["window_bytes"] >= share for status in hosted.statuses()), "all windows are full")
    read = [status["next_input_index"] for status in hosted.statuses()]
    statuses = hosted.statuses()
    assert [status["window_bytes_max"] for status in statuses] == [share] * MAPPERS
    # The batch that is being mapped when the limit is reached may go over it.
    assert sum(status["window_bytes"] for status in statuses) <= MEMORY_BYTES + MAPPERS * 2 * BATCH_BYTES
    assert [status["next_input_index"] for status in statuses] == read, "a full window takes in nothing"


def test_metrics_and_logs_of_a_process_tell_its_mappers_apart(hosted: Hosted) -> None:
    write_spec(hosted.folder)
    for index in range(MAPPERS):
        append(hosted.client, 100 * (index + 1), range(index, index + 1))
    hosted.start("0-2")
    wait_until(lambda: [status["next_input_index"] for status in hosted.statuses()] == [100, 200, 300])
    members = hosted.client.leases.members("job/mappers")
    endpoints = {member.attributes["metrics"] for member in members}
    assert len(endpoints) == 1
    with urllib.request.urlopen(endpoints.pop(), timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    rows = [line for line in lines if line.startswith("shuffle_input_rows_total{")]
    assert [(f'index="{i}"' in line, float(line.split()[-1])) for i, line in enumerate(rows)] == [
        (True, 100.0),
        (True, 200.0),
        (True, 300.0),
    ]
    assert len([line for line in lines if line.startswith("shuffle_process_resident_bytes{")]) == 1
    logged = [json.loads(line) for line in hosted.log("mapper").splitlines() if line.startswith("{")]
    for event in ("serving", "reading from"):
        assert sorted(line["index"] for line in logged if line["event"] == event) == list(range(MAPPERS)), event


def test_row_that_stops_one_mapper_ends_its_process_with_an_error_that_names_it(hosted: Hosted) -> None:
    write_spec(hosted.folder, mapper_class="Poisoned")
    append(hosted.client, 100)
    hosted.client.queue("logs").append(1, pa.table({"user": ["bad"], "n": [-1]}, schema=SCHEMA))
    mapper = hosted.start("0-2")
    wait_until(lambda: "reading no further" in hosted.log("mapper"))
    append(hosted.client, 50, range(2, 3))
    wait_until(lambda: [status["next_input_index"] for status in hosted.statuses()] == [100, 100, 150], "others go on")
    assert mapper.wait(WAIT_S) == 3
    error = [line for line in hosted.log("mapper").splitlines() if line.startswith("error: ")][-1]
    assert "mapper 1" in error
    assert "cannot take -1" in error
    assert hosted.instances() == [], "all have left"


@pytest.mark.parametrize(
    ("indexes", "said"),
    [("0-5", "there is no mapper 3"), ("1,1", "twice"), ("2-1", "1-2"), ("x", "names no mappers"), ("0-999", "512")],
)
def test_indexes_that_cannot_be_are_refused(hosted: Hosted, indexes: str, said: str) -> None:
    write_spec(hosted.folder)
    assert hosted.start(indexes).wait(WAIT_S) == 2
    assert said in hosted.log("mapper").splitlines()[-1]
