"""Planted bugs of the spill. Every function here is one; see ``mutants``. They are looked for with stragglers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shuffle.durable.mapper_state import state_rows as _state_rows
from shuffle.durable.tables import mappers_table as _mappers_table
from shuffle.mapper.core import MapperCore as _Core
from shuffle.mapper.shared_core import SharedCore as _Shared
from shuffle.mapper.spill.index import Spill as _Spill
from shuffle.mapper.spill.policy import Spilling as _Spilling
from shuffle.mapper.spill.response import SpillResponse as _SpillResponse
from shuffle.mapper.spill.store import SpillStore as _Store
from shuffle.mapper.trim import Trimmer as _Trimmer


def spill_in_a_transaction_of_its_own(patch: Any) -> None:
    """The rows first, the state later: a crash between the two leaves them in the spill, and to be mapped again."""
    original = _Trimmer._write

    def write(self: Any, tx: Any, plan: Any, prepared: Any) -> bool:
        if prepared is not None:
            with self._client.transaction() as other:
                if not self._spill.is_expected(other, prepared):
                    return False
                self._spill.write(other, prepared)
                other.commit()
        return original(self, tx, plan, None)

    patch(_Trimmer, "_write", write)


def state_moved_before_the_spill(patch: Any) -> None:
    original = _Trimmer._write

    def write(self: Any, tx: Any, plan: Any, prepared: Any) -> bool:
        if prepared is not None:
            with self._client.transaction() as other:
                other.write(_mappers_table(self._processor), _state_rows(self._core.mapper_index, plan.state))
                other.commit()
        return original(self, tx, plan, prepared)

    patch(_Trimmer, "_write", write)


def spill_without_the_split_brain_check(patch: Any) -> None:
    """Neither the state nor the ends are compared: two instances both spill."""
    original = _Trimmer._transact

    def transact(self: Any, plan: Any, prepared: Any) -> bool:
        if prepared is None:
            return original(self, plan, prepared)
        with self._client.transaction() as tx:
            if not self._write(tx, plan, prepared):
                return False
            tx.commit()
        return True

    patch(_Trimmer, "_transact", transact)
    patch(_Store, "is_expected", lambda self, tx, prepared: True)


def spill_forgotten_by_a_restart(patch: Any) -> None:
    patch(_Core, "load_spill", lambda self, spills: None)


def stopped_before_the_spill_was_fetched(patch: Any) -> None:
    """As it once was: a mapper that stops at a bad row waits for its window only, and tells nobody of its spill."""

    def restart(self: Any, persisted: Any, committed: Any, spills: Any) -> None:
        with self.lock:
            self.core.restart(persisted, committed)
            self.core.load_spill(spills)

    patch(_Core, "is_drained", property(lambda self: not len(self._window)))
    patch(_Shared, "restart", restart)


def bucket_served_before_the_spill(patch: Any) -> None:
    patch(_Core, "spill_read", lambda self, request: None)


def cursor_trims_the_spill(patch: Any) -> None:
    """What was read from the spill is trimmed, before the reducer has committed it."""
    original = _Spill.learn

    def learn(self: Any, heads: Any) -> None:
        original(self, heads)
        if heads:
            self.commit(heads[-1].last_row_index)

    patch(_Spill, "learn", learn)


def partly_committed_batch_trimmed(patch: Any) -> None:
    original = _Spill.commit

    def commit(self: Any, row_index: Any) -> None:
        original(self, row_index)
        if self._heads and self._heads[0].rows_after and self._heads[0].last_row_index <= row_index + 2:
            original(self, self._heads[0].last_row_index)

    patch(_Spill, "commit", commit)


def first_row_of_a_part_left_out_of_the_spill(patch: Any) -> None:
    import shuffle.mapper.core as core

    original = core.spill_part

    def part(one: Any) -> Any:
        made = original(one)
        return made if len(made.row_indexes) < 2 else type(made)(made.rows.slice(1), *(each[1:] for each in made[1:]))

    patch(core, "spill_part", part)


def indexes_of_the_spill_off_by_one(patch: Any) -> None:
    import shuffle.mapper.core as core

    original = core.spill_part
    patch(core, "spill_part", lambda one: original(one)._replace(row_indexes=original(one).row_indexes + 1))


def entry_of_a_reducer_in_time_spilled_past(patch: Any) -> None:
    """Everybody counts as a straggler for the window, but only the parts of stragglers are written."""
    original_front, original_plan = _Spilling.front, _Core.trim_plan

    def front(self: Any, window: Any, is_full: bool) -> Any:
        if not self.is_wanted:
            return []
        late = self.stragglers
        found = []
        for entry in list(window.entries)[:-1]:
            if not late.intersection(entry.parts):
                break
            found.append(entry)
        return found or original_front(self, window, is_full)

    def trim_plan(self: Any) -> Any:
        plan = original_plan(self)
        late = self.spilling.stragglers
        return None if plan is None else replace(plan, spill={r: p for r, p in plan.spill.items() if r in late})

    patch(_Spilling, "front", front)
    patch(_Core, "trim_plan", trim_plan)


def adopted_spill_not_read_again(patch: Any) -> None:
    """After a commit whose answer was lost the rows are dropped from the window, and their spill is not known."""
    patch(_Core, "forget_spill", lambda self: None)


def unpublished_rows_taken_for_spilled(patch: Any) -> None:
    """Staged rows are never published: only those small enough to travel in the transaction get there."""
    original = _Store.write

    def write(self: Any, tx: Any, prepared: Any) -> None:
        original(self, tx, replace(prepared, staged={}))

    patch(_Store, "write", write)


def spill_skips_a_batch(patch: Any) -> None:
    original = _SpillResponse.add

    def add(self: Any, batch: Any) -> bool:
        if self.served and batch.head.position % 3 == 0:
            self._cursor = batch.head.last_row_index
            return True
        return original(self, batch)

    patch(_SpillResponse, "add", add)


def unknown_trim_of_the_spill_taken_for_done(patch: Any) -> None:
    original = _Store.trim

    def trim(self: Any, positions: Any) -> bool:
        original(self, positions)
        return True

    patch(_Store, "trim", trim)


def spill_trimmed_by_claims(patch: Any) -> None:
    """The store is asked before the state moves, and not before the spill is trimmed."""
    original_trim, original_check = _Trimmer._trim_spill, _Trimmer._check_claims
    trimming: list[Any] = []

    def trim_spill(self: Any) -> bool:
        trimming.append(self)
        try:
            return original_trim(self)
        finally:
            trimming.remove(self)

    def check_claims(self: Any, claims: Any) -> None:
        if self not in trimming:
            original_check(self, claims)

    patch(_Trimmer, "_trim_spill", trim_spill)
    patch(_Trimmer, "_check_claims", check_claims)


def spill_never_trimmed(patch: Any) -> None:
    patch(_Spilling, "trims", lambda self: {})


def rows_in_the_spill_called_complete(patch: Any) -> None:
    """What a reducer has in the spill is not looked at when it is told up to where it has seen everything."""
    original = _Core.tail

    def tail(self: Any, request: Any, served: Any) -> Any:
        spills, self.spilling.spills = self.spilling.spills, {}
        try:
            return original(self, request, served)
        finally:
            self.spilling.spills = spills

    patch(_Core, "tail", tail)
