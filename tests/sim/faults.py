"""The faults: a list made from the seed, and how each is applied to the simulated world.

The list is data, so that a failing run can be repeated with parts of it left out. A fault that acts on messages has a
random stream of its own, seeded by its number: leaving out another one does not change what this one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.network import Trouble

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

FAULTS_UNTIL_US = 1_600_000
"""Faults begin before this; some last a little longer."""


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    kind: str
    at_us: int
    length_us: int
    target: float
    """In [0, 1): picks one of whatever there is to choose from."""
    amount: float

    def __str__(self) -> str:
        return (
            f"#{self.number} {self.kind} at {self.at_us / 1e6:.3f} s for {self.length_us / 1e6:.3f} s "
            f"(target {self.target:.2f}, amount {self.amount:.2f})"
        )


TOGETHER = (
    ["twin reducer", "slow answers", "slow answers"],
    ["twin reducer", "pause reducer", "lose commit answers"],
    ["twin mapper", "pause mapper", "slow answers"],
    ["crash store", "fail segment sync", "lose commit answers"],
)
"""Answers that come back to a reducer that has begun anew, commits of two that do not hear, and so on."""


def with_more(
    made: Sequence[Fault],
    first_number: int,
    rng: Random,
    kinds: Sequence[str],
    counts: Sequence[int],
    lengths_us: Sequence[int] = (100_000, 400_000, 1_200_000),
) -> list[Fault]:
    """``made`` and what a profile adds: one of ``counts`` faults of ``kinds``, each about as long as one of
    ``lengths_us``."""
    more = []
    for number in range(first_number, first_number + rng.choice(counts)):
        at_us = int(rng.random() * FAULTS_UNTIL_US)
        length_us = int(rng.choice(lengths_us) * (0.5 + rng.random()))
        more.append(Fault(number, rng.choice(kinds), at_us, length_us, rng.random(), rng.random()))
    return sorted([*made, *more], key=lambda fault: (fault.at_us, fault.number))


def make_faults(rng: Random) -> list[Fault]:
    """A random subset of the kinds, with a random intensity."""
    kinds = sorted(KINDS)
    chosen = rng.sample(kinds, rng.randint(2, min(9, len(kinds))))
    # Messages are what there is most of, so nearly every run has something happen to them.
    if rng.random() < 0.95:
        chosen += rng.choices(["lose", "delay", "double", "reorder"], k=3)
    # Some do their worst together, and would rarely meet by chance alone.
    if rng.random() < 0.4:
        chosen += rng.choice(TOGETHER)
    faults = []
    for number in range(rng.choice([32, 48, 64, 80])):
        at_us = int(rng.random() * FAULTS_UNTIL_US)
        length_us = int(rng.choice([20_000, 150_000, 600_000, 1_200_000]) * (0.5 + rng.random()))
        faults.append(Fault(number, rng.choice(chosen), at_us, length_us, rng.random(), rng.random()))
    return sorted(faults, key=lambda fault: (fault.at_us, fault.number))


def begin(simulation: Simulation, fault: Fault) -> None:
    from tests.sim import exporting, liars, stragglers, twins

    act = KINDS.get(fault.kind) or {**stragglers.KINDS, **twins.KINDS, **liars.KINDS, **exporting.KINDS}[fault.kind]
    end = act(simulation, fault)
    if end is not None:
        simulation.end_later(end, fault.length_us)


End = Callable[[], None] | None


# processes


def _crash_worker(role: str) -> Callable[[Simulation, Fault], End]:
    def act(simulation: Simulation, fault: Fault) -> End:
        process = simulation.pick_process(role, fault.target)
        if process is not None:
            simulation.world.fault(f"crash {role}", process.name)
            process.kill()
        return None

    return act


def _pause_worker(role: str) -> Callable[[Simulation, Fault], End]:
    def act(simulation: Simulation, fault: Fault) -> End:
        process = simulation.pick_process(role, fault.target)
        if process is not None:
            world = simulation.world
            world.fault(f"pause {role}", process.name)
            process.freeze(world.now_us + fault.length_us)
            if fault.length_us > simulation.spec.lease_ttl_ms * 1000:
                world.mark(f"{role} paused beyond its lease")
        return None

    return act


def _twin(role: str) -> Callable[[Simulation, Fault], End]:
    def act(simulation: Simulation, fault: Fault) -> End:
        slot = simulation.pick_slot(role, fault.target)
        simulation.world.fault(f"twin {role}", slot.name)
        slot.start()
        if len(slot.living()) >= 3:
            simulation.world.mark(f"three instances of a {role}")

        def end() -> None:
            living = slot.living()
            if len(living) > 1:
                living[int(fault.amount * len(living))].kill()

        return end

    return act


def _crash_store(simulation: Simulation, fault: Fault) -> End:
    if simulation.host.process is not None and simulation.host.process.alive:
        simulation.world.fault("crash store")
        simulation.host.crash(int(5_000 + fault.length_us * 0.3))
    return None


def _pause_store(simulation: Simulation, fault: Fault) -> End:
    process = simulation.host.process
    if process is not None and process.alive:
        simulation.world.fault("pause store")
        process.freeze(simulation.world.now_us + fault.length_us)
    return None


def _clock_jump(simulation: Simulation, fault: Fault) -> End:
    """The wall clock of one process, or of the store from its next start on, is set anew."""
    world = simulation.world
    offset_us = int((fault.amount - 0.5) * 7_200_000_000)
    world.fault("clock jump")
    if fault.target < 0.3:
        simulation.host.wall_offset_us = offset_us
        if simulation.host.process is not None:
            simulation.host.process.wall_offset_us = offset_us
        return None
    process = simulation.pick_process("mapper", (fault.target - 0.3) / 0.7)
    if process is not None:
        process.wall_offset_us = offset_us
    return None


# messages


def _messages(kind: str, chance: Callable[[Fault], float]) -> Callable[[Simulation, Fault], End]:
    def act(simulation: Simulation, fault: Fault) -> End:
        rng = Random(f"{simulation.world.seed}/fault/{fault.number}")
        trouble = Trouble(kind, chance(fault), _link(simulation, fault), rng)
        simulation.network.troubles.append(trouble)

        def end() -> None:
            if trouble in simulation.network.troubles:
                simulation.network.troubles.remove(trouble)

        return end

    return act


def _link(simulation: Simulation, fault: Fault) -> Callable[[str, str, str], bool]:
    """Which messages: all, those to or from the store, those to or from mappers, or those of one process."""
    pick = fault.target
    if pick < 0.35:
        return lambda source, target, label: True
    if pick < 0.5:
        return lambda source, target, label: target.startswith("grpc://store")
    if pick < 0.65:
        return lambda source, target, label: source.startswith("grpc://store")
    if pick < 0.8:
        return lambda source, target, label: label.startswith("get_rows")
    process = simulation.pick_process("any", (pick - 0.8) / 0.2)
    name = process.name if process is not None else "nobody"
    return lambda source, target, label: name in (source, target)


def _commit_answers(simulation: Simulation, fault: Fault) -> End:
    """The commit is applied and nobody hears of it."""
    rng = Random(f"{simulation.world.seed}/fault/{fault.number}")
    trouble = Trouble("lose", 0.3 + 0.7 * fault.amount, lambda s, t, label: label == "commit:answer", rng)
    simulation.network.troubles.append(trouble)
    return lambda: simulation.network.troubles.remove(trouble)


def _slow_answers(simulation: Simulation, fault: Fault) -> End:
    """Rows are under way for so long that the one who asked may have begun anew meanwhile."""
    rng = Random(f"{simulation.world.seed}/fault/{fault.number}")
    chance = 0.3 + 0.6 * fault.amount
    trouble = Trouble("delay", chance, lambda s, t, label: label == "get_rows:answer", rng, delay_us_max=900_000)
    simulation.network.troubles.append(trouble)
    return lambda: simulation.network.troubles.remove(trouble)


def _one_way(simulation: Simulation, fault: Fault) -> End:
    """Nothing gets from one process to another, while everything gets back."""
    process = simulation.pick_process("any", fault.target)
    name = process.name if process is not None else "nobody"
    outwards = fault.amount < 0.5
    rng = Random(f"{simulation.world.seed}/fault/{fault.number}")
    trouble = Trouble("lose", 1.0, lambda source, target, label: name == (source if outwards else target), rng)
    simulation.network.troubles.append(trouble)
    return lambda: simulation.network.troubles.remove(trouble)


# discovery


def _discovery(kind: str) -> Callable[[Simulation, Fault], End]:
    def act(simulation: Simulation, fault: Fault) -> End:
        simulation.discovery_faults.kind = kind

        def end() -> None:
            if simulation.discovery_faults.kind == kind:
                simulation.discovery_faults.kind = None

        return end

    return act


# disk


def _slow_sync(simulation: Simulation, fault: Fault) -> End:
    simulation.sync_us_max = int(20_000 + 500_000 * fault.amount**3)

    def end() -> None:
        simulation.sync_us_max = simulation.sync_us_usual

    return end


def _disk_full(simulation: Simulation, fault: Fault) -> End:
    simulation.disk.free_bytes = 0

    def end() -> None:
        simulation.disk.free_bytes = 1 << 40

    return end


def _disk_failure(operation: str) -> Callable[[Simulation, Fault], End]:
    """The next operation of this kind fails, whenever it comes; the last one of the job may be the one."""

    def act(simulation: Simulation, fault: Fault) -> End:
        simulation.disk.fail_next = operation
        return None

    return act


# load


def _slow_reducer(simulation: Simulation, fault: Fault) -> End:
    reducer = int(fault.target * simulation.workload.reducer_count)
    simulation.slow_reducers[reducer] = 0.05 + 0.5 * fault.amount

    def end() -> None:
        simulation.slow_reducers.pop(reducer, None)

    return end


def _input_stops(simulation: Simulation, fault: Fault) -> End:
    simulation.world.fault("input stops")
    if simulation.producer.process is not None:
        simulation.producer.process.freeze(simulation.world.now_us + fault.length_us)
    return None


KINDS: dict[str, Callable[[Any, Fault], End]] = {
    "crash mapper": _crash_worker("mapper"),
    "crash reducer": _crash_worker("reducer"),
    "crash store": _crash_store,
    "pause mapper": _pause_worker("mapper"),
    "pause reducer": _pause_worker("reducer"),
    "pause store": _pause_store,
    "twin mapper": _twin("mapper"),
    "twin reducer": _twin("reducer"),
    "clock jump": _clock_jump,
    "lose": _messages("lose", lambda fault: 0.06 + 0.4 * fault.amount**2),
    "delay": _messages("delay", lambda fault: 0.15 + 0.7 * fault.amount**2),
    "double": _messages("double", lambda fault: 0.15 + 0.75 * fault.amount),
    "reorder": _messages("reorder", lambda fault: 0.2 + 0.8 * fault.amount),
    "lose commit answers": _commit_answers,
    "slow answers": _slow_answers,
    "one way": _one_way,
    "discovery empty": _discovery("empty"),
    "discovery stale": _discovery("stale"),
    "discovery lies": _discovery("lies"),
    "slow syncs": _slow_sync,
    "disk full": _disk_full,
    "fail write": _disk_failure("write"),
    "fail sync": _disk_failure("sync"),
    "fail append": _disk_failure("append"),
    "fail segment sync": _disk_failure("segment sync"),
    "slow reducer": _slow_reducer,
    "input stops": _input_stops,
}
