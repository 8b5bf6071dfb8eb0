"""The mapper as a process, with a state store as another, killed, paused, doubled and starved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.discovery import MapperAddress, arrange_mappers
from shuffle.durable.mapper_state import MapperState, lookup_state
from shuffle.durable.reducer_state import ReducerState
from shuffle.errors import BadInput, NotServed, RowsGone, ShuffleError, StaleMapper, StoreUnavailable
from shuffle.ids import MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.messages import ROWS_EXCHANGE, GetRows, Tail
from shuffle.statestore import StateClient
from shuffle.support import flight
from shuffle.user_code.poison import decode_row
from tests.waiting import pause, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = pa.schema([("n", pa.int64()), ("pad", pa.string())])
REDUCERS = 2
PROCESS_BYTES_MAX = 150 * 1000 * 1000
"""Of a mapper besides its window."""
NOT_IN_A_MAPPER = {
    *("grpc", "google.protobuf", "prometheus_client", "rocksdict", "rich"),
    *("pandas.core", "polars", "pyarrow.parquet", "pyarrow.dataset", "pyarrow.acero", "pyarrow.csv", "pyarrow.json"),
    *("ssl", "hashlib", "http", "asyncio", "email", "multiprocessing"),
}
"""What a mapper that reads a queue and has its metrics off has no use for: all of it would nearly double its memory.
(``pandas`` itself is asked for by pyarrow, and refused; see ``footprint``.)"""

JOB = """
import numpy as np
from shuffle import Mapper, PartitionedRowset

