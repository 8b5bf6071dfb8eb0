"""Partitions of a queue, and what a group of commits plans for them, without files or a database."""

from __future__ import annotations

import pytest

from shuffle.errors import OutOfRange, SequenceError
from shuffle.statestore.codec.segment import RecordIndex
from shuffle.statestore.engine import ordered_table
from shuffle.statestore.engine.ordered_table import (
    PRODUCER_SEQUENCES_MAX,
    Partition,
    PartitionPlan,
    partition_prefix,
    queue_prefix,
)

HEADER_BYTES = 64
RECORD_BYTES = 100


class Rows:
    """The rows of a partition as a database would keep them."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.names = 0

    def plan(self, partition: Partition) -> PartitionPlan:
        def name(row: int) -> str:
            self.names += 1
            return f"seg-{row}-{self.names}"

        return PartitionPlan(partition, HEADER_BYTES, name)

    def commit(self, plan: PartitionPlan) -> list[str]:
        freed = [segment.name for segment in plan.freed()]
        for key, value in plan.rows():
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value
        plan.apply()
        return freed

    def reopened(self) -> Partition:
        partition = Partition(3, 7)
        partition.load(sorted(self.rows.items()))
        return partition


def shape(partition: Partition) -> list[tuple[int, int, int]]:
    return [(segment.begin, segment.end, segment.size_bytes) for segment in partition.segments]


def append(rows: Rows, partition: Partition, *counts: int) -> None:
    plan = rows.plan(partition)
    for count in counts:
        plan.append(count, RECORD_BYTES)
    rows.commit(plan)


def test_prefixes_keep_queues_and_partitions_apart() -> None:
    assert partition_prefix(1, 255) < partition_prefix(1, 256) < partition_prefix(2, 0)
    assert partition_prefix(1, 2).startswith(queue_prefix(1))
    assert not partition_prefix(256, 0).startswith(queue_prefix(1))


def test_appends_fill_one_segment_until_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_table, "SEGMENT_BYTES_MAX", HEADER_BYTES + 2 * RECORD_BYTES)
    rows, partition = Rows(), Partition(3, 7)
    append(rows, partition, 5)
    append(rows, partition, 1, 2, 4)
    assert shape(partition) == [(0, 6, 264), (6, 12, 264)]
    assert partition.end == 12
    assert [partition.segment_of(row).begin for row in (0, 5, 6, 11)] == [0, 0, 6, 6]  # type: ignore[union-attr]
    assert partition.segment_of(12) is None
    assert shape(rows.reopened()) == shape(partition)
    assert rows.reopened().end == 12


def test_plan_changes_nothing_until_it_is_applied() -> None:
    rows, partition = Rows(), Partition(3, 7)
    append(rows, partition, 5)
    plan = rows.plan(partition)
    target, first_row = plan.append(3, RECORD_BYTES)
    plan.remember("p", 1, 5, 8)
    plan.trim(4)
    assert (first_row, plan.end) == (5, 8)
    assert [(write.name, write.offset, write.create) for write in plan.file_writes()] == [
        (partition.segments[0].name, HEADER_BYTES + RECORD_BYTES, False)
    ]
    assert shape(partition) == [(0, 5, HEADER_BYTES + RECORD_BYTES)]
    assert (partition.begin, partition.end, partition.producers) == (0, 5, {})
    assert partition.segments[0].index is not None
    assert len(partition.segments[0].index) == 1
    assert target.write is not None


def test_segment_of_an_earlier_life_is_not_continued() -> None:
    """It would have to be read first; instead the next append begins another one."""
    rows = Rows()
    append(rows, Partition(3, 7), 5)
    partition = rows.reopened()
    append(rows, partition, 2)
    append(rows, partition, 2)
    assert shape(partition) == [(0, 5, 164), (5, 9, 264)]


def test_staged_file_becomes_a_segment_between_those_before_and_after_it() -> None:
    rows, partition = Rows(), Partition(3, 7)
    append(rows, partition, 5)
    plan = rows.plan(partition)
    plan.append(1, RECORD_BYTES)
    assert plan.adopt("staged", 10, 500, RecordIndex(HEADER_BYTES)) == (6, 16)
    plan.append(2, RECORD_BYTES)
    assert [write.create for write in plan.file_writes()] == [False, True]
    rows.commit(plan)
    assert shape(partition) == [(0, 6, 264), (6, 16, 500), (16, 18, 164)]
    assert partition.segments[1].name == "staged"
    assert shape(rows.reopened()) == shape(partition)
    append(rows, partition, 1)
    assert shape(partition)[-1] == (16, 19, 264)


def test_trim_frees_whole_segments_only_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_table, "SEGMENT_BYTES_MAX", HEADER_BYTES + RECORD_BYTES)
    rows, partition = Rows(), Partition(3, 7)
    append(rows, partition, 5, 5, 5)
    names = [segment.name for segment in partition.segments]
    plan = rows.plan(partition)
    plan.trim(9)
    assert rows.commit(plan) == names[:1]
    assert (partition.begin, shape(partition)[0][0]) == (9, 5)
    plan = rows.plan(partition)
    plan.trim(3)
    assert rows.commit(plan) == []
    assert partition.begin == 9
    plan = rows.plan(partition)
    plan.trim(15)
    assert rows.commit(plan) == names[1:]
    reopened = rows.reopened()
    assert (reopened.begin, reopened.end, reopened.segments) == (15, 15, [])
    append(rows, reopened, 2)
    again = rows.reopened()
    assert (again.begin, again.end, shape(again)) == (15, 17, [(15, 17, 164)])


def test_rows_appended_and_trimmed_in_one_group_leave_no_segment() -> None:
    rows, partition = Rows(), Partition(3, 7)
    plan = rows.plan(partition)
    plan.append(5, RECORD_BYTES)
    plan.trim(5)
    assert len(rows.commit(plan)) == 1
    assert partition.segments == []
    assert (rows.reopened().begin, rows.reopened().end, rows.reopened().segments) == (5, 5, [])


def test_trim_beyond_the_end_is_refused() -> None:
    plan = Rows().plan(Partition(3, 7))
    plan.append(2, RECORD_BYTES)
    with pytest.raises(OutOfRange) as caught:
        plan.trim(3)
    assert (caught.value.partition, caught.value.end) == (7, 2)


def test_producer_gets_its_old_answer_within_what_is_remembered() -> None:
    rows, partition = Rows(), Partition(3, 7)
    for sequence in range(PRODUCER_SEQUENCES_MAX + 3):
        plan = rows.plan(partition)
        assert plan.repeated("p", sequence) is None
        plan.append(1, RECORD_BYTES)
        plan.remember("p", sequence, plan.end - 1, plan.end)
        assert plan.repeated("p", sequence) == (sequence, sequence + 1), "in the same group already"
        rows.commit(plan)
    for current in (partition, rows.reopened()):
        plan = rows.plan(current)
        assert plan.repeated("p", 3) == (3, 4)
        assert plan.repeated("p", 100) is None
        assert plan.repeated("other", 0) is None
        assert plan.repeated(None, None) is None
        with pytest.raises(SequenceError, match="remembered") as caught:
            plan.repeated("p", 2)
        assert (caught.value.producer, caught.value.sequence) == ("p", 2)
