"""A reducer as a process, with a real store and real mappers: killed, doubled, stopped, given rows it cannot take."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shuffle.durable.reducer_state import ReducerState
from shuffle.errors import ShuffleError
from shuffle.statestore import StateClient
from shuffle.user_code.poison import decode_row
from tests.waiting import WAIT_S, pause, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
USERS = 17

JOB = """
import os
import time
from shuffle import AggregateReducer, Count, HashMapper, Sum

class ByUser(HashMapper):
    key = ["user"]

class Totals(AggregateReducer):
    table = "totals"
    key = ["user"]
    aggregates = {"count": Count(), "sum": Sum("n")}

class Held(Totals):
    def reduce(self, rows):
        while os.path.exists(f"hold-{os.getpid()}"):
            open(f"held-{os.getpid()}", "w").close()
            time.sleep(0.01)
        return super().reduce(rows)

class HeldLater(Held):
    # Not with its first rows: when it has committed some, and has others in hand.
    works = 0

    def reduce(self, rows):
        self.works += 1
        return super().reduce(rows) if self.works == 2 else Totals.reduce(self, rows)

class Picky(Totals):
    def reduce(self, rows):
        if -1 in rows["n"].to_pylist():
            raise ValueError("cannot take -1")
        return super().reduce(rows)
