"""Planted bugs of the exporter. Every function here is one; see ``mutants``.

They are searched for with the profile ``exporter``, in which every seed has an outbox and a sink.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shuffle.errors import CommitConflict as _CommitConflict
from shuffle.errors import PublishUnknown as _PublishUnknown
from shuffle.reducer.exporter.core import ExporterCore as _Core
from shuffle.reducer.exporter.cycle import ExportCycle as _Cycle


def intent_after_the_publication(patch: Any) -> None:
    """What is under way is noted when it is there: after a crash in between, other rows get another name."""

    def publish(self: Any, batch: Any) -> None:
        self._sink.publish(batch.rows, batch.begin, batch.end)
        if self._core.notes_each_batch:
            self._note(self._core.under_way(batch.end))
        self._core.published(batch)

    patch(_Cycle, "_publish", publish)


def intent_redone_with_more_rows(patch: Any) -> None:
    """A batch that was under way is made anew, from whatever is in the outbox now."""
    original = _Core.opened

    def opened(self: Any, sink_position: Any, outbox: Any) -> Any:
        result = original(self, sink_position, outbox)
        self._redo_end = None
        return result

    patch(_Core, "opened", opened)


def intent_forgotten_at_the_claim(patch: Any) -> None:
    original = _Core.claim

    def claim(self: Any, found: Any, guid: Any, begin: int) -> Any:
        return replace(original(self, found, guid, begin), in_flight_end=None)

    patch(_Core, "claim", claim)


def outbox_trimmed_before_the_publication(patch: Any) -> None:
    original = _Cycle._publish

    def publish(self: Any, batch: Any) -> None:
        with self._client.transaction() as tx:
            tx.trim(self._outbox, self._core.partition, batch.end)
            tx.commit()
        original(self, batch)

    patch(_Cycle, "_publish", publish)


def unknown_publication_repeated(patch: Any) -> None:
    """The answer was lost, so the rows are sent again, without asking the sink."""
    original = _Cycle._publish

    def publish(self: Any, batch: Any) -> None:
        try:
            original(self, batch)
        except _PublishUnknown:
            original(self, batch)

    patch(_Cycle, "_publish", publish)


def unknown_publication_taken_for_done(patch: Any) -> None:
    original = _Cycle._publish

    def publish(self: Any, batch: Any) -> None:
        try:
            original(self, batch)
        except _PublishUnknown:
            self._core.published(batch)

    patch(_Cycle, "_publish", publish)


def position_of_the_row_used(patch: Any) -> None:
    """The row is a second old, and the sink knows better."""
    original = _Core.opened

    def opened(self: Any, sink_position: Any, outbox: Any) -> Any:
        known = self.state.position if sink_position is not None else None
        return original(self, known, outbox)

    patch(_Core, "opened", opened)


def position_remembered_and_not_asked(patch: Any) -> None:
    """An instance that starts again trusts what it published itself."""
    original = _Core.opened

    def opened(self: Any, sink_position: Any, outbox: Any) -> Any:
        result = original(self, sink_position, outbox)
        before = self.__dict__.get("before", 0)
        if before > outbox[0]:
            self.position = min(before, outbox[1])
            self._forget_rows()
        return result

    published = _Core.published

    def remember(self: Any, batch: Any) -> None:
        published(self, batch)
        self.before = batch.end

    patch(_Core, "opened", opened)
    patch(_Core, "published", remember)


def row_not_compared(patch: Any) -> None:
    """Whoever writes last is right."""
    original = _Cycle._write

    def write(self: Any, expected: Any, state: Any, trims: bool = False) -> None:
        from shuffle.durable.export_state import ExportState

        found = ExportState.from_rows(self._client.lookup(self._table, ExportState.key(self._core.partition)))
        original(self, found, state, trims)

    patch(_Cycle, "_write", write)


def conflict_of_an_exporter_taken_for_committed(patch: Any) -> None:
    original = _Cycle._write

    def write(self: Any, expected: Any, state: Any, trims: bool = False) -> None:
        try:
            original(self, expected, state, trims)
        except _CommitConflict:
            return

    patch(_Cycle, "_write", write)


def rows_kept_over_a_restart(patch: Any) -> None:
    """What was read before an error is published after it, whatever the sink has by then."""
    patch(_Core, "claimed", _claimed_without_forgetting)
    patch(_Core, "opened", _opened_without_forgetting)


def _claimed_without_forgetting(self: Any, state: Any) -> None:
    self.state = state
    if not self._parts:
        self.position = self._cursor = state.position


def _opened_without_forgetting(self: Any, sink_position: Any, outbox: Any) -> bool:
    self._redo_end = None if self._keeps_position else self.state.in_flight_end
    start = max(self.state.position, sink_position or 0)
    if not self._parts:
        self.position = self._cursor = start
    return self._keeps_position and self.state.in_flight_end is None and sink_position != start


def clean_stop_noted_beside_rows_under_way(patch: Any) -> None:
    """The row says that nothing is under way while the instance goes on publishing."""
    original = _Core.trimmed_state
    patch(_Core, "trimmed_state", lambda self: replace(original(self), in_flight_end=None, position=self.position))
    patch(_Core, "opened", _opened_by_the_row)


def _opened_by_the_row(self: Any, sink_position: Any, outbox: Any) -> bool:
    state = self.state
    self._redo_end = None if self._keeps_position else state.in_flight_end
    self.position = state.position if state.in_flight_end is None else sink_position or state.position
    self._forget_rows()
    return self._keeps_position and state.in_flight_end is None and sink_position != self.position
