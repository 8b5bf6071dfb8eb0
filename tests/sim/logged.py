"""Runs in which tables are logged: every commit goes to a changelog, and logs are compacted and moved all the time.

A share of all seeds has it; with the profile ``logged`` (``--faults logged``) every seed has, with more crashes of the
store. What is set here has a random stream of its own, so that the other parts of a seed do not change.
"""

from __future__ import annotations

import sys
from random import Random

from tests.sim import profiles
from tests.sim.faults import Fault, with_more

SHARE = 0.25
"""Of the seeds of an ordinary run."""

MARKS = (
    "a block was stored in a segment",
    "a block was stored in the database",
    "a log was compacted",
    "a log was moved to the database",
    "a log was read after a restart",
    "a replacement failed",
    "a transaction conflicted with a log",
    "an earlier version was read from a log",
    "rows of a log were taken back",
)
"""What must have happened at least once in a run of many seeds of this profile."""

OFTEN = ("crash store", "crash store", "fail segment sync", "fail sync", "fail append", "pause reducer", "twin reducer")


class Logged:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = Random(f"{seed}/logged")
        self.is_on = profiles.current() == profiles.LOGGED or rng.random() < SHARE
        self._rows_min = rng.choice([1, 1, 2]) if self.is_on else 1 << 30
        self._inline_bytes = rng.choice([0, 150, 8_192])
        self._compacted_rows = rng.choice([2, 8, 30, 1 << 30])
        self._growth = rng.choice([2, 2, 3])
        self._bytes_max = rng.choice([1, 1 << 40]) if self._compacted_rows < 1 << 30 else 1
        self._chunk_rows = rng.choice([2, 1_000])
        self._check_s = rng.choice([0.02, 0.1, 0.3])

    def settle(self) -> None:
        """Set the constants of the product for this seed."""
        client, local, keeper, logs, engine = (
            sys.modules[f"shuffle.statestore.{name}"]
            for name in (
                "client.transaction",
                "local.local",
                "local.log_keeper",
                "engine.table_logs",
                "engine.engine",
            )
        )
        for module in (client, local, logs):
            vars(module).update(LOGGED_ROWS_MIN=self._rows_min)
        vars(engine).update(INLINE_BYTES_MAX=self._inline_bytes)
        vars(logs).update(COMPACTED_ROWS_MIN=self._compacted_rows, COMPACTED_GROWTH=self._growth)
        vars(keeper).update(
            CHUNK_ROWS=self._chunk_rows,
            MOVED_ROWS=self._chunk_rows,
            _CHECK_S=self._check_s if self.is_on else 10.0,
            logs_bytes_max=lambda: self._bytes_max,
        )

    def faults(self, made: list[Fault]) -> list[Fault]:
        if not self.is_on or profiles.current() != profiles.LOGGED:
            return made
        return with_more(made, len(made), self._rng, OFTEN, [2, 6, 12], [50_000, 300_000])
