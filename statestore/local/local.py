"""The store in this process: the engine, its one writer thread, and the readers around it.

Group commit. Callers put their commit into a queue and wait. The writer takes all that are waiting, lets the engine
prepare, persist and apply them as one group, publishes the new version, and wakes the callers. While it syncs, the
next group gathers. Readers see only published versions, so nobody ever sees what is not durable.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from shuffle.errors import (
    BadInput,
    CommitUnknown,
    CorruptData,
    ShuffleError,
    StoreError,
    StoreUnavailable,
    ThreadDied,
    TooLarge,
    one_line,
)
from shuffle.limits import BATCH_BYTES_MAX, LOGGED_ROWS_MIN, TRANSACTION_BYTES_MAX, WAIT_MS_MAX
from shuffle.statestore.codec.arrow_bytes import Binary, to_array
from shuffle.statestore.codec.row_block import BlockBody
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.codec.segment import decode_records
from shuffle.statestore.engine.catalogue import QueueEntry, TableEntry
from shuffle.statestore.engine.commit_group import CommitGroup
from shuffle.statestore.local.commit_queue import Awaited, CommitQueue, Pending
from shuffle.statestore.local.lease_service import WatchedLeases
from shuffle.statestore.local.log_keeper import LogKeeper
from shuffle.statestore.local.opening import open_parts
from shuffle.statestore.local.read_views import ReadViews
from shuffle.statestore.local.store_folder import StoreFolder, folder_path
from shuffle.statestore.local.store_view import StoreView
from shuffle.statestore.request import Append, CatalogueChange, CommitRequest, Committed, validate_payloads
from shuffle.statestore.store import Member, QueueRead, ReadView, Span
from shuffle.support import crash_points
from shuffle.support.logs import get_logger
from shuffle.support.mapped_files import map_range
from shuffle.support.vital_threads import start_vital

_HOUSEKEEPING_S = 0.5
_MARKER_SYNC_S = 1.0
"""The seconds between two syncs of the marker: a power cut undoes no more of its changes than those of this time. Each
sync delays the commits after it by a few milliseconds."""

_CLOSED_BEFORE = "the state store was closed before the commit was looked at"

_log = get_logger("statestore")


class LocalStore:
    """A ``Store`` on a folder of this machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = StoreFolder(folder_path(path))
        try:
            self._parts = open_parts(self._folder, _wall_ms(), threading.RLock(), int(uuid.uuid4().hex[:15], 16))
        except BaseException:
            self._folder.close()
            raise
        self._rocks, self._disk = self._parts.rocks, self._parts.disk
        self._engine, self._marker = self._parts.engine, self._parts.marker
        self._lock = threading.Lock()
        self._watchers: dict[tuple[int, int], dict[object, Callable[[], None]]] = {}
        """For each partition (queue id, partition), the watchers to notify, once, when it has changed."""
        self._views = ReadViews(self._engine.version, self._engine_view())
        self._marker_sync_at = 0.0
        self._leases = WatchedLeases()
        self._groups_written = 0
        self._commits_written = 0
        self._failed: ShuffleError | None = None
        self._closed = False
        self._commits = CommitQueue()
        self.on_failure: Callable[[ShuffleError], None] = lambda error: None
        """Called with the error when the store cannot be used any more. A daemon ends then; a user's own process goes
        on, and every call raises the error."""
        self.on_group: Callable[[CommitGroup, float], None] | None = None
        """Called by the writer after each group that is durable, with the seconds that writing and syncing it took."""
        self._writer = start_vital(self._write_groups, "store-writer", self.fail)
        self._keeper = LogKeeper(self._engine, self._rocks, lambda: self._view(None).logs, self._commit, _wall_ms)
        self._keeper_thread = start_vital(self._keeper.run, "store-logs", self.fail)

    # --- the catalogue ---

    def tables(self) -> list[TableSchema]:
        with self._lock:
            return [entry.schema for entry in self._engine.catalogue.tables.values()]

    def queues(self) -> list[QueueSchema]:
        with self._lock:
            return [entry.schema for entry in self._engine.catalogue.queues.values()]

    def change_catalogue(self, change: CatalogueChange) -> None:
        self.commit(CommitRequest(catalogue=change))

    # --- read views ---

    def open_view(self) -> ReadView:
        self._check_usable()
        with self._lock:
            return self._views.open()

    def abandon_view(self, view: ReadView) -> None:
        self._views.abandon(view)

    def release_view(self, view: ReadView) -> None:
        with self._lock:
            self._views.release(view)

    def share_view(self, ttl_ms: int) -> ReadView:
        raise BadInput(
            "a snapshot can be shared only if a daemon serves the store: start one with `shuffle statestore`"
        )

    def renew_view(self, view: ReadView) -> None:
        self._view(view)

    def _view(self, view: ReadView | None) -> StoreView:
        self._check_usable()
        with self._lock:
            return self._views.view(view)

    def _engine_view(self) -> StoreView:
        """What the engine has now, for readers."""
        engine = self._engine
        logs = engine.logs.views(engine.version, lambda table_id: engine.partitions[table_id, 0].end)
        return StoreView(self._rocks.view(), logs)

    # --- reading tables ---

    def get(self, view: ReadView | None, table_id: int, keys: Binary) -> Binary:
        self._table(table_id).check_prefix(keys)
        return self._view(view).get(table_id, keys)

    def open_view_and_get(self, table_id: int, keys: Binary) -> tuple[ReadView, Binary]:
        view = self.open_view()
        try:
            return view, self.get(view, table_id, keys)
        except BaseException:
            self.release_view(view)
            raise

    def scan(
        self, view: ReadView | None, table_id: int, begin: bytes, end: bytes | None, rows_max: int, reverse: bool
    ) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        self._table(table_id).check_range(begin, end)
        return self._view(view).scan(table_id, begin, end, rows_max, reverse)

    def _table(self, table_id: int) -> TableEntry:
        with self._lock:
            return self._engine.catalogue.table(table_id)

    def _queue(self, queue_id: int) -> QueueEntry:
        with self._lock:
            return self._engine.catalogue.queue(queue_id)

    # --- writing ---

    def commit(self, request: CommitRequest, view: ReadView | None = None) -> Committed:
        try:
            return self._commit(request)
        finally:
            if view is not None:
                self.release_view(view)

    def check_commit_rows(self, request: CommitRequest) -> None:
        """Check all rows of a commit against their schemas, in the caller's thread: there is only one writer thread.

        The schema of a table or queue never changes, so the writer need not repeat this.
        """
        # This does not take the lock, which the writer holds while it publishes a group: an entry never changes,
        # reading one from a dict is atomic, and the engine checks whether the table still exists when its rows are
        # written.
        catalogue = self._engine.catalogue
        for write in request.writes:
            catalogue.table(write.table_id).check_write(write)
            if len(write.keys) >= LOGGED_ROWS_MIN and write.body is None:
                write.body = BlockBody(to_array(write.keys), to_array(write.values))
        for append in request.appends:
            if isinstance(append, Append):
                entry = catalogue.queue(append.queue_id)
                append.count_rows(entry.schema, entry.not_null)

    def _commit(self, request: CommitRequest) -> Committed:
        self.check_commit_rows(request)
        pending = Awaited(request)
        self.submit([pending])
        while not pending.wait(1.0):
            if not self._writer.is_alive():
                raise self._failed or StoreUnavailable(_CLOSED_BEFORE)
        assert pending.outcome is not None
        if isinstance(pending.outcome, ShuffleError):
            raise pending.outcome
        return pending.outcome

    def submit(self, commits: Sequence[Pending]) -> None:
        """Hand commits to the writer, which finishes each of them when it is durable or refused."""
        refusal = StoreUnavailable("the state store is closed") if self._closed else self._failed
        for pending in commits:
            if refusal is not None:
                pending.finish(refusal)
            else:
                self._commits.put(pending)

    def _write_groups(self) -> None:
        housekeeping_at = time.monotonic() + _HOUSEKEEPING_S
        while True:
            group = self._commits.next_group(_HOUSEKEEPING_S)
            if group is None:
                self._commits.refuse_all(StoreUnavailable(_CLOSED_BEFORE))
                return
            if not group:
                self._collect_garbage()
                continue
            self._groups_written += 1
            self._commits_written += len(group)
            try:
                self._write_group(group)
            except Exception as error:
                # This is a bug of the store itself: its memory may be wrong now, its files are not.
                self._failed = StoreError(f"the state store must be restarted: {type(error).__name__}: {error}")
                for pending in group:
                    pending.finish(CommitUnknown(f"the commit may or may not be durable: {self._failed.message}"))
            if time.monotonic() > housekeeping_at:
                self._collect_garbage()
                housekeeping_at = time.monotonic() + _HOUSEKEEPING_S

    def fail(self, error: ShuffleError) -> None:
        """A thread that this store depends on is dead: refuse every commit from now on, and call ``on_failure``."""
        self._failed = self._failed or error
        self._commits.refuse_all(self._failed)
        self.on_failure(self._failed)

    def _check_usable(self) -> None:
        if isinstance(self._failed, ThreadDied):
            raise self._failed

    def _write_group(self, waiting: list[Pending]) -> None:
        if self._failed is not None:
            for pending in waiting:
                pending.finish(self._failed)
            return
        with self._lock:
            self._views.release_abandoned()
            oldest_version = self._views.oldest_version
        try:
            group = self._engine.prepare([pending.request for pending in waiting], oldest_version)
        except Exception as error:
            # Nothing was written, and nothing of the group is in memory: the next group may succeed.
            _log.error("a group of commits was refused", commits=len(waiting), error=error)
            refusal = StoreError(f"the state store cannot take commits now ({one_line(error)}): nothing was written")
            for pending in waiting:
                pending.finish(refusal)
            return
        begin_s = time.monotonic()
        try:
            self._engine.persist(group)
            if group.changed:
                # After the log's sync and before any commit is acknowledged: the marker names the durable version.
                self._marker.acknowledge(self._engine.version)
        except ShuffleError as error:
            self._finish_failed(waiting, group, error)
            return
        sync_s = time.monotonic() - begin_s
        unused = self._publish(group)
        crash_points.reach("store.before_answer")
        for pending, outcome in zip(waiting, group.results, strict=True):
            pending.finish(outcome)
        if self.on_group is not None:
            self.on_group(group, sync_s)
        self._remove_files(unused)

    def _publish(self, group: CommitGroup) -> list[str]:
        with self._lock:
            unused = self._engine.apply(group)
            if group.changed:
                self._views.publish(self._engine.version, self._engine_view())
            callbacks = self._take_watchers(group.queues)
        for notify in callbacks:
            notify()
        return unused

    def _finish_failed(self, waiting: list[Pending], group: CommitGroup, error: ShuffleError) -> None:
        if group.reached_rocks:
            # After a failed write or sync it is unknown what is on the disk, until the store is opened again.
            self._failed = StoreError(f"the state store must be restarted: {error.message}")
            error = CommitUnknown(f"the commit may or may not be durable: {error.message}; read the state again")
        for pending, outcome in zip(waiting, group.results, strict=True):
            pending.finish(outcome if isinstance(outcome, ShuffleError) else error)

    def _collect_garbage(self) -> None:
        with self._lock:
            self._views.release_abandoned()
        self._remove_files(self._engine.staged.collect(_wall_ms()))
        if time.monotonic() >= self._marker_sync_at:
            self._marker_sync_at = time.monotonic() + _MARKER_SYNC_S
            try:
                self._marker.sync()
            except ShuffleError as error:
                self._failed = StoreError(f"the state store must be restarted: {error.message}")

    def _remove_files(self, names: Sequence[str]) -> None:
        try:
            self._engine.remove_files(names)
        except OSError as error:
            # Nothing refers to these files: the next opening of the store removes them.
            _log.warning("files that are not needed any more cannot be removed", error=error)

    # --- queues ---

    def stage(self, queue_id: int, payloads: Sequence[pa.Buffer], ttl_ms: int) -> str:
        self._check_usable()
        entry = self._queue(queue_id)
        if sum(payload.size for payload in payloads) > TRANSACTION_BYTES_MAX:
            raise TooLarge(f"queue {entry.schema.name!r}: stage at most {TRANSACTION_BYTES_MAX} bytes at a time")
        self._engine.check_room(sum(payload.size for payload in payloads))
        rows = validate_payloads(payloads, entry.schema, entry.not_null)
        staged_id = uuid.uuid4().hex
        filled = [(count, payload) for count, payload in zip(rows, payloads, strict=True) if count]
        self._engine.staged.add(staged_id, queue_id, entry.header, filled, ttl_ms, _wall_ms())
        return staged_id

    def discard(self, staged_id: str) -> None:
        self._engine.staged.expire(staged_id)

    def bounds(self, queue_id: int) -> list[tuple[int, int]]:
        self._check_usable()
        with self._lock:
            return self._engine.bounds(queue_id)

    def read(
        self, queue: QueueSchema, partition: int, begin: int, max_rows: int, max_bytes: int, wait_ms: int
    ) -> QueueRead | None:
        span = self.locate(queue.queue_id, partition, begin, max_rows, max_bytes, wait_ms)
        if span is None:
            return None
        file = self._disk.path(span.file)
        try:
            mapped = map_range(file, span.offset, span.size_bytes)
        except FileNotFoundError:
            raise self.missing_file_error(file, queue.queue_id, partition, begin) from None
        records = span.split(mapped)
        return QueueRead(decode_records(records, queue.schema, str(file), span.offset, span.segment_begin), span.end)

    def missing_file_error(self, file: Path, queue_id: int, partition: int, begin: int) -> ShuffleError:
        """The error for a ``file`` that is gone since ``locate`` named it: its rows were trimmed, or it is lost."""
        try:
            self.locate(queue_id, partition, begin, 1, 1, 0)
        except ShuffleError as error:
            return error
        return CorruptData(f"{file}: the file is missing, but its rows were acknowledged", file=str(file))

    def locate(
        self, queue_id: int, partition: int, begin: int, max_rows: int, max_bytes: int, wait_ms: int
    ) -> Span | None:
        """The span of the rows from ``begin`` on, waiting for the first of them; None when none came in time."""
        deadline = time.monotonic() + min(wait_ms, WAIT_MS_MAX) / 1000
        while True:
            arrived = threading.Event()
            span = self.locate_or_watch(queue_id, partition, begin, max_rows, max_bytes, arrived, arrived.set)
            if span is not None:
                return span
            try:
                if self._closed or not arrived.wait(max(deadline - time.monotonic(), 0)):
                    return None
            finally:
                self.unwatch(queue_id, partition, arrived)

    def locate_or_watch(
        self,
        queue_id: int,
        partition: int,
        begin: int,
        max_rows: int,
        max_bytes: int,
        watcher: object,
        notify: Callable[[], None],
    ) -> Span | None:
        """The span of the rows; or None, and then ``notify`` is called once, when the partition has changed.

        The writer calls ``notify``, so it must be short. ``watcher`` identifies the watch for ``unwatch``.
        """
        self._check_usable()
        with self._lock:
            span = self._engine.locate(
                queue_id, partition, begin, max(max_rows, 1), min(max(max_bytes, 1), BATCH_BYTES_MAX)
            )
            if span is None:
                self._watchers.setdefault((queue_id, partition), {})[watcher] = notify
        return span

    def unwatch(self, queue_id: int, partition: int, watcher: object) -> None:
        with self._lock:
            watchers = self._watchers.get((queue_id, partition))
            if watchers is not None:
                watchers.pop(watcher, None)

    def _take_watchers(self, partitions: Iterable[tuple[int, int]]) -> list[Callable[[], None]]:
        return [notify for partition in partitions for notify in self._watchers.pop(partition, {}).values()]

    def segment_path(self, name: str) -> Path:
        return self._disk.path(name)

    # --- leases ---

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> int:
        return self._leases.register(group, member, attributes, ttl_ms)

    def renew(self, lease_id: int) -> None:
        self._leases.renew(lease_id)

    def leave(self, lease_id: int) -> None:
        self._leases.leave(lease_id)

    def members(self, group: str) -> tuple[int, list[Member]]:
        return self._leases.members(group)

    def watch(self, group: str, revision: int, wait_ms: int) -> tuple[int, list[Member]]:
        return self._leases.watch(group, revision, wait_ms)

    def groups(self) -> list[str]:
        return self._leases.groups()

    # --- the rest ---

    def stats(self) -> dict[str, Any]:
        with self._lock:
            stats = self._engine.stats()
            total = stats["total"]
            total["open_moments"] = len(self._views)
            total["commits"] = self._commits_written
            total["groups"] = self._groups_written
            total["marker_bytes"] = self._marker.written_bytes
            total["marker_syncs"] = self._marker.syncs
        return stats

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def failure(self) -> ShuffleError | None:
        """The error because of which nothing can be written any more; None while the store is sound."""
        return self._failed

    @property
    def address(self) -> str:
        return str(self._folder.path)

    @property
    def folder(self) -> Path | None:
        return self._folder.path

    @property
    def store_id(self) -> str:
        """The id of the store in this folder, in hexadecimal; it is the same after every start."""
        return self._marker.store_id.hex()

    def announce(self, address: str) -> None:
        self._folder.announce(address)

    def withdraw(self) -> None:
        self._folder.withdraw()

    def close(self) -> None:
        """Finish the commits that were accepted, then unlock the folder."""
        if self._closed:
            return
        self._closed = True
        self._keeper.stop()
        self._commits.stop()
        self._writer.join(60)
        self._keeper_thread.join(60)
        with self._lock:
            callbacks = self._take_watchers(list(self._watchers))
            self._views.close()
        for notify in callbacks:
            notify()
        self._leases.close()
        self._parts.close()
        self._folder.close()


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
