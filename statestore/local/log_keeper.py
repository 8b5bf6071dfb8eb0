"""Keeps the logs of tables short, in a thread of its own: compacts them, or moves their rows to RocksDB.

Everything is prepared from a published view of a log, which does not change, while commits go on. What is prepared
takes effect as a commit of its own; if the log is another one by then (its table was dropped), it is refused and
nothing has happened.

    compact   the newest row of each key -> a new log, and a staged file of blocks that takes the place of the old ones
    move      the newest row of each key -> RocksDB, without its log, then flushed; then the changelog is trimmed
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa

from shuffle.errors import CommitConflict
from shuffle.limits import GIB, MIB
from shuffle.statestore.codec.arrow_bytes import NumpyArray
from shuffle.statestore.codec.keys import bytes_after, table_prefix
from shuffle.statestore.codec.row_block import BlockBody
from shuffle.statestore.engine.engine import Engine
from shuffle.statestore.engine.row_log import PIECE_ROWS, LogView, RowLog
from shuffle.statestore.engine.storage import KeyValues
from shuffle.statestore.engine.table_logs import LogReplacement, changelog_header
from shuffle.statestore.request import CommitRequest
from shuffle.support.logs import get_logger

CHUNK_ROWS = 1 << 18
"""The rows of one block of a compacted log: enough to compress well, and few enough not to hold up readers for long."""

MOVED_ROWS = 8_192
"""The rows that are written to RocksDB at once, so that other writes get their turn."""

STAGED_TTL_MS = 600_000
"""The time for which a compacted file waits for its commit. Should that never come, the file is removed."""

LOGS_BYTES_MAX = 2 * GIB
"""The most bytes of memory that the logs of all tables take, before the largest is moved to RocksDB."""

_CHECK_S = 0.5
_RETRY_S = 5.0

_log = get_logger("statestore")


def logs_bytes_max() -> int:
    """The bytes of memory that the logs of all tables may take on this machine: an eighth of its memory, within
    bounds."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(LOGS_BYTES_MAX, max(256 * MIB, machine_bytes // 8)))


class LogKeeper:
    """The upkeep of the logs of one store. ``run`` is its thread."""

    def __init__(
        self,
        engine: Engine,
        keys: KeyValues,
        views: Callable[[], Mapping[int, LogView]],
        commit: Callable[[CommitRequest], object],
        now_ms: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._views = views
        self._commit = commit
        self._now_ms = now_ms
        self._stopped = threading.Event()
        self.bytes_max = logs_bytes_max()
        engine.logs.bytes_max = 2 * self.bytes_max + 64 * MIB

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(_CHECK_S):
            try:
                while not self._stopped.is_set() and self.keep_one():
                    pass
            except Exception as error:
                # The log stays as it was, and the store serves on. A later round tries again, when the disk has room,
                # for example.
                if not self._stopped.is_set():
                    _log.warning("the log of a table could not be made shorter", error=error)
                    self._stopped.wait(_RETRY_S)

    def keep_one(self) -> bool:
        """Compact or move one log, if one is due; whether there was one."""
        views = self._views()
        outdated = [table_id for table_id in views if self._engine.logs.is_outdated(table_id)]
        if outdated:
            self._compact(outdated[0], views[outdated[0]])
            return True
        due = [table_id for table_id in views if self._engine.logs.is_trickle(table_id)]
        if views and sum(view.rows.size_bytes for view in views.values()) > self.bytes_max:
            due.append(max(views, key=lambda table_id: views[table_id].rows.size_bytes))
        if due:
            self._move(due[0], views[due[0]])
        return bool(due)

    def _compact(self, table_id: int, view: LogView) -> None:
        base_is_empty = self._engine.logs.is_base_empty(table_id)
        rows = self._live(view, base_is_empty)
        compacted = self._engine.logs.new_rows()
        payloads: list[tuple[int, pa.Buffer]] = []
        for keys, values in self._chunks(view, rows, CHUNK_ROWS):
            compacted.append(keys, values)
            payloads.append((len(keys), pa.py_buffer(BlockBody(keys, values).encode(view.version))))
        if not payloads:
            # A segment without rows would have the same key as the one after it.
            self._replace(table_id, view, compacted, None, base_is_empty)
            return
        staged_id = uuid.uuid4().hex
        self._engine.staged.add(staged_id, table_id, changelog_header(), payloads, STAGED_TTL_MS, self._now_ms())
        try:
            self._replace(table_id, view, compacted, staged_id, base_is_empty)
        except BaseException:
            self._engine.staged.expire(staged_id)
            raise
        _log.info("log compacted", table=table_id, rows=view.end, kept=len(rows))

    def _move(self, table_id: int, view: LogView) -> None:
        rows = self._live(view, self._engine.logs.is_base_empty(table_id))
        self._engine.check_room(view.rows.size_bytes)
        self._engine.logs.fill_base(table_id)
        with view.guard:
            pieces = view.rows.split(rows, PIECE_ROWS)
        for piece in pieces:
            with view.guard:
                ordered = view.rows.in_order(piece)  # RocksDB takes keys in their order in half the time.
            for keys, values in self._chunks(view, ordered, MOVED_ROWS):
                self._keys.write_unlogged([(keys.to_pylist(), values.to_pylist())])
        self._keys.flush()
        try:
            self._replace(table_id, view, self._engine.logs.new_rows(), None, False)
        except CommitConflict:
            self._clear_if_dropped(table_id)
            raise
        _log.info("log moved to the database", table=table_id, rows=len(rows))

    def _clear_if_dropped(self, table_id: int) -> None:
        """Remove the rows that were moved while their table was dropped."""
        if table_id not in self._engine.catalogue.tables:
            prefix = table_prefix(table_id)
            self._keys.write([], [(prefix, bytes_after(prefix) or prefix)])

    def _replace(self, table_id: int, view: LogView, rows: RowLog, staged_id: str | None, base_is_empty: bool) -> None:
        """Commit that ``rows``, which are in the staged file too, take the place of those of ``view``."""
        replacement = LogReplacement(
            table_id, view.rows, view.end, view.version, view.position, rows, staged_id, base_is_empty
        )
        self._commit(CommitRequest(replacement=replacement))

    def _live(self, view: LogView, base_is_empty: bool) -> NumpyArray:
        """The rows of a view that are the newest of their keys, without those that say a row is deleted, if RocksDB
        has none that they hide."""
        while True:
            with view.guard:
                if not view.rows.put_next_into_index():
                    rows = view.rows.live(view.end)
                    deleted = view.rows.are_deleted(rows) if base_is_empty else None
                    break
        return rows if deleted is None else rows[~deleted]

    @staticmethod
    def _chunks(view: LogView, rows: NumpyArray, count: int) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
        with view.guard:
            pieces = view.rows.split(rows, count)
        for piece in pieces:
            with view.guard:
                chunk = view.rows.take(piece)
            yield chunk
