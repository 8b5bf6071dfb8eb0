"""Planted bugs of the reducer. Every function here is one; see ``mutants``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import shuffle.reducer.core as _core
from shuffle.durable.reducer_state import ReducerState as _ReducerState
from shuffle.errors import CommitConflict as _CommitConflict
from shuffle.errors import CommitUnknown as _CommitUnknown
from shuffle.errors import SplitBrain as _SplitBrain
from shuffle.ids import NOTHING_COMMITTED as _NOTHING_COMMITTED
from shuffle.reducer.commit import Committer as _Committer
from shuffle.reducer.core import ReducerCore as _Core
from shuffle.reducer.core import Settled as _Settled
from shuffle.reducer.fetch import InstanceChoice as _InstanceChoice
from shuffle.reducer.reduce import ReduceStage as _Stage
from shuffle.reducer.row_cache import CommittedRowCache as _CommittedRowCache
from shuffle.statestore.client.transaction import Transaction as _Transaction
from shuffle.statestore.codec.arrow_bytes import to_list as _listed


def no_compare_at_commit(patch: Any) -> None:
    def commit(self: Any, reduced: Any) -> None:
        with reduced.transaction or self._client.transaction() as transaction:
            transaction.lookup(self._table, _ReducerState.key(self._index))
            transaction.write(self._table, reduced.batch.new.to_row(self._index))
            transaction.commit()

    patch(_Committer, "commit", commit)


def no_read_at_commit(patch: Any) -> None:
    def commit(self: Any, reduced: Any) -> None:
        with reduced.transaction or self._client.transaction() as transaction:
            transaction.write(self._table, reduced.batch.new.to_row(self._index))
            transaction.commit()

    patch(_Committer, "commit", commit)


def compare_outside_the_transaction(patch: Any) -> None:
    def commit(self: Any, reduced: Any) -> None:
        if self.read_state() != reduced.batch.expected:
            raise _SplitBrain("another instance")
        with self._client.transaction() as transaction:
            transaction.write(self._table, reduced.batch.new.to_row(self._index))
            if reduced.transaction is not None:
                # The user's writes, without what the user has read.
                transaction._request.writes.extend(reduced.transaction._request.writes)
                transaction._request.appends.extend(reduced.transaction._request.appends)
            transaction.commit()

    patch(_Committer, "commit", commit)


def positions_before_state(patch: Any) -> None:
    def commit(self: Any, reduced: Any) -> None:
        with self._client.transaction() as transaction:
            rows = transaction.lookup(self._table, _ReducerState.key(self._index))
            if _ReducerState.from_rows(rows, self._mapper_count) != reduced.batch.expected:
                raise _SplitBrain("another instance")
            transaction.write(self._table, reduced.batch.new.to_row(self._index))
            transaction.commit()
        if reduced.transaction is not None:
            reduced.transaction.commit()

    patch(_Committer, "commit", commit)


def state_before_positions(patch: Any) -> None:
    original = _Committer.commit

    def commit(self: Any, reduced: Any) -> None:
        if reduced.transaction is not None:
            reduced.transaction.commit()
        original(self, replace(reduced, transaction=None))

    patch(_Committer, "commit", commit)


def blind_retry_after_unknown(patch: Any) -> None:
    original = _Committer.commit

    def commit(self: Any, reduced: Any) -> None:
        try:
            original(self, reduced)
        except _CommitUnknown:
            request = reduced.transaction._request if reduced.transaction is not None else None
            if request is None:
                raise
            request.reads, request.preconditions = None, []
            self._client._store.commit(request)

    patch(_Committer, "commit", commit)


def unknown_taken_for_committed(patch: Any) -> None:
    original = _Committer.commit

    def commit(self: Any, reduced: Any) -> None:
        with contextlib.suppress(_CommitUnknown):
            original(self, reduced)

    patch(_Committer, "commit", commit)


def conflict_taken_for_committed(patch: Any) -> None:
    original = _Committer.commit

    def commit(self: Any, reduced: Any) -> None:
        with contextlib.suppress(_CommitConflict):
            original(self, reduced)

    patch(_Committer, "commit", commit)


def known_rows_neither_expected_nor_forgotten(patch: Any) -> None:
    """The state kept between commits outlives the conflict that says it is not true any more."""
    patch(_Transaction, "_get_through", _get_without_expecting)
    patch(_CommittedRowCache, "forget", lambda self: False)


def known_rows_learnt_before_the_answer(patch: Any) -> None:
    original = _Transaction.commit

    def commit(self: Any) -> Any:
        if self._cache is not None:
            for write in self._request.writes:
                self._seen.update(zip(_listed(write.keys), _listed(write.values), strict=True))
            self._cache.learn(self._seen)
        return original(self)

    patch(_Transaction, "commit", commit)
    patch(_Transaction, "_get_through", _get_without_expecting)
    patch(_CommittedRowCache, "forget", lambda self: False)


_get_expecting = _Transaction._get_through


def _get_without_expecting(self: Any, cache: Any, table: Any, keys: Any) -> Any:
    expected = len(self._request.preconditions)
    values = _get_expecting(self, cache, table, keys)
    del self._request.preconditions[expected:]
    return values


def expected_row_taken_for_committed(patch: Any) -> None:
    def settle(self: Any, batch: Any, persisted: Any) -> Any:
        if persisted in (batch.new, batch.expected):
            self.committed(batch)
            return _Settled.COMMITTED
        self.restart(persisted)
        return _Settled.SPLIT_BRAIN

    patch(_Core, "settle", settle)


def stale_cache_after_split_brain(patch: Any) -> None:
    def settle(self: Any, batch: Any, persisted: Any) -> Any:
        if persisted == batch.new:
            self.committed(batch)
            return _Settled.COMMITTED
        self.rerun(batch)
        return _Settled.RERUN

    patch(_Core, "settle", settle)


def cursor_told_as_committed(patch: Any) -> None:
    original = _Core.fetch_plan

    def fetch_plan(self: Any, mapper_index: Any) -> Any:
        plan = original(self, mapper_index)
        return None if plan is None else replace(plan, committed_row_index=plan.from_row_index)

    patch(_Core, "fetch_plan", fetch_plan)


def _tip_of(core: Any) -> Any:
    """The row that the store holds once what is in flight is committed."""
    return core.committed_state if core.in_flight is None else core.in_flight.new


def tip_told_as_committed(patch: Any) -> None:
    original = _Core.fetch_plan

    def fetch_plan(self: Any, mapper_index: Any) -> Any:
        plan = original(self, mapper_index)
        return None if plan is None else replace(plan, committed_row_index=_tip_of(self)[mapper_index])

    patch(_Core, "fetch_plan", fetch_plan)


def answers_of_another_epoch_taken(patch: Any) -> None:
    original = _Core.fetched

    def fetched(self: Any, plan: Any, *response: Any) -> Any:
        of_this = replace(plan, epoch=self.epoch, from_row_index=self._cursors[plan.mapper_index])
        return original(self, of_this, *response)

    patch(_Core, "fetched", fetched)


def queue_kept_over_a_restart(patch: Any) -> None:
    original = _Core._reset

    def reset(self: Any, state: Any) -> None:
        queued = getattr(self, "_queued", None)
        original(self, state)
        if queued is not None:
            self._queued = queued

    patch(_Core, "_reset", reset)


def cursor_kept_over_a_restart(patch: Any) -> None:
    original = _Core._reset

    def reset(self: Any, state: Any) -> None:
        cursors = getattr(self, "_cursors", None)
        original(self, state)
        if cursors is not None:
            self._cursors = [max(a, b) for a, b in zip(cursors, self._cursors, strict=True)]

    patch(_Core, "_reset", reset)


def parts_taken_from_the_wrong_end(patch: Any) -> None:
    original = _Core._take_parts

    def take_parts(self: Any) -> Any:
        for queued in self._queued:
            if len(queued) > 1:
                queued.rotate(1)
        return original(self)

    patch(_Core, "_take_parts", take_parts)


def last_index_off_by_one(patch: Any) -> None:
    original = _core._parts

    def parts(plan: Any, batches: Any, tails: Any) -> Any:
        return original(plan, [(batch, last + 1) for batch, last in batches], tails)

    patch(_core, "_parts", parts)


def other_mappers_forgotten(patch: Any) -> None:
    original = _ReducerState.advanced

    def advanced(self: Any, last_row_indices: Any, fronts: Any = None) -> Any:
        moved, count = original(self, last_row_indices, fronts), len(self.committed_row_indices)
        if len(last_row_indices) < count == 3:
            return replace(
                moved, committed_row_indices=tuple(last_row_indices.get(i, _NOTHING_COMMITTED) for i in range(count))
            )
        return moved

    patch(_ReducerState, "advanced", advanced)


def poison_row_dropped_by_the_reducer(patch: Any) -> None:
    original = _Stage._dead_letters

    def dead_letters(self: Any, batch: Any, bad: Any, found: Any) -> Any:
        return original(self, batch, bad, found).slice(1)

    patch(_Stage, "_dead_letters", dead_letters)


def only_one_instance_is_ever_asked(patch: Any) -> None:
    def choose(self: Any, listed: Any) -> Any:
        if not self._listed and listed:
            self._listed = list(listed)
        return self._listed[0] if self._listed else None

    patch(_InstanceChoice, "choose", choose)
