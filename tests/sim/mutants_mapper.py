"""Planted bugs of the mapper. Every function here is one; see ``mutants``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from pyarrow import concat_tables as _concat_tables

import shuffle.mapper.serve as _serve
from shuffle.durable.mapper_state import MapperState as _MapperState
from shuffle.durable.mapper_state import lookup_state as _lookup_state
from shuffle.durable.mapper_state import state_rows as _state_rows
from shuffle.durable.tables import mappers_table as _mappers_table
from shuffle.errors import SplitBrain as _SplitBrain
from shuffle.mapper.bucket import Bucket as _Bucket
from shuffle.mapper.bucket import ServedBatch as _ServedBatch
from shuffle.mapper.core import MapperCore as _Core
from shuffle.mapper.mapping import MapStage as _MapStage
from shuffle.mapper.trim import Trimmer as _Trimmer
from shuffle.mapper.trim_plan import TrimPlan as _TrimPlan
from shuffle.mapper.window import EntryPart as _Part
from shuffle.mapper.window import Window as _Window


def trim_too_early(patch: Any) -> None:
    def trim_plan(self: Any) -> Any:
        state = _MapperState(self.next_input_index, self.next_shuffle_index, self.token)
        if not self.persisted.is_before(state):
            return None
        self._attempts.append(state)
        return _TrimPlan(self.persisted, state, None)

    patch(_Core, "trim_plan", trim_plan)


def input_trimmed_before_the_commit(patch: Any) -> None:
    original = _Trimmer.trim

    def trim(self: Any) -> Any:
        state = self._core.local
        self._reader.trim(state.input_unread_row_index, state.continuation_token)
        return original(self)

    patch(_Trimmer, "trim", trim)


def no_compare_at_trim(patch: Any) -> None:
    def trim(self: Any) -> Any:
        plan = self._core.trim_plan()
        if plan is None:
            self._trim_input()
            return False
        with self._client.transaction() as tx:
            _lookup_state(tx, self._processor, self._core.mapper_index)
            if plan.dead_letters is not None:
                tx.append(self._dead_letter_queue, 0, plan.dead_letters)
            tx.write(_mappers_table(self._processor), _state_rows(self._core.mapper_index, plan.state))
            tx.commit()
        if self._core.persisted.is_before(plan.state):
            self._core.trimmed(plan.state)
        self._trim_input()
        return True

    patch(_Trimmer, "trim", trim)


def unknown_trim_taken_for_done(patch: Any) -> None:
    def learn(self: Any, index: Any, state: Any) -> bool:
        if self._core.persisted.is_before(state):
            self._core.trimmed(state)
        self._trim_input()
        return True

    patch(_Trimmer, "_learn", learn)


def dead_letters_in_a_transaction_of_their_own(patch: Any) -> None:
    original = _Core.trim_plan

    def trim(self: Any) -> Any:
        plan = self._core.trim_plan()
        if plan is not None and plan.dead_letters is not None:
            with self._client.transaction() as tx:
                tx.append(self._dead_letter_queue, 0, plan.dead_letters)
                tx.commit()
        return original_trim(self)

    original_trim = _Trimmer.trim

    def trim_plan(self: Any) -> Any:
        plan = original(self)
        self.letters_wanted = not getattr(self, "letters_wanted", False)
        return plan if plan is None or self.letters_wanted else replace(plan, dead_letters=None)

    patch(_Trimmer, "trim", trim)
    patch(_Core, "trim_plan", trim_plan)


def poison_row_dropped_by_the_mapper(patch: Any) -> None:
    original = _Core.trim_plan

    def trim_plan(self: Any) -> Any:
        plan = original(self)
        return None if plan is None else replace(plan, dead_letters=None)

    patch(_Core, "trim_plan", trim_plan)


def guid_ignored(patch: Any) -> None:
    original = _Core._check_request

    def check(self: Any, request: Any) -> None:
        original(self, replace(request, mapper_id=self.guid))

    patch(_Core, "_check_request", check)


def pointer_count_off_by_one(patch: Any) -> None:
    original = _Bucket.push

    def push(self: Any, part: Any) -> None:
        was_empty = not self._parts
        original(self, part)
        if was_empty and part.reducer_index == 1:
            part.entry.pointer_count -= 1

    patch(_Bucket, "push", push)


def pointer_not_moved_on(patch: Any) -> None:
    original = _Bucket.commit

    def commit(self: Any, row_index: Any, window: Any) -> None:
        before = self._parts[0] if self._parts else None
        original(self, row_index, window)
        if before is not None and self._parts and self._parts[0] is not before:
            self._parts[0].entry.pointer_count -= 1

    patch(_Bucket, "commit", commit)


def entry_dropped_with_rows_in_it(patch: Any) -> None:
    def retire_front(self: Any) -> Any:
        trimmed = []
        while self._entries and (self._entries[0].pointer_count == 0 or len(self._entries[0].parts) < 2):
            entry = self._entries.popleft()
            self.first_entry_index += 1
            self.nbytes -= entry.overhead_bytes
            trimmed.append(entry)
        return trimmed

    patch(_Window, "retire_front", retire_front)


def served_rows_forgotten(patch: Any) -> None:
    original = _Core.get_rows

    def get_rows(self: Any, request: Any) -> Any:
        rows = original(self, request)
        if rows:
            self._buckets[request.reducer_index].commit(rows[-1].last_row_index, self._window)
            self._retire_entries()
        return rows

    patch(_Core, "get_rows", get_rows)


def cursor_taken_for_committed(patch: Any) -> None:
    original = _Core.get_rows

    def get_rows(self: Any, request: Any) -> Any:
        return original(self, replace(request, committed_row_index=request.from_row_index))

    patch(_Core, "get_rows", get_rows)


def rows_below_the_window_skipped(patch: Any) -> None:
    """RowsGone is never raised: a reducer that lost its place gets what there is."""
    patch(_Core, "_check_servable", lambda self, request, bucket: None)


def window_dropped_without_restart(patch: Any) -> None:
    original = _Core.restart

    def restart(self: Any, *arguments: Any) -> None:
        kept = getattr(self, "next_input_index", None), getattr(self, "next_shuffle_index", None), None
        token = getattr(self, "token", None)
        original(self, *arguments)
        if kept[0] is not None and kept[0] > self.next_input_index:
            self.next_input_index, self.next_shuffle_index, self.token = kept[0], kept[1], token

    patch(_Core, "restart", restart)


def other_instance_ignored(patch: Any) -> None:
    original = _Core.observe

    def observe(self: Any, state: Any) -> None:
        with contextlib.suppress(_SplitBrain):
            original(self, state)

    patch(_Core, "observe", observe)


def other_instances_state_adopted(patch: Any) -> None:
    """The positions of another instance are taken over, and the window is kept."""
    original = _Core.observe

    def observe(self: Any, state: Any) -> None:
        try:
            original(self, state)
        except _SplitBrain:
            if state is not None and self.persisted.is_before(state):
                self.trimmed(state)
                self.next_input_index = state.input_unread_row_index
                self.next_shuffle_index = state.shuffle_unread_row_index
                self.token = state.continuation_token

    patch(_Core, "observe", observe)


def numbering_begins_again(patch: Any) -> None:
    original = _Core.restart

    def restart(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.next_shuffle_index = 0

    patch(_Core, "restart", restart)


def token_of_the_batch_before(patch: Any) -> None:
    original = _Core.ingest

    def ingest(self: Any, observed: Any, rows_in: int, token_after: Any, mapped: Any) -> Any:
        before = self.token
        woken = original(self, observed, rows_in, before or token_after, mapped)
        self.token = token_after
        return woken

    patch(_Core, "ingest", ingest)


def committed_rows_kept_after_a_restart(patch: Any) -> None:
    original = _Core._uncommitted_part

    def uncommitted_part(self: Any, entry: Any, mapped: Any) -> Any:
        bucket = self._buckets[mapped.reducer_index]
        committed, bucket.committed = bucket.committed, -1
        part = original(self, entry, mapped)
        bucket.committed = committed
        return part

    patch(_Core, "_uncommitted_part", uncommitted_part)


def memory_limit_ignored(patch: Any) -> None:
    patch(_Core, "wants_input", property(lambda self: True))


def row_after_the_cursor_again(patch: Any) -> None:
    original = _Part.row_after

    def row_after(self: Any, row_index: int) -> int:
        found = original(self, row_index)
        return found - 1 if 0 < found < len(self.row_offsets) else found

    patch(_Part, "row_after", row_after)


def tail_of_the_first_batch(patch: Any) -> None:
    def join(batches: Any) -> Any:
        joined = original(batches)
        return _ServedBatch(joined.rows, batches[0].last_row_index)

    original = _serve._join
    patch(_serve, "_join", join)


def gap_counted_as_a_row(patch: Any) -> None:
    def skip_to(self: Any, token: Any) -> None:
        self.token = token
        self.next_input_index += 1

    patch(_Core, "skip_to", skip_to)


def order_of_rows_depends_on_how_many_were_read(patch: Any) -> None:
    """Of the calls of ``map`` for one read the last comes first: its rows get other indexes than when they are read
    again with others."""
    original = _MapStage.apply

    def apply(self: Any, rows: Any, input_begin: Any, rows_max: Any = None) -> Any:
        if rows_max is None or rows.num_rows <= rows_max:
            return original(self, rows, input_begin, rows_max)
        last = (rows.num_rows - 1) // rows_max * rows_max
        turned = _concat_tables([rows.slice(last), rows.slice(0, last)])
        return original(self, turned, input_begin, rows_max)

    patch(_MapStage, "apply", apply)
