"""The state store's logic: groups of commits against tables, queues and the catalogue.

A group goes through three steps, which the caller runs in this order and one group at a time:

    prepare   check every commit, in order, against the durable state and the commits before it in the group, and
              collect what has to be written; a commit that fails leaves no trace in the group
    persist   write: (1) records behind the committed end of their segments, (2) sync those segments,
              (3) one batch to RocksDB with rows, positions and the new version, (4) sync RocksDB's log
    apply     take the changes over in memory, and return the results

A crash anywhere before the end of (4) leaves the group absent or whole: positions in RocksDB decide which bytes of a
segment exist. There are no threads, clocks or randomness here; ``local`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shuffle.errors import BadInput, DiskFull, OutOfRange, ShuffleError, StoreError, TooLarge, one_line
from shuffle.errors import CommitConflict as Conflict
from shuffle.limits import MIB, TRANSACTION_APPENDS_MAX, TRANSACTION_BYTES_MAX, TRANSACTION_ROWS_MAX
from shuffle.statestore.codec.arrow_bytes import nulls_in, to_list
from shuffle.statestore.codec.keys import table_prefix
from shuffle.statestore.codec.segment import RecordIndex, encode_record, record_bytes
from shuffle.statestore.engine.catalogue import CATALOGUE_PREFIX, Catalogue, CatalogueStep
from shuffle.statestore.engine.commit_group import CheckedCommit, CommitGroup
from shuffle.statestore.engine.conflicts import ConflictHistory
from shuffle.statestore.engine.leftovers import clean_files, segment_name
from shuffle.statestore.engine.ordered_table import FileWrite, Partition, PartitionPlan, partition_prefix, queue_prefix
from shuffle.statestore.engine.staged import StagedFiles
from shuffle.statestore.engine.storage import KeyValues, KeyView, Segments
from shuffle.statestore.request import (
    Append,
    CommitRequest,
    Committed,
    Precondition,
    Publish,
    Trim,
    check_producer,
    check_published_once,
    check_sequences,
)
from shuffle.statestore.store import Span
from shuffle.support import crash_points
from shuffle.support.logs import get_logger

VERSION_KEY = b"\0v"
STORE_ID_KEY = b"\0s"

DISK_RESERVE_BYTES = 16 * MIB
"""Commits are refused while fewer bytes than this are free, so that RocksDB itself never fails on a full disk."""

_log = get_logger("statestore")

RECORDS_MAX = 4096
"""The most records of one read: the end of each is in the header of the response, which is limited to 64 KiB."""


class Engine:
    """Everything the store knows, and the rules by which it changes."""

    def __init__(self, keys: KeyValues, segments: Segments, now_ms: int) -> None:
        self._keys = keys
        self._segments = segments
        view = keys.view()
        self.catalogue = Catalogue()
        self.catalogue.load(view.scan(CATALOGUE_PREFIX, _after(CATALOGUE_PREFIX)))
        stored = view.get_many([VERSION_KEY])[0]
        self.version = int(stored) if stored is not None else 0
        self.history = ConflictHistory(self.version)
        self.partitions: dict[tuple[int, int], Partition] = {}
        for queue_id, entry in self.catalogue.queues.items():
            for index in range(entry.schema.partitions):
                self._load_partition(view, queue_id, index)
        self.staged = StagedFiles(segments)
        self.set_aside: list[str] = []
        self._clean_files(now_ms)
        self.table_bytes: dict[int, tuple[int, int]] = {}
        """The rows and bytes written to the log since the store was opened, by table id."""
        self.queue_bytes: dict[int, int] = {}
        """The bytes appended to segments since the store was opened, by queue id."""

    # --- opening ---

    def _load_partition(self, view: KeyView, queue_id: int, index: int) -> None:
        partition = Partition(queue_id, index)
        prefix = partition_prefix(queue_id, index)
        partition.load(view.scan(prefix, _after(prefix)))
        self.partitions[queue_id, index] = partition

    def _clean_files(self, now_ms: int) -> None:
        self.set_aside = clean_files(self._segments, self.staged, self.version, self.catalogue, self.partitions, now_ms)

    # --- step 1: prepare ---

    def prepare(self, requests: Sequence[CommitRequest], oldest_version: int) -> CommitGroup:
        """Check each commit in order; no open transaction reads at a version below ``oldest_version``.

        A commit that fails has its error as its result and leaves nothing behind: it affects neither the other commits
        nor the store.
        """
        self.history.forget_before(oldest_version)
        refused: dict[int, ShuffleError] = {}
        while True:
            group = CommitGroup(version_before=self.version, room_bytes=self._room_bytes())
            for number, request in enumerate(requests):
                if number in refused:
                    group.results.append(refused[number])
                    continue
                try:
                    checked = self._check_commit(request, group)
                except Exception as error:
                    group.results.append(_refusal(error))
                    continue
                try:
                    group.results.append(self._accept(request, checked, group))
                except Exception as error:
                    # It has changed a part of the group already. The others are prepared again, without it.
                    refused[number] = _refusal(error)
                    self._undo(group)
                    break
            else:
                if group.changed:
                    group.puts.append(([VERSION_KEY], [b"%d" % self.version]))
                return group

    def _check_commit(self, request: CommitRequest, group: CommitGroup) -> CheckedCommit:
        """Makes all checks of a commit, before the group is changed."""
        size_bytes = self._check_size(request, group)
        puts = [self.catalogue.table(write.table_id).check_write(write) for write in request.writes]
        rows = [self._check_append(append) for append in request.appends]
        if request.appends:
            check_published_once(request.appends)
        if request.reads is not None:
            if request.reads.version > group.version_before:
                raise BadInput(f"the transaction read at version {request.reads.version}, which has not been yet")
            read = (key for keys_read in request.reads.keys for key in to_list(keys_read))
            reason = self.history.conflict(request.reads.version, read, request.reads.ranges)
            if reason is not None:
                raise Conflict(f"the transaction cannot commit: {reason}; nothing was written, run it again")
        for precondition in request.preconditions:
            self._check_precondition(precondition, group)
        step = self._check_catalogue(request, group)
        repeated = [self._repeated_positions(append, group) for append in request.appends]
        if request.appends:
            first_time = zip(request.appends, repeated, strict=True)
            check_sequences([append for append, positions in first_time if positions is None])
        self._check_trims(request.trims, group)
        return CheckedCommit(puts, size_bytes, rows, repeated, step)

    def _accept(self, request: CommitRequest, checked: CheckedCommit, group: CommitGroup) -> Committed:
        """Add a checked commit to the group. Nothing should fail from here on."""
        if request.is_empty:
            return Committed(self.version)
        self.version += 1
        group.changed = True
        group.size_bytes += checked.size_bytes
        if checked.step is not None:
            self._add_catalogue(checked.step, group)
        group.puts.extend(checked.puts)
        for write in request.writes:
            rows_before, bytes_before = group.table_bytes.get(write.table_id, (0, 0))
            group.table_bytes[write.table_id] = rows_before + len(write.keys), bytes_before + write.size_bytes
        if checked.puts:
            self.history.record(self.version, [key for keys, _ in checked.puts for key in keys])
        appended = [
            positions if positions is not None else self._add_append(append, counts, group)
            for append, counts, positions in zip(request.appends, checked.rows, checked.repeated, strict=True)
        ]
        for trim in request.trims:
            self._plan(group, trim.queue_id, trim.partition).trim(trim.index)
        return Committed(self.version, tuple(appended))

    def _check_size(self, request: CommitRequest, group: CommitGroup) -> int:
        size_bytes = request.size_bytes()
        rows = sum(len(write.keys) for write in request.writes)
        if size_bytes > TRANSACTION_BYTES_MAX or rows > TRANSACTION_ROWS_MAX:
            raise TooLarge(
                f"the transaction has {rows} rows and {size_bytes} bytes; at most {TRANSACTION_ROWS_MAX} rows and "
                f"{TRANSACTION_BYTES_MAX} bytes are taken: split it",
                rows=rows,
                bytes=size_bytes,
            )
        if len(request.appends) > TRANSACTION_APPENDS_MAX:
            raise TooLarge(
                f"the transaction has {len(request.appends)} appends; at most {TRANSACTION_APPENDS_MAX} are taken: "
                "append more rows at a time, or split it",
                appends=len(request.appends),
            )
        # Removing rows must stay possible on a full disk, since it frees space.
        grows = size_bytes > 0 and not all(nulls_in(write.values) == len(write.values) for write in request.writes)
        if grows or request.appends:
            _check_room(group.room_bytes, group.size_bytes + size_bytes)
        return size_bytes

    def check_room(self, size_bytes: int) -> None:
        """Raises when writing ``size_bytes`` could fill the disk."""
        _check_room(self._room_bytes(), size_bytes)

    def _room_bytes(self) -> int:
        """The bytes that may still be written: the free space of the disk, minus what RocksDB has still to flush."""
        return self._segments.free_bytes() - self._keys.unflushed_bytes() - DISK_RESERVE_BYTES

    def _check_precondition(self, precondition: Precondition, group: CommitGroup) -> None:
        """Checks that the expected rows are in the store, including the commits before this one in the group."""
        entry = self.catalogue.table(precondition.table_id)
        name = entry.schema.name
        entry.check_prefix(precondition.keys)
        keys, values = to_list(precondition.keys), to_list(precondition.values)
        written = group.written()
        stored = self._keys.get_many(keys)
        for key, value, expected in zip(keys, stored, values, strict=True):
            if written.get(key, value) != expected:
                raise Conflict(
                    f"the transaction cannot commit: a row of table {name!r} is not the one it expects; nothing was "
                    "written, read it again",
                    table=name,
                )

    def _partition(self, queue_id: int, index: int) -> Partition:
        entry = self.catalogue.queue(queue_id)
        partition = self.partitions.get((queue_id, index))
        if partition is None:
            raise OutOfRange(
                f"queue {entry.schema.name!r} has the partitions 0 to {entry.schema.partitions - 1}, not {index}",
                queue=entry.schema.name,
                partition=index,
            )
        return partition

    def _check_append(self, append: Append | Publish) -> list[int]:
        """Checks an append and returns the number of rows of each payload."""
        self._partition(append.queue_id, append.partition)
        if isinstance(append, Publish):
            return [self.staged.get(append.staged_id, append.queue_id).rows]
        entry = self.catalogue.queue(append.queue_id)
        check_producer(append, entry.schema.name)
        return append.count_rows(entry.schema, entry.not_null)

    def _repeated_positions(self, append: Append | Publish, group: CommitGroup) -> tuple[int, int] | None:
        if isinstance(append, Publish):
            return None
        return self._plan(group, append.queue_id, append.partition).repeated(append.producer, append.sequence)

    def _check_trims(self, trims: Sequence[Trim], group: CommitGroup) -> None:
        for trim in trims:
            end = self._plan(group, trim.queue_id, trim.partition).end
            if trim.index > end:
                raise OutOfRange(
                    f"partition {trim.partition} ends at {end}: it cannot be trimmed up to {trim.index}",
                    partition=trim.partition,
                    end=end,
                )

    def _check_catalogue(self, request: CommitRequest, group: CommitGroup) -> CatalogueStep | None:
        if request.catalogue is None:
            return None
        # The caller puts a change of the catalogue into a group of its own, so that no other commit sees half of it.
        assert not group.changed
        return self.catalogue.check_change(request.catalogue)

    def _add_catalogue(self, step: CatalogueStep, group: CommitGroup) -> None:
        pairs = step.rows(self.catalogue.next_id)
        group.catalogue = step
        # A dropped table may have any number of rows: they are removed as a range, not one by one.
        if step.dropped_table is not None:
            prefix = table_prefix(step.dropped_table.schema.table_id)
            group.cleared.append((prefix, _after(prefix)))
        if step.dropped_queue is not None:
            prefix = queue_prefix(step.dropped_queue.schema.queue_id)
            group.cleared.append((prefix, _after(prefix)))
        if pairs:
            group.puts.append(([key for key, _ in pairs], [value for _, value in pairs]))

    def _plan(self, group: CommitGroup, queue_id: int, index: int) -> PartitionPlan:
        plan = group.partitions.get((queue_id, index))
        if plan is None:
            partition = self._partition(queue_id, index)
            header = self.catalogue.queue(queue_id).header
            version = self.version + 1
            plan = PartitionPlan(partition, len(header), lambda row: segment_name(queue_id, index, row, version))
            group.partitions[queue_id, index] = plan
        return plan

    def _add_append(self, append: Append | Publish, counts: list[int], group: CommitGroup) -> tuple[int, int]:
        plan = self._plan(group, append.queue_id, append.partition)
        if isinstance(append, Publish):
            staged = self.staged.take(append.staged_id)
            group.published.append(append.staged_id)
            if not staged.rows:
                # A segment without rows would have the same key as the one after it.
                group.unused.append(staged.name)
                return plan.end, plan.end
            return plan.adopt(staged.name, staged.rows, staged.size_bytes, staged.index)
        positions = plan.repeated(append.producer, append.sequence)
        if positions is not None:
            return positions
        begin = plan.end
        for payload, rows in zip(append.payloads, counts, strict=True):
            if rows:
                target, first_row = plan.append(rows, record_bytes(payload.size))
                assert target.write is not None
                target.write.parts.extend(encode_record(first_row, rows, payload))
        if append.producer is not None and append.sequence is not None:
            plan.remember(append.producer, append.sequence, begin, plan.end)
        return begin, plan.end

    # --- step 2: persist ---

    def persist(self, group: CommitGroup) -> None:
        """Make the group durable. An error before (3) leaves nothing; after one in (3) or (4) a restart is needed."""
        if not group.changed:
            return
        try:
            for (queue_id, _), plan in group.partitions.items():
                self._write_files(plan.file_writes(), queue_id)  # (1), (2)
        except ShuffleError:
            self._undo(group)
            raise
        rows = [pair for plan in group.partitions.values() for pair in plan.rows()]
        crash_points.reach("store.before_log_write")
        if rows:
            group.puts.append(([key for key, _ in rows], [value for _, value in rows]))
        group.reached_rocks = True
        self._keys.write(group.puts, group.cleared)  # (3)
        crash_points.reach("store.after_log_write")
        self._keys.sync()  # (4)
        crash_points.reach("store.after_log_sync")

    def _write_files(self, writes: list[FileWrite], queue_id: int) -> None:
        for write in writes:
            crash_points.reach("store.before_segment_write")
            if write.create:
                self._segments.create(write.name, self.catalogue.queue(queue_id).header)
            self._segments.append(write.name, write.offset, write.parts)
            crash_points.reach("store.after_segment_write")
            self._segments.sync(write.name)
            crash_points.reach("store.after_segment_sync")

    def _undo(self, group: CommitGroup) -> None:
        """Undo the group in memory, after nothing of it was written to RocksDB."""
        # If its keys stayed in the history, every retry would be refused, since it reads at the version before them.
        self.version = group.version_before
        self.history.take_back(group.version_before)
        for staged_id in group.published:
            self.staged.give_back(staged_id)
        for plan in group.partitions.values():
            for write in plan.file_writes():
                if write.create:
                    self._segments.remove(write.name)

    # --- step 3: apply ---

    def apply(self, group: CommitGroup) -> list[str]:
        """Take the durable group over in memory. Returns the segment files that nothing refers to any more."""
        unused = list(group.unused)
        for (queue_id, index), plan in group.partitions.items():
            unused.extend(segment.name for segment in plan.freed())
            before = {segment.name for segment in self.partitions[queue_id, index].segments[:-1]}
            written = sum(len(part) for write in plan.file_writes() for part in write.parts)
            self.queue_bytes[queue_id] = self.queue_bytes.get(queue_id, 0) + written
            group.appended_rows += plan.end - self.partitions[queue_id, index].end
            group.appended_bytes += written
            plan.apply()
            for segment in self.partitions[queue_id, index].segments[:-1]:
                if segment.name not in before:
                    self._segments.close_file(segment.name)
        for staged_id in group.published:
            self.staged.forget(staged_id)
        for table_id, (rows, size_bytes) in group.table_bytes.items():
            rows_before, bytes_before = self.table_bytes.get(table_id, (0, 0))
            self.table_bytes[table_id] = rows_before + rows, bytes_before + size_bytes
        if group.catalogue is not None:
            unused.extend(self._apply_catalogue(group.catalogue))
        return unused

    def _apply_catalogue(self, step: CatalogueStep) -> list[str]:
        step.apply(self.catalogue)
        unused: list[str] = []
        if step.queue is not None:
            schema = step.queue.schema
            for index in range(schema.partitions):
                self.partitions[schema.queue_id, index] = Partition(schema.queue_id, index)
        if step.dropped_queue is not None:
            schema = step.dropped_queue.schema
            for index in range(schema.partitions):
                partition = self.partitions.pop((schema.queue_id, index))
                unused.extend(segment.name for segment in partition.segments)
        return unused

    def remove_files(self, names: Sequence[str]) -> None:
        for name in names:
            crash_points.reach("store.before_segment_remove")
            self._segments.remove(name)

    # --- statistics ---

    def stats(self) -> dict[str, Any]:
        """Bytes written since the store was opened, per table, per queue, and in all."""
        tables = {}
        for table_id, entry in self.catalogue.tables.items():
            rows, size_bytes = self.table_bytes.get(table_id, (0, 0))
            tables[entry.schema.name] = {"rows_written": rows, "log_bytes": size_bytes}
        queues = {}
        for queue_id, queue in self.catalogue.queues.items():
            partitions = [self.partitions[queue_id, index] for index in range(queue.schema.partitions)]
            queues[queue.schema.name] = {
                "partitions": len(partitions),
                "rows": sum(partition.end - partition.begin for partition in partitions),
                "segments": sum(len(partition.segments) for partition in partitions),
                "segment_bytes": sum(s.size_bytes for partition in partitions for s in partition.segments),
                "segment_bytes_written": self.queue_bytes.get(queue_id, 0),
            }
        total: dict[str, Any] = dict(self._keys.statistics())
        total["segment_bytes"] = self._segments.written_bytes
        total["version"] = self.version
        total["staged"] = len(self.staged)
        total["conflict_keys"] = self.history.keys_count
        return {"tables": tables, "queues": queues, "total": total}

    # --- reading queues ---

    def bounds(self, queue_id: int) -> list[tuple[int, int]]:
        entry = self.catalogue.queue(queue_id)
        partitions = (self.partitions[queue_id, index] for index in range(entry.schema.partitions))
        return [(partition.begin, partition.end) for partition in partitions]

    def locate(self, queue_id: int, index: int, begin: int, max_rows: int, max_bytes: int) -> Span | None:
        """The records that hold the rows from ``begin`` on, of one segment; None at the end of the partition."""
        partition = self._partition(queue_id, index)
        if not partition.begin <= begin <= partition.end:
            name = self.catalogue.queue(queue_id).schema.name
            raise OutOfRange(
                f"queue {name!r}, partition {index}: position {begin} is not in {partition.begin} to {partition.end}"
                + (": these rows were trimmed" if begin < partition.begin else ""),
                queue=name,
                partition=index,
                begin=partition.begin,
                end=partition.end,
            )
        segment = partition.segment_of(begin)
        if segment is None:
            return None
        if segment.index is None:
            data = memoryview(self._segments.map(segment.name, segment.size_bytes))
            segment.index = RecordIndex.load(data, segment.size_bytes, segment.name)
        records = segment.index
        first = records.find(begin - segment.begin)
        last = min(records.find(begin - segment.begin + max_rows - 1), len(records) - 1, first + RECORDS_MAX - 1)
        start = records.offset(first)
        ends: list[int] = []
        for record in range(first, last + 1):
            end = records.offset(record + 1) - start
            if ends and end > max_bytes:
                break
            ends.append(end)
        after = first + len(ends)
        rows = records.first_row(after) if after < len(records) else segment.rows
        return Span(segment.name, start, ends, segment.begin, segment.begin + rows)


def _refusal(error: Exception) -> ShuffleError:
    """The result of a commit that could not be prepared."""
    if isinstance(error, ShuffleError):
        return error
    # The checks cover everything that can be wrong with a commit, so this is a mistake in the store: it is logged.
    _log.error("a commit was refused because of a mistake in the store", error=error)
    return StoreError(f"the state store cannot take this commit ({one_line(error)}): nothing was written")


def _check_room(room_bytes: int, size_bytes: int) -> None:
    # RocksDB needs the space twice: in its log, and for the flushed file.
    if room_bytes < 2 * size_bytes:
        raise DiskFull(
            f"less than {DISK_RESERVE_BYTES // MIB} MiB would be left on the disk of the state store: nothing was "
            "written; free some room and try again"
        )


def _after(prefix: bytes) -> bytes:
    """The smallest key after all keys with this prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix[-1] < 255 else _after(prefix[:-1])
