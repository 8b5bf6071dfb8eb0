"""One seed: a world with a store, workers, a producer and a reader; faults for a while, then none, until all rows are
committed and trimmed."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import shuffle.mapper.daemon
import shuffle.reducer.daemon
from shuffle.errors import CommitUnknown, StoreError, UserCodeError
from shuffle.ids import MapperIndex
from shuffle.mapper.readers.queue import QueueReader
from shuffle.statestore.client.client import StateClient
from tests.sim import checkers, faults, flight, kernel, probes, shims
from tests.sim.clients import Producer, SnapshotReader
from tests.sim.discovery_faults import DiscoveryFaults
from tests.sim.exporting import Exporting
from tests.sim.grouping import Grouping
from tests.sim.growth import Growth
from tests.sim.hosting import Hosting
from tests.sim.job import batch_bytes_max, job_spec, prepared_disk
from tests.sim.kernel import Process, World
from tests.sim.liars import Liars, is_lie
from tests.sim.logged import Logged
from tests.sim.network import Network
from tests.sim.store import SimStore, StoreHost
from tests.sim.stragglers import Stragglers
from tests.sim.tail_checker import decode_tail
from tests.sim.twins import Twins
from tests.sim.worker_slots import Slot
from tests.sim.workload import GapReader, Oracle, SimMapper, SimReducer, Workload

PEACE_US = 30_000_000
"""Within this virtual time after the faults stop, everything must be committed and trimmed."""


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


class Simulation:
    def __init__(self, seed: int, fault_list: list[faults.Fault] | None = None, keep_lines: bool = False) -> None:
        self.world = World(seed)
        self.world.keep_lines = keep_lines
        self.stragglers = Stragglers(seed)
        self.twins = Twins(seed)
        self.liars = Liars(seed)
        self.hosting = Hosting(seed)
        self.logged = Logged(seed)
        self.grouping = Grouping(seed)
        self.growth = Growth(seed)
        self.exporting = Exporting(seed)
        workload = Workload.make(self.world.streams["workload"])
        workload = self.hosting.workload(self.twins.workload(self.stragglers.workload(workload)))
        self.workload = self.grouping.workload(self.exporting.workload(self.growth.workload(workload)))
        self.grouping.world = self.world
        if self.grouping.growing is not None:
            self.growth.due_us = self.grouping.growing.known_us
        self.oracle = Oracle(self.workload)
        made = self.twins.faults(self.stragglers.faults(faults.make_faults(self.world.streams["faults"])))
        made = self.logged.faults(self.hosting.faults(self.liars.faults(made)))
        made = self.exporting.faults(self.growth.faults(self.grouping.faults(made)))
        self.faults = made if fault_list is None else fault_list
        rng = self.world.streams["workload"]
        self.spec = self.exporting.spec(self.hosting.spec(self.stragglers.spec(job_spec(self.workload, rng))))
        self.world.preempt_chance = rng.choice([0.0, 0.0, 0.02])
        self.sync_us_usual = self.sync_us_max = rng.choice([200, 3_000, 15_000])
        self.producer = Producer(self.world, self.workload, rng.choice([1, 4, 12]), rng.choice([0.02, 0.08, 0.2]))
        self.slow_reducers: dict[int, float] = {}
        self.discovery_faults = DiscoveryFaults(self.world)
        self._ports = 1000
        self.batch_bytes_max = batch_bytes_max(self.workload)
        self.violation_texts: list[str] = []
        # Before any bug is planted: what a run begins with is sound.
        self._prepared = prepared_disk(self.workload)

    # what there is

    @property
    def mapper_count(self) -> int:
        """How many mappers the input has now."""
        return self.growth.mapper_count(self.world.now_us)

    def pick_slot(self, role: str, target: float) -> Slot:
        slots = [slot for slot in self.slots if slot.role == role]
        return slots[int(target * len(slots))]

    def pick_slot_of(self, role: str, index: int) -> Slot:
        return next(slot for slot in self.slots if slot.role == role and slot.index == index)

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

    @property
    def mains(self) -> Mapping[str, Callable[[Process, Sequence[int]], None]]:
        """What a process of each role runs."""
        return {"mapper": self.mapper_main, "reducer": self.reducer_main, "exporter": self.exporting.main(self)}

    # the run

    def run(self) -> Result:
        kernel.set_world(self.world)
        self.logged.settle()
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
        self.slots = [Slot(self, "mapper", hosted) for hosted in self.hosting.processes(self.workload.mapper_count)]
        self.slots += [Slot(self, "reducer", hosted) for hosted in self.hosting.processes(self.workload.reducer_count)]
        self.slots += self.exporting.slots(self)
        self._wire()
        self.host.start()
        for slot in self.slots:
            if slot.role == "mapper":
                slot.away_until_us = max(self.growth.due_us[index] for index in slot.hosted)
            self.world.at(
                slot.away_until_us, lambda _, slot=slot: slot.ensure()
            ) if slot.away_until_us else slot.start()
        self.producer.start(self.client)
        SnapshotReader(world, self.workload, self.checkers).start(self.client)

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
        probes.observe_false_claim = self._observe_false_claim
        probes.observe_tail = self.checkers.tails.on_tail
        daemon: Any = shuffle.mapper.daemon
        daemon.check_against_store = lambda spec, client: self.mapper_count
        daemon.load_class = lambda spec, role: SimMapper
        daemon.open_reader = lambda spec, index, client: GapReader(
            QueueReader(client, "input", index, wait_ms=spec.mapper.read_wait_ms)
        )
        if self.grouping.is_on:
            daemon.open_reader = self.grouping.open_reader
        daemon = shuffle.reducer.daemon
        daemon._check = lambda spec, client: self.mapper_count
        daemon.load_class = lambda spec, role: SimReducer
        SimReducer.output = self.workload.output
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
        return self.producer.is_done and self.checkers.done()

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
        store.distort = self.discovery_faults.distort
        return StateClient(store)

    def mapper_main(self, process: Process, hosted: Sequence[int]) -> None:
        indexes = [MapperIndex(index) for index in hosted]
        self.run_worker(
            process,
            lambda stop: shuffle.mapper.daemon._run(
                self.spec, indexes, self.client(process), "127.0.0.1:0", stop, lambda address: None
            ),
        )

    def reducer_main(self, process: Process, hosted: Sequence[int]) -> None:
        self.run_worker(
            process,
            lambda stop: shuffle.reducer.daemon._run_hosted(
                self.spec, hosted, self.client(process), self.mapper_count, stop
            ),
        )

    def run_worker(self, process: Process, run: Callable[[Any], None]) -> None:
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

    # eyes

    def _observe_false_claim(self, mapper: int, reducer: int, dropped: int) -> None:
        if not self.liars.has_told(mapper, reducer, dropped):
            self.checkers.violated(7, f"mapper {mapper} dropped row {dropped} of reducer {reducer}, not committed")

    def _observe_answer(self, server: Any, ticket: Any, chunks: list[Any]) -> None:
        asked = json.loads(ticket.ticket)
        core = server.mapper(asked["mapper_id"]).shared.core
        tails = [decode_tail(bytes(chunk.app_metadata)) for chunk in chunks]
        found = [chunk.data for chunk in chunks if chunk.data is not None and chunk.data.num_rows]
        inputs = self.workload.inputs[core.mapper_index]
        input_end = len(inputs) if self.grouping.is_on else self.producer.sent[core.mapper_index]
        self.checkers.on_get_rows(core.mapper_index, asked, found, tails, input_end, is_lie(asked))
        self.checkers.on_window(core.mapper_index, core.nbytes, core.memory_bytes_max, self.batch_bytes_max)
        parts = [
            (part.reducer_index, part.last_row_index) for entry in core._window.entries for part in entry.parts.values()
        ]
        self.checkers.on_parts(core.mapper_index, parts, [bucket.committed for bucket in core.buckets])
        spills = core.spilling.spills
        self.checkers.on_spills(core.mapper_index, {reducer: spill.trimmed for reducer, spill in spills.items()})
