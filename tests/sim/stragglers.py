"""Runs with stragglers: a reducer that stays away or is slow for long, small windows, and mappers that spill.

A share of all seeds has a little of it; with the profile ``stragglers`` (``--faults stragglers``) every seed has much.
They have a random stream of their own, so that the other parts of a seed do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from shuffle.spec.config import ProcessorSpec, SpillSpec
from tests.sim import profiles
from tests.sim.faults import FAULTS_UNTIL_US, Fault
from tests.sim.network import Trouble
from tests.sim.workload import Workload

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

SHARE = 0.2
"""Of the seeds of an ordinary run."""

MARKS = (
    "a commit that had spilled was unknown, and had happened",
    "a mapper found its spill again after a restart",
    "a reducer caught up with its spill",
    "a spill was refused for want of room",
    "a spill was trimmed",
    "a spilled part was partly committed",
    "another instance had spilled",
    "rows came from the spill",
    "rows were spilled",
    "rows were spilled for two reducers at once",
    "rows were staged for the spill",
    "spilled rows were asked for again",
)
"""What must have happened at least once in a run of many seeds of this profile."""


def is_profile() -> bool:
    return profiles.current() == profiles.STRAGGLERS


class Stragglers:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = Random(f"{seed}/stragglers")
        self.is_on = is_profile() or self._rng.random() < SHARE

    def workload(self, made: Workload) -> Workload:
        if not self.is_on or not is_profile():
            return made
        rng = self._rng
        made.reducer_count = rng.choice([2, 3, 3])
        made.lengthen(rng, [40, 80])
        return made

    def spec(self, made: ProcessorSpec) -> ProcessorSpec:
        rng = self._rng
        if not self.is_on:
            return replace(made, spill=SpillSpec(enabled=False))
        spill = SpillSpec(
            reducers_done_share=rng.choice([0.3, 0.5]),
            age_ms=rng.choice([20, 60, 200]),
            memory_share=rng.choice([0.05, 0.05, 0.3] if is_profile() else [0.05, 0.3, 0.6]),
            compression=rng.choice(["none", "lz4", "zstd"]),  # type: ignore[arg-type]
        )
        memory_bytes = rng.choice([3_000, 6_000, 12_000]) if is_profile() else made.mapper.memory_bytes
        batch_rows_max = rng.choice([1, 3, 8]) if is_profile() else made.mapper.batch_rows_max
        mapper = replace(made.mapper, memory_bytes=memory_bytes, batch_rows_max=batch_rows_max)
        return replace(made, spill=spill, mapper=mapper)

    def faults(self, made: list[Fault]) -> list[Fault]:
        if not self.is_on:
            return made
        rng = self._rng
        kinds = ["straggler"]
        if is_profile():
            often = ["crash mapper", "crash mapper", "twin mapper", "lose commit answers", "crash store", "disk full"]
            kinds += [*often, "slow reducer", "crash reducer", "twin reducer", "lose", "double"]
        more = []
        for number in range(len(made), len(made) + (rng.choice([4, 8, 14]) if is_profile() else 2)):
            is_first = number == len(made)
            kind = "straggler" if is_first else rng.choice(kinds)
            at_us = int(rng.random() * FAULTS_UNTIL_US * (0.3 if is_first else 1.0))
            length_us = int(rng.choice([200_000, 700_000, 1_500_000]) * (0.5 + rng.random()))
            more.append(Fault(number, kind, at_us, length_us, rng.random(), rng.random()))
        if is_profile():
            more += self._lost_commits(len(made) + len(more))
        return sorted([*made, *more], key=lambda fault: (fault.at_us, fault.number))

    def _lost_commits(self, first_number: int) -> list[Fault]:
        """When somebody has caught up: the trim of its spill is the last commit of it, and nothing comes after it."""
        rng = Random(f"{self._seed}/stragglers/commits")
        return [
            Fault(
                number,
                "lose commits",
                int((0.3 + 0.7 * rng.random()) * FAULTS_UNTIL_US),
                int(rng.choice([100_000, 400_000]) * (0.5 + rng.random())),
                rng.random(),
                rng.random(),
            )
            for number in range(first_number, first_number + 12)
        ]


def straggler(simulation: Simulation, fault: Fault) -> Callable[[], None]:
    """A reducer that stays away: whatever is started for it ends at once."""
    slot = simulation.pick_slot("reducer", fault.target)
    simulation.world.fault("straggler", slot.name)
    slot.away_until_us = max(slot.away_until_us, simulation.world.now_us + fault.length_us)
    for process in slot.living():
        process.kill()

    def end() -> None:
        slot.away_until_us = min(slot.away_until_us, simulation.world.now_us)
        slot.ensure()

    return end


def lose_commits(simulation: Simulation, fault: Fault) -> Callable[[], None]:
    """The store never hears of them, and whoever has sent them cannot tell that from a lost answer."""
    rng = Random(f"{simulation.world.seed}/fault/{fault.number}")
    trouble = Trouble("lose", 0.3 + 0.7 * fault.amount, lambda source, target, label: label == "commit", rng)
    simulation.network.troubles.append(trouble)
    return lambda: simulation.network.troubles.remove(trouble)


KINDS = {"straggler": straggler, "lose commits": lose_commits}
"""What these runs have beside the ordinary kinds of faults."""


def staged_bytes_min() -> int:
    """So that even the few rows of a simulated job are staged sometimes."""
    return 900


def settle(modules: dict[str, Any]) -> None:
    vars(modules["shuffle.mapper.spill.store"]).update(STAGED_BYTES_MIN=staged_bytes_min(), STAGED_TTL_MS=3_000)
    vars(modules["shuffle.mapper.spill.format"]).update(BATCH_BYTES=120)
    vars(modules["shuffle.mapper.spill.policy"]).update(BLOCKED_MS=300)
