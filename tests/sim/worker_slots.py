"""Slots for workers: each keeps its worker process running, as a controller would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shuffle.spec.index_sets import indexes_text
from tests.sim.kernel import Process

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


PORTS = {"mapper": 0, "reducer": 100, "exporter": 200}


class Slot:
    """Keeps a process with one worker, or several, running: at least one instance of it, more during some faults."""

    def __init__(self, simulation: Simulation, role: str, hosted: Sequence[int]) -> None:
        self.simulation = simulation
        self.role = role
        self.hosted = hosted
        self.index = hosted[0]
        self.name = f"{role}{indexes_text(hosted)}"
        self._processes: list[Process] = []
        self.starts = 0
        self.away_until_us = 0
        """The virtual time in microseconds until which no process of this slot is started."""

    def living(self) -> list[Process]:
        return [process for process in self._processes if process.alive]

    def start(self) -> None:
        simulation = self.simulation
        if self.role == "mapper" and max(self.hosted) >= simulation.mapper_count:
            return  # Its partition is not there yet.
        self.starts += 1
        process = Process(simulation.world, f"{self.name}#{self.starts}")
        # Others listen nowhere; a number of their own keeps them out of the mappers' way.
        process.port = simulation.free_port(self.index + PORTS[self.role])
        self._processes.append(process)
        process.at_end.append(self._ended)
        main = simulation.mains[self.role]
        process.spawn("main", lambda: main(process, self.hosted))

    def _ended(self) -> None:
        if len(self.hosted) > 1:
            self.simulation.world.mark(f"several {self.role}s died together")
        # The controller starts it again, a little later.
        self.simulation.world.at(self.simulation.world.now_us + 150_000, lambda _: self.ensure())

    def ensure(self) -> None:
        if not self.living() and self.simulation.world.now_us >= self.away_until_us:
            self.start()
