"""TrimInputRows: the persisted state follows the window, and the input is trimmed after it.

What stragglers hold up goes to the spill in the same transaction; see ``spill``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from shuffle.durable.mapper_state import MapperState, lookup_committed, lookup_state, state_rows
from shuffle.durable.spill_ends import SpillEnd
from shuffle.durable.tables import mappers_table
from shuffle.errors import CommitConflict, CommitUnknown, DiskFull, Expired, ShuffleError, TooLarge
from shuffle.ids import MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.mapper.core import MapperCore
from shuffle.mapper.reader import PartitionReader
from shuffle.mapper.spill.store import Prepared, SpillStore
from shuffle.mapper.trim_plan import TrimPlan
from shuffle.support import crash_points
from shuffle.support.logs import get_logger

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction

STRAGGLER_CHECK_S = 0.1
"""The seconds between two looks for stragglers, while the window holds enough bytes for a spill to come soon. Otherwise
a mapper looks as often as it trims."""

GIVE_BACK_PERIODS_MAX = 5
"""The number of trim periods by which spills that are due may delay the trim of the input."""

FULL_REPORT_S = 60.0
"""The seconds between two log lines that say which reducers fill the window, while it is full."""

_log = get_logger(__name__)


class Trimmer:
    """Runs the trim of one mapper; ``lock`` guards ``core``, and is never held during a request to the store."""

    def __init__(
        self,
        client: StateClient,
        processor: str,
        core: MapperCore,
        reader: PartitionReader,
        lock: threading.RLock | threading.Lock | threading.Condition,
        dead_letter_queue: str | None = None,
        spill: SpillStore | None = None,
        period_s: float = 0.0,
    ) -> None:
        self._client = client
        self._processor = processor
        self._core = core
        self._reader = reader
        self._lock = lock
        self._dead_letter_queue = dead_letter_queue
        self._spill = spill
        self._period_s = period_s
        self._due_s = 0.0
        self._give_back_due_s = 0.0
        self._moved = False
        self._full_since_s: float | None = None
        self._full_reported_s = 0.0
        self._input_trimmed: MapperState | None = None
        self.on_conflict: Callable[[], None] = lambda: None
        self.on_dead_letters: Callable[[int], None] = lambda rows: None
        self.on_spilled: Callable[[ReducerIndex, SpillEnd, SpillEnd], None] = lambda reducer, before, after: None

    @property
    def pause_s(self) -> float:
        """The seconds to wait before the next round."""
        with self._lock:
            if self._moved and self._core.spill_is_due:
                return 0.0
            core = self._core
            busy = core.spilling.is_near(core.nbytes, core.window_bytes_max) or not core.wants_input
            return min(self._period_s, STRAGGLER_CHECK_S) if busy else self._period_s

    def hurry(self) -> None:
        """The next round is the last one: everything is due in it."""
        self._due_s = 0.0
        self._give_back_due_s = -math.inf

    def trim(self) -> bool:
        """One round; whether the persisted state moved. Raises SplitBrain if another instance moved it.

        1. Plan: how far the window has retired, and the dead letters on the way; and what to spill to get further.
           What requests have called committed must be so in the store, or FalseClaim is raised; without a plan this is
           checked only where a later request denies it.
        2. Transact: write large spills ahead. In a transaction, read the persisted state. It must be the one the plan
           starts from: anything else was written by another instance, or by this one in a commit whose response was
           lost.
           Append the dead letters and the spill, write the state, commit.
        3. Settle. On *conflict* nothing happened; on *unknown* read the state again. Never repeat the commit. Once the
           new state is durable, tell the reader to trim, now or in a later round.
        """
        # 1
        self._moved = False
        with self._lock:
            is_known = self._core.spilling.is_known
        if not is_known:
            self._load_spill()
        now_s = time.monotonic()
        plan = self._plan(now_s)
        if plan is None:
            with self._lock:
                disputed = self._core.take_dispute()
            self._check_claims(disputed)
            self._give_back(now_s)
            return False
        self._check_claims(plan.claims)
        # 2
        prepared = self._prepare(plan) if plan.spill else None
        if plan.spill and prepared is None:
            return False
        try:
            if not self._transact(plan, prepared):
                return False
        # 3
        except (CommitConflict, CommitUnknown) as error:
            return self._not_committed(plan, prepared, error)
        except (DiskFull, Expired) as error:
            if prepared is None:
                raise
            self._blocked(plan, error)
            return False
        self._committed(plan, prepared)
        self._give_back(now_s)
        self._moved = True
        return True

    def _plan(self, now_s: float) -> TrimPlan | None:
        """What to commit in this round; None if nothing is due, or nothing can move."""
        with self._lock:
            self._core.tick(int(now_s * 1000))
            self._report_full(now_s)
            is_due = now_s >= self._due_s or self._core.spill_is_due
            plan = self._core.trim_plan() if is_due else None
            is_coming = self._core.spilling.is_coming
        if plan is not None:
            self._due_s = now_s + self._period_s
        elif is_coming:
            self._get_ready()
        return plan

    def _transact(self, plan: TrimPlan, prepared: Prepared | None) -> bool:
        """Commit ``plan``, with all that belongs to it; False if the store does not hold what it starts from."""
        with self._client.transaction() as tx:
            persisted = lookup_state(tx, self._processor, self._core.mapper_index)
            if (persisted or MapperState()) != plan.expected:
                self._discard(prepared)
                with self._lock:
                    self._core.observe(persisted)
                return False  # This instance has written it: the next round plans from there.
            if not self._write(tx, plan, prepared):
                return False
            crash_points.reach("mapper.before_trim_commit")
            tx.commit()
            crash_points.reach("mapper.after_trim_commit")
        return True

    def _not_committed(self, plan: TrimPlan, prepared: Prepared | None, error: CommitConflict | CommitUnknown) -> bool:
        """After a commit that was not acknowledged: whether the persisted state has moved nevertheless."""
        if isinstance(error, CommitConflict):
            self.on_conflict()
            self._discard(prepared)
        _log.info("trim not committed, reading the state again", error=error)
        return self._learn(self._core.mapper_index, plan.state)

    def _check_claims(self, claims: Mapping[ReducerIndex, ShuffleIndex]) -> None:
        """Raise FalseClaim unless the reducers' rows in the store confirm ``claims``, which were made before this.

        It is a plain lookup, outside of the trim's transaction, which would otherwise conflict with every commit of a
        reducer. What it reads stays true: committed indexes only grow.
        """
        if not claims:
            return
        core = self._core
        committed = lookup_committed(self._client, self._processor, core.mapper_index, core.reducer_count)
        with self._lock:
            core.check_claims(claims, committed)

    def _give_back(self, now_s: float) -> None:
        """Trim the input and the spill up to what is committed.

        Each of the two is a commit. So they are done once in a period, and not while more is to be spilled: the spill
        would wait for them, and with it the reading, if the window is full.
        """
        with self._lock:
            latest_s = self._give_back_due_s + (GIVE_BACK_PERIODS_MAX - 1) * self._period_s
            if now_s < self._give_back_due_s or (self._core.spill_is_due and now_s < latest_s):
                return
        did_input, did_spill = self._trim_input(), self._trim_spill()
        if did_input or did_spill:
            self._give_back_due_s = now_s + self._period_s

    def _committed(self, plan: TrimPlan, prepared: Prepared | None) -> None:
        with self._lock:
            # The ingestion may have read the new state before this, and adopted it.
            if self._core.persisted.is_before(plan.state):
                self._core.trimmed(plan.state)
                if prepared is not None:
                    self._core.spilled(prepared.after)
        if plan.dead_letters is not None:
            self.on_dead_letters(plan.dead_letters.num_rows)
        if prepared is not None:
            for reducer, after in prepared.after.items():
                self._report_spilled(reducer, prepared.before[reducer], after)

    def _learn(self, index: MapperIndex, state: MapperState) -> bool:
        """Read the persisted state again; whether it is ``state``, which this instance tried to write."""
        persisted = lookup_state(self._client, self._processor, index)
        with self._lock:
            self._core.observe(persisted)
        if persisted != state:
            return False
        self._trim_input()
        return True

    def _trim_input(self) -> bool:
        """Trim the input up to the persisted state; whether there was something to trim. It is also done after a round
        without progress: the round before may have ended between its commit and the trim."""
        with self._lock:
            state = self._core.persisted
        if state == self._input_trimmed:
            return False
        self._reader.trim(state.input_unread_row_index, state.continuation_token)
        crash_points.reach("mapper.after_input_trim")
        self._input_trimmed = state
        return True

    # The spill

    def _load_spill(self) -> None:
        """Read again what is in the spill, if the state that belongs to it is the one this instance knows."""
        if self._spill is None:
            with self._lock:
                self._core.load_spill({})
            return
        state, spills = self._spill.load()
        with self._lock:
            self._core.observe(state)
            if (state or MapperState()) == self._core.persisted:
                self._core.load_spill(spills)

    def _get_ready(self) -> None:
        """Prepare for a spill, since a reducer may become a straggler. If that fails, it is tried again, and the error
        reported, when there are rows to spill."""
        if self._spill is not None:
            with suppress(ShuffleError):
                self._spill.get_ready()

    def _prepare(self, plan: TrimPlan) -> Prepared | None:
        """The rows to spill, encoded, the large ones staged; None if the store cannot take them now."""
        assert self._spill is not None
        with self._lock:
            reducers = list(plan.spill)
            spills = self._core.spilling.spills
            before = self._core.spilling.ends(reducers)
            is_begun = {reducer: reducer in spills and not spills[reducer].is_empty for reducer in reducers}
        try:
            return self._spill.prepare(plan.spill, before, plan.freed, is_begun)
        except (DiskFull, TooLarge) as error:
            self._blocked(plan, error)
            return None

    def _write(self, tx: Transaction, plan: TrimPlan, prepared: Prepared | None) -> bool:
        """Write everything that belongs to ``plan`` into ``tx``; False if the spill is not as this instance expects."""
        if prepared is not None:
            assert self._spill is not None
            if not self._spill.is_expected(tx, prepared):
                self._discard(prepared)
                with self._lock:
                    self._core.forget_spill()
                return False
            self._spill.write(tx, prepared)
        if plan.dead_letters is not None:
            assert self._dead_letter_queue is not None
            tx.append(self._dead_letter_queue, 0, plan.dead_letters)
        tx.write(mappers_table(self._processor), state_rows(self._core.mapper_index, plan.state))
        return True

    def _discard(self, prepared: Prepared | None) -> None:
        if prepared is None or self._spill is None:
            return
        try:
            self._spill.discard(prepared)
        except ShuffleError as error:
            _log.info("staged rows left to be collected", error=error)

    def _blocked(self, plan: TrimPlan, error: ShuffleError) -> None:
        """The spill cannot be written: reading stops when the window is full, as without a spill, and nothing is
        lost."""
        with self._lock:
            self._core.spilling.block(f"{type(error).__name__}: {error.message}")
        rows = {int(reducer): sum(part.rows.num_rows for part in parts) for reducer, parts in plan.spill.items()}
        _log.warning(
            "the spill cannot be written, so rows of reducers that lag behind stay in memory", rows=rows, error=error
        )

    def _trim_spill(self) -> bool:
        with self._lock:
            positions = self._core.spilling.trims()
            emptied = [reducer for reducer in positions if self._core.spilling.spills[reducer].is_empty]
            claims = self._core.claims()
        if not positions:
            return False
        self._check_claims(claims)
        assert self._spill is not None
        if not self._spill.trim(positions):
            return False  # A later round tries again: there may be no later spill that is trimmed together with it.
        with self._lock:
            self._core.spilling.trimmed(positions)
        for reducer in emptied:
            _log.info("a reducer has caught up: nothing of it is spilled any more", reducer=int(reducer))
        return True

    # Status and logs

    def _report_spilled(self, reducer: ReducerIndex, before: SpillEnd, after: SpillEnd) -> None:
        self.on_spilled(reducer, before, after)
        if after.since_ms != before.since_ms:
            _log.warning(
                "a reducer lags behind the others: its rows go to the spill until it has caught up",
                reducer=int(reducer),
                rows=after.rows - before.rows,
                bytes=after.nbytes - before.nbytes,
            )

    def _report_full(self, now_s: float) -> None:
        """Log which reducers fill the window, while it is full. The caller holds the lock."""
        core = self._core
        if core.wants_input:
            self._full_since_s = None
            return
        if self._full_since_s is None:
            self._full_since_s = self._full_reported_s = now_s
        if now_s - self._full_reported_s < FULL_REPORT_S:
            return
        self._full_reported_s = now_s
        _log.warning(
            "the window is full, so no input is read",
            full_for_s=round(now_s - self._full_since_s),
            held=self.held(),
            spill_blocked=core.spilling.blocked,
        )

    def held(self) -> Mapping[str, str]:
        """The reducers that have rows in memory, and how many, those with the most first. The caller holds the lock."""
        buckets = sorted((bucket for bucket in self._core.buckets if bucket.rows), key=lambda bucket: -bucket.nbytes)
        return {
            f"reducer {bucket.reducer_index}": f"{bucket.rows} rows, {bucket.nbytes} bytes" for bucket in buckets[:8]
        }
