"""Where the rows of a queue are that a reader asks for."""

from __future__ import annotations

from shuffle.errors import OutOfRange
from shuffle.statestore.codec.segment import RecordIndex
from shuffle.statestore.engine.ordered_table import Partition
from shuffle.statestore.engine.storage import Segments
from shuffle.statestore.store import Span

RECORDS_MAX = 4096
"""The most records of one read: the end of each is in the header of the response, which is limited to 64 KiB."""


def locate_records(
    partition: Partition, queue: str, segments: Segments, begin: int, max_rows: int, max_bytes: int
) -> Span | None:
    """The records that hold the rows from ``begin`` on, of one segment; None at the end of the partition."""
    if not partition.begin <= begin <= partition.end:
        raise OutOfRange(
            f"queue {queue!r}, partition {partition.index}: position {begin} is not in {partition.begin} to "
            f"{partition.end}" + (": these rows were trimmed" if begin < partition.begin else ""),
            queue=queue,
            partition=partition.index,
            begin=partition.begin,
            end=partition.end,
        )
    segment = partition.segment_of(begin)
    if segment is None:
        return None
    if segment.index is None:
        data = memoryview(segments.map(segment.name, segment.size_bytes))
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
