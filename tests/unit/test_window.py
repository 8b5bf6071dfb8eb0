from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from shuffle.ids import InputIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.bucket import Bucket
from shuffle.mapper.window import ENTRY_OVERHEAD_BYTES, EntryPart, Window, WindowEntry


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int64())], names=["v"])


def entry(input_begin: int, shuffle_begin: int, rows: int, token: bytes = b"t") -> WindowEntry:
    return WindowEntry(
        InputIndex(input_begin),
        InputIndex(input_begin + rows),
        ShuffleIndex(shuffle_begin),
        ShuffleIndex(shuffle_begin + rows),
        Token(token),
    )


def add(one: WindowEntry, reducer: int, row_offsets: list[int]) -> EntryPart:
    return one.add_part(ReducerIndex(reducer), batch(*row_offsets), np.array(row_offsets, np.uint32))


def test_part_maps_places_to_shuffle_indexes() -> None:
    part = add(entry(0, 100, 10), 0, [1, 4, 9])
    assert (part.first_row_index, part.last_row_index) == (101, 109)
    assert [part.row_index_at(row) for row in range(3)] == [101, 104, 109]
    assert [part.row_after(index) for index in (0, 100, 101, 103, 104, 108, 109, 500)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_part_commit_counts_each_row_once() -> None:
    part = add(entry(0, 0, 10), 0, [1, 4, 9])
    assert part.commit(0) == 0
    assert part.commit(4) == 2
    assert part.commit(4) == 0
    assert part.commit(2) == 0, "a commit never takes rows back"
    assert part.rows == 1
    assert part.commit(9) == 1
    assert part.is_committed


def test_window_counts_whole_buffers_until_a_part_is_done() -> None:
    window = Window()
    first = entry(0, 0, 4)
    part = add(first, 0, [0, 1, 2, 3])
    window.push(first)
    full = window.nbytes
    assert full == part.nbytes + ENTRY_OVERHEAD_BYTES
    assert window.rows == 4
    window.commit(part, 2)
    assert (window.nbytes, window.rows) == (full, 1), "a slice keeps the whole buffer, so it is counted"
    window.commit(part, 3)
    assert (window.nbytes, window.rows) == (ENTRY_OVERHEAD_BYTES, 0)
    assert part.batch is None


def test_part_counts_the_buffer_it_was_sliced_from() -> None:
    large = batch(*range(10_000))
    one = entry(0, 0, 1)
    part = one.add_part(ReducerIndex(0), large.slice(5, 1), np.array([0], np.uint32))
    assert part.nbytes >= large.nbytes


def test_front_entries_without_pointers_are_trimmed_in_order() -> None:
    window = Window()
    buckets = [Bucket(ReducerIndex(0)), Bucket(ReducerIndex(1))]
    first, second = entry(0, 0, 2, b"1"), entry(2, 2, 2, b"2")
    for one, row_offsets in ((first, ([0], [1])), (second, ([0], [1]))):
        parts = [add(one, reducer, list(row_offsets[reducer])) for reducer in (0, 1)]
        window.push(one)
        for part in parts:
            buckets[part.reducer_index].push(part)
    assert (first.pointer_count, second.pointer_count) == (2, 0)
    buckets[0].commit(ShuffleIndex(2), window)
    assert (first.pointer_count, second.pointer_count) == (1, 0)
    assert window.retire_front() == []
    buckets[1].commit(ShuffleIndex(1), window)
    assert (first.pointer_count, second.pointer_count) == (0, 1)
    assert window.retire_front() == [first]
    assert window.first_entry_index == 1
    buckets[1].commit(ShuffleIndex(3), window)
    assert window.retire_front() == [second]
    assert (window.nbytes, window.rows, len(window)) == (0, 0, 0)


def test_entry_of_no_rows_lengthens_the_one_before_it() -> None:
    window = Window()
    first = entry(0, 0, 1)
    add(first, 0, [0])
    window.push(first)
    nbytes = window.nbytes
    for begin in range(1, 1000):
        window.push(
            WindowEntry(InputIndex(begin), InputIndex(begin + 1), ShuffleIndex(1), ShuffleIndex(1), Token(b"x"))
        )
    assert len(window) == 1
    assert window.nbytes == nbytes
    assert (first.input_end, first.shuffle_end, first.token_after) == (1000, 1, b"x")


def test_window_refuses_a_hole_in_the_numbering() -> None:
    window = Window()
    first = entry(0, 0, 1)
    add(first, 0, [0])
    window.push(first)
    with pytest.raises(AssertionError):
        window.push(entry(2, 2, 1))
