"""Tables with large commits: their newest rows are in a changelog, over those that RocksDB has.

Theory of operation. A commit that writes thousands of rows to a table does not put each of them into RocksDB. They are
appended to the table's *changelog* as one compressed block, which costs a fraction of the time and of the bytes, and
are kept in memory (``row_log``). From then on the table is *logged*: all its writes go the same way, so that the order
of the blocks is the order of the commits, and whatever the log has of a key is newer than what RocksDB has.

    a reader          looks into the log first, and into RocksDB for what the log does not have
    a large block     is a record of a segment file, written and synced before the commit, like the rows of a queue
    a small block     is a row of RocksDB, named by its version, so that a small commit needs one sync and not two
    opening a store   reads the blocks in the order of their versions
    compaction        replaces blocks by one with only the newest row of each key, when most rows are outdated
    moving            writes the newest rows to RocksDB and begins a new log, when the logs take too much memory

Compaction and moving are prepared beside the commits, from a view of the log that does not change, and take effect as a
commit of their own (``LogReplacement``). A crash before that leaves the log as it was.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import TooBusy
from shuffle.limits import KIB, LOGGED_ROWS_MIN, MIB
from shuffle.statestore.codec.arrow_bytes import Binary, all_start_with, to_array
from shuffle.statestore.codec.keys import bytes_after, table_prefix
from shuffle.statestore.codec.row_block import BlockBody, RowBlock, decode_block
from shuffle.statestore.codec.segment import RecordIndex, decode_record, encode_file_header
from shuffle.statestore.engine.ordered_table import Partition
from shuffle.statestore.engine.row_log import Guard, LogView, RowLog
from shuffle.statestore.engine.storage import KeyView, Segments
from shuffle.statestore.key_range import KeyRange
from shuffle.statestore.request import TableWrite

INLINE_BYTES_MAX = 8 * KIB
"""The most bytes of a block that is stored as a row of RocksDB: for so few it does not matter that RocksDB writes them
again when it flushes them."""

COMPACTED_ROWS_MIN = 2_000_000
"""The least rows of a log that is compacted: fewer take little memory, and are read quickly when a store is opened."""

COMPACTED_GROWTH = 3
"""A log is compacted when it has this many times the rows that the last compaction has kept. So what compaction writes
is at most half of what the commits have written, and a log takes at most this many times the memory of its rows."""

EARLIER_BYTES_MAX = 512 * MIB
"""The most bytes of replaced logs of one table, which are kept for transactions that began before. One that is open for
so long that its log had to be forgotten is refused when it commits."""

SMALL_BLOCKS_MAX = 4_096
SMALL_BLOCK_ROWS = 64
"""A log that has got so many blocks, with fewer rows each than this, is moved to RocksDB: the large commits are over,
and each block takes its time when a store is opened."""

_PREFIX_BYTES = 5
"""The length of the prefix of a table, with which all its keys begin."""


@functools.cache
def changelog_header() -> bytes:
    """The file header of the segments of changelogs."""
    return encode_file_header(pa.schema([("key", pa.binary()), ("value", pa.binary())]))


def inline_prefix(table_id: int) -> bytes:
    return b"l" + struct.pack(">I", table_id)


def inline_key(table_id: int, version: int) -> bytes:
    return inline_prefix(table_id) + struct.pack(">Q", version)


def table_id_of(key: bytes) -> int:
    """The id of the table that a key belongs to."""
    return int.from_bytes(key[1:_PREFIX_BYTES], "big")


@dataclass(slots=True)
class LogReplacement:
    """A log whose rows up to some row are replaced: by compacted rows, or by none since they are in RocksDB now."""

    table_id: int
    replaced: RowLog
    end: int
    """The number of rows of the log that are replaced; later ones are taken over."""
    version: int
    """The version of the newest of the replaced rows."""
    position: int
    """The position in the changelog up to which its blocks are replaced."""
    rows: RowLog
    """The new log, with the rows that take the place of the replaced ones."""
    staged_id: str | None
    """The staged file with the same rows as blocks; None if they were moved to RocksDB."""
    base_is_empty: bool
    """Whether RocksDB has no rows of the table after this."""


@dataclass(slots=True)
class _Marks:
    """How many rows a log had at each version."""

    versions: list[int]
    counts: list[int]

    def add(self, version: int, count: int) -> None:
        self.versions.append(version)
        self.counts.append(count)

    def count_at(self, version: int) -> int:
        """The number of rows at ``version``; for versions before the first mark, the number at that mark."""
        return self.counts[max(bisect_right(self.versions, version) - 1, 0)]

    def forget_before(self, version: int) -> None:
        passed = bisect_right(self.versions, version) - 1
        if passed > 0:
            del self.versions[:passed], self.counts[:passed]

    def take_back(self, version: int) -> None:
        # The first mark says what was there before the log, or the first commit that is still of interest.
        kept = max(1, bisect_right(self.versions, version))
        del self.versions[kept:], self.counts[kept:]


@dataclass(slots=True)
class TableLog:
    """The log of one table, and the logs before it that open transactions may still conflict with."""

    rows: RowLog
    marks: _Marks
    base_is_empty: bool
    earlier: list[tuple[RowLog, _Marks, int]] = field(default_factory=list)
    """Logs that were replaced, each with the version at which that happened."""
    rows_kept: int = 0
    """The number of rows that the last compaction has kept; of a log that was loaded, a guess."""
    floor: int = 0
    """Transactions that read at an earlier version are refused: what has changed since is not known any more."""

    def retire(self, version: int) -> None:
        """Put the log among the earlier ones, at the commit of ``version``. The oldest of too many is forgotten."""
        self.earlier.append((self.rows, self.marks, version))
        while sum(earlier[0].size_bytes for earlier in self.earlier) > EARLIER_BYTES_MAX:
            self.floor = self.earlier.pop(0)[2]

    def changed_since(self, version: int, keys: pa.BinaryArray) -> bool:
        """Whether one of the keys was written after ``version``."""
        if version < self.floor:
            return True
        return any(rows.has_since(first_row, keys) for rows, first_row in self._parts_since(version))

    def range_changed_since(self, version: int, key_range: KeyRange) -> bool:
        if version < self.floor:
            return True
        for rows, first_row in self._parts_since(version):
            for keys, _ in rows.pieces(first_row, len(rows)):
                inside = pc.greater_equal(keys, pa.scalar(key_range.begin, pa.binary()))
                if key_range.end is not None:
                    inside = pc.and_(inside, pc.less(keys, pa.scalar(key_range.end, pa.binary())))
                if pc.any(inside).as_py():
                    return True
        return False

    def _parts_since(self, version: int) -> list[tuple[RowLog, int]]:
        parts = [(self.rows, self.marks.count_at(version))]
        parts += [(rows, marks.count_at(version)) for rows, marks, until in self.earlier if version < until]
        return parts

    def forget_before(self, version: int) -> None:
        self.marks.forget_before(version)
        self.earlier = [earlier for earlier in self.earlier if version < earlier[2]]


class TableLogs:
    """The logs of all logged tables."""

    def __init__(self, seed: int, guard: Guard) -> None:
        self._seed = seed
        self._guard = guard
        self._logs: dict[int, TableLog] = {}
        self._views: dict[int, LogView] | None = {}
        self._last_views: dict[int, LogView] = {}
        """The views that were made last; those of logs that have not changed since are used again."""
        self.bytes_max: int | None = None
        """The bytes of memory beyond which the logs take no further rows; None if there is no such bound."""

    def __len__(self) -> int:
        return len(self._logs)

    @property
    def size_bytes(self) -> int:
        """The bytes of memory that the logs take."""
        logs = list(self._logs.values())
        return sum(rows.size_bytes for log in logs for rows in (log.rows, *(earlier[0] for earlier in log.earlier)))

    def new_rows(self) -> RowLog:
        return RowLog(self._seed)

    def is_logged(self, table_id: int) -> bool:
        log = self._logs.get(table_id)
        return log is not None and len(log.rows) > 0

    def takes(self, table_id: int, rows: int) -> bool:
        """Whether a commit that writes so many rows to this table writes them to its log."""
        return rows >= LOGGED_ROWS_MIN or self.is_logged(table_id)

    def check_room(self, write: TableWrite) -> None:
        """Raises ``TooBusy`` if the rows would go to a log and the logs take too much memory: they grow faster than
        they can be moved to RocksDB, so whoever writes has to wait."""
        if self.bytes_max is None or not self.takes(write.table_id, len(write.keys)):
            return
        size_bytes = self.size_bytes
        if size_bytes > self.bytes_max:
            raise TooBusy(
                f"the logs of tables take {size_bytes >> 20} MiB of memory and are being moved to the database: "
                "nothing was written, try again",
                bytes=size_bytes,
            )

    # --- changes ---

    def load(self, table_id: int, blocks: Iterable[RowBlock], version: int, base_is_empty: bool) -> None:
        """Make the log of a table, when the store is opened."""
        rows = self.new_rows()
        for block in sorted(blocks, key=lambda block: block.version):
            rows.append(block.keys, block.values)
        if len(rows):
            log = TableLog(rows, _Marks([version], [len(rows)]), base_is_empty, rows_kept=len(rows) // 2)
            self._logs[table_id] = log
            self._views = None

    def append(
        self,
        table_id: int,
        version: int,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        base_is_empty: bool,
    ) -> None:
        """Add the rows of the commit that makes ``version``. ``base_is_empty`` says whether RocksDB has no rows of the
        table, and is of interest only if the log had none either."""
        log = self._logs.get(table_id)
        if log is None:
            log = self._logs[table_id] = TableLog(self.new_rows(), _Marks([version - 1], [0]), base_is_empty)
        elif not len(log.rows):
            log.base_is_empty = base_is_empty
        with self._guard:
            log.rows.append(keys, values)
        log.marks.add(version, len(log.rows))
        self._views = None

    def take_back(self, table_id: int, rows: int, version: int) -> None:
        """Remove the rows after the first ``rows``: the commits after ``version`` were not written."""
        log = self._logs.get(table_id)
        if log is None:
            return
        with self._guard:
            log.rows.cut(rows)
        log.marks.take_back(version)
        self._views = None

    def replace(self, replacement: LogReplacement, version: int) -> None:
        """Put a new log in the place of a part of the old one, by the commit that makes ``version``."""
        log = self._logs[replacement.table_id]
        log.rows_kept = len(replacement.rows)
        with self._guard:
            for keys, values in log.rows.pieces(replacement.end, len(log.rows)):
                replacement.rows.append(keys, values)
        log.retire(version)
        log.rows, log.marks = replacement.rows, _Marks([version], [len(replacement.rows)])
        log.base_is_empty = replacement.base_is_empty
        self._views = None

    def is_outdated(self, table_id: int) -> bool:
        """Whether most rows of a log are likely to have newer versions, so that it is worth compacting."""
        log = self._logs.get(table_id)
        return log is not None and len(log.rows) >= max(COMPACTED_ROWS_MIN, COMPACTED_GROWTH * log.rows_kept)

    def is_trickle(self, table_id: int) -> bool:
        """Whether a log has got many small blocks: then it is worth moving to RocksDB."""
        log = self._logs.get(table_id)
        if log is None or log.rows.blocks < SMALL_BLOCKS_MAX:
            return False
        return len(log.rows) - log.rows_kept < SMALL_BLOCK_ROWS * log.rows.blocks

    def is_base_empty(self, table_id: int) -> bool:
        log = self._logs.get(table_id)
        return log is not None and log.base_is_empty

    def fill_base(self, table_id: int) -> None:
        """RocksDB is about to get rows of this table. Should that be interrupted, some of them stay there."""
        log = self._logs.get(table_id)
        if log is not None:
            log.base_is_empty = False
            self._views = None

    def row_count(self, table_id: int) -> int:
        log = self._logs.get(table_id)
        return 0 if log is None else len(log.rows)

    def may_replace(self, replacement: LogReplacement) -> bool:
        """Whether the log is still the one that the replacement was made from."""
        log = self._logs.get(replacement.table_id)
        return log is not None and log.rows is replacement.replaced

    def drop(self, table_id: int) -> None:
        self._logs.pop(table_id, None)
        self._views = None

    def forget_before(self, version: int) -> None:
        """Forget what no open transaction can conflict with: none of them reads at a version below this one."""
        for table_id, log in list(self._logs.items()):
            log.forget_before(version)
            if not len(log.rows) and not log.earlier:
                del self._logs[table_id]

    # --- reading ---

    def views(self, version: int, position_of: Callable[[int], int]) -> Mapping[int, LogView]:
        """What can be read of each logged table now. A view does not change when the log does.

        ``position_of`` returns the end of the changelog of a table.
        """
        if self._views is None:
            views = {}
            for table_id in list(self._logs):
                view, last = self.current(table_id), self._last_views.get(table_id)
                if view is None:
                    continue
                if last is not None and (last.rows, last.end, last.base_is_empty) == (
                    view.rows,
                    view.end,
                    view.base_is_empty,
                ):
                    views[table_id] = last  # It knows the order of its keys already, if somebody has asked for it.
                else:
                    views[table_id] = replace(view, version=version, position=position_of(table_id))
            self._views = self._last_views = views
        return self._views

    def current(self, table_id: int) -> LogView | None:
        """All rows of a logged table, those of commits too that are only being written."""
        log = self._logs.get(table_id)
        if log is None or not len(log.rows):
            return None
        return LogView(log.rows, len(log.rows), self._guard, log.base_is_empty)

    def conflict(self, version: int, keys_read: Iterable[tuple[int, Binary]], ranges: Iterable[KeyRange]) -> str | None:
        """Why reads made at ``version`` no longer hold, or None when they do, as far as logged tables are concerned."""
        if not self._logs:
            return None
        with self._guard:
            for table_id, keys in keys_read:
                log = self._logs.get(table_id)
                if log is not None and log.changed_since(version, to_array(keys)):
                    return f"a key it read was written after version {version}"
            for key_range in ranges:
                log = self._logs.get(table_id_of(key_range.begin))
                if log is not None and log.range_changed_since(version, key_range):
                    return f"a range it read was written after version {version}"
        return None


def is_base_empty(view: KeyView, table_id: int) -> bool:
    """Whether RocksDB has no rows of this table."""
    prefix = table_prefix(table_id)
    return next(iter(view.scan(prefix, bytes_after(prefix))), None) is None


def as_block(writes: Sequence[TableWrite]) -> tuple[pa.BinaryArray, pa.BinaryArray, BlockBody]:
    """The rows that one commit writes to one table, and how they are stored."""
    keys, values, body = to_array(writes[0].keys), to_array(writes[0].values), writes[0].body
    if len(writes) > 1:
        keys = pa.concat_arrays([to_array(write.keys) for write in writes])
        values = pa.concat_arrays([to_array(write.values) for write in writes])
        body = None
    return keys, values, body or BlockBody(keys, values)


def by_table(keys_read: Sequence[Binary]) -> Iterable[tuple[int, Binary]]:
    """The keys that a transaction read, with the id of their table; a client reads from one table at a time."""
    for keys in keys_read:
        if not len(keys):
            continue
        first = keys[0] if isinstance(keys, list) else keys[0].as_py()
        if all_start_with(keys, first[:_PREFIX_BYTES]):
            yield table_id_of(first), keys
            continue
        for key in keys if isinstance(keys, list) else keys.to_pylist():
            yield table_id_of(key), [key]


def read_changelog(
    partition: Partition, inline: Iterable[tuple[bytes, bytes]], segments: Segments
) -> Iterable[RowBlock]:
    """The blocks of a table's changelog: those in segment files, and those in RocksDB."""
    for segment in partition.segments:
        mapped = segments.map(segment.name, segment.size_bytes)
        index = RecordIndex.load(memoryview(mapped), segment.size_bytes, segment.name)
        for record in range(len(index)):
            if segment.begin + index.first_row(record) >= partition.begin:
                begin, end = index.offset(record), index.offset(record + 1)
                payload = decode_record(mapped.slice(begin, end - begin), segment.name, begin)[1]
                yield decode_block(payload, f"{segment.name}, offset {begin}")
    for key, value in inline:
        yield decode_block(pa.py_buffer(value), f"the row {key.hex()} of the database")
