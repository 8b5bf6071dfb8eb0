"""A clock for the simulated mappers, so that responses and rows have fronts: at each row it shows ``at(index)``.

It is a function of the shuffle numbering alone, and shows the same time for some rows, as a clock may.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

ROWS, STEP = 3, 10


def at(shuffle_index: int) -> int:
    return shuffle_index // ROWS * STEP


def install() -> None:
    from shuffle.mapper.core import MapperCore

    original = MapperCore.ingest

    def ingest(self: Any, observed: Any, rows_in: int, token_after: Any, mapped: Any) -> Any:
        front = at(self.next_shuffle_index + mapped.rows_out)
        return original(self, observed, rows_in, token_after, replace(mapped, front=front))

    core: Any = MapperCore
    core.ingest = ingest