"""


class World:
    """A store and two mappers as processes; every process it starts is ended by it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.listen = f"127.0.0.1:{free.getsockname()[1]}"
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "totals_job.py").write_text(JOB)
        self.client: StateClient
        self.expected: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def begin(self) -> None:
        self.store = self.start_store()
        wait_until(self.connects, lambda: self.log("store"))
        self.client.create_queue("in", schema=SCHEMA, partitions=2)

    def connects(self) -> bool:
        try:
            self.client = StateClient.connect(f"grpc://{self.listen}")
        except ShuffleError:
            return False
        return True

    def answers(self) -> bool:
        try:
            self.client.tables()
        except ShuffleError:
            return False
        return True

    def spec(self, **reducer: Any) -> Path:
        options = {"class": "totals_job:Totals", "count": 1, "fetch_wait_ms": 100, "batch_rows_max": 200} | reducer
        inner = ", ".join(
            f'{name}: "{value}"' if isinstance(value, str) else f"{name}: {value}" for name, value in options.items()
        )
        path = self.folder / "job.yaml"
        path.write_text(
            f"processor: job\nstate: grpc://{self.listen}\ninput: {{queue: in}}\nmetrics: false\nlease_ttl: 1s\n"
            'mapper: {class: "totals_job:ByUser", trim_period: 100ms, batch_rows_max: 100}\n'
            f"reducer: {{{inner}}}\n"
        )
        return path

    def start_store(self) -> subprocess.Popen[bytes]:
        return self.start("store", "statestore", "--path", str(self.folder / "state"), "--listen", self.listen)

    def start(self, log: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(self.folder)]),
            "SHUFFLE_LOG": "json",
        }
        with open(self.folder / f"{log}.log", "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=self.folder,
                stdout=output,
                stderr=output,
                env=environment,
            )
        self.processes.append(process)
        return process

    def mappers(self, spec: Path) -> None:
        for index in (0, 1):
            self.start(f"mapper-{index}", "mapper", str(spec), "--index", str(index))

    def reducer(self, spec: Path, log: str = "reducer") -> subprocess.Popen[bytes]:
        return self.start(log, "reducer", str(spec), "--index", "0")

    def log(self, name: str = "reducer") -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def append(self, count: int, begin: int = 0) -> None:
        for partition in (0, 1):
            numbers = range(begin, begin + count)
            users = [f"user-{n % USERS}" for n in numbers]
            self.client.queue("in").append(partition, pa.table({"user": users, "n": list(numbers)}, schema=SCHEMA))
            for user, n in zip(users, numbers, strict=True):
                self.expected[user] += 1
                self.sums[user] += n

    def totals(self) -> dict[str, tuple[int, int]]:
        try:
            rows = self.client.scan("totals").read_all().to_pylist()
        except ShuffleError:
            return {}
        return {row["user"]: (row["count"], row["sum"]) for row in rows}

    def counted(self) -> int:
        return sum(count for count, _ in self.totals().values())

    def committed(self) -> ReducerState:
        rows = self.client.lookup("job/reducers", pa.table({"reducer_index": pa.array([0], pa.int32())}))
        return ReducerState.from_rows(rows, 2)

    def wait_drained(self) -> None:
        rows = sum(self.expected.values())
        wait_until(lambda: self.counted() >= rows, lambda: f"{self.counted()} of {rows}\n{self.log()[-3000:]}")
        assert self.totals() == {user: (count, self.sums[user]) for user, count in self.expected.items()}

    def close(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    try:
        one.begin()
        yield one
    finally:
        one.close()


def test_reducer_killed_while_it_works_counts_every_row_once(world: World) -> None:
    spec = world.spec(**{"class": "totals_job:HeldLater"})
    world.mappers(spec)
    for life in range(4):
        before = world.counted()
        reducer = world.reducer(spec)
        (world.folder / f"hold-{reducer.pid}").touch()
        world.append(3000, begin=3000 * life)
        wait_until((world.folder / f"held-{reducer.pid}").exists, world.log)
        reducer.send_signal(signal.SIGKILL)
        reducer.wait(10)
        assert before < world.counted() < sum(world.expected.values()), "some was committed, and some was not"
    world.reducer(spec)
    world.wait_drained()


def test_reducer_started_twice_counts_every_row_once_and_one_says_so(world: World) -> None:
    spec = world.spec()
    world.mappers(spec)
    world.reducer(spec, "one")
    world.reducer(spec, "two")
    round_number = 0
    while "split brain" not in world.log("one") + world.log("two"):
        assert round_number < 60, "two instances never met"
        world.append(500, begin=500 * round_number)
        world.wait_drained()
        round_number += 1
    assert "another instance of reducer 0 of processor job is alive" in world.log("one") + world.log("two")
    world.append(500, begin=500 * round_number)
    world.wait_drained()


def test_reducer_paused_past_its_lease_with_rows_in_hand_finds_out_and_counts_none_twice(world: World) -> None:
    """It may learn of it from a mapper whose rows are gone or from its own row, whichever it comes to first; what the
    row alone must tell is in test_reducer_commit.py."""
    spec = world.spec(**{"class": "totals_job:Held"})
    world.mappers(spec)
    old = world.reducer(spec, "old")
    hold, held = (world.folder / f"{name}-{old.pid}" for name in ("hold", "held"))
    hold.touch()
    world.append(2000)
    wait_until(held.exists, lambda: world.log("old"))
    pause(old.pid)
    try:
        wait_until(lambda: world.client.leases.members("job/reducers") == [])
        world.reducer(spec, "new")
        world.wait_drained()
        hold.unlink()
    finally:
        old.send_signal(signal.SIGCONT)
    wait_until(lambda: "another instance of reducer 0 of processor job is alive" in world.log("old"))
    world.append(2000, begin=2000)
    world.wait_drained()


def test_reducer_told_to_stop_leaves_with_its_commit_made_and_its_lease_given_back(world: World) -> None:
    spec = world.spec()
    world.mappers(spec)
    reducer = world.reducer(spec)
    world.append(2000)
    wait_until(lambda: world.counted() >= 200, world.log)
    reducer.send_signal(signal.SIGTERM)
    assert reducer.wait(15) == 0, world.log()
    assert world.client.leases.members("job/reducers") == []
    counted = world.counted()
    time.sleep(0.3)
    assert world.counted() == counted
    world.reducer(spec)
    world.wait_drained()


def test_store_restarted_under_a_reducer_counts_every_row_once(world: World) -> None:
    spec = world.spec()
    world.mappers(spec)
    reducer = world.reducer(spec)
    world.append(4000)
    wait_until(lambda: world.counted() >= 500, world.log)
    world.store.send_signal(signal.SIGKILL)
    world.store.wait(10)
    time.sleep(0.5)  # Long enough for calls to fail, and not only to wait.
    world.store = world.start_store()
    wait_until(world.answers)
    world.wait_drained()
    assert reducer.poll() is None, "it waited, and did not die"


def test_poison_row_with_on_error_stop_ends_with_its_positions_and_the_exception(world: World) -> None:
    spec = world.spec(**{"class": "totals_job:Picky"})
    world.mappers(spec)
    world.client.queue("in").append(1, pa.table({"user": ["u", "u"], "n": [5, -1]}, schema=SCHEMA))
    reducer = world.reducer(spec)
    assert reducer.wait(WAIT_S) == 3, world.log()
    last = world.log().splitlines()[-1]
    assert last.startswith(
        "error: processor job, reducer 0: reduce failed on 2 rows (shuffle indexes of mapper 1: 0 to 1)"
    )
    assert "ValueError: cannot take -1 (at " in last
    assert "totals_job.py:" in last
    assert world.committed() == ReducerState.initial(2)
    assert world.totals() == {}


def test_poison_rows_with_dead_letter_are_set_aside_with_their_positions_and_the_rest_is_counted(world: World) -> None:
    spec = world.spec(**{"class": "totals_job:Picky", "on_error": "dead_letter"})
    world.mappers(spec)
    world.append(1000)
    world.client.queue("in").append(1, pa.table({"user": ["a", "u", "b", "u"], "n": [0, -1, 0, -1]}, schema=SCHEMA))
    world.expected.update({"a": 1, "b": 1})
    world.append(1000, begin=1000)
    world.reducer(spec)
    world.wait_drained()
    wait_until(lambda: world.committed().committed_row_indices == (1999, 2003))
    rows, _ = world.client.queue("job/reducer_dead_letters").read(0, 0)
    letters = rows.to_pylist()
    assert [(letter["role"], letter["mapper"], letter["position"]) for letter in letters] == [
        ("reducer", 1, 1001),
        ("reducer", 1, 1003),
    ]
    assert {letter["reason"] for letter in letters} == {"ValueError: cannot take -1"}
    assert [decode_row(letter["row"]).to_pylist() for letter in letters] == [[{"user": "u", "n": -1}]] * 2


def test_reducer_of_an_index_that_is_not_there_is_refused(world: World) -> None:
    spec = world.spec()
    refused = world.start("refused", "reducer", str(spec), "--index", "1")
    assert refused.wait(WAIT_S) == 2
    assert "there is no reducer 1" in world.log("refused").splitlines()[-1]
