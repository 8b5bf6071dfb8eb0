"""When and what a mapper spills, and what it has spilled: the part of ``MapperCore`` that deals with stragglers.

Nothing is spilled unless all of this holds:

- a reducer is a straggler (``stragglers``), or still has rows in its spill: then those after them go there too;
- the window holds more bytes than its share of the memory limit (``memory_share``);
- the entries at the front of the window are held by such reducers only.

No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from shuffle.durable.spill_ends import SpillEnd
from shuffle.ids import ReducerIndex, ShuffleIndex
from shuffle.limits import MIB
from shuffle.mapper.bucket import Bucket
from shuffle.mapper.spill.format import SpillPart
from shuffle.mapper.spill.index import Spill
from shuffle.mapper.spill.stragglers import ReducerProgress, Stragglers
from shuffle.mapper.window import EntryPart, Window, WindowEntry
from shuffle.spec.config import SpillSpec

SPILL_BYTES_MAX = 8 * MIB
"""The most bytes of rows in one transaction, about. Not more, because rows are in memory some five times over on their
way to the store; not less, because what waits for the next transaction takes room from the other reducers, and each
transaction has a cost of its own, however few rows it has."""

WORTH_SHARE = 1 / 16
"""The share of the memory limit that a spill must have. Less is not worth a file and a transaction, unless the window
is full and reading has stopped."""

BLOCKED_MS = 5_000
"""The milliseconds for which nothing is spilled after the store had no room."""


class ReducerView(NamedTuple):
    """What the mapper knows of one reducer at a tick."""

    bucket: Bucket
    committed: ShuffleIndex
    """The last row that the reducer has committed, as far as is known."""
    is_waiting: bool
    """Whether a request of the reducer waits for rows at this moment."""


class Spilling:
    """Decides when and what one mapper spills, and records what it has spilled."""

    def __init__(self, reducer_count: int, memory_bytes_max: int, spec: SpillSpec | None) -> None:
        self._reducer_count = reducer_count
        self._memory_bytes_max = memory_bytes_max
        self._spec = spec if spec is not None and spec.enabled else None
        self.restart()

    def restart(self) -> None:
        spec = self._spec or SpillSpec()
        self._late = Stragglers(self._reducer_count, spec.reducers_done_share, spec.age_ms)
        self.spills: dict[ReducerIndex, Spill] = {}
        """The spill of each reducer for which rows were ever spilled."""
        self.is_known = True
        """Whether ``spills`` is what the store holds. After another instance, or a commit whose response was lost, has
        moved the persisted state, it must be read again."""
        self._over = False
        self._now_ms = 0
        self._blocked_until_ms: int | None = None
        self.blocked: str | None = None
        """The reason why nothing can be spilled at present though it should be; None if there is none."""

    # which reducers are late

    @property
    def stragglers(self) -> frozenset[ReducerIndex]:
        """The reducers whose rows may be spilled: those that are late, and those that still have rows in the spill."""
        return self._late.current.union(reducer for reducer, spill in self.spills.items() if not spill.is_empty)

    def tick(
        self,
        now_ms: int,
        reducers: Sequence[ReducerView],
        next_index: ShuffleIndex,
        window_bytes: int,
        window_bytes_max: int,
    ) -> None:
        """Look at the reducers again. It is called regularly, by the trim."""
        self._now_ms = now_ms
        if self._spec is None:
            return
        if self._blocked_until_ms is not None and now_ms >= self._blocked_until_ms:
            self._blocked_until_ms = self.blocked = None
        self._late.tick(now_ms, [self._progress(reducer, next_index) for reducer in reducers])
        # Spilling begins at the limit and ends at half of it, so that it does not begin again with every entry.
        limit_bytes = self._spec.memory_share * window_bytes_max
        self._over = window_bytes >= (limit_bytes / 2 if self._over else limit_bytes)

    def _progress(self, reducer: ReducerView, next_index: ShuffleIndex) -> ReducerProgress:
        first = reducer.bucket.first_row_index
        position = next_index if first is None else first
        spill = self.spills.get(reducer.bucket.reducer_index)
        if spill is not None and not spill.is_empty:
            position = ShuffleIndex(min(position, spill.end.last_row_index))
        return ReducerProgress(position, reducer.committed, position == next_index, reducer.is_waiting)

    def is_near(self, window_bytes: int, window_bytes_max: int) -> bool:
        """Whether the window may soon hold enough bytes to spill. Then the reducers are looked at more often, so that
        it is known at once which of them are late."""
        return self._spec is not None and window_bytes >= self._spec.memory_share * window_bytes_max / 2

    def block(self, reason: str) -> None:
        """The store cannot take any rows now: keep them in memory for ``BLOCKED_MS``, as if there were no spilling."""
        self.blocked = reason
        self._blocked_until_ms = self._now_ms + BLOCKED_MS

    @property
    def is_wanted(self) -> bool:
        """Whether rows of stragglers at the front of the window are to be spilled."""
        return self._over and self.is_known and self.blocked is None and bool(self.stragglers)

    @property
    def is_coming(self) -> bool:
        """Whether rows may have to be spilled soon, so that the queue for them can be created ahead."""
        return self._spec is not None and self._over and self.blocked is None and self._late.is_suspecting

    # what to spill

    def front(self, window: Window, is_full: bool) -> list[WindowEntry]:
        """The entries to spill now: those at the front that only stragglers hold, and not the last one of the window,
        which may still grow by ranges without rows."""
        if not self.is_wanted:
            return []
        late = self.stragglers
        entries: list[WindowEntry] = []
        nbytes = 0
        for entry in islice(window.entries, max(0, len(window) - 1)):
            if not late.issuperset(entry.parts) or nbytes >= SPILL_BYTES_MAX:
                break
            entries.append(entry)
            nbytes += sum(part.nbytes for part in entry.parts.values())
        worth = min(SPILL_BYTES_MAX, WORTH_SHARE * self._memory_bytes_max)
        return entries if nbytes >= worth or is_full else []

    # what was spilled

    def load(self, spills: Mapping[ReducerIndex, Spill], buckets: Sequence[Bucket]) -> None:
        """Take over what the store holds, from the read view from which the persisted state was read."""
        self.spills = dict(spills)
        self.is_known = True
        for bucket in buckets:
            spill = self.spills.get(bucket.reducer_index)
            if spill is None or spill.is_empty or bucket.spilled > spill.end.last_row_index:
                # This instance has spilled rows that are not in the store: another one came to the very same state
                # because their reducer had committed them.
                bucket.freed = max(bucket.freed, bucket.spilled)
            if spill is not None:
                # What was freed is committed, too: after a restart nothing else is known of a reducer.
                spill.commit(max(bucket.committed, bucket.freed))

    def record(self, ends: Mapping[ReducerIndex, SpillEnd]) -> None:
        """The store has taken more rows, and the spills end at ``ends`` now."""
        for reducer, end in ends.items():
            self.spills.setdefault(reducer, Spill(SpillEnd(), 0, 0, 0)).extend(end)

    def ends(self, reducers: Sequence[ReducerIndex]) -> dict[ReducerIndex, SpillEnd]:
        """The ends of the spills of ``reducers``, where more rows would be appended."""
        return {reducer: self.spills[reducer].end if reducer in self.spills else SpillEnd() for reducer in reducers}

    def trims(self) -> dict[ReducerIndex, int]:
        """The position up to which each spill is committed, for those that were not trimmed up to there yet."""
        return {reducer: spill.begin for reducer, spill in self.spills.items() if spill.begin > spill.trimmed}

    def trimmed(self, positions: Mapping[ReducerIndex, int]) -> None:
        for reducer, position in positions.items():
            if reducer in self.spills:
                self.spills[reducer].trimmed = max(self.spills[reducer].trimmed, position)


def spill_part(part: EntryPart) -> SpillPart:
    """The uncommitted rows of ``part``. The result keeps them in memory until they are spilled, even if the part is
    freed meanwhile."""
    assert part.batch is not None
    assert part.row_offsets is not None
    indexes = part.row_offsets[part.begin :].astype("int64") + part.entry.shuffle_begin
    return SpillPart(part.batch.slice(part.begin), indexes, np.full(len(indexes), part.entry.ingested_us, np.int64))
