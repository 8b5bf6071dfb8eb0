"""Planted bugs of the logs of tables. Every function here is one; see ``mutants``.

They are searched for with the profile ``logged``, in which all tables are logged.
"""

from __future__ import annotations

from dataclasses import replace as _replaced
from typing import Any

from shuffle.statestore.engine.engine import Engine as _Engine
from shuffle.statestore.engine.row_log import RowLog as _RowLog
from shuffle.statestore.engine.table_logs import TableLogs as _TableLogs
from shuffle.statestore.engine.table_logs import inline_prefix as _inline_prefix
from shuffle.statestore.local.log_keeper import LogKeeper as _LogKeeper


def blocks_read_in_the_order_of_the_files(patch: Any) -> None:
    """Compacted blocks are behind newer ones, so that old rows win after a restart."""
    original = _TableLogs.load

    def load(self: Any, table_id: int, blocks: Any, version: int, base_is_empty: bool) -> None:
        numbered = [_replaced(block, version=number) for number, block in enumerate(blocks)]
        original(self, table_id, numbered, version, base_is_empty)

    patch(_TableLogs, "load", load)


def rows_added_during_a_compaction_forgotten(patch: Any) -> None:
    original = _TableLogs.replace

    def replace(self: Any, replacement: Any, version: int) -> None:
        log = self._logs[replacement.table_id]
        original(self, _replaced(replacement, end=len(log.rows)), version)

    patch(_TableLogs, "replace", replace)


def moved_rows_not_flushed(patch: Any) -> None:
    original = _LogKeeper._move

    def move(self: Any, table_id: int, view: Any) -> None:
        flush, self._keys.flush = self._keys.flush, lambda: None
        try:
            original(self, table_id, view)
        finally:
            self._keys.flush = flush

    patch(_LogKeeper, "_move", move)


def moved_rows_taken_for_absent(patch: Any) -> None:
    original = _LogKeeper._replace

    def replace(self: Any, table_id: int, view: Any, rows: Any, staged_id: Any, base_is_empty: bool) -> None:
        original(self, table_id, view, rows, staged_id, True)

    patch(_LogKeeper, "_replace", replace)


def reads_of_logged_tables_not_checked(patch: Any) -> None:
    patch(_TableLogs, "conflict", lambda self, version, keys_read, ranges: None)


def snapshots_see_the_newest_rows(patch: Any) -> None:
    patch(_RowLog, "newest", lambda self, keys, end: self._find(keys))


def rows_of_a_failed_group_stay_in_the_log(patch: Any) -> None:
    patch(_TableLogs, "take_back", lambda self, table_id, rows, version: None)


def changelog_not_synced(patch: Any) -> None:
    original = _Engine._write_files

    def write_files(self: Any, writes: Any, queue_id: int) -> None:
        if queue_id not in self.catalogue.tables:
            original(self, writes, queue_id)
            return
        sync, self._segments.sync = self._segments.sync, lambda name: None
        try:
            original(self, writes, queue_id)
        finally:
            self._segments.sync = sync

    patch(_Engine, "_write_files", write_files)


def blocks_cleared_that_are_newer_than_the_compaction(patch: Any) -> None:
    original = _Engine._add_replacement

    def add_replacement(self: Any, replacement: Any, group: Any) -> None:
        original(self, replacement, group)
        prefix = _inline_prefix(replacement.table_id)
        group.cleared.append((prefix, prefix + b"\xff" * 9))

    patch(_Engine, "_add_replacement", add_replacement)


def changelog_trimmed_up_to_its_end(patch: Any) -> None:
    """Instead of up to where it ended when the compaction began."""
    original = _Engine._add_replacement

    def add_replacement(self: Any, replacement: Any, group: Any) -> None:
        position = self.partitions[replacement.table_id, 0].end
        original(self, _replaced(replacement, position=position), group)

    patch(_Engine, "_add_replacement", add_replacement)


def compaction_named_by_the_newest_version(patch: Any) -> None:
    """A row that was written while the log was compacted is then older than the compacted one, after a restart."""
    original = _LogKeeper._compact

    def compact(self: Any, table_id: int, view: Any) -> None:
        original(self, table_id, _replaced(view, version=self._engine.version + 3))

    patch(_LogKeeper, "_compact", compact)


def preconditions_compared_with_the_database_alone(patch: Any) -> None:
    original = _Engine._check_precondition

    def check_precondition(self: Any, precondition: Any, group: Any) -> None:
        current, self.logs.current = self.logs.current, lambda table_id: None
        try:
            original(self, precondition, group)
        finally:
            self.logs.current = current

    patch(_Engine, "_check_precondition", check_precondition)


def outdated_rows_kept_instead_of_the_newest(patch: Any) -> None:
    """The compaction keeps the first row of each key."""

    def live(self: Any, end: int) -> Any:
        self._put_into_index()
        before = self._before.filled[:end]
        return (before < 0).nonzero()[0]

    patch(_RowLog, "live", live)
