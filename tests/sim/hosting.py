"""Runs in which a process hosts several mappers, or several reducers: they are started, paused and killed together.

Only with the profile ``hosting`` (``--faults hosting``), and then in every seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from shuffle.spec.config import ProcessorSpec
from shuffle.spec.index_sets import share_out
from tests.sim import profiles
from tests.sim.faults import Fault, with_more
from tests.sim.workload import PLAIN, Workload

MARKS = (
    "a mapper noticed another instance",
    "a mapper process refused a request for an instance of another life",
    "a poison row stopped its partition",
    "mapper paused beyond its lease",
    "several mappers died together",
    "several reducers died together",
    "three instances of a mapper",
)
"""What must have happened at least once in a run of many seeds of this profile."""

OFTEN = (
    "crash mapper",
    "crash mapper",
    "pause mapper",
    "twin mapper",
    "discovery stale",
    "crash reducer",
    "pause reducer",
    "twin reducer",
)


class Hosting:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed}/hosting")
        self.is_on = profiles.current() == profiles.HOSTING
        self._per_process = self._rng.choice([2, 2, 3]) if self.is_on else 1

    def workload(self, made: Workload) -> Workload:
        if self.is_on:
            for mapper in range(made.mapper_count, self._rng.choice([2, 3, 4])):
                made.inputs.append([(mapper * 1000, PLAIN)])
            made.mapper_count = len(made.inputs)
            made.lengthen(self._rng, [8, 16, 30])
        return made

    def spec(self, made: ProcessorSpec) -> ProcessorSpec:
        if not self.is_on:
            return made
        # Batches are bound by their rows here; what the spec says of bytes has only to fit a share of the memory.
        mapper = replace(made.mapper, per_process=self._per_process, batch_bytes_max=1_000)
        return replace(made, mapper=mapper)

    def faults(self, made: list[Fault]) -> list[Fault]:
        if not self.is_on:
            return made
        return with_more(made, len(made), self._rng, OFTEN, [4, 8, 16])

    def processes(self, worker_count: int) -> Sequence[Sequence[int]]:
        """The mappers, or reducers, that each process hosts."""
        return share_out(worker_count, self._per_process)
