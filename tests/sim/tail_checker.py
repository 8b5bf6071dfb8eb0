"""Compares what mappers promise in the tails of their responses, and what is durable of it, with the truth (invariant
12).

The tail of a response is decoded here a second time, from its description in ``docs/protocol.md``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.sim import clock
from tests.sim.workload import Oracle

GENERATION = 0
"""Of the job. Nothing changes it yet."""

_NO_FRONT = -(2**63)


class Tail(NamedTuple):
    last: int
    complete: int
    front: int | None
    generation: int
    more: bool


def decode_tail(metadata: bytes) -> Tail:
    tag, flags, generation, last, complete, front = struct.unpack("<cBIqqq", metadata)
    assert tag == b"#"
    return Tail(last, complete, front if flags & 2 else None, generation, bool(flags & 1))


class TailChecker:
    def __init__(self, oracle: Oracle, violated: Callable[[int, str], None]) -> None:
        self._oracle = oracle
        self._violated = violated
        self._told: dict[tuple[str, int], tuple[Any, Any]] = {}
        """By the mapper's guid and reducer: the window it had, and the tail that went furthest."""
        self._complete: dict[tuple[int, int], int] = {}
        """By mapper and reducer: what the last answer said."""
        self._fronts: dict[tuple[int, int], int] = {}
        """By mapper and reducer: the front that is durable."""

    def on_answer(
        self, mapper: int, ticket: dict[str, Any], rows: Sequence[int], tails: Sequence[Tail], produced: int
    ) -> None:
        """An answer with so many rows in each batch; the mapper can have produced so many rows in all by now."""
        reducer, cursor = ticket["reducer_index"], ticket["from_row_index"]
        who = f"mapper {mapper} answered reducer {reducer} after {cursor}"
        if ticket.get("generation") != GENERATION:
            self._violated(12, f"{who}, which asks for generation {ticket.get('generation')}")
        if len(tails) != max(1, len(rows)) or [tail.more for tail in tails] != [True] * (len(tails) - 1) + [False]:
            self._violated(12, f"{who} with {len(rows)} batches and the tails {tails}")
            return
        if not rows and tails[0].last != cursor:
            self._violated(12, f"{who} without rows, and says that the last one is {tails[0].last}")
        mine = [index for index, _ in self._oracle.parts[mapper][reducer] if index > cursor]
        given = 0
        for at, tail in enumerate(tails):
            given += rows[at] if rows else 0
            following = mine[given] if given < len(mine) else None
            self._check(who, tail, following, max(produced, cursor + 1))
        self._complete[mapper, reducer] = tails[-1].complete

    def _check(self, who: str, tail: Tail, following: int | None, produced: int) -> None:
        if tail.generation != GENERATION:
            self._violated(12, f"{who} for generation {tail.generation}")
        if following is not None and following <= tail.complete:
            self._violated(12, f"{who} and calls that complete up to {tail.complete}: row {following} comes later")
        if tail.complete >= produced:
            self._violated(12, f"{who} and calls that complete up to {tail.complete} of {produced} rows produced")
        limit = clock.at(produced if following is None else following)
        if tail.front is not None and tail.front > limit:
            self._violated(12, f"{who} and promises nothing below {tail.front}: row {following} is at {limit}")

    def on_tail(self, guid: str, window: Any, request: Any, tail: Any) -> None:
        """A mapper has just made a tail, and nothing else can change: in one life of its window, promises only grow."""
        if request.to_row_index is not None:
            return
        if tail.front is None and tail.complete_up_to == tail.last_row_index:
            # While it does not know what is in the spill, it promises nothing; what it promised before stays true.
            return
        at = guid, int(request.reducer_index)
        life, before = self._told.get(at, (None, None))
        if life is window and tail.last_row_index >= before.last_row_index:
            if tail.complete_up_to < before.complete_up_to:
                self._violated(12, f"reducer {at[1]}: complete fell from {before} to {tail}")
            if tail.front is not None and before.front is not None and tail.front < before.front:
                self._violated(12, f"reducer {at[1]}: the front fell from {before} to {tail}")
        if life is not window or tail.last_row_index >= before.last_row_index:
            self._told[at] = window, tail

    # what is durable

    def on_mapper_row(self, mapper: int, rows_in: int, rows_out: int, generation: int, front: int | None) -> None:
        right = clock.at(rows_out) if rows_in else None
        if generation != GENERATION or front != right:
            said = f"mapper {mapper} stands at row {rows_out} of generation {generation} with the front {front}"
            self._violated(12, f"{said}, and should have {right}")

    def on_reducer_row(self, reducer: int, committed: Sequence[int], generation: int, fronts: bytes | None) -> None:
        if generation != GENERATION:
            self._violated(12, f"reducer {reducer} is of generation {generation}")
        found = struct.unpack(f"<{len(committed)}q", fronts) if fronts is not None else [_NO_FRONT] * len(committed)
        for mapper, front in enumerate(found):
            before = self._fronts.get((mapper, reducer), _NO_FRONT)
            following = [i for i, _ in self._oracle.parts[mapper][reducer] if i > committed[mapper]]
            limit = clock.at(following[0] if following else len(self._oracle.shuffled[mapper]))
            if front < before or front > limit:
                said = f"reducer {reducer} has the front {front} of mapper {mapper}, which was {before} before"
                self._violated(12, f"{said}, and its next row is at {limit}")
            self._fronts[mapper, reducer] = front

    # the end

    def is_told(self) -> bool:
        """Whether every reducer has been told that it has seen all there is."""
        for mapper, rows in enumerate(self._oracle.shuffled):
            if self._oracle.stops[mapper] is None and any(
                self._complete.get((mapper, reducer), -1) != len(rows) - 1
                for reducer in range(self._oracle.workload.reducer_count)
            ):
                return False
        return True

    def behind(self) -> str:
        return f"complete up to {sorted(self._complete.items())}"


def produced_rows(oracle: Oracle, mapper: int, input_end: int) -> int:
    """How many rows there can be of a mapper whose input ends at this position."""
    return oracle.input_ends[mapper][bisect_left(oracle.positions[mapper], input_end)]
