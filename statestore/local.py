"""The store in this process: the engine, its one writer thread, and the readers around it.

Group commit. Callers put their commit into a queue and wait. The writer takes all that are waiting, lets the engine
prepare, persist and apply them as one group, publishes the new moment, and wakes the callers. While it syncs, the
next group gathers. Readers see only published moments, so nobody ever sees what is not durable.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from shuffle import crash_points
from shuffle.errors import (
    BadInput,
    CommitUnknown,
    CorruptData,
    Expired,
    ShuffleError,
    StoreError,
    StoreUnavailable,
    TooLarge,
)
from shuffle.limits import BATCH_BYTES_MAX, MIB, TRANSACTION_BYTES_MAX, WAIT_MS_MAX
from statestore.buffers import Binary, listed
from statestore.disk import SegmentDisk, map_range
from statestore.engine import Engine
from statestore.folder import StoreFolder
from statestore.group import Group, Span
from statestore.leases import Member
from statestore.pending import Awaited, Pending
from statestore.request import CatalogueChange, CommitRequest, Committed
from statestore.rocks import Rocks
from statestore.schema import QueueSchema, TableSchema
from statestore.segment import decode_payload
from statestore.storage import KeyView
from statestore.store import Moment, QueueRead
from statestore.watched_leases import WatchedLeases

GROUP_COMMITS_MAX = 1024
"""Commits in one group: enough to keep the disk busy, few enough that the first of them does not wait long."""

GROUP_BYTES_MAX = 64 * MIB
"""Bytes in one group; the commit that exceeds it is still taken."""

SCAN_BYTES_MAX = 16 * MIB
"""Bytes in one chunk of a scan."""

_HOUSEKEEPING_S = 0.5
_CLOSED_BEFORE = "the state store was closed before the commit was looked at"
_STOP = None


class LocalStore:
    """A ``Store`` on a folder of this machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = StoreFolder(Path(path).absolute())
        try:
            self._disk = SegmentDisk(self._folder.segments)
            self._rocks = Rocks(self._folder.rocks)
            self._engine = Engine(self._rocks, self._disk, _wall_ms())
        except BaseException:
            self._folder.close()
            raise
        self._lock = threading.Lock()
        self._watchers: dict[tuple[int, int], dict[object, Callable[[], None]]] = {}
        """Per partition: who wants to be told, once, that it has changed."""
        self._published: tuple[int, KeyView] = (self._engine.version, self._rocks.view())
        self._moments: dict[int, tuple[int, KeyView]] = {}
        self._open_versions: Counter[int] = Counter()
        self._moment_ids = 0
        self._abandoned: deque[Moment] = deque()
        self._leases = WatchedLeases()
        self._groups_written = 0
        self._commits_written = 0
        self._failed: ShuffleError | None = None
        self._closed = False
        self._commits: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._left_over: list[Pending | None] = []
        """Taken out of the queue, but not fit for the group at hand: the next one begins with it."""
        self._writer = threading.Thread(target=self._write_groups, name="store-writer", daemon=True)
        self._writer.start()

    # --- the catalogue ---

    def tables(self) -> list[TableSchema]:
        with self._lock:
            return [entry.schema for entry in self._engine.catalogue.tables.values()]

    def queues(self) -> list[QueueSchema]:
        with self._lock:
            return [entry.schema for entry in self._engine.catalogue.queues.values()]

    def change_catalogue(self, change: CatalogueChange) -> None:
        self.commit(CommitRequest(catalogue=change))

    # --- moments ---

    def open_moment(self) -> Moment:
        with self._lock:
            self._moment_ids += 1
            version, view = self._published
            self._moments[self._moment_ids] = version, view
            self._open_versions[version] += 1
            return Moment(self._moment_ids, version)

    def abandon_moment(self, moment: Moment) -> None:
        self._abandoned.append(moment)

    def _release_abandoned(self) -> None:
        while self._abandoned:
            self.release_moment(self._abandoned.popleft())

    def release_moment(self, moment: Moment) -> None:
        with self._lock:
            found = self._moments.pop(moment.moment_id, None)
            if found is not None:
                self._open_versions[found[0]] -= 1
                if not self._open_versions[found[0]]:
                    del self._open_versions[found[0]]

    def share_moment(self, ttl_ms: int) -> Moment:
        raise BadInput(
            "a snapshot can be shared only if a daemon serves the store: start one with `shuffle statestore`"
        )

    def renew_moment(self, moment: Moment) -> None:
        self._view(moment)

    def _view(self, moment: Moment | None) -> KeyView:
        with self._lock:
            if moment is None:
                return self._published[1]
            found = self._moments.get(moment.moment_id)
        if found is None:
            raise Expired("the snapshot or transaction is over: it was released, or its client was silent too long")
        return found[1]

    # --- reading tables ---

    def get(self, moment: Moment | None, table_id: int, keys: Binary) -> Binary:
        self._check_table(table_id)
        values = self._view(moment).get_many(listed(keys))
        return values if isinstance(keys, list) else pa.array(values, pa.binary())

    def get_and_hold(self, table_id: int, keys: Binary) -> tuple[Moment, Binary]:
        moment = self.open_moment()
        try:
            return moment, self.get(moment, table_id, keys)
        except BaseException:
            self.release_moment(moment)
            raise

    def scan(
        self, moment: Moment | None, table_id: int, begin: bytes, end: bytes | None, rows_max: int, reverse: bool
    ) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        self._check_table(table_id)
        pairs = self._view(moment).scan(begin, end, reverse)
        keys: list[bytes] = []
        values: list[bytes] = []
        size_bytes = 0
        for key, value in pairs:
            keys.append(key)
            values.append(value)
            size_bytes += len(key) + len(value)
            if len(keys) >= rows_max or size_bytes >= SCAN_BYTES_MAX:
                break
        return pa.array(keys, pa.binary()), pa.array(values, pa.binary())

    def _check_table(self, table_id: int) -> None:
        with self._lock:
            self._engine.catalogue.table(table_id)

    # --- writing ---

    def commit(self, request: CommitRequest, moment: Moment | None = None) -> Committed:
        try:
            return self._commit(request)
        finally:
            if moment is not None:
                self.release_moment(moment)

    def _commit(self, request: CommitRequest) -> Committed:
        pending = Awaited(request)
        self.submit([pending])
        while not pending.wait(1.0):
            if not self._writer.is_alive():
                raise self._failed or StoreUnavailable(_CLOSED_BEFORE)
        assert pending.answer is not None
        if isinstance(pending.answer, ShuffleError):
            raise pending.answer
        return pending.answer

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
            try:
                first = self._left_over.pop() if self._left_over else self._commits.get(timeout=_HOUSEKEEPING_S)
            except queue.Empty:
                self._collect_garbage()
                continue
            if first is _STOP:
                self._refuse_the_rest()
                return
            group = self._gather(first)
            self._groups_written += 1
            self._commits_written += len(group)
            try:
                self._write_group(group)
            except Exception as error:
                # A mistake in the store itself: what it holds in memory may be wrong now, what is on the disk is not.
                self._failed = StoreError(f"the state store must be restarted: {type(error).__name__}: {error}")
                for pending in group:
                    pending.finish(CommitUnknown(f"the commit may or may not be durable: {self._failed.message}"))
            if time.monotonic() > housekeeping_at:
                self._collect_garbage()
                housekeeping_at = time.monotonic() + _HOUSEKEEPING_S

    def _refuse_the_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                pending = self._commits.get_nowait()
                if pending is not _STOP:
                    pending.finish(StoreUnavailable(_CLOSED_BEFORE))

    def _gather(self, first: Pending) -> list[Pending]:
        """``first`` and whatever waits behind it, within the bounds of a group."""
        group = [first]
        size_bytes = first.size_bytes
        # Changes of the catalogue go alone: what the others were checked against must not change under them.
        while first.request.catalogue is None and len(group) < GROUP_COMMITS_MAX and size_bytes < GROUP_BYTES_MAX:
            try:
                pending = self._commits.get_nowait()
            except queue.Empty:
                break
            if pending is _STOP or pending.request.catalogue is not None:
                self._left_over.append(pending)
                break
            group.append(pending)
            size_bytes += pending.size_bytes
        return group

    def _write_group(self, waiting: list[Pending]) -> None:
        self._release_abandoned()
        if self._failed is not None:
            for pending in waiting:
                pending.finish(self._failed)
            return
        with self._lock:
            oldest_version = min(self._open_versions, default=self._published[0])
        group = self._engine.prepare([pending.request for pending in waiting], oldest_version)
        try:
            self._engine.persist(group)
        except ShuffleError as error:
            self._answer_failed(waiting, group, error)
            return
        unused = self._publish(group)
        crash_points.reach("store.before_answer")
        for pending, answer in zip(waiting, group.answers, strict=True):
            pending.finish(answer)
        self._engine.remove_files(unused)

    def _publish(self, group: Group) -> list[str]:
        with self._lock:
            unused = self._engine.apply(group)
            if group.changed:
                self._published = (self._engine.version, self._rocks.view())
            told = self._take_watchers(group.queues)
        for tell in told:
            tell()
        return unused

    def _answer_failed(self, waiting: list[Pending], group: Group, error: ShuffleError) -> None:
        if group.reached_rocks:
            # After a failed write or sync nobody knows what is on the disk. Only opening it again tells.
            self._failed = StoreError(f"the state store must be restarted: {error.message}")
            error = CommitUnknown(f"the commit may or may not be durable: {error.message}; read the state again")
        for pending, answer in zip(waiting, group.answers, strict=True):
            pending.finish(answer if isinstance(answer, ShuffleError) else error)

    def _collect_garbage(self) -> None:
        self._release_abandoned()
        self._engine.remove_files(self._engine.staged.collect(_wall_ms()))

    # --- queues ---

    def stage(self, queue_id: int, payloads: Sequence[pa.Buffer], ttl_ms: int) -> str:
        with self._lock:
            entry = self._engine.catalogue.queue(queue_id)
        if sum(payload.size for payload in payloads) > TRANSACTION_BYTES_MAX:
            raise TooLarge(f"queue {entry.schema.name!r}: stage at most {TRANSACTION_BYTES_MAX} bytes at a time")
        self._engine.check_room(sum(payload.size for payload in payloads))
        counted = [(decode_payload(payload, entry.schema.schema).num_rows, payload) for payload in payloads]
        staged_id = uuid.uuid4().hex
        counted = [(rows, payload) for rows, payload in counted if rows]
        self._engine.staged.add(staged_id, queue_id, entry.header, counted, ttl_ms, _wall_ms())
        return staged_id

    def discard(self, staged_id: str) -> None:
        self._engine.staged.expire(staged_id)

    def bounds(self, queue_id: int) -> list[tuple[int, int]]:
        with self._lock:
            return self._engine.bounds(queue_id)

    def read(
        self, queue_id: int, partition: int, begin: int, max_rows: int, max_bytes: int, wait_ms: int
    ) -> QueueRead | None:
        span = self.locate(queue_id, partition, begin, max_rows, max_bytes, wait_ms)
        if span is None:
            return None
        file = self._disk.path(span.file)
        try:
            records = map_range(file, span.offset, span.size_bytes)
        except FileNotFoundError:
            raise self.missing(file, queue_id, partition, begin) from None
        return QueueRead(str(file), span.offset, span.split(records), span.segment_begin, span.end)

    def missing(self, file: Path, queue_id: int, partition: int, begin: int) -> ShuffleError:
        """Why there is no ``file``, where the row ``begin`` was a moment ago: trimmed since, or lost."""
        try:
            self.locate(queue_id, partition, begin, 1, 1, 0)
        except ShuffleError as error:
            return error
        return CorruptData(f"{file}: the file is missing, but its rows were acknowledged", file=str(file))

    def locate(
        self, queue_id: int, partition: int, begin: int, max_rows: int, max_bytes: int, wait_ms: int
    ) -> Span | None:
        """Where the rows from ``begin`` on are, waiting for the first of them; None when none came in time."""
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
        tell: Callable[[], None],
    ) -> Span | None:
        """Where the rows are; or None, and ``tell`` is called once when the partition has changed since.

        It is called by the writer, so it must be short. ``watcher`` is who to ``unwatch``.
        """
        with self._lock:
            span = self._engine.locate(
                queue_id, partition, begin, max(max_rows, 1), min(max(max_bytes, 1), BATCH_BYTES_MAX)
            )
            if span is None:
                self._watchers.setdefault((queue_id, partition), {})[watcher] = tell
        return span

    def unwatch(self, queue_id: int, partition: int, watcher: object) -> None:
        with self._lock:
            watchers = self._watchers.get((queue_id, partition))
            if watchers is not None:
                watchers.pop(watcher, None)

    def _take_watchers(self, partitions: Iterable[tuple[int, int]]) -> list[Callable[[], None]]:
        return [tell for place in partitions for tell in self._watchers.pop(place, {}).values()]

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
            found = self._engine.stats()
            found["total"]["open_moments"] = len(self._moments)
            found["total"]["commits"] = self._commits_written
            found["total"]["groups"] = self._groups_written
        return found

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def failure(self) -> ShuffleError | None:
        """Why nothing can be written any more, if that is so."""
        return self._failed

    @property
    def address(self) -> str:
        return str(self._folder.path)

    @property
    def folder(self) -> Path | None:
        return self._folder.path

    def announce(self, address: str) -> None:
        self._folder.announce(address)

    def withdraw(self) -> None:
        self._folder.withdraw()

    def close(self) -> None:
        """Finish what was accepted, then give the folder back."""
        if self._closed:
            return
        self._closed = True
        self._commits.put(_STOP)
        self._writer.join(60)
        with self._lock:
            told = self._take_watchers(list(self._watchers))
            self._moments.clear()
            self._published = (self._engine.version, _ClosedView())
        for tell in told:
            tell()
        self._leases.close()
        self._disk.close()
        self._rocks.close()
        self._folder.close()


class _ClosedView:
    """What is left to read from after ``close``."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        raise StoreUnavailable("the state store is closed")

    def scan(self, begin: bytes, end: bytes | None, reverse: bool = False) -> Any:
        raise StoreUnavailable("the state store is closed")


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
