"""One seed: a world with a store, workers, a producer and a reader, faults for a while, then peace, then the end."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import mapper.daemon
import reducer.daemon
from mapper.reader import PartitionReader, QueueReader
from shuffle.config import InputSpec, MapperSpec, ProcessorSpec, ReducerSpec
from shuffle.errors import CommitConflict, CommitUnknown, ShuffleError, StoreError, UserCodeError
from shuffle.ids import MapperIndex
from statestore.client import StateClient
from statestore.leases import Member
from tests.sim import checkers, faults, flight, kernel, shims
from tests.sim.disk import Disk
from tests.sim.kernel import Process, World
from tests.sim.network import Network
from tests.sim.store import SimStore, StoreHost
from tests.sim.stragglers import Stragglers
from tests.sim.twins import Twins
from tests.sim.workload import EFFECTS_KEY, EFFECTS_VALUE, HOLE, INPUT, OUTPUT, Oracle, SimMapper, SimReducer, Workload

PEACE_US = 30_000_000
"""Within this virtual time after the faults stop, everything must be committed and trimmed."""


BATCH_BYTES = 5_000
"""More than one batch of twenty input rows weighs in the window, with its overhead."""

LETTERS_BYTES = 19_000
"""And what they weigh beyond that if all of them become dead letters."""


@dataclass
class Result:
    seed: int
    violations: list[str] = field(default_factory=list)
    fault_counts: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    trace_hash: str = ""
    events: int = 0
    virtual_us: int = 0
    peace_us: int = 0
    rows: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return sum(self.fault_counts.values())


class GapReader(PartitionReader):
    """A partition whose positions have holes: the queue's rows of kind HOLE do not exist for the mapper."""

    def __init__(self, inner: QueueReader) -> None:
        self._inner = inner
        self.wait_ms = inner.wait_ms

    @property
    def schema(self) -> pa.Schema:
        return self._inner.schema

    def start(self) -> Any:
        return self._inner.start()

    def read(self, begin_row_index: int, end_row_index: int, token: Any) -> tuple[pa.Table, Any]:
        rows, after = self._inner.read(begin_row_index, end_row_index, token)
        kinds = rows["kind"].to_pylist()
        if HOLE in kinds:
            rows = rows.filter(pa.array([kind != HOLE for kind in kinds], pa.bool_()))
            if not rows.num_rows:
                kernel.world().mark("a gap without rows")
        return rows, after

    def trim(self, row_index: int, token: Any) -> None:
        self._inner.trim(row_index, token)

    def lag_rows(self, token: Any) -> int | None:
        return None


class Slot:
    """A place for a worker: one instance at least, more while a fault has it so."""

    def __init__(self, simulation: Simulation, role: str, index: int) -> None:
        self.simulation = simulation
        self.role = role
        self.index = index
        self.name = f"{role}{index}"
        self._processes: list[Process] = []
        self.starts = 0
        self.away_until_us = 0
        """Until then nothing that is started here lives."""

    def living(self) -> list[Process]:
        return [process for process in self._processes if process.alive]

    def start(self) -> None:
        simulation = self.simulation
        self.starts += 1
        process = Process(simulation.world, f"{self.name}#{self.starts}")
        # Reducers listen nowhere; a number of their own keeps them out of the mappers' way.
        process.port = simulation.free_port(self.index if self.role == "mapper" else 100 + self.index)
        self._processes.append(process)
        process.at_end.append(self._ended)
        main = simulation.mapper_main if self.role == "mapper" else simulation.reducer_main
        process.spawn("main", lambda: main(process, self.index))

    def _ended(self) -> None:
        # The controller starts it again, a little later.
        self.simulation.world.at(self.simulation.world.now_us + 150_000, lambda _: self.ensure())

    def ensure(self) -> None:
        if not self.living() and self.simulation.world.now_us >= self.away_until_us:
            self.start()


