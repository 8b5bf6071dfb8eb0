"""A mapper that spills, as a process: killed in each phase of it, with a reducer away; row by row against an oracle."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shuffle.durable.tables import spill_queue
from shuffle.run.drain import spilled_partitions
from shuffle.spec.config import load_spec
from shuffle.support import flight
from tests.process.test_mapper_daemon import World
from tests.waiting import wait_until

ROWS = 6_000
PAD = 800
AWAY = 1
SPEC = "spill: {age: 20ms, memory_share: 0.1, reducers_done_share: 0.5, compression: zstd}\n"

DYING = """
import os, runpy, signal, sys
point = sys.argv.pop(1)
import shuffle.mapper.spill.store as spill_store, shuffle.mapper.trim as trim
store, trimmer = spill_store.SpillStore, trim.Trimmer

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def after(owner, name):
    original = getattr(owner, name)
    def wrapped(*args, **kwargs):
        original(*args, **kwargs)
        die()
    setattr(owner, name, wrapped)

if point == "before it is staged":
    store.prepare = die
elif point == "after it was staged":
    spill_store.STAGED_BYTES_MIN = 1
    after(store, "prepare")
elif point == "before the commit":
    after(store, "write")
elif point == "after the commit":
    trimmer._committed = die
elif point == "before the input is trimmed":
    after(trimmer, "_committed")
elif point == "while it is read":
    store.read = die
elif point == "before the spill is trimmed":
    store.trim = die
elif point == "after the spill was trimmed":
    after(store, "trim")
sys.argv[0] = "mapper"
runpy.run_module("mapper", run_name="__main__", alter_sys=True)
"""

WRITING = [
    pytest.param("before it is staged", marks=pytest.mark.long),
    "after it was staged",
    pytest.param("before the commit", marks=pytest.mark.long),
    "after the commit",
    pytest.param("before the input is trimmed", marks=pytest.mark.long),
]
READING = [
    "while it is read",
    pytest.param("before the spill is trimmed", marks=pytest.mark.long),
    pytest.param("after the spill was trimmed", marks=pytest.mark.long),
]


class SpillWorld(World):
    """Two reducers, of which one stays away until the test lets it come."""

    def prepare(self) -> None:
        self.append(0, ROWS, pad=PAD)
        self.write_spec(memory="1MiB", batch_bytes_max="64KiB")
        with (self.folder / "job.yaml").open("a") as spec:
            spec.write(SPEC)
        self.expect(ROWS)
        (self.folder / "dying.py").write_text(DYING)

    def start_dying(self, point: str) -> object:
        return self.start("dying", point, "job.yaml", "--index", "0")

    def step_without(self) -> None:
        """The reducer that is not away fetches and commits."""
        reducer = 1 - AWAY
        for instance in self.instances():
            try:
                self.fetch(reducer, instance, rows_max=200)
                break
            except Exception:
                self.rewind(reducer)
        self.committed[reducer] = self.cursor[reducer]

    def left(self) -> list[tuple[str, int]]:
        return spilled_partitions(load_spec(self.folder / "job.yaml"), self.client)

    def spilled_ever(self) -> int:
        names = {queue.name for queue in self.client.queues()}
        if spill_queue("job", 0) not in names:
            return 0
        return int(self.client.queue(spill_queue("job", 0)).bounds()[AWAY][1])

    def others_are_done(self) -> bool:
        self.step_without()
        return self.committed[1 - AWAY] == self.last[1 - AWAY]

    def status(self) -> dict[str, object]:
        address = self.instances()[0].address
        connection = flight.connect(address)
        try:
            return dict(json.loads(flight.do_action(connection, "status", who=address)))
        finally:
            connection.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SpillWorld]:
    one = SpillWorld(tmp_path)
    try:
        one.start_store()
        one.prepare()
        yield one
    finally:
        one.close()


def check_exact(world: SpillWorld) -> None:
    """The reducer comes back: everything is there, in order, once committed nothing is left of the spill."""
    wait_until(lambda: world.is_drained(ROWS), "all is committed and trimmed")
    assert [sorted(got) for got in world.got] == world.wanted
    wait_until(lambda: not world.left(), "the spill is empty")
    wait_until(lambda: not spill_files(world), "its files are gone")


def spill_files(world: SpillWorld) -> list[str]:
    queue_id = world.client.queue(spill_queue("job", 0)).queue_id
    return [path.name for path in world.folder.glob(f"store/**/q{queue_id}-*.seg")]


def test_others_go_on_while_a_reducer_is_away_and_it_catches_up(world: SpillWorld) -> None:
    mapper = world.start_mapper()
    wait_until(world.others_are_done, "the others have committed everything")
    assert world.spilled_ever() > 0
    buckets = world.status()["buckets"]
    assert isinstance(buckets, list)
    away = buckets[AWAY]
    assert away["is_straggler"]
    assert away["rows"] + away["spilled_rows"] == len(world.wanted[AWAY]), "each row is in one of two places"
    assert away["spilled_since_ms"] > 0
    assert world.persisted().input_unread_row_index > ROWS // 2, "the state has moved past the rows of the one away"
    # The input is trimmed when nothing is left to spill, so it may come a little later.
    wait_until(lambda: world.client.queue("in").bounds()[0][0] > ROWS // 2, "the input is trimmed behind it")
    check_exact(world)
    check_log(world, mapper)


def check_log(world: SpillWorld, mapper: subprocess.Popen[bytes]) -> None:
    lines = [json.loads(line) for line in world.log(mapper).splitlines() if line.startswith("{")]
    begun = [line for line in lines if "lags behind the others" in line["event"]]
    assert [line["reducer"] for line in begun] == [AWAY]
    assert begun[0]["rows"] > 0
    assert begun[0]["bytes"] > 0
    wait_until(lambda: "caught up" in world.log(mapper), "it says that it has caught up")


@pytest.mark.parametrize("point", WRITING)
def test_mapper_killed_while_it_spills(world: SpillWorld, point: str) -> None:
    dying = world.start_dying(point)
    wait_until(lambda: world.step_without() or dying.poll() is not None, "it dies")  # type: ignore[attr-defined,func-returns-value]
    assert dying.wait(10) == -9, world.log(dying)  # type: ignore[attr-defined,arg-type]
    world.rewind(1 - AWAY)
    world.start_mapper()
    wait_until(world.others_are_done, "the others have committed everything")
    assert world.spilled_ever() > 0
    check_exact(world)


@pytest.mark.parametrize("point", READING)
def test_mapper_killed_while_a_reducer_catches_up(world: SpillWorld, point: str) -> None:
    first = world.start_mapper()
    wait_until(world.others_are_done, "the others have committed everything")
    first.kill()
    first.wait(10)
    dying = world.start_dying(point)
    wait_until(lambda: world.step() < -1 or dying.poll() is not None, "it dies")  # type: ignore[attr-defined]
    assert dying.wait(10) == -9, world.log(dying)  # type: ignore[attr-defined,arg-type]
    for reducer in (0, 1):
        world.rewind(reducer)
    world.start_mapper()
    check_exact(world)


@pytest.mark.long
def test_two_instances_spill_and_each_row_is_spilled_once(world: SpillWorld) -> None:
    twins = [world.start_mapper(), world.start_mapper()]
    wait_until(world.others_are_done, "the others have committed everything")
    assert all(twin.poll() is None for twin in twins), [world.log(twin) for twin in twins]
    check_exact(world)
