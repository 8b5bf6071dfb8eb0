"""The state store's logic: groups of commits against tables, queues and the catalogue.

A group goes through three steps, which the caller runs in this order and one group at a time:

    prepare   check every commit, in order, against the durable state and the commits before it in the group, and
              collect what has to be written; a commit that fails leaves no trace in the group
    persist   write: (1) records behind the committed end of their segments, (2) sync those segments,
              (3) one batch to RocksDB with rows, positions and the new version, (4) sync RocksDB's log
    apply     take the changes over in memory, and return the results

Rows of tables are written to RocksDB, or, where there are many, to the changelog of their table (``table_logs``).

A crash anywhere before the end of (4) leaves the group absent or whole: positions in RocksDB decide which bytes of a
segment exist. There are no threads, clocks or randomness here; ``local`` has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput, OutOfRange, ShuffleError
from shuffle.errors import CommitConflict as Conflict
from shuffle.statestore.codec.arrow_bytes import to_array, to_list
from shuffle.statestore.codec.keys import table_prefix
from shuffle.statestore.codec.segment import encode_record, record_bytes
from shuffle.statestore.engine.catalogue import CATALOGUE_PREFIX, Catalogue, CatalogueStep
from shuffle.statestore.engine.commit_checks import DISK_RESERVE_BYTES, check_room, check_size, refusal_of
from shuffle.statestore.engine.commit_group import CheckedCommit, CommitGroup
from shuffle.statestore.engine.conflicts import ConflictHistory
from shuffle.statestore.engine.leftovers import clean_files, segment_name
from shuffle.statestore.engine.ordered_table import FileWrite, Partition, PartitionPlan, partition_prefix, queue_prefix
from shuffle.statestore.engine.queue_reads import locate_records
from shuffle.statestore.engine.row_log import Guard
from shuffle.statestore.engine.staged import StagedFiles
from shuffle.statestore.engine.statistics import queue_statistics, table_statistics
from shuffle.statestore.engine.storage import KeyValues, KeyView, Segments
from shuffle.statestore.engine.table_logs import (
    INLINE_BYTES_MAX,
    LogReplacement,
    TableLogs,
    as_block,
    by_table,
    changelog_header,
    inline_key,
    inline_prefix,
    is_base_empty,
    read_changelog,
)
from shuffle.statestore.request import (
    Append,
    CommitRequest,
    Committed,
    Precondition,
    Publish,
    TableWrite,
    Trim,
    check_producer,
    check_published_once,
    check_sequences,
)
from shuffle.statestore.store import Span
from shuffle.support import crash_points

VERSION_KEY = b"\0v"
STORE_ID_KEY = b"\0s"


class Engine:
    """Everything the store knows, and the rules by which it changes."""

    def __init__(
        self, keys: KeyValues, segments: Segments, now_ms: int, *, guard: Guard | None = None, hash_seed: int = 0
    ) -> None:
        """``guard`` is held while the logs of tables are read or extended, where other threads read them; the seed is
        for the hashes of their keys."""
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
        self.logs = TableLogs(hash_seed, guard if guard is not None else contextlib.nullcontext())
        for table_id in self.catalogue.tables:
            self._load_log(view, table_id)
        self.staged = StagedFiles(segments)
        self.set_aside = clean_files(segments, self.staged, self.version, self.catalogue, self.partitions, now_ms)
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

    def _load_log(self, view: KeyView, table_id: int) -> None:
        self._load_partition(view, table_id, 0)
        prefix = inline_prefix(table_id)
        blocks = read_changelog(self.partitions[table_id, 0], view.scan(prefix, _after(prefix)), self._segments)
        self.logs.load(table_id, blocks, self.version, is_base_empty(view, table_id))

    # --- step 1: prepare ---

    def prepare(self, requests: Sequence[CommitRequest], oldest_version: int) -> CommitGroup:
        """Check each commit in order; no open transaction reads at a version below ``oldest_version``.

        A commit that fails has its error as its result and leaves nothing behind: it affects neither the other commits
        nor the store.
        """
        self.history.forget_before(oldest_version)
        self.logs.forget_before(oldest_version)
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
                    group.results.append(refusal_of(error))
                    continue
                try:
                    group.results.append(self._accept(request, checked, group))
                except Exception as error:
                    # It has changed a part of the group already. The others are prepared again, without it.
                    refused[number] = refusal_of(error)
                    self._undo(group)
                    break
            else:
                if group.changed:
                    group.puts.append(([VERSION_KEY], [b"%d" % self.version]))
                return group

    def _check_commit(self, request: CommitRequest, group: CommitGroup) -> CheckedCommit:
        """Makes all checks of a commit, before the group is changed."""
        size_bytes = check_size(request, group)
        for write in request.writes:
            self.catalogue.table(write.table_id).check_write(write)
            self.logs.check_room(write)
        rows = [self._check_append(append) for append in request.appends]
        if request.appends:
            check_published_once(request.appends)
        if request.reads is not None:
            if request.reads.version > group.version_before:
                raise BadInput(f"the transaction read at version {request.reads.version}, which has not been yet")
            read = request.reads.version, list(by_table(request.reads.keys)), request.reads.ranges
            reason = self.history.conflict(*read) or self.logs.conflict(*read)
            if reason is not None:
                raise Conflict(f"the transaction cannot commit: {reason}; nothing was written, run it again")
        for precondition in request.preconditions:
            self._check_precondition(precondition, group)
        step = self._check_catalogue(request, group)
        if request.replacement is not None and not self.logs.may_replace(request.replacement):
            raise Conflict("the log of the table is another one by now")
        repeated = [self._repeated_positions(append, group) for append in request.appends]
        if request.appends:
            first_time = zip(request.appends, repeated, strict=True)
            check_sequences([append for append, positions in first_time if positions is None])
        self._check_trims(request.trims, group)
        return CheckedCommit(size_bytes, rows, repeated, step)

    def _accept(self, request: CommitRequest, checked: CheckedCommit, group: CommitGroup) -> Committed:
        """Add a checked commit to the group. Nothing should fail from here on."""
        if request.is_empty:
            return Committed(self.version)
        self.version += 1
        group.changed = True
        group.size_bytes += checked.size_bytes
        if checked.step is not None:
            self._add_catalogue(checked.step, group)
        if request.writes:
            self._add_writes(request.writes, group)
        appended = [
            positions if positions is not None else self._add_append(append, counts, group)
            for append, counts, positions in zip(request.appends, checked.rows, checked.repeated, strict=True)
        ]
        for trim in request.trims:
            self._plan(group, trim.queue_id, trim.partition).trim(trim.index)
        if request.replacement is not None:
            self._add_replacement(request.replacement, group)
        return Committed(self.version, tuple(appended))

    def _add_writes(self, given: Sequence[TableWrite], group: CommitGroup) -> None:
        rows: dict[int, int] = {}
        writes = [write for write in given if len(write.keys)]
        for write in writes:
            rows[write.table_id] = rows.get(write.table_id, 0) + len(write.keys)
            rows_before, bytes_before = group.table_bytes.get(write.table_id, (0, 0))
            group.table_bytes[write.table_id] = rows_before + len(write.keys), bytes_before + write.size_bytes
        logged = {table_id for table_id, count in rows.items() if self.logs.takes(table_id, count)}
        for table_id in logged:
            self._add_block(table_id, [write for write in writes if write.table_id == table_id], group)
        puts = [write.pairs for write in writes if write.table_id not in logged]
        if puts:
            group.plain_tables |= rows.keys() - logged
            group.puts.extend(puts)
            self.history.record(self.version, [key for keys, _ in puts for key in keys], rows.keys() - logged)

    def _add_block(self, table_id: int, writes: Sequence[TableWrite], group: CommitGroup) -> None:
        """Add what a commit writes to one table to the table's log, as one block."""
        keys, values, body = as_block(writes)
        # Before anything is added, so that whatever fails from here on can be taken back.
        group.logged.setdefault(table_id, self.logs.row_count(table_id))
        is_new = not self.logs.is_logged(table_id) and table_id not in group.plain_tables
        is_empty = is_new and is_base_empty(self._keys.view(), table_id)
        self.logs.append(table_id, self.version, keys, values, is_empty)
        block = body.encode(self.version)
        if body.size_bytes <= INLINE_BYTES_MAX:
            group.puts.append(([inline_key(table_id, self.version)], [block]))
            return
        target, first_row = self._plan(group, table_id, 0).append(len(keys), record_bytes(len(block)))
        assert target.write is not None
        target.write.parts.extend(encode_record(first_row, len(keys), pa.py_buffer(block)))

    def _add_replacement(self, replacement: LogReplacement, group: CommitGroup) -> None:
        """Put compacted blocks, or none, in the place of the first ones of a changelog."""
        table_id = replacement.table_id
        plan = self._plan(group, table_id, 0)
        if replacement.staged_id is not None:
            staged = self.staged.take(replacement.staged_id)
            group.published.append(replacement.staged_id)
            plan.adopt(staged.name, staged.rows, staged.size_bytes, staged.index)
        plan.trim(replacement.position)
        group.cleared.append((inline_key(table_id, 0), inline_key(table_id, replacement.version + 1)))
        group.replacement = replacement

    def check_room(self, size_bytes: int) -> None:
        """Raises when writing ``size_bytes`` could fill the disk."""
        check_room(self._room_bytes(), size_bytes)

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
        log = self.logs.current(precondition.table_id)
        if log is not None:
            found, missing = log.get(to_array(precondition.keys))
            fromlog = zip(keys, to_list(found), missing.tolist(), strict=True)
            written = {**written, **{key: value for key, value, is_missing in fromlog if not is_missing}}
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
            table_id = step.dropped_table.schema.table_id
            for prefix in (table_prefix(table_id), inline_prefix(table_id), queue_prefix(table_id)):
                group.cleared.append((prefix, _after(prefix)))
        if step.dropped_queue is not None:
            prefix = queue_prefix(step.dropped_queue.schema.queue_id)
            group.cleared.append((prefix, _after(prefix)))
        if pairs:
            group.puts.append(([key for key, _ in pairs], [value for _, value in pairs]))

    def _plan(self, group: CommitGroup, queue_id: int, index: int) -> PartitionPlan:
        plan = group.partitions.get((queue_id, index))
        if plan is None:
            is_log = queue_id in self.catalogue.tables
            partition = self.partitions[queue_id, index] if is_log else self._partition(queue_id, index)
            header = self._header(queue_id)
            version = self.version + 1
            plan = PartitionPlan(partition, len(header), lambda row: segment_name(queue_id, index, row, version))
            group.partitions[queue_id, index] = plan
        return plan

    def _header(self, queue_id: int) -> bytes:
        """The file header of the segments of a queue, or of the changelog of a table."""
        return changelog_header() if queue_id in self.catalogue.tables else self.catalogue.queue(queue_id).header

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
                self._segments.create(write.name, self._header(queue_id))
            self._segments.append(write.name, write.offset, write.parts)
            crash_points.reach("store.after_segment_write")
            self._segments.sync(write.name)
            crash_points.reach("store.after_segment_sync")

    def _undo(self, group: CommitGroup) -> None:
        """Undo the group in memory, after nothing of it was written to RocksDB."""
        # If its keys stayed in the history, every retry would be refused, since it reads at the version before them.
        self.version = group.version_before
        self.history.take_back(group.version_before)
        for table_id, rows in group.logged.items():
            self.logs.take_back(table_id, rows, group.version_before)
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
            if queue_id in self.catalogue.queues:
                group.count_appended(plan.end - self.partitions[queue_id, index].end, written)
            plan.apply()
            for segment in self.partitions[queue_id, index].segments[:-1]:
                if segment.name not in before:
                    self._segments.close_file(segment.name)
        for staged_id in group.published:
            self.staged.forget(staged_id)
        for table_id, (rows, size_bytes) in group.table_bytes.items():
            rows_before, bytes_before = self.table_bytes.get(table_id, (0, 0))
            self.table_bytes[table_id] = rows_before + rows, bytes_before + size_bytes
        if group.replacement is not None:
            self.logs.replace(group.replacement, self.version)
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
        if step.table is not None:
            table_id = step.table.schema.table_id
            self.partitions[table_id, 0] = Partition(table_id, 0)
        dropped: list[tuple[int, int]] = []
        if step.dropped_queue is not None:
            schema = step.dropped_queue.schema
            dropped = [(schema.queue_id, index) for index in range(schema.partitions)]
        if step.dropped_table is not None:
            table_id = step.dropped_table.schema.table_id
            dropped = [(table_id, 0)]
            self.logs.drop(table_id)
        for partition in dropped:
            unused.extend(segment.name for segment in self.partitions.pop(partition).segments)
        return unused

    def remove_files(self, names: Sequence[str]) -> None:
        for name in names:
            crash_points.reach("store.before_segment_remove")
            self._segments.remove(name)

    # --- statistics ---

    def stats(self) -> dict[str, Any]:
        """Bytes written since the store was opened, per table, per queue, and in all."""
        tables = table_statistics(self.catalogue, self.table_bytes, self.partitions)
        queues = queue_statistics(self.catalogue, self.queue_bytes, self.partitions)
        total: dict[str, Any] = dict(self._keys.statistics())
        total["segment_bytes"] = self._segments.written_bytes
        total["version"] = self.version
        total["staged"] = len(self.staged)
        total["conflict_keys"] = self.history.keys_count
        total["changelog_memory_bytes"] = self.logs.size_bytes
        return {"tables": tables, "queues": queues, "total": total}

    # --- reading queues ---

    def bounds(self, queue_id: int) -> list[tuple[int, int]]:
        entry = self.catalogue.queue(queue_id)
        partitions = (self.partitions[queue_id, index] for index in range(entry.schema.partitions))
        return [(partition.begin, partition.end) for partition in partitions]

    def locate(self, queue_id: int, index: int, begin: int, max_rows: int, max_bytes: int) -> Span | None:
        """The records that hold the rows from ``begin`` on, of one segment; None at the end of the partition."""
        partition = self._partition(queue_id, index)
        queue = self.catalogue.queue(queue_id).schema.name
        return locate_records(partition, queue, self._segments, begin, max_rows, max_bytes)


def _after(prefix: bytes) -> bytes:
    """The smallest key after all keys with this prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix[-1] < 255 else _after(prefix[:-1])