class Simulation:
    def __init__(self, seed: int, fault_list: list[faults.Fault] | None = None, keep_lines: bool = False) -> None:
        self.world = World(seed)
        self.world.keep_lines = keep_lines
        self.stragglers = Stragglers(seed)
        self.twins = Twins(seed)
        workload = Workload.make(self.world.streams["workload"])
        self.workload = self.twins.workload(self.stragglers.workload(workload))
        self.oracle = Oracle(self.workload)
        made = self.twins.faults(self.stragglers.faults(faults.make_faults(self.world.streams["faults"])))
        self.faults = made if fault_list is None else fault_list
        rng = self.world.streams["workload"]
        self.spec = self.stragglers.spec(_spec(self.workload, rng))
        self.world.preempt_chance = rng.choice([0.0, 0.0, 0.02])
        self.sync_us_usual = self.sync_us_max = rng.choice([200, 3_000, 15_000])
        self.burst = rng.choice([1, 4, 12])
        self.pause_s = rng.choice([0.02, 0.08, 0.2])
        self.slow_reducers: dict[int, float] = {}
        self.discovery: str | None = None
        self._old_members: dict[str, tuple[int, list[Member]]] = {}
        self._ports = 1000
        self.producing = 0
        self.producer: Process | None = None
        self.batch_bytes_max = BATCH_BYTES + LETTERS_BYTES * (self.workload.on_error == "dead_letter")
        self.violation_texts: list[str] = []
        # Before any bug is planted: what a run begins with is sound.
        self._prepared = prepared_disk(self.workload)

    # what there is

    def pick_slot(self, role: str, target: float) -> Slot:
        slots = [slot for slot in self.slots if slot.role == role]
        return slots[int(target * len(slots))]

    def pick_process(self, role: str, target: float) -> Process | None:
        living = [process for slot in self.slots if role in (slot.role, "any") for process in slot.living()]
        return living[int(target * len(living))] if living else None

    def free_port(self, index: int) -> int:
        """A restarted worker gets its old address when nobody has it, so that late messages find it."""
        taken = {process.port for slot in self.slots for process in slot.living()}
        if 100 + index not in taken:
            return 100 + index
        self._ports += 1
        return self._ports

    def end_later(self, end: Callable[[], None], length_us: int) -> None:
        self.world.at(self.world.now_us + length_us, self._end, end)
        self._ends.append(end)

    def _end(self, end: Callable[[], None]) -> None:
        if end in self._ends:
            self._ends.remove(end)
            end()

    # the run

    def run(self) -> Result:
        kernel.set_world(self.world)
        try:
            self._build()
            finished = self._play()
            if not self.checkers.violations and not self.world.failures:
                if not finished:
                    self.checkers.violated(11, f"not at its end in time: {self.checkers.behind()}")
                else:
                    self.checkers.at_end()
        except kernel.Stuck as error:
            self.violation_texts.append(f"invariant 11: {error}")
        finally:
            result = self._result()
            self._tear_down()
            kernel.set_world(None)
        return result

    def _build(self) -> None:
        world = self.world
        self.network = Network(world)
        self.disk = self._prepared.copy(world.streams["disk"])
        self.disk.on_fault = world.fault
        self.disk.sync_us = self._sync_us
        self.checkers = checkers.Checkers(self.oracle, self.disk, self._halt)
        self.disk.on_durable = self.checkers.on_durable
        self.host = StoreHost(world, self.network, self.disk)
        self.host.on_commit = lambda request, committed: self.checkers.on_commit(request, committed.version)
        self._ends: list[Callable[[], None]] = []
        counts = [("mapper", self.workload.mapper_count), ("reducer", self.workload.reducer_count)]
        self.slots = [Slot(self, role, index) for role, count in counts for index in range(count)]
        self._wire()
        self.host.start()
        for slot in self.slots:
            slot.start()
        self._start_producer()
        self._start_reader()

    def _sync_us(self) -> int:
        taken_us = int(self.world.streams["disk"].random() * self.sync_us_max)
        if taken_us > self.sync_us_usual:
            self.world.fault("slow sync")
        return taken_us

    def _halt(self) -> None:
        self.world.halted = True

    def _wire(self) -> None:
        """The few places where the daemons ask for something that is made up here."""
        flight.network = self.network
        flight.observe_answer = self._observe_answer
        daemon: Any = mapper.daemon
        daemon.check_against_store = lambda spec, client: self.workload.mapper_count
        daemon.load_class = lambda spec, role: SimMapper
        daemon.open_reader = lambda spec, index, client, mapper_spec: GapReader(
            QueueReader(client, "input", index, wait_ms=mapper_spec.read_wait_ms)
        )
        daemon = reducer.daemon
        daemon.load_class = lambda spec, role: SimReducer
        daemon.check_config = lambda cls, config: config
        SimReducer.with_output = self.workload.with_output
        SimReducer.slow = staticmethod(self._slow)

    def _play(self) -> bool:
        world = self.world

        for fault in self.faults:
            world.at(fault.at_us, lambda fault: faults.begin(self, fault), fault)
        world.run(lambda: False, faults.FAULTS_UNTIL_US + 300_000, every_us=PEACE_US)
        for end in list(self._ends):
            self._end(end)
        self.network.troubles.clear()
        for slot in self.slots:
            for process in slot.living()[1:]:
                process.kill()
        self.peace_from_us = world.now_us
        world.log("peace")
        return world.run(self._settled, world.now_us + PEACE_US, every_us=20_000)

    def _settled(self) -> bool:
        return self.producing == 0 and self.checkers.done()

    def _result(self) -> Result:
        world = self.world
        texts = [str(violation) for violation in self.checkers.violations] + self.violation_texts
        for who, error in world.failures:
            shown = "".join(traceback.format_exception(error)[-4:])
            texts.append(f"{who} ended with {type(error).__name__}: {error}\n{shown}")
        return Result(
            seed=world.seed,
            violations=texts,
            fault_counts=world.fault_counts,
            marks=world.marks,
            trace_hash=world.trace_hash(),
            events=world.event_count,
            virtual_us=world.now_us,
            peace_us=world.now_us - getattr(self, "peace_from_us", world.now_us),
            rows=sum(len(rows) for rows in self.oracle.shuffled),
            lines=world.lines if world.keep_lines else [],
        )

    def _tear_down(self) -> None:
        for process in self.world.processes:
            process.at_end.clear()
            process.kill()
        self.world.clear()

    # processes

    def client(self, process: Process) -> StateClient:
        store = SimStore(self.host, process)
        store.distort = self._distort
        return StateClient(store)

    def mapper_main(self, process: Process, index: int) -> None:
        self._worker(
            process,
            lambda stop: mapper.daemon._run(
                self.spec, MapperIndex(index), self.client(process), "127.0.0.1:0", stop, lambda address: None
            ),
        )

    def reducer_main(self, process: Process, index: int) -> None:
        self._worker(
            process,
            lambda stop: reducer.daemon.ReducerDaemon(
                self.spec, index, self.client(process), self.workload.mapper_count
            ).run(stop),
        )

    def _worker(self, process: Process, run: Callable[[Any], None]) -> None:
        try:
            run(shims.Event())
        except UserCodeError as error:
            if not any(stop is not None for stop in self.oracle.stops):
                raise
            # Without the place in the code, which has the folder in it: the trace is the same everywhere.
            self.world.log("stopped", process.name, error.message.partition(" (at ")[0])
            self.world.mark("a poison row stopped its partition")
        except (StoreError, CommitUnknown) as error:
            # A worker may give up on a store that fails it in a way that does not pass; the controller tries again.
            self.world.log("gave up", process.name, type(error).__name__)
            self.world.mark(f"a worker gave up: {type(error).__name__}")
        self.world.at(self.world.now_us, lambda _: process.kill())

    def _slow(self, index: int) -> None:
        delay_s = self.slow_reducers.get(index)
        if delay_s:
            self.world.fault("slow reducer", index)
            kernel.sleep(delay_s)

    def _start_producer(self) -> None:
        process = self.producer = Process(self.world, "producer")
        self.producing = self.workload.mapper_count
        client = self.client(process)
        for partition in range(self.workload.mapper_count):
            process.spawn(f"produce-{partition}", functools.partial(self._produce, client, partition))

    def _produce(self, client: StateClient, partition: int) -> None:
        rng = self.world.streams["workload"]
        rows = self.workload.inputs[partition]
        at = sequence = 0
        while at < len(rows):
            chunk = rows[at : at + rng.randint(1, self.burst)]
            table = pa.table(
                [pa.array([row[0] for row in chunk], pa.int64()), pa.array([row[1] for row in chunk], pa.int8())],
                schema=INPUT,
            )
            while True:
                try:
                    client.queue("input").append(partition, table, producer=f"p{partition}", sequence=sequence)
                    break
                except (StoreError, CommitUnknown, CommitConflict):
                    self.world.mark("the producer repeated an append")
                    kernel.sleep(0.05)
            at += len(chunk)
            sequence += 1
            kernel.sleep(rng.random() * self.pause_s)
        self.producing -= 1

    def _start_reader(self) -> None:
        process = Process(self.world, "reader")
        client = self.client(process)
        process.spawn("read", lambda: self._read_snapshots(client))

    def _read_snapshots(self, client: StateClient) -> None:
        mappers, reducers = self.workload.mapper_count, self.workload.reducer_count
        pairs = [(m, r) for m in range(mappers) for r in range(reducers)]
        keys = pa.table(
            [pa.array([m for m, _ in pairs], pa.int32()), pa.array([r for _, r in pairs], pa.int32())],
            schema=EFFECTS_KEY,
        )
        rows = pa.table({"reducer_index": pa.array(range(reducers), pa.int32())})
        while True:
            kernel.sleep(0.7)
            try:
                with client.snapshot() as snapshot:
                    states = snapshot.lookup("job/reducers", rows).to_pylist()
                    effects = snapshot.lookup("effects", keys).to_pylist()
            except ShuffleError:
                continue
            committed = [[-1] * mappers for _ in range(reducers)]
            for row in states:
                raw = row["committed_row_indices"]
                committed[row["reducer_index"]] = [
                    int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw), 8)
                ]
            seen = dict.fromkeys(pairs, (0, 0))
            seen.update({(row["mapper"], row["reducer"]): (row["rows"], row["chain"]) for row in effects})
            self.checkers.on_snapshot(committed, seen)
            self.world.mark("a snapshot was read")

    # eyes and lies

    def _observe_answer(self, server: Any, ticket: Any, chunks: list[Any]) -> None:
        core = server._shared.core
        batches = [(chunk.data, int(chunk.app_metadata)) for chunk in chunks]
        self.checkers.on_get_rows(core.mapper_index, json.loads(ticket.ticket), batches)
        self.checkers.on_window(core.mapper_index, core.nbytes, core.memory_bytes_max, self.batch_bytes_max)
        parts = [
            (part.reducer_index, part.last_row_index) for entry in core._window.entries for part in entry.parts.values()
        ]
        self.checkers.on_parts(core.mapper_index, parts, [bucket.committed for bucket in core.buckets])

    def _distort(self, group: str, found: tuple[int, list[Member]]) -> tuple[int, list[Member]]:
        """Discovery as the faults have it. A lie is a wrong address or a guid that nobody has."""
        if self.discovery is None:
            if found[1]:
                self._old_members[group] = found
            return found
        self.world.fault(f"discovery {self.discovery}")
        revision, members = found
        kernel.sleep(0.02)
        if self.discovery == "empty":
            return revision, []
        if self.discovery == "stale":
            return self._old_members.get(group, found)
        addresses = [member.attributes.get("address", "") for member in members]
        rng = self.world.streams["chance"]
        lies = []
        for member in members:
            wrong = {**member.attributes, "address": rng.choice(addresses)}
            lies.append(Member(member.name if rng.random() < 0.6 else f"{rng.getrandbits(64):032x}", wrong))
        return revision, lies


