"""Runs with an exporter: what reducers emit goes through an outbox to a sink, while both ends and the middle fail.

With the profile ``exporter`` (``--faults exporter``) in every seed, with the profile ``partitions`` in some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import shuffle.reducer.exporter.daemon
from shuffle.reducer.outputs.routes import output_route
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.outputs import SinkOutputSpec
from tests.sim import faults, probes_exporter, profiles
from tests.sim.faults import Fault, with_more
from tests.sim.kernel import Process
from tests.sim.network import Trouble
from tests.sim.sinks import SimSink, SinkHost
from tests.sim.worker_slots import Slot
from tests.sim.workload import Workload

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

MARKS = (
    "a batch was published again from its note",
    "a batch was published under its name again",
    "a publication was unknown",
    "a sink forgot its position",
    "a sink refused an instance that another one has replaced",
    "a sink was told its position",
    "an exporter found more in the sink than in its row",
    "an exporter stopped cleanly",
    "the outbox was trimmed",
    "three instances of a exporter",
)
"""What must have happened at least once in a run of many seeds of this profile."""

BESIDE = 0.3
"""How often there is an exporter in runs of mappers that read several partitions."""

KEPT = 0.2
"""The share of the ordinary faults that these runs have."""

FORGETS = 0.5
"""How often a sink has lost its position after a clean stop."""

OFTEN = (
    "crash exporter",
    "crash exporter",
    "twin exporter",
    "pause exporter",
    "stop exporter",
    "crash sink",
    "lose publications",
    "lose answers of the sink",
    "slow sink",
    "crash reducer",
    "crash store",
    "lose commit answers",
)


@dataclass(frozen=True, slots=True)
class SimOutputSpec(SinkOutputSpec):
    kind: ClassVar[str] = "sim"

    rows_max: int = 10
    bytes_max: int = 100_000
    age_ms: int = 0

    @property
    def limits(self) -> tuple[int, int, int]:
        return self.rows_max, self.bytes_max, self.age_ms


class Exporting:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed}/exporter")
        beside = profiles.current() == profiles.PARTITIONS and Random(f"{seed}/exporter beside").random() < BESIDE
        self.is_on = beside or profiles.current() == profiles.EXPORTER
        self._kind = self._rng.choice(["fencing", "comparing", "naming"])
        self._clean: set[int] = set()
        """The partitions whose exporter has stopped cleanly since it was started last."""
        self.stops: dict[Process, Any] = {}
        """What ends each exporter process cleanly."""

    def workload(self, made: Workload) -> Workload:
        if self.is_on:
            made.with_output = made.with_outbox = True
            made.reducer_count = self._rng.choice([1, 1, 2])
            made.lengthen(self._rng, [10, 20, 40])
        return made

    def spec(self, made: ProcessorSpec) -> ProcessorSpec:
        if not self.is_on:
            return made
        rng = self._rng
        output = SimOutputSpec(rng.choice([2, 5, 20]), rng.choice([60, 100_000]), rng.choice([0, 0, 50, 200]))
        return replace(made, output=output)

    def faults(self, made: list[Fault]) -> list[Fault]:
        if not self.is_on:
            return made
        rng = self._rng
        # With all of them the store is away most of the time, and an exporter hardly gets to anything that can fail.
        kept = [fault for fault in made if rng.random() < KEPT]
        return with_more(kept, len(made), rng, OFTEN, [12, 24, 40], [50_000, 200_000, 800_000])

    def slots(self, simulation: Simulation) -> list[Slot]:
        if not self.is_on:
            return []
        checker = simulation.checkers.exports
        count = simulation.workload.reducer_count
        self.host = SinkHost(simulation.world, simulation.network, self._kind, count, checker.on_change)
        checker.host = self.host
        self.host.start()
        daemon: Any = shuffle.reducer.exporter.daemon
        daemon.open_sink = lambda spec, route, client, partition: SimSink(self.host, simulation.network, partition)
        probes_exporter.observe_clean_stop = self._clean.add
        daemon.TRIM_PERIOD_MS = self._rng.choice([5, 50, 400])
        daemon.reserve_queue = lambda client, consumer, queue: None
        return [Slot(simulation, "exporter", [partition]) for partition in range(count)]

    def main(self, simulation: Simulation) -> Callable[[Process, Sequence[int]], None]:
        def run(process: Process, hosted: Sequence[int]) -> None:
            client = simulation.client(process)
            route = output_route(simulation.spec)
            assert route is not None
            exporters = [(route, partition) for partition in hosted]

            def until_stopped(stop: Any) -> None:
                self.stops[process] = stop
                self._clean.discard(hosted[0])
                shuffle.reducer.exporter.daemon._run_hosted(simulation.spec, exporters, client, stop)
                is_alone = len(simulation.pick_slot_of("exporter", hosted[0]).living()) == 1
                if is_alone and hosted[0] in self._clean and self._rng.random() < FORGETS:
                    simulation.world.mark("a sink forgot its position")
                    self.host.forget_position(hosted[0])

            simulation.run_worker(process, until_stopped)

        return run


def stop_exporter(simulation: Simulation, fault: Fault) -> None:
    """A clean stop. While nobody runs and nothing is under way, the sink may forget its position, as brokers do."""
    process = simulation.pick_process("exporter", fault.target)
    stop = simulation.exporting.stops.get(process) if process is not None else None
    if process is None or stop is None:
        return
    simulation.world.fault("stop exporter", process.name)
    stop.set()


def crash_sink(simulation: Simulation, fault: Fault) -> None:
    simulation.world.fault("crash sink")
    simulation.exporting.host.crash(int(5_000 + fault.length_us * 0.3))


def _messages(kind: str, label: str, chance: float) -> Callable[[Simulation, Fault], Callable[[], None]]:
    def act(simulation: Simulation, fault: Fault) -> Callable[[], None]:
        rng = Random(f"{simulation.world.seed}/fault/{fault.number}")
        trouble = Trouble(
            kind, chance * (0.5 + 0.5 * fault.amount), lambda s, t, said: said == label, rng, delay_us_max=900_000
        )
        simulation.network.troubles.append(trouble)
        return lambda: simulation.network.troubles.remove(trouble)

    return act


KINDS: dict[str, Callable[[Any, Fault], Any]] = {
    "crash exporter": faults._crash_worker("exporter"),
    "pause exporter": faults._pause_worker("exporter"),
    "twin exporter": faults._twin("exporter"),
    "stop exporter": stop_exporter,
    "crash sink": crash_sink,
    "lose publications": _messages("lose", "sink_publish", 0.8),
    "lose answers of the sink": _messages("lose", "sink_publish:answer", 0.9),
    "slow sink": _messages("delay", "sink_publish", 0.9),
}
"""What these runs have beside the ordinary kinds of faults."""
