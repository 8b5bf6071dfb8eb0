"""Probes in the logs of tables; see ``probes``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shuffle.statestore.engine.engine import Engine
from shuffle.statestore.engine.row_log import RowLog
from shuffle.statestore.engine.table_logs import TableLogs
from shuffle.statestore.local.log_keeper import LogKeeper

Mark = Callable[[str], None]


def install(watch: Callable[..., None]) -> None:
    watch(Engine, "_add_block", _after_block, lambda self, table_id, writes, group: len(group.puts))
    watch(TableLogs, "replace", _after_replace)
    watch(TableLogs, "load", _after_load)
    watch(TableLogs, "conflict", _after_conflict)
    watch(TableLogs, "take_back", _after_take_back)
    watch(RowLog, "newest", _after_newest)
    watch(LogKeeper, "_replace", _after_replacement)


def _after_block(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    if error is None:
        is_inline = len(args[2].puts) > seen[0]
        mark("a block was stored in the database" if is_inline else "a block was stored in a segment")


def _after_replace(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    mark("a log was moved to the database" if args[0].staged_id is None else "a log was compacted")


def _after_load(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    if len(self):
        mark("a log was read after a restart")


def _after_conflict(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    if error is None and seen[1] is not None:
        mark("a transaction conflicted with a log")


def _after_take_back(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    mark("rows of a log were taken back")


def _after_newest(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    if args[1] < len(self):
        mark("an earlier version was read from a log")


def _after_replacement(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    if error is not None:
        mark("a replacement failed")
