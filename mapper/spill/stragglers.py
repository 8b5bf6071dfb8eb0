"""Which reducers are stragglers: so far behind the others that waiting for them would stop everybody.

Every tick gives the position of each reducer: the first shuffle index it has not committed. The *front of the many* is
the index that a given share of the reducers has passed. A reducer is a straggler when it has not yet come to where the
front of the many was a given time ago. So one that is merely the last of many to commit is none, however full the
window is, and neither are reducers that are all slow together.

Only reducers that move count among the many: those that have committed rows lately, or have committed all of theirs and
wait for more. A reducer that has rows and commits none, one that never had any, and one that no process runs say
nothing about how fast the others could be. When too few of them move (all are away, say), nobody is a straggler.

No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shuffle.ids import ReducerIndex

SAMPLES_PER_AGE = 32
"""The number of past fronts of the many that are remembered for one age; it bounds the memory for them, too."""

STANDING_AGES = 5
"""A reducer that has not moved for this many times the age does not count among the many."""


class ReducerProgress(NamedTuple):
    """How far one reducer is at a tick."""

    position: int
    """The first shuffle index that the reducer has not committed; if it has committed all, the next index there will
    be."""
    committed: int
    """The shuffle index of the last row that the reducer has committed; -1 if it has committed none."""
    is_empty: bool
    """Whether no row waits for the reducer."""
    is_waiting: bool
    """Whether a request of the reducer waits for rows at this moment."""


class Stragglers:
    """Finds the stragglers among the reducers of one mapper (see the module's text)."""

    def __init__(self, reducer_count: int, done_share: float, age_ms: int) -> None:
        # With a single reducer, or a share of all of them, there would be nobody left to be late.
        self._many = math.ceil(done_share * reducer_count)
        self._possible = 0 < self._many < reducer_count
        self._age_ms = age_ms
        self._fronts: deque[tuple[int, int]] = deque()
        """Past fronts of the many with their times, as (time, front), the oldest first. The first one is the newest of
        those that are at least ``age_ms`` old, if there is one."""
        self._moved_ms: list[int | None] = [None] * reducer_count
        """The time at which each reducer was last seen to move; None if it never was."""
        self._before: Sequence[ReducerProgress] = ()
        self.current: frozenset[ReducerIndex] = frozenset()
        self.is_suspecting = False
        """Whether a reducer has been late for half the age, so that a spill should be prepared."""

    def tick(self, now_ms: int, progress: Sequence[ReducerProgress]) -> None:
        """Look at the reducers again; ``progress`` has one item for each."""
        if not self._possible:
            return
        for reducer, now in enumerate(progress):
            # A reducer that committed rows before this instance was started counts until it is seen to stand still.
            has_moved = now.committed != self._before[reducer].committed if self._before else now.committed >= 0
            has_caught_up = now.is_empty and now.committed >= 0 and now.is_waiting
            if has_moved or has_caught_up:
                self._moved_ms[reducer] = now_ms
        self._before = progress
        positions = [one.position for one in progress]
        front = self._front(now_ms, positions)
        if front is None:
            self._fronts.clear()
            self.current = frozenset()
            self.is_suspecting = False
            return
        if not self._fronts or now_ms - self._fronts[-1][0] >= self._age_ms / SAMPLES_PER_AGE:
            self._fronts.append((now_ms, front))
        while len(self._fronts) > 1 and now_ms - self._fronts[1][0] >= self._age_ms:
            self._fronts.popleft()
        since_ms, front_then = self._fronts[0]
        late = now_ms - since_ms >= self._age_ms
        self.current = frozenset(
            ReducerIndex(reducer) for reducer, position in enumerate(positions) if late and position < front_then
        )
        halfway = (front for at_ms, front in reversed(self._fronts) if now_ms - at_ms >= self._age_ms / 2)
        self.is_suspecting = min(positions) < next(halfway, 0)

    def _front(self, now_ms: int, positions: Sequence[int]) -> int | None:
        moving = [
            position
            for position, moved_ms in zip(positions, self._moved_ms, strict=True)
            if moved_ms is not None and now_ms - moved_ms <= STANDING_AGES * self._age_ms
        ]
        return sorted(moving, reverse=True)[self._many - 1] if len(moving) >= self._many else None