def _spec(workload: Workload, rng: Any) -> ProcessorSpec:
    return ProcessorSpec(
        processor="job",
        state="sim",
        input=InputSpec(queue="input"),
        mapper=MapperSpec(
            class_name="sim:SimMapper",
            memory_bytes=rng.choice([3_000, 8_000, 100_000]),
            batch_rows_max=rng.choice([3, 8, 20]),
            read_wait_ms=500,
            trim_period_ms=rng.choice([80, 250]),
            split_brain_delay_ms=80,
            on_error=workload.on_error,  # type: ignore[arg-type]
        ),
        reducer=ReducerSpec(
            class_name="sim:SimReducer",
            count=workload.reducer_count,
            fetch_rows_max=rng.choice([2, 8, 50]),
            fetch_wait_ms=500,
            batch_rows_max=rng.choice([3, 10, 100]),
            batch_bytes_max=rng.choice([300, 10_000]),
            backoff_ms=10,
            backoff_ms_max=400,
            on_error=workload.on_error,  # type: ignore[arg-type]
        ),
        lease_ttl_ms=750,
        metrics=False,
    )


_prepared: dict[tuple[int, int, str, bool], Disk] = {}


def prepared_disk(workload: Workload) -> Disk:
    """A store with the job's tables and queues in it, made once for each shape of job."""
    shape = (workload.mapper_count, workload.reducer_count, workload.on_error, workload.with_output)
    found = _prepared.get(shape)
    if found is None:
        found = _prepared[shape] = _prepare(*shape)
    return found


