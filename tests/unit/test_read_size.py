"""How many rows a mapper reads at once: more than one batch only while it is behind its input and ``map`` is fast."""

from __future__ import annotations

from shuffle.mapper.read_size import MAP_S_MAX, ROWS_MAX, ReadSize

FAST_S = MAP_S_MAX / 100


def test_first_read_is_one_batch() -> None:
    assert ReadSize(100).rows == 100


def test_reads_grow_while_they_are_full_up_to_a_bound_and_in_whole_batches() -> None:
    size = ReadSize(100)
    seen = []
    for _ in range(20):
        size.mapped(size.rows, size.rows, FAST_S)
        seen.append(size.rows)
    assert seen[:3] == [200, 400, 800]
    assert seen[-1] == ROWS_MAX // 100 * 100


def test_large_batches_are_read_one_at_a_time() -> None:
    size = ReadSize(100_000)
    size.mapped(100_000, 100_000, FAST_S)
    assert size.rows == 100_000


def test_read_that_is_not_full_ends_the_growth() -> None:
    size = ReadSize(100)
    for _ in range(4):
        size.mapped(size.rows, size.rows, FAST_S)
    size.mapped(size.rows, 120, FAST_S)
    assert size.rows == 200
    size.mapped(size.rows, 1, FAST_S)
    assert size.rows == 100


def test_slow_map_does_not_keep_its_first_rows_waiting_for_the_others() -> None:
    size = ReadSize(100)
    for _ in range(3):
        size.mapped(size.rows, size.rows, FAST_S)
    assert size.rows == 800
    for expected in (400, 200, 100, 100):
        size.mapped(size.rows, size.rows, 2 * MAP_S_MAX)
        assert size.rows == expected
