"""Ordered tables: partitions of rows by position, and how a group of commits changes them.

A ``Partition`` is the durable state. A ``PartitionPlan`` collects the changes of one group of commits: records to write
after the committed bytes, segments to begin, staged files to adopt, rows to trim. The plan has the files and keys to
write; it is applied only when all of that is durable. A crash before that leaves bytes after the committed length,
which nobody reads and the next append overwrites.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shuffle.errors import OutOfRange, SequenceError
from shuffle.limits import MIB
from shuffle.statestore.codec.segment import RecordIndex

SEGMENT_BYTES_MAX = 64 * MIB
"""The size in bytes at which a segment is sealed. Trimming frees whole segments, so space is freed in such steps."""

PRODUCER_SEQUENCES_MAX = 16
"""The sequence numbers that are remembered per producer and partition: only these appends can be repeated safely."""

_PARTITION_ROW = struct.Struct("<QQ")
_SEGMENT_ROW = struct.Struct("<QQ")
_SEQUENCE_ROW = struct.Struct("<qQQ")

Pair = tuple[bytes, bytes | None]


def queue_prefix(queue_id: int) -> bytes:
    return b"q" + struct.pack(">I", queue_id)


def partition_prefix(queue_id: int, partition: int) -> bytes:
    return queue_prefix(queue_id) + struct.pack(">I", partition)


@dataclass(slots=True)
class Segment:
    """A run of rows in one file. ``rows`` and ``size_bytes`` are what was committed; the file may be longer."""

    name: str
    begin: int
    rows: int
    size_bytes: int
    index: RecordIndex | None = None
    """The index of the records; loaded at the first read, unless this process wrote the segment itself."""

    @property
    def end(self) -> int:
        return self.begin + self.rows

    def encode(self) -> bytes:
        return _SEGMENT_ROW.pack(self.rows, self.size_bytes) + self.name.encode()

    @staticmethod
    def decode(begin: int, row: bytes) -> Segment:
        rows, size_bytes = _SEGMENT_ROW.unpack_from(row)
        return Segment(row[_SEGMENT_ROW.size :].decode(), begin, rows, size_bytes)


Sequences = tuple[tuple[int, int, int], ...]
"""The remembered appends of one producer: (sequence, begin, end), the newest last."""


class Partition:
    """The durable state of one partition."""

    def __init__(self, queue_id: int, index: int) -> None:
        self.queue_id = queue_id
        self.index = index
        self.prefix = partition_prefix(queue_id, index)
        self.begin = 0
        self.end = 0
        self.segments: list[Segment] = []
        self.producers: dict[str, Sequences] = {}

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the state from the rows that the store has under this partition's prefix."""
        for key, value in rows:
            kind, rest = key[len(self.prefix) : len(self.prefix) + 1], key[len(self.prefix) + 1 :]
            if kind == b"p":
                self.begin, self.end = _PARTITION_ROW.unpack(value)
            elif kind == b"s":
                self.segments.append(Segment.decode(struct.unpack(">Q", rest)[0], value))
            else:
                self.producers[rest.decode()] = tuple(_SEQUENCE_ROW.iter_unpack(value))
        if self.segments:
            self.end = max(self.end, self.segments[-1].end)

    def partition_row(self, begin: int, end: int) -> Pair:
        return self.prefix + b"p", _PARTITION_ROW.pack(begin, end)

    def segment_key(self, segment: Segment) -> bytes:
        return self.prefix + b"s" + struct.pack(">Q", segment.begin)

    def producer_row(self, producer: str, sequences: Sequences) -> Pair:
        packed = b"".join(_SEQUENCE_ROW.pack(*sequence) for sequence in sequences)
        return self.prefix + b"d" + producer.encode(), packed

    def segment_of(self, row: int) -> Segment | None:
        at = bisect_right(self.segments, row, key=lambda segment: segment.begin) - 1
        if at < 0 or row >= self.segments[at].end:
            return None
        return self.segments[at]


@dataclass(slots=True)
class FileWrite:
    """Bytes to append to a segment file; ``create`` when it does not exist yet."""

    name: str
    offset: int
    create: bool = False
    parts: list[bytes | memoryview] = field(default_factory=list)


@dataclass(slots=True)
class _OpenSegment:
    """A segment as it will be after the group; ``target`` is the committed one that it continues, if any."""

    segment: Segment
    target: Segment | None
    index: RecordIndex
    write: FileWrite | None
    added: list[tuple[int, int]] = field(default_factory=list)