def _prepare(mapper_count: int, reducer_count: int, on_error: str, with_output: bool) -> Disk:
    from mapper.spill import SPILL_SCHEMA
    from mapper.spill_store import SPILLS_KEY, SPILLS_VALUE
    from mapper.state import MAPPERS_KEY, MAPPERS_VALUE
    from reducer.state import REDUCERS_KEY, REDUCERS_VALUE
    from shuffle.poison import DEAD_LETTER_SCHEMA

    before = kernel.maybe_world()
    world = World(0)
    kernel.set_world(world)
    disk = Disk(world.streams["disk"])
    host = StoreHost(world, Network(world), disk)
    host.start()
    process = Process(world, "setup")
    ended = []

    def setup() -> None:
        kernel.sleep(0.1)
        client = StateClient(SimStore(host, process))
        client.create_table("job/mappers", MAPPERS_KEY, MAPPERS_VALUE)
        client.create_table("job/reducers", REDUCERS_KEY, REDUCERS_VALUE)
        client.create_table("effects", EFFECTS_KEY, EFFECTS_VALUE)
        client.create_table("job/spills", SPILLS_KEY, SPILLS_VALUE)
        for mapper_index in range(mapper_count):
            client.create_queue(f"job/spill/{mapper_index}", SPILL_SCHEMA, reducer_count)
        client.create_queue("input", INPUT, mapper_count)
        if on_error == "dead_letter":
            client.create_queue("job/mapper_dead_letters", DEAD_LETTER_SCHEMA, 1)
            client.create_queue("job/reducer_dead_letters", DEAD_LETTER_SCHEMA, 1)
        if with_output:
            client.create_queue("output", OUTPUT, reducer_count)
        ended.append(True)

    process.spawn("setup", setup)
    world.run(lambda: bool(ended or world.failures), 10_000_000)
    if world.failures:
        raise world.failures[0][1]
    for one in world.processes:
        one.kill()
    kernel.set_world(before)
    return disk
