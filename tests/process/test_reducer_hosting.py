"""Reducer processes that host several reducers: run, killed, and stopped by one of their own."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections import Counter
from pathlib import Path

import pyarrow as pa

from shuffle.statestore import StateClient
from tests.process.test_run_processor import children_of, counts_in, finished, running
from tests.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
REDUCERS = 4

JOB = """
from shuffle import AggregateReducer, Count, HashMapper

class ByUser(HashMapper):
    key = ["user"]

class CountUsers(AggregateReducer):
    table = "counts"
    key = ["user"]
    aggregates = {"count": Count()}

class Poisoned(CountUsers):
    def reduce(self, rows):
        if -1 in rows["n"].to_pylist():
            raise ValueError("cannot take -1")
        return super().reduce(rows)
"""


def write_spec(folder: Path, reducer_class: str = "CountUsers") -> Path:
    (folder / "hosted_reducers.py").write_text(JOB)
    path = folder / "job.yaml"
    path.write_text(
        "processor: job\nstate: ./job.state\ninput: {queue: logs}\nlease_ttl_ms: 1000\n"
        'mapper: {class: "hosted_reducers:ByUser", trim_period: 100ms, read_wait_ms: 100}\n'
        f'reducer: {{class: "hosted_reducers:{reducer_class}", count: {REDUCERS}, per_process: 3}}\n'
    )
    return path


def append(client: StateClient, rows: int, n: int = 0) -> Counter[str]:
    users = [f"user-{i % 97}" for i in range(rows)]
    client.queue("logs").append(0, pa.table({"user": users, "n": [n] * rows}, schema=SCHEMA))
    return Counter(users)


def test_reducers_that_share_a_process_count_every_row_once_though_it_is_killed(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    with StateClient.open(tmp_path / "job.state") as client:
        client.create_queue("logs", schema=SCHEMA, partitions=1)
        expected = append(client, 3_000)
    workers = {"statestore", "mapper 0", "reducer 0-2", "reducer 3"}
    with running("run", str(spec), "--no-check", "--no-screen") as controller:
        wait_until(lambda: children_of(controller.pid).keys() == workers)
        with StateClient.open(tmp_path / "job.state") as client:
            for _ in range(2):
                wait_until(lambda: counts_in(client).total() > 0)
                killed = children_of(controller.pid)["reducer 0-2"]
                expected += append(client, 2_000)
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda pid=killed: children_of(controller.pid).get("reducer 0-2", pid) != pid)  # type: ignore[misc]
                expected += append(client, 2_000)
            wait_until(lambda: counts_in(client) == expected)
            members = {member.attributes["index"]: member for member in client.leases.members("job/reducers")}
            wait_until(lambda: len(client.leases.members("job/reducers")) == REDUCERS)
            assert sorted(members) == [str(index) for index in range(REDUCERS)]
            metrics = members["0"].attributes["metrics"]
            assert metrics == members["2"].attributes["metrics"] != members["3"].attributes["metrics"]
            text = urllib.request.urlopen(metrics, timeout=WAIT_S).read().decode()
            assert {f'index="{index}"' in text for index in range(3)} == {True}
        status = json.loads(finished("status", str(spec), "--json").stdout)
        assert len(status["reducers"]) == REDUCERS
        controller.send_signal(signal.SIGTERM)
        assert controller.wait(WAIT_S) == 0
    with StateClient.open(tmp_path / "job.state") as client:
        assert counts_in(client) == expected


def test_error_of_one_reducer_ends_its_process_and_is_named(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "Poisoned")
    with StateClient.open(tmp_path / "job.state") as client:
        client.create_queue("logs", schema=SCHEMA, partitions=1)
        append(client, 100)
        append(client, 1, n=-1)
    ended = finished("run", str(spec), "--until-drained", "--no-check", "--no-screen")
    assert ended.returncode != 0
    assert "cannot take -1" in ended.stderr
    assert "reducer 0-2 died" in ended.stderr or "reducer 3 died" in ended.stderr


def test_reducer_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    ended = finished("reducer", str(write_spec(tmp_path)), "--index", "1,1")
    assert ended.returncode != 0
    assert "names a reducer twice" in ended.stderr