class Spread(Mapper):
    def map(self, rows):
        n = rows["n"].to_numpy()
        if np.isin(n, self.config.get("poison", [])).any():
            raise ValueError("poison")
        return PartitionedRowset(rows.filter(n % 10 != 9), (n[n % 10 != 9] // 3) % self.spec.reducer_count)

class Idle:
    pass
"""
REDUCER = """
from shuffle import Reducer

class Nothing(Reducer):
    def reduce(self, rows):
        return None
"""


def expected(rows: int, poison: tuple[int, ...] = ()) -> list[list[tuple[int, int]]]:
    """For each reducer what it must get: (shuffle index, n)."""
    kept = [n for n in range(rows) if n % 10 != 9 and n not in poison]
    return [[(i, n) for i, n in enumerate(kept) if (n // 3) % REDUCERS == reducer] for reducer in range(REDUCERS)]


def resident_bytes(pid: int) -> int:
    """All of a process's memory that is resident, the libraries' files included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class World:
    """A folder with a spec, the store's process, any number of mapper processes, and reducers played by the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[bytes]] = []
        self.logs: dict[int, Path] = {}
        (folder / "mapper_job.py").write_text(JOB)
        (folder / "reducer_job.py").write_text(REDUCER)
        self.committed = [-1] * REDUCERS
        self.cursor = [-1] * REDUCERS
        self.durable = [-1] * REDUCERS
        """What the reducers' rows in the store say."""
        self.got: list[dict[int, int]] = [{} for _ in range(REDUCERS)]
        self.flights: dict[str, object] = {}

    def start_store(self) -> None:
        self.store = self.start("statestore", "--path", str(self.folder / "store"), "--listen", "127.0.0.1:0")
        self.client = self.connect()

    def start(self, module: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{module}-{len(self.children)}.log"
        path = f"{ROOT}{os.pathsep}{self.folder}"
        environment = {**os.environ, "PYTHONPATH": path, "SHUFFLE_LOG": "json", **variables}
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=environment,
            )
        self.children.append(child)
        self.logs[child.pid] = log
        return child

    def log(self, child: subprocess.Popen[bytes]) -> str:
        return self.logs[child.pid].read_text()

    def connect(self) -> StateClient:
        mark = "serves at "
        wait_until(lambda: mark in self.log(self.store) or self.store.poll() is not None, "the store serves")
        assert self.store.poll() is None, self.log(self.store)
        self.address = self.log(self.store).split(mark)[1].split()[0]
        return StateClient.connect(self.address)

    def restart_store(self) -> None:
        self.store.kill()
        self.store.wait(10)
        listen = self.address.removeprefix("grpc://")
        self.store = self.start("statestore", "--path", str(self.folder / "store"), "--listen", listen)
        wait_until(lambda: "serves at " in self.log(self.store), "the store serves again")

    def write_spec(self, **mapper: object) -> None:
        options = {
            "trim_period_ms": 50,
            "read_wait_ms": 100,
            "split_brain_delay_ms": 50,
            "batch_rows_max": 100,
            **mapper,
        }
        lines = "".join(f"  {name}: {value}\n" for name, value in options.items())
        (self.folder / "job.yaml").write_text(
            f"processor: job\nstate: {self.address}\ninput: {{queue: in}}\nlease_ttl_ms: 1000\nmetrics: false\n"
            f'mapper:\n  class: "mapper_job:Spread"\n{lines}'
            f'reducer: {{class: "reducer_job:Nothing", count: {REDUCERS}}}\n'
        )

    def start_mapper(self) -> subprocess.Popen[bytes]:
        return self.start("mapper", "job.yaml", "--index", "0")

    def append(self, begin: int, end: int, pad: int = 0) -> None:
        queue = self.client.create_queue("in", schema=SCHEMA, partitions=1, if_not_exists=True)
        for first in range(begin, end, 500):
            ns = list(range(first, min(first + 500, end)))
            queue.append(0, pa.table({"n": ns, "pad": ["x" * pad] * len(ns)}, schema=SCHEMA))

    def instances(self) -> list[MapperAddress]:
        return arrange_mappers(self.client.leases.members("job/mappers")).get(MapperIndex(0), [])

    def fetch(self, reducer: int, of: MapperAddress, rows_max: int = 37) -> int:
        """One GetRows, checked against everything that was served before; the number of rows."""
        self.make_durable(reducer)
        rows = 0
        for last, ns in self.ask(reducer, of, self.committed[reducer], self.cursor[reducer], rows_max):
            for n in ns:
                self.note(reducer, n)
                rows += 1
            self.cursor[reducer] = last
        return rows

    def make_durable(self, reducer: int) -> None:
        """As a reducer does before it tells a mapper that rows are committed."""
        if self.durable[reducer] != self.committed[reducer]:
            state = ReducerState((ShuffleIndex(self.committed[reducer]),))
            with self.client.transaction() as tx:
                tx.write("job/reducers", state.to_row(ReducerIndex(reducer)))
                tx.commit()
            self.durable[reducer] = self.committed[reducer]

    def ask(
        self, reducer: int, of: MapperAddress, committed: int, cursor: int, rows_max: int = 37, processor: str = "job"
    ) -> Iterator[tuple[int, list[int]]]:
        """One GetRows, whether what it says is so or not: of each batch the last index, and its rows."""
        connection = self.flights.setdefault(of.address, flight.connect(of.address))
        ticket = GetRows(
            of.guid,
            ReducerIndex(reducer),
            ShuffleIndex(committed),
            ShuffleIndex(cursor),
            rows_max,
            1 << 20,
            wait_ms=20,
            processor=processor,
        )
        with flight.typed_errors(of.address):
            for chunk in connection.do_get(flight.Ticket(ticket.encode()), flight.call_options(10)):  # type: ignore[attr-defined]
                last = Tail.decode(chunk.app_metadata.to_pybytes()).last_row_index
                if chunk.data.num_rows:
                    yield last, chunk.data.column("n").to_pylist()

    def note(self, reducer: int, n: int) -> None:
        """Rows come in order and none is left out: the next one after the cursor is always the same."""
        index = self.following[reducer].get(self.cursor_seen[reducer])
        assert index == n, f"reducer {reducer} got {n} after {self.cursor_seen[reducer]}, but {index} is next"
        self.cursor_seen[reducer] = n
        self.got[reducer][n] = self.got[reducer].get(n, 0) + 1

    def expect(self, rows: int, poison: tuple[int, ...] = ()) -> None:
        wanted = expected(rows, poison)
        self.wanted = [[n for _, n in of_reducer] for of_reducer in wanted]
        self.last = [of_reducer[-1][0] for of_reducer in wanted]
        self.by_index = [dict(of_reducer) for of_reducer in wanted]
        self.following = [dict(zip([-1, *ns], ns, strict=False)) for ns in self.wanted]
        self.cursor_seen = [-1] * REDUCERS

    def step(self, commit: bool = True) -> int:
        """Every reducer fetches from the instance it would choose and, if asked to, commits. The hindmost cursor."""
        for reducer in range(REDUCERS):
            for instance in self.instances():
                try:
                    self.fetch(reducer, instance)
                    break
                except (StoreUnavailable, StaleMapper, RowsGone, NotServed):
                    self.rewind(reducer)
            if commit:
                self.committed[reducer] = self.cursor[reducer]
        return min(self.cursor)

    def rewind(self, reducer: int) -> None:
        self.cursor[reducer] = self.committed[reducer]
        self.cursor_seen[reducer] = self.by_index[reducer].get(self.committed[reducer], -1)

    def is_drained(self, rows: int) -> bool:
        self.step()
        return self.committed == self.last and self.persisted().input_unread_row_index == rows

    def persisted(self) -> MapperState:
        return lookup_state(self.client, "job", MapperIndex(0)) or MapperState()

    def close(self) -> None:
        for connection in self.flights.values():
            connection.close()  # type: ignore[attr-defined]
        if hasattr(self, "client"):
            self.client.close()
        for child in reversed(self.children):
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.kill()
            child.wait(10)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    try:
        one.start_store()
        yield one
    finally:
        one.close()


def test_mapper_serves_commits_trims_and_ends_on_sigterm(world: World) -> None:
    world.append(0, 2000)
    world.write_spec()
    world.expect(2000)
    mapper = world.start_mapper()
    wait_until(lambda: world.is_drained(2000), "all is committed and trimmed")
    assert [list(got) for got in world.got] == world.wanted
    assert all(times == 1 for got in world.got for times in got.values())
    wait_until(lambda: world.client.queue("in").bounds() == [(2000, 2000)], "the input is trimmed")
    mapper.terminate()
    assert mapper.wait(15) == 0, world.log(mapper)
    assert world.instances() == [], "it gives its lease back"


def test_mapper_ends_on_sigterm_though_a_client_keeps_an_exchange_open(world: World) -> None:
    world.append(0, 10)
    world.write_spec()
    mapper = world.start_mapper()
    wait_until(lambda: len(world.instances()) == 1, "it is there")
    [instance] = world.instances()
    client = flight.connect(instance.address)
    try:
        descriptor = flight.FlightDescriptor.for_command(ROWS_EXCHANGE)
        writer, reader = client.do_exchange(descriptor, flight.call_options(60.0))
        writer.begin(pa.schema([]))
        writer.write_metadata(b"no request")
        assert b"bad_input" in bytes(reader.read_chunk().app_metadata), "it is served, and waits for the next request"
        mapper.terminate()
        assert mapper.wait(5) == 0, world.log(mapper)
    finally:
        client.close()


def test_forged_committed_index_is_refused_and_no_row_is_lost(world: World) -> None:
    world.append(0, 2000)
    world.write_spec()
    world.expect(2000)
    world.start_mapper()
    wait_until(lambda: world.step(commit=False) > 100, "rows are served")
    mapper = world.instances()[0]
    for reducer in range(REDUCERS):
        for forged in (world.cursor[reducer] + 1, 1_000_000, 2**62):
            with pytest.raises(NotServed) as refused:
                list(world.ask(reducer, mapper, forged, forged))
            assert refused.value.reducer_index == reducer
            assert refused.value.committed_row_index == forged
            assert refused.value.served_row_index == world.cursor[reducer]
    with pytest.raises(BadInput, match="is of processor 'another'"):
        list(world.ask(0, mapper, world.cursor[0], world.cursor[0], processor="another"))
    wait_until(lambda: world.is_drained(2000), "all is committed and trimmed")
    assert [list(got) for got in world.got] == world.wanted


def test_rows_called_committed_that_are_not_are_served_again(world: World) -> None:
    world.append(0, 2000)
    world.write_spec()
    world.expect(2000)
    mapper = world.start_mapper()
    wait_until(lambda: world.step(commit=False) > 300, "rows are served")
    for reducer in range(REDUCERS):
        list(world.ask(reducer, world.instances()[0], world.cursor[reducer], world.cursor[reducer]))
    wait_until(lambda: "rows were called committed that are not" in world.log(mapper), "the trim finds out")
    assert world.persisted().input_unread_row_index == 0, "nothing is forgotten for good"
    for reducer in range(REDUCERS):
        world.rewind(reducer)
    wait_until(lambda: world.is_drained(2000), "all is committed and trimmed")
    assert [list(got) for got in world.got] == world.wanted
    assert mapper.poll() is None, "the same process has started again from its persisted state"


@pytest.mark.parametrize("commit", [False, True], ids=["rows_served", "rows_committed"])
def test_mapper_killed_after(world: World, commit: bool) -> None:
    world.append(0, 2000)
    world.write_spec()
    world.expect(2000)
    mapper = world.start_mapper()
    wait_until(lambda: world.step(commit) > 100, "rows are served")
    mapper.kill()
    mapper.wait(10)
    world.start_mapper()
    wait_until(lambda: world.is_drained(2000), "all is committed and trimmed")
    assert [list(got) for got in world.got] == world.wanted


def test_mapper_killed_again_and_again(world: World) -> None:
    world.append(0, 1000)
    world.write_spec()
    world.expect(1000)
    for target in (50, 300, 600):
        mapper = world.start_mapper()
        wait_until(lambda target=target: world.step() > target, f"rows up to {target}")  # type: ignore[misc]
        mapper.kill()
        mapper.wait(10)
    world.start_mapper()
    wait_until(lambda: world.is_drained(1000), "all is committed and trimmed")


def test_two_instances_from_the_start(world: World) -> None:
    world.append(0, 3000)
    world.write_spec()
    world.expect(3000)
    twins = [world.start_mapper(), world.start_mapper()]
    wait_until(lambda: len(world.instances()) == 2, "both are registered")
    turn = [0]

    def drained() -> bool:
        """Each reducer goes from one to the other and back, not both at the same time."""
        turn[0] += 1
        for reducer in range(REDUCERS):
            instances = world.instances()
            try:
                world.fetch(reducer, instances[(turn[0] + reducer) % len(instances)])
            except (StaleMapper, StoreUnavailable, RowsGone, NotServed):
                world.rewind(reducer)
            world.committed[reducer] = world.cursor[reducer]
        return world.committed == world.last and world.persisted().input_unread_row_index == 3000

    wait_until(drained, "all is committed and trimmed")
    assert [list(got) for got in world.got] == world.wanted
    assert any("zombie" in world.log(twin) for twin in twins)
    assert all(twin.poll() is None for twin in twins)


def test_mapper_paused_past_its_lease_is_replaced_and_resumed(world: World) -> None:
    world.append(0, 2000)
    world.write_spec()
    world.expect(2000)
    first = world.start_mapper()
    wait_until(lambda: world.step() > 100, "rows are committed")
    paused = world.instances()[0]
    pause(first.pid)
    wait_until(lambda: world.instances() == [], "its lease is over")
    world.start_mapper()
    wait_until(lambda: world.is_drained(2000), "all is committed and trimmed")
    world.append(2000, 2100)
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: "zombie" in world.log(first), "it says that it is a zombie")
    wait_until(lambda: paused in world.instances(), "it is registered again")
    world.expect(2100)
    for reducer in range(REDUCERS):
        world.rewind(reducer)
    wait_until(lambda: world.is_drained(2100), "what came later is exact too")


def test_store_restarted_under_the_mapper(world: World) -> None:
    world.append(0, 2000)
    world.write_spec()
    world.expect(2000)
    mapper = world.start_mapper()
    wait_until(lambda: world.step() > 100, "rows are committed")
    world.restart_store()

    def drained() -> bool:
        try:
            return world.is_drained(2000)
        except ShuffleError:
            return False

    wait_until(drained, "all is committed and trimmed")
    assert mapper.poll() is None, "it waits, connects again and goes on"


def test_poison_row_stops_with_a_report_after_all_rows_before_it(world: World) -> None:
    world.append(0, 1000)
    world.write_spec(config="{poison: [555]}")
    world.expect(555)
    mapper = world.start_mapper()
    wait_until(lambda: world.is_drained(555), "the rows before are committed")
    assert mapper.wait(30) == 3
    last = world.log(mapper).strip().splitlines()[-1]
    assert last.startswith("error: job: mapper 0: Spread.map failed at input row 555: ValueError: poison")


def test_dead_letters_exactly_once_though_the_mapper_is_killed(world: World) -> None:
    poison = (5, 250, 251, 777)
    world.append(0, 1000)
    world.write_spec(config=f"{{poison: {list(poison)}}}", on_error="dead_letter")
    world.expect(1000, poison)
    for target in (100, 300):
        mapper = world.start_mapper()
        wait_until(lambda target=target: world.step() > target, f"rows up to {target}")  # type: ignore[misc]
        mapper.kill()
        mapper.wait(10)
    world.start_mapper()
    wait_until(lambda: world.is_drained(1000), "all is committed and trimmed")
    letters, _ = world.client.queue("job/mapper_dead_letters").read(0, 0)
    assert letters["position"].to_pylist() == list(poison)
    assert [decode_row(row).to_pylist()[0]["n"] for row in letters["row"].to_pylist()] == list(poison)


def test_reducer_that_is_down_fills_the_window_and_no_more(world: World) -> None:
    """At its limit the process stays within the limit and 150 MB; the other reducer goes on."""
    world.append(0, 1)
    limit_bytes = 24 * 1024 * 1024
    world.write_spec(memory_bytes=limit_bytes, batch_rows_max=2000, batch_bytes_max=4 * 1024 * 1024)
    with (world.folder / "job.yaml").open("a") as spec:
        spec.write("spill: false\n")  # It would move the rows out of the window, on a machine slow enough.
    world.expect(20_000)
    mapper = world.start_mapper()
    wait_until(lambda: len(world.instances()) == 1, "it is registered")
    wait_until(lambda: world.fetch(0, world.instances()[0]) == 1, "its first row is served")
    world.append(1, 20_000, pad=4000)
    at_limit_bytes: list[int] = []
    while len(at_limit_bytes) < 30:
        rows = world.fetch(0, world.instances()[0], rows_max=5000)
        world.committed[0] = world.cursor[0]
        at_limit_bytes = [] if rows else [*at_limit_bytes, resident_bytes(mapper.pid)]
    assert 0 < world.committed[0] < world.last[0], "reading stopped at the limit"
    assert max(at_limit_bytes) <= limit_bytes + PROCESS_BYTES_MAX
    wait_until(lambda: world.is_drained(20_000), "the other one is back: all is committed and trimmed", wait_s=120)


def test_mapper_imports_nothing_large_that_it_has_no_use_for(world: World) -> None:
    world.append(0, 200)
    world.write_spec()
    world.expect(200)
    mapper = world.start("mapper", "job.yaml", "--index", "0", PYTHONPROFILEIMPORTTIME="1")
    wait_until(lambda: world.is_drained(200), "all is committed and trimmed")
    mapper.terminate()
    assert mapper.wait(15) == 0, world.log(mapper)
    lines = [line for line in world.log(mapper).splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "shuffle.mapper.serve" in imported, "Python says what is imported"
    assert sorted(imported & NOT_IN_A_MAPPER) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["job.yaml", "--index", "7"], "there is no mapper 7"),
        (["other.yaml", "--index", "0"], "other.yaml"),
    ],
)
def test_mapper_refuses_what_it_cannot_run(world: World, arguments: list[str], reason: str) -> None:
    world.append(0, 1)
    world.write_spec()
    mapper = world.start("mapper", *arguments)
    assert mapper.wait(30) == 2
    assert reason in world.log(mapper).strip().splitlines()[-1]
