"""Planted bugs of growth: an input that gets more partitions. Every function here is one; see ``mutants``.

They are searched for with the profile ``growth``, in which every seed has mappers that come later.
"""

from __future__ import annotations

from contextlib import suppress as _suppress
from dataclasses import replace as _replace
from typing import Any

from shuffle.durable.reducer_state import ReducerState as _State
from shuffle.errors import CommitConflict as _Conflict
from shuffle.errors import CommitUnknown as _Unknown
from shuffle.reducer.commit import Committer as _Committer
from shuffle.reducer.daemon import ReducerDaemon as _Reducer


def unknown_mapper_taken_for_committed(patch: Any) -> None:
    """A reducer that does not know of the mapper yet does not hold its rows, so they are dropped."""
    original = _State.committed

    def committed(self: Any, mapper_index: Any) -> Any:
        return original(self, mapper_index) if mapper_index < len(self.committed_row_indices) else 1 << 40

    patch(_State, "committed", committed)


def first_row_of_a_new_mapper_taken_for_committed(patch: Any) -> None:
    def widened(self: Any, mapper_count: int) -> Any:
        more = mapper_count - len(self.committed_row_indices)
        fronts = None if self.fronts is None else self.fronts + (None,) * more
        return _State(self.committed_row_indices + (0,) * more, self.generation, fronts)

    patch(_State, "widened", widened)


def row_widened_whatever_it_is_now(patch: Any) -> None:
    """Another instance may have committed since it was read."""

    def widen(self: Any, state: Any) -> None:
        with self._client.transaction() as transaction:
            transaction.write(self._table, state.widened(self._mapper_count).to_row(self._index))
            with _suppress(_Conflict, _Unknown):
                transaction.commit()

    patch(_Committer, "_widen", widen)


def row_begun_anew_with_more_mappers(patch: Any) -> None:
    """Of the wrong width, so it is taken for no row at all."""
    original = _Committer.read_state

    def read_state(self: Any) -> Any:
        rows = self._client.lookup(self._table, _State.key(self._index))
        if rows.num_rows:
            width = len(rows["committed_row_indices"][0].as_py()) // 8
            if width < self._mapper_count:
                with self._client.transaction() as transaction:
                    transaction.write(self._table, _State.initial(self._mapper_count).to_row(self._index))
                    with _suppress(_Conflict, _Unknown):
                        transaction.commit()
        return original(self)

    patch(_Committer, "read_state", read_state)


def new_mappers_not_looked_for(patch: Any) -> None:
    """A reducer that was there before them never fetches from them."""
    original = _Reducer._run_stages

    def run_stages(self: Any, parts: Any, stop: Any) -> None:
        fetched = self._mapper_count

        class _Blind:
            def __getattr__(self, name: str) -> Any:
                return getattr(parts.directory, name)

            def mappers(self) -> Any:
                found = parts.directory.mappers()
                return {index: listed for index, listed in found.items() if index < fetched}

        original(self, _replace(parts, directory=_Blind()), stop)

    patch(_Reducer, "_run_stages", run_stages)


def outgrown_instance_goes_on_with_what_it_knows(patch: Any) -> None:
    """The mappers it does not know are cut off its row, as if they were not there."""
    original = _Committer.read_state

    def read_state(self: Any) -> Any:
        rows = self._client.lookup(self._table, _State.key(self._index))
        if rows.num_rows:
            state = _State.from_any_row(rows.to_pylist()[0])
            if len(state.committed_row_indices) > self._mapper_count:
                kept = state.committed_row_indices[: self._mapper_count]
                fronts = None if state.fronts is None else state.fronts[: self._mapper_count]
                with self._client.transaction() as transaction:
                    cut = _State(kept, state.generation, fronts)
                    transaction.write(self._table, cut.to_row(self._index))
                    with _suppress(_Conflict, _Unknown):
                        transaction.commit()
        return original(self)

    patch(_Committer, "read_state", read_state)
