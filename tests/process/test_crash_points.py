"""Every role killed at every named place, in a running processor; what comes out is compared row by row.

One world has a store, a mapper and a reducer as processes, and input that does not end before all places were reached.
Whoever dies is started again, set to die at its next place. A place that is not reached fails the test: then the name
is wrong, or nothing comes by there.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.errors import CommitConflict, CommitUnknown, ShuffleError, StoreError
from shuffle.statestore import StateClient
from shuffle.support.crash_points import ENVIRONMENT, POINTS
from tests.daemons import ROOT, environment

NUMBERS = pa.schema([("n", pa.int64())])
CHUNK_ROWS = 25
ROWS_MAX = 200_000
TICK_S = 0.02
REACHED_TICKS_MAX = 3_000
"""A minute, counted so that a time in which this whole test stands still is not in it."""
DRAINED_S_MAX = 60.0
ROUNDS = 20

JOB = """
import numpy as np
import pyarrow as pa
from shuffle import Mapper, PartitionedRowset, Reducer

class Pass(Mapper):
    def map(self, rows):
        return PartitionedRowset(rows, np.zeros(rows.num_rows, dtype=np.int64))

class Once(Reducer):
    def reduce(self, rows):
        transaction = self.state.transaction()
        found = transaction.lookup("seen", rows.select(["n"]))
        times = dict(zip(found["n"].to_pylist(), found["times"].to_pylist()))
        after = [times.get(n, 0) + 1 for n in rows["n"].to_pylist()]
        transaction.write("seen", rows.select(["n"]).append_column("times", pa.array(after, pa.int64())))
        transaction.append("out", 0, rows)
        return transaction