class PartitionPlan:
    """What one group of commits does to one partition."""

    def __init__(self, partition: Partition, header_bytes: int, new_name: Callable[[int], str]) -> None:
        self._partition = partition
        self._header_bytes = header_bytes
        self._new_name = new_name
        self.begin = partition.begin
        self.end = partition.end
        self._changed: list[_OpenSegment] = []
        self._active: _OpenSegment | None = None
        self._may_continue = True
        """True while rows may still be appended to the last committed segment."""
        self._producers: dict[str, Sequences] = {}

    # --- for the commits of the group ---

    def repeated(self, producer: str | None, sequence: int | None) -> tuple[int, int] | None:
        """The positions of the rows that this (producer, sequence) appended before; None if it is new."""
        if producer is None or sequence is None:
            return None
        sequences = self._producers.get(producer, self._partition.producers.get(producer, ()))
        if not sequences or sequence > sequences[-1][0]:
            return None
        for number, begin, end in sequences:
            if number == sequence:
                return begin, end
        raise SequenceError(
            f"producer {producer!r} is at sequence {sequences[-1][0]}; {sequence} is older than the "
            f"{PRODUCER_SEQUENCES_MAX} that are remembered",
            producer=producer,
            sequence=sequence,
        )

    def remember(self, producer: str, sequence: int, begin: int, end: int) -> None:
        before = self._producers.get(producer, self._partition.producers.get(producer, ()))
        self._producers[producer] = (*before, (sequence, begin, end))[-PRODUCER_SEQUENCES_MAX:]

    def append(self, rows: int, size_bytes: int) -> tuple[_OpenSegment, int]:
        """Reserve space for a record; returns the segment and the record's first row in it."""
        active = self._writable()
        first_row = active.segment.rows
        active.segment.rows += rows
        active.segment.size_bytes += size_bytes
        active.added.append((first_row, size_bytes))
        self.end += rows
        return active, first_row

    def adopt(self, name: str, rows: int, size_bytes: int, index: RecordIndex) -> tuple[int, int]:
        """Make a staged file the next segment, without writing its rows again; returns their positions."""
        segment = Segment(name, self.end, rows, size_bytes, index)
        self._changed.append(_OpenSegment(segment, None, index, None))
        # Rows after it need a new segment, since segments are in the order of their rows.
        self._active = None
        self._may_continue = False
        begin, self.end = self.end, self.end + rows
        return begin, self.end

    def trim(self, index: int) -> None:
        if index > self.end:
            raise OutOfRange(
                f"partition {self._partition.index} ends at {self.end}: it cannot be trimmed up to {index}",
                partition=self._partition.index,
                end=self.end,
            )
        self.begin = max(self.begin, index)

    def _writable(self) -> _OpenSegment:
        """The segment that the next record goes to: the one being filled, the last committed one, or a new one."""
        if self._active is not None and self._active.segment.size_bytes < SEGMENT_BYTES_MAX:
            return self._active
        self._active = self._continue_last_segment() or self._begin_segment()
        self._may_continue = False
        self._changed.append(self._active)
        return self._active

    def _continue_last_segment(self) -> _OpenSegment | None:
        last = self._partition.segments[-1] if self._partition.segments else None
        # A segment without its index was written before a restart. It is not continued, so that nothing has to be read
        # to append.
        if not self._may_continue or last is None or last.index is None or last.size_bytes >= SEGMENT_BYTES_MAX:
            return None
        segment = Segment(last.name, last.begin, last.rows, last.size_bytes)
        return _OpenSegment(segment, last, last.index, FileWrite(segment.name, segment.size_bytes))

    def _begin_segment(self) -> _OpenSegment:
        segment = Segment(self._new_name(self.end), self.end, 0, self._header_bytes)
        write = FileWrite(segment.name, self._header_bytes, create=True)
        return _OpenSegment(segment, None, RecordIndex(self._header_bytes), write)

    # --- for the engine ---

    def file_writes(self) -> list[FileWrite]:
        return [changed.write for changed in self._changed if changed.write is not None]

    def rows(self) -> list[Pair]:
        """The keys and values to write; None deletes."""
        partition = self._partition
        pairs: list[Pair] = []
        for changed in self._changed:
            pairs.append((partition.segment_key(changed.segment), changed.segment.encode()))
        for segment in self.freed():
            pairs.append((partition.segment_key(segment), None))
        if self.begin != partition.begin:
            pairs.append(partition.partition_row(self.begin, self.end))
        pairs.extend(partition.producer_row(name, sequences) for name, sequences in self._producers.items())
        return pairs

    def _segments_after(self) -> list[Segment]:
        replaced = {id(changed.target): changed.segment for changed in self._changed if changed.target is not None}
        kept = [replaced.get(id(segment), segment) for segment in self._partition.segments]
        return kept + [changed.segment for changed in self._changed if changed.target is None]

    def freed(self) -> list[Segment]:
        """The segments of which every row is trimmed."""
        return [segment for segment in self._segments_after() if segment.end <= self.begin]

    def apply(self) -> None:
        """Make the plan the state of the partition, once all of it is durable."""
        partition = self._partition
        freed = {segment.name for segment in self.freed()}
        for changed in self._changed:
            for first_row, size_bytes in changed.added:
                changed.index.add(first_row, size_bytes)
            changed.segment.index = changed.index
        partition.segments = [segment for segment in self._segments_after() if segment.name not in freed]
        partition.producers.update(self._producers)
        partition.begin, partition.end = self.begin, self.end
