"""Runs with second instances of workers (twins): some fall behind, and mappers are restarted beside them.

Only with the profile ``twins`` (``--faults twins``), and then in every seed.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.sim import profiles
from tests.sim.faults import Fault, with_more
from tests.sim.workload import Workload

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

MARKS = (
    "a commit was settled: split brain",
    "a mapper noticed another instance",
    "a reducer learned from a mapper that another instance is alive",
    "rows were gone",
    "the store refused a commit that had read what changed",
    "three instances of a mapper",
    "three instances of a reducer",
)
"""What must have happened at least once in a run of many seeds of this profile."""

OFTEN = ("left behind", "twin reducer", "twin mapper", "pause reducer", "crash mapper")


class Twins:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed}/twins")
        self.is_on = profiles.current() == profiles.TWINS

    def workload(self, made: Workload) -> Workload:
        if self.is_on:
            made.reducer_count = self._rng.choice([1, 1, 2])
            made.lengthen(self._rng, [20, 40, 80])
        return made

    def faults(self, made: list[Fault]) -> list[Fault]:
        if not self.is_on:
            return made
        return with_more(made, len(made), self._rng, OFTEN, [8, 16, 32])


def left_behind(simulation: Simulation, fault: Fault) -> None:
    """One instance sleeps while another gets on; then it wakes alone, before mappers that were started anew.

    Nobody tells those mappers what has been committed meanwhile, unless they ask the store.
    """
    slot = simulation.pick_slot("reducer", fault.target)
    simulation.world.fault("left behind", slot.name)
    if not slot.living():
        slot.start()
    sleeper = slot.living()[0]
    sleeper.freeze(simulation.world.now_us + fault.length_us)
    slot.start()

    def wake(_: object) -> None:
        slots = [other for other in simulation.slots if other is slot or other.role == "mapper"]
        for process in [process for other in slots for process in other.living() if process is not sleeper]:
            process.kill()

    simulation.world.at(simulation.world.now_us + fault.length_us - 1_000, wake)


KINDS = {"left behind": left_behind}
"""What these runs have beside the ordinary kinds of faults."""