"""
SPEC = """
processor: job
state: grpc://{listen}
input: {{queue: in}}
metrics: false
lease_ttl: 1s
mapper: {{class: "crash_job:Pass", trim_period: 50ms, batch_rows_max: 100}}
reducer: {{class: "crash_job:Once", count: 1, fetch_wait_ms: 100, batch_rows_max: 100}}
"""
FIRST = "mapper.after_first_state"
ONCE_A_LIFE = {FIRST, "mapper.after_registering", "reducer.after_state_read"}
"""Places that an instance comes to once: it cannot be killed there the second time it passes."""


class Role:
    """One process, started again whenever it dies, each time set to die at the next of its places."""

    def __init__(
        self, folder: Path, name: str, command: Sequence[str], points: Sequence[str], nths: Iterator[int]
    ) -> None:
        self.folder = folder
        self.name = name
        self.command = command
        self.nths = nths
        self.waiting = list(points)
        self.armed: str | None = None
        self.ticks = 0
        self.hit: list[str] = []
        self.log = folder / f"{name}.log"

    def start(self) -> None:
        self.armed = self.waiting.pop(0) if self.waiting else None
        self.ticks = 0
        variables = {**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}", "SHUFFLE_LOG": "json"}
        if self.armed is not None:
            nth = 1 if self.armed in ONCE_A_LIFE else next(self.nths)
            variables[ENVIRONMENT] = f"{self.armed}:{nth}"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command], cwd=self.folder, stdout=output, stderr=output, env=variables
            )

    def tick(self) -> None:
        code = self.process.poll()
        if code is not None:
            assert code == -signal.SIGKILL, f"{self.name} ended with {code} by itself:\n{self.tail()}"
            assert self.armed is not None, f"{self.name} died at no place of ours:\n{self.tail()}"
            self.hit.append(self.armed)
            self.start()
        elif self.armed is not None:
            self.ticks += 1
            assert self.ticks < REACHED_TICKS_MAX, f"{self.armed} was not reached:\n{self.tail()}"

    @property
    def done(self) -> bool:
        return self.armed is None

    def tail(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


class World:
    def __init__(self, folder: Path, points: Sequence[str], nth: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.listen = f"127.0.0.1:{free.getsockname()[1]}"
        (folder / "crash_job.py").write_text(JOB)
        (folder / "job.yaml").write_text(SPEC.format(listen=self.listen))
        # From one place to the next another number of passes, so that rounds differ.
        nths = itertools.cycle([nth, nth + 1, nth + 3])
        commands = {
            "store": ["statestore", "--path", str(folder / "state"), "--listen", self.listen],
            "mapper": ["mapper", "job.yaml", "--index", "0"],
            "reducer": ["reducer", "job.yaml", "--index", "0"],
        }
        # The store begins in peace: its tables have to be made before there is anything to kill.
        self.roles = {
            name: Role(folder, name, command, [p for p in points if p.startswith(f"{name}.")], nths)
            for name, command in commands.items()
        }
        self.appended = 0
        self._stop = threading.Event()
        self._ending = threading.Event()
        """There will be no store any more to append to."""
        self._failure: BaseException | None = None
        self._producer = threading.Thread(target=self._produce, name="producer", daemon=True)

    def run(self) -> None:
        store = self.roles["store"]
        later, store.waiting = store.waiting, []
        store.start()
        self.client = self._connect()
        self.client.create_queue("in", schema=NUMBERS, partitions=1)
        self.client.create_queue("out", schema=NUMBERS, partitions=1)
        self.client.create_table("seen", key=NUMBERS, value=pa.schema([("times", pa.int64())]))
        for name in ("mapper", "reducer"):
            self.roles[name].start()
        self._producer.start()
        # The first state is written once in the life of a store, and the place after it is not reached by a mapper that
        # did not hear of its commit: until then the store lives.
        while self.roles["mapper"].armed == FIRST:
            self._tick()
        if later:
            store.end()
            store.waiting = later
            store.start()
        while not all(role.done for role in self.roles.values()):
            self._tick()
        self._stop.set()
        self._producer.join(DRAINED_S_MAX)
        assert self._failure is None, self._failure
        for _ in range(REACHED_TICKS_MAX):
            if self._out_rows() >= self.appended:
                return
            self._tick()
        raise AssertionError(f"{self._out_rows()} of {self.appended} rows came out:\n{self._tails()}")

    def _tick(self) -> None:
        for role in self.roles.values():
            role.tick()
        assert self._failure is None, self._failure
        time.sleep(TICK_S)

    def _connect(self) -> StateClient:
        for _ in range(REACHED_TICKS_MAX):
            try:
                return StateClient.connect(f"grpc://{self.listen}")
            except ShuffleError:
                time.sleep(TICK_S)
        raise AssertionError(self._tails())

    def _produce(self) -> None:
        """Input without an end, and a queue that comes and goes: files of segments are removed with it."""
        try:
            for sequence in itertools.count():
                if self._stop.is_set() or self.appended >= ROWS_MAX:
                    return
                rows = pa.table(
                    [pa.array(range(self.appended, self.appended + CHUNK_ROWS), pa.int64())], schema=NUMBERS
                )
                while True:
                    try:
                        self.client.queue("in").append(0, rows, producer="test", sequence=sequence)
                        break
                    except (StoreError, CommitUnknown, CommitConflict):
                        if self._ending.wait(0.05):
                            return
                self.appended += CHUNK_ROWS
                if sequence % 10 == 9:
                    self._scratch(rows)
                time.sleep(0.02)
        except BaseException as error:
            self._failure = error

    def _scratch(self, rows: pa.Table) -> None:
        with suppress(ShuffleError):
            self.client.create_queue("scratch", schema=NUMBERS, partitions=1, if_not_exists=True).append(0, rows)
            self.client.drop_queue("scratch")

    def _out_rows(self) -> int:
        try:
            return self.client.queue("out").bounds()[0][1]
        except StoreError:
            return 0

    def check(self) -> None:
        """The oracle: every number that went in has had its effect once, and came out once, in order."""
        seen = self.client.scan("seen").read_all()
        assert seen["n"].to_pylist() == list(range(self.appended))
        assert set(seen["times"].to_pylist()) == {1}
        out: list[int] = []
        while len(out) < self.appended:
            rows, _ = self.client.queue("out").read(0, len(out))
            out += rows["n"].to_pylist()
        assert out == list(range(self.appended))

    def _tails(self) -> str:
        return "\n".join(f"--- {role.name}\n{role.tail()}" for role in self.roles.values())

    def end(self) -> None:
        self._stop.set()
        self._ending.set()
        for role in self.roles.values():
            with suppress(AttributeError):
                role.end()
        if self._producer.is_alive():
            self._producer.join(DRAINED_S_MAX)


def killed_at(folder: Path, points: Sequence[str], nth: int) -> None:
    world = World(folder, points, nth)
    try:
        world.run()
        world.check()
        hit = [point for role in world.roles.values() for point in role.hit]
        assert sorted(hit) == sorted(points)
    finally:
        world.end()


def test_every_place_in_the_code_has_a_name_in_the_list_and_the_other_way_round() -> None:
    called = [
        name
        for package in ("mapper", "reducer", "statestore")
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r'crash_points\.reach\("([^"]+)"\)', path.read_text())
    ]
    assert sorted(called) == sorted(POINTS)


def test_unknown_place_is_refused_before_anything_starts() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import shuffle.support.crash_points"],
        env={**environment(), ENVIRONMENT: "mapper.nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "not NAME or NAME:N" in ran.stderr


@pytest.mark.timeout(240)
def test_each_role_killed_where_it_hurts_most_loses_and_doubles_nothing(tmp_path: Path) -> None:
    points = [
        "mapper.after_push",
        "mapper.after_trim_commit",
        "reducer.before_commit",
        "reducer.after_commit",
        "store.after_log_write",
        "store.before_answer",
    ]
    killed_at(tmp_path, points, nth=2)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_each_role_killed_at_every_place_loses_and_doubles_nothing(tmp_path: Path, round_number: int) -> None:
    # Another order each time, but what happens only before the first state has to come first.
    points = sorted(point for point in POINTS if not point.startswith("exporter."))  # Those: test_exporter.
    turn = round_number % len(points)
    turned = points[turn:] + points[:turn]
    killed_at(tmp_path, [FIRST, *(point for point in turned if point != FIRST)], nth=1 + round_number % 4)
