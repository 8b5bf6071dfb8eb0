"""Runs with liars: requests for rows, in the name of a reducer, that say what is not so.

A share of all seeds has them. A liar knows more than anybody could: it looks up in a mapper's memory what to say. It
calls rows committed that were served and are not committed, rows that were never served, and rows that do not exist; it
has rows served to itself, the next ones or those far ahead; and it asks in the name of another processor,
or of another generation.

Chance is of its own here, so that the other parts of a seed stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from shuffle.errors import ShuffleError
from tests.sim import flight, kernel, profiles
from tests.sim.faults import FAULTS_UNTIL_US, Fault
from tests.sim.kernel import Process

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

SHARE = 0.3
"""Of the seeds of an ordinary run."""

SHARE_WITH_STRAGGLERS = 0.5

COUNTS, COUNTS_WITH_STRAGGLERS = (1, 3, 6), (6, 10, 14)
"""How many liars a seed has. The moments in which a lie about spilled rows could do harm are short."""

SPILLED_SHARE = 0.7
"""Of the lies to a mapper that has spilled rows: those in the name of a reducer that they are for."""

KINDS_OF_LIES = ("served", "served", "beyond", "mapped", "huge", "on", "ahead", "other processor", "other generation")
KINDS_OF_LIES_ABOUT_SPILLS = ("served", "served", "served", "beyond", "mapped")

ANSWER_S_MAX = 0.3

ROWS_MAX, BYTES_MAX = 7, 777
"""Of the answers to lies. No reducer asks for so many, so that a lie can be told from a request that is honest."""


class Liars:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed}/liars")
        share = SHARE_WITH_STRAGGLERS if profiles.current() == profiles.STRAGGLERS else SHARE
        self.is_on = self._rng.random() < share
        self._counts = COUNTS_WITH_STRAGGLERS if profiles.current() == profiles.STRAGGLERS else COUNTS
        self._told: dict[tuple[int, int], int] = {}

    def faults(self, made: list[Fault]) -> list[Fault]:
        if not self.is_on:
            return made
        rng = self._rng
        more = [
            Fault(
                number,
                "liar",
                int(rng.random() * FAULTS_UNTIL_US),
                int(rng.choice([30_000, 200_000, 700_000]) * (0.5 + rng.random())),
                rng.random(),
                rng.random(),
            )
            for number in range(len(made), len(made) + rng.choice(self._counts))
        ]
        return sorted([*made, *more], key=lambda fault: (fault.at_us, fault.number))

    def tell(self, mapper: int, reducer: int, index: int) -> None:
        """A lie is about to be sent."""
        self._told[mapper, reducer] = max(self._told.get((mapper, reducer), -1), index)

    def has_told(self, mapper: int, reducer: int, index: int) -> bool:
        """Whether any lie called this row committed."""
        return self._told.get((mapper, reducer), -1) >= index


def is_lie(ticket: dict[str, Any]) -> bool:
    return (ticket["max_rows"], ticket["max_bytes"]) == (ROWS_MAX, BYTES_MAX)


def liar(simulation: Simulation, fault: Fault) -> Callable[[], None]:
    process = Process(simulation.world, f"liar#{fault.number}")
    rng = Random(f"{simulation.world.seed}/fault/{fault.number}")
    process.spawn("lie", lambda: _lie_again_and_again(simulation, rng))
    return process.kill


def _lie_again_and_again(simulation: Simulation, rng: Random) -> None:
    while True:
        kernel.sleep(rng.choice([0.003, 0.02, 0.08]) * rng.random())
        served = [
            (address, hosted.shared.core)
            for address, found in simulation.network.servers.items()
            for hosted in getattr(found[1], "mappers", {}).values()
        ]
        with_spills = [(address, core) for address, core in served if _spilled(core)]
        if not served:
            continue
        if with_spills and rng.random() < SPILLED_SHARE:
            address, core = rng.choice(with_spills)
            reducer, kinds = _plan_about_spill(core, rng)
        else:
            address, core = rng.choice(served)
            reducer, kinds = rng.randrange(core.reducer_count), [rng.choice(KINDS_OF_LIES)]
        for kind in kinds:
            ticket = _lie(simulation, core, rng, reducer, kind)
            try:
                flight.connect(address).do_get(flight.Ticket(ticket), ANSWER_S_MAX)
            except ShuffleError as error:
                simulation.world.log("a lie failed", type(error).__name__)
                break


def _spilled(core: Any) -> list[int]:
    """The reducers for which rows are in the spill."""
    return [int(reducer) for reducer, spill in core.spilling.spills.items() if not spill.is_empty]


def _plan_about_spill(core: Any, rng: Random) -> tuple[int, list[str]]:
    """In whose name to lie, and what to say in which order.

    Spilled rows wait for a reducer that is away, so that nobody but a liar has them served. It takes them, and then
    calls them committed.
    """
    takes = ["on"] * rng.choice([0, 1, 4, 12])
    return rng.choice(_spilled(core)), [*takes, rng.choice(KINDS_OF_LIES_ABOUT_SPILLS)]


def _lie(simulation: Simulation, core: Any, rng: Random, reducer: int, kind: str) -> bytes:
    bucket = core.buckets[reducer]
    believed = int(max(bucket.committed, bucket.freed))
    last = int(core.next_shuffle_index) - 1
    committed = {
        "served": int(bucket.served),
        "beyond": int(bucket.served) + rng.randint(1, 6),
        "mapped": last,
        "huge": 2**40,
        "on": believed,
        "ahead": believed,
        "other processor": last,
        "other generation": believed,
    }[kind]
    simulation.world.fault("lie", kind, core.mapper_index, reducer, committed)
    if kind not in ("other processor", "other generation"):
        simulation.liars.tell(core.mapper_index, reducer, committed)
    cursor = {"on": int(bucket.served), "ahead": last - rng.randint(0, 3)}.get(kind, committed)
    ticket = {
        "version": 2,
        "generation": 1 if kind == "other generation" else 0,
        "mapper_id": core.guid,
        "processor": "other" if kind == "other processor" else "job",
        "reducer_index": reducer,
        "committed_row_index": committed,
        "from_row_index": max(committed, cursor),
        "max_rows": ROWS_MAX,
        "max_bytes": BYTES_MAX,
    }
    return json.dumps(ticket).encode()


KINDS = {"liar": liar}
"""What these runs have beside the ordinary kinds of faults."""
