"""Runs in which the input gets more partitions: some mappers are there from the first, the others come later.

Only with the profile ``growth`` (``--faults growth``), and then in every seed. What a worker learns from the input, how
many mappers there are, is here a number that rises at some moments. A reducer is started with the number of that
moment, and those that live on with a smaller one are what this is about.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.sim import profiles
from tests.sim.faults import FAULTS_UNTIL_US, Fault, with_more
from tests.sim.workload import PLAIN, Workload

MARKS = (
    "a reducer began again with more mappers",
    "a reducer was outgrown by another instance of it",
    "a row of a reducer was widened",
    "a row of a reducer was widened by two at a time",
    "a commit was settled: split brain",
    "three instances of a reducer",
)
"""What must have happened at least once in a run of many seeds of this profile."""

OFTEN = ("twin reducer", "twin reducer", "pause reducer", "crash reducer", "crash mapper", "lose commit answers")


class Growth:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed}/growth")
        self.is_on = profiles.current() == profiles.GROWTH
        self.due_us: list[int] = []
        """For each mapper the virtual time from which on it is there."""

    def workload(self, made: Workload) -> Workload:
        if not self.is_on:
            self.due_us = [0] * made.mapper_count
            return made
        rng = self._rng
        for mapper in range(made.mapper_count, rng.choice([2, 3, 4])):
            made.inputs.append([(mapper * 1000, PLAIN)])
        made.mapper_count = len(made.inputs)
        made.lengthen(rng, [8, 16, 30])
        first = rng.randrange(1, max(2, made.mapper_count))
        moments = sorted(int(rng.random() * FAULTS_UNTIL_US) for _ in range(made.mapper_count - first))
        self.due_us = [0] * first + moments
        return made

    def faults(self, made: list[Fault]) -> list[Fault]:
        if not self.is_on:
            return made
        return with_more(made, len(made), self._rng, OFTEN, [8, 16, 32])

    def mapper_count(self, now_us: int) -> int:
        """How many mappers there are now, as the input and the store say."""
        return sum(due_us <= now_us for due_us in self.due_us)


def install(watch: Any) -> None:
    """Probes that set the marks; see ``probes``."""
    from shuffle.errors import Outgrown
    from shuffle.reducer.commit import Committer
    from shuffle.reducer.daemon import ReducerDaemon

    def read(mark: Any, committer: Any, args: Any, result: Any, error: Any) -> None:
        if isinstance(error, Outgrown):
            mark("a reducer was outgrown by another instance of it")

    def widened(mark: Any, committer: Any, args: Any, result: Any, error: Any) -> None:
        mark("a row of a reducer was widened")
        if committer._mapper_count - len(args[0].committed_row_indices) > 1:
            mark("a row of a reducer was widened by two at a time")

    def ran(mark: Any, daemon: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and result[1]:
            mark("a reducer began again with more mappers")

    watch(Committer, "read_state", read)
    watch(Committer, "_widen", widened)
    watch(ReducerDaemon, "run", ran)
