from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from shuffle.ids import InputIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.bucket import Bucket
from shuffle.mapper.rows import fit
from shuffle.mapper.window import Window, WindowEntry


def strings(*values: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.string())], names=["s"])


def filled(*entries: dict[int, str]) -> tuple[Window, Bucket]:
    """A window and bucket 0; each entry is given as {place: value} among ten rows."""
    window, bucket = Window(), Bucket(ReducerIndex(0))
    for number, rows in enumerate(entries):
        begin, end = number * 10, number * 10 + 10
        entry = WindowEntry(InputIndex(begin), InputIndex(end), ShuffleIndex(begin), ShuffleIndex(end), Token(b""))
        part = entry.add_part(ReducerIndex(0), strings(*rows.values()), np.array(list(rows), np.uint32))
        window.push(entry)
        bucket.push(part)
    return window, bucket


def served(
    bucket: Bucket, cursor: int = -1, to: int | None = None, rows: int = 100, nbytes: int = 1 << 20
) -> list[tuple[list[str], int]]:
    wanted = None if to is None else ShuffleIndex(to)
    found = bucket.rows_after(ShuffleIndex(cursor), wanted, rows, nbytes)
    return [(one.rows.column(0).to_pylist(), one.last_row_index) for one in found]


def test_rows_after_the_cursor_in_order() -> None:
    _, bucket = filled({0: "a", 5: "b"}, {1: "c"}, {9: "d"})
    assert served(bucket) == [(["a", "b"], 5), (["c"], 11), (["d"], 29)]
    assert served(bucket, cursor=0) == [(["b"], 5), (["c"], 11), (["d"], 29)]
    assert served(bucket, cursor=4) == [(["b"], 5), (["c"], 11), (["d"], 29)]
    assert served(bucket, cursor=11) == [(["d"], 29)]
    assert served(bucket, cursor=29) == []
    assert served(bucket, cursor=10_000) == []


def test_rows_served_stay() -> None:
    _, bucket = filled({0: "a"})
    assert served(bucket) == served(bucket)


def test_row_bound_cuts_inside_a_part_without_a_hole() -> None:
    _, bucket = filled({0: "a", 5: "b"}, {1: "c"})
    assert served(bucket, rows=1) == [(["a"], 0)]
    assert served(bucket, cursor=0, rows=2) == [(["b"], 5), (["c"], 11)]


def test_end_of_range_is_inclusive() -> None:
    _, bucket = filled({0: "a", 5: "b"}, {1: "c"}, {9: "d"})
    assert served(bucket, to=4) == [(["a"], 0)]
    assert served(bucket, to=5) == [(["a", "b"], 5)]
    assert served(bucket, to=11) == [(["a", "b"], 5), (["c"], 11)]
    assert served(bucket, cursor=5, to=5) == []


def test_byte_bound_is_kept_with_rows_of_very_different_size() -> None:
    _, bucket = filled({0: "a", 1: "x" * 5000, 2: "b", 3: "c"})
    answers = []
    cursor = -1
    while answer := served(bucket, cursor=cursor, nbytes=100):
        answers.append([value for values, _ in answer for value in values])
        cursor = answer[-1][1]
    assert answers == [["a"], ["x" * 5000], ["b", "c"]], "the large row comes alone, and nothing is left out"


def test_byte_bound_does_not_jump_over_a_large_row() -> None:
    _, bucket = filled({0: "a"}, {0: "x" * 5000}, {0: "b"})
    assert served(bucket, nbytes=100) == [(["a"], 0)]


def test_commit_inside_a_part_serves_the_rest() -> None:
    window, bucket = filled({0: "a", 5: "b"}, {1: "c"})
    bucket.commit(ShuffleIndex(3), window)
    assert served(bucket) == [(["b"], 5), (["c"], 11)]
    assert (bucket.rows, bucket.freed, bucket.first_row_index) == (2, 0, 5)


def test_commit_ahead_of_all_rows_empties_the_bucket() -> None:
    window, bucket = filled({0: "a", 5: "b"}, {1: "c"})
    bucket.commit(ShuffleIndex(1000), window)
    assert (bucket.rows, len(bucket), bucket.freed, bucket.committed) == (0, 0, 11, 1000)
    assert bucket.first_row_index is None
    assert window.retire_front() != []
    assert window.rows == 0


def test_older_commit_changes_nothing() -> None:
    window, bucket = filled({0: "a", 5: "b"})
    bucket.commit(ShuffleIndex(0), window)
    bucket.commit(ShuffleIndex(-1), window)
    assert (bucket.committed, bucket.rows) == (0, 1)


def test_fit_of_few_rows_is_the_longest_prefix() -> None:
    rows = strings(*["x" * 10] * 100)
    for nbytes in (0, 1, 14, 200, 700, 10_000):
        found = fit(rows, nbytes).num_rows
        assert found == 0 or rows.slice(0, found).nbytes <= nbytes
        assert found == 100 or rows.slice(0, found + 1).nbytes > nbytes


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([30] * 20_000, id="alike"),
        pytest.param([0] * 10_000 + [1000] * 100, id="large ones last"),
        pytest.param([1000] * 100 + [0] * 10_000, id="large ones first"),
        pytest.param([5, 3000, 1, 70] * 2_500, id="mixed"),
    ],
)
def test_fit_of_many_rows_leaves_little_room(lengths: list[int]) -> None:
    rows = strings(*["x" * length for length in lengths])
    for share in (0.001, 0.1, 0.5, 0.9, 0.999):
        limit = int(rows.nbytes * share)
        found = fit(rows, limit)
        one_more = rows.slice(0, found.num_rows + 1).nbytes
        assert found.nbytes <= limit < max(one_more, found.nbytes + limit / 60)
