"""The shortest list of faults with which a seed still fails."""

from __future__ import annotations

from contextlib import nullcontext

from tests.sim import mutants
from tests.sim.faults import Fault
from tests.sim.simulation import Simulation

RUNS_MAX = 120
"""Enough for thirty faults, and a bound on patience."""


def fails(seed: int, faults: list[Fault], mutant: str | None) -> bool:
    simulation = Simulation(seed, faults)
    with mutants.planted(mutant) if mutant else nullcontext():
        return bool(simulation.run().violations)


def shrink(seed: int, mutant: str | None = None) -> list[Fault]:
    """Leaves out ever smaller parts of the list for as long as the run still fails."""
    faults = Simulation(seed).faults
    runs = 0
    step = max(1, len(faults) // 2)
    while runs < RUNS_MAX:
        shorter = None
        for at in range(0, len(faults), step):
            candidate = faults[:at] + faults[at + step :]
            runs += 1
            if fails(seed, candidate, mutant):
                shorter = candidate
                break
        if shorter is not None:
            faults = shorter
        elif step == 1:
            return faults
        else:
            step //= 2
    return faults
