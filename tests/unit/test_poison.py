"""Finding rows that user code cannot take."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffle.errors import Expired, SpecError, StoreUnavailable, UserCodeError
from shuffle.user_code.poison import (
    DEAD_LETTER_SCHEMA,
    REASON_CHARS_MAX,
    dead_letters,
    decode_row,
    is_transient,
    locate_poison,
    reason_of,
    split_rows,
)


class Attempt:
    """User code that cannot take some values, and counts how often it is called."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.calls = 0

    def __call__(self, rows: pa.Table) -> None:
        self.calls += 1
        for value in rows["n"].to_pylist():
            if value in self.bad:
                raise ValueError(f"cannot take {value}")


def numbers(count: int) -> pa.Table:
    return pa.table({"n": pa.array(range(count), pa.int64())})


@settings(deadline=None)
@given(st.integers(0, 300), st.sets(st.integers(0, 299), max_size=20))
def test_locate_poison_finds_every_bad_row_in_order_with_its_reason(count: int, bad: set[int]) -> None:
    attempt, rows = Attempt(bad), numbers(count)
    found = locate_poison(rows, attempt)
    expected = sorted(value for value in bad if value < count)
    assert [poison.row for poison in found] == expected
    assert [poison.reason for poison in found] == [f"ValueError: cannot take {value}" for value in expected]
    good, rejected = split_rows(rows, [poison.row for poison in found])
    assert rejected["n"].to_pylist() == expected
    assert good["n"].to_pylist() == [value for value in range(count) if value not in bad]
    assert attempt.calls <= 1 + 2 * len(expected) * (math.ceil(math.log2(max(count, 2))))


def test_locate_poison_with_chunked_rows() -> None:
    rows = pa.concat_tables([numbers(3), numbers(5), numbers(2)])
    found = locate_poison(rows, Attempt({1}))
    assert [poison.row for poison in found] == [1, 4, 9]
    assert split_rows(rows, [poison.row for poison in found])[1]["n"].to_pylist() == [1, 1, 1]


def test_locate_poison_when_every_row_is_bad() -> None:
    assert [poison.row for poison in locate_poison(numbers(50), Attempt(set(range(50))))] == list(range(50))


def test_locate_poison_gives_up_when_there_are_too_many() -> None:
    with pytest.raises(UserCodeError, match="not like a few bad rows"):
        locate_poison(numbers(1000), Attempt(set(range(1000))), attempts_max=100)


def test_locate_poison_does_not_blame_a_row_when_only_the_whole_fails() -> None:
    def attempt(rows: pa.Table) -> None:
        if rows.num_rows > 5:
            raise OverflowError("too much at once")

    with pytest.raises(UserCodeError, match="no row of it fails alone: OverflowError: too much at once"):
        locate_poison(numbers(20), attempt)


def test_locate_poison_does_not_blame_a_row_when_the_store_is_away() -> None:
    def attempt(rows: pa.Table) -> None:
        try:
            raise StoreUnavailable("nobody at the door")
        except StoreUnavailable as error:
            raise RuntimeError("lookup failed") from error

    with pytest.raises(RuntimeError, match="lookup failed"):
        locate_poison(numbers(4), attempt)


def test_locate_poison_does_not_blame_a_row_for_a_mistake_in_the_spec() -> None:
    def attempt(rows: pa.Table) -> None:
        raise SpecError("output: is missing")

    with pytest.raises(SpecError, match="output: is missing"):
        locate_poison(numbers(4), attempt)


def test_locate_poison_when_the_failure_went_away() -> None:
    assert locate_poison(numbers(4), Attempt(set())) == []


def test_is_transient_follows_causes_and_contexts_but_not_suppressed_ones() -> None:
    during = ValueError("mine")
    during.__context__ = Expired("too late")
    assert is_transient(during)
    during.__suppress_context__ = True
    assert not is_transient(during)
    during.__cause__ = StoreUnavailable("away")
    assert is_transient(during)
    assert not is_transient(ValueError("mine"))


def test_reason_is_cut_to_its_limit() -> None:
    assert reason_of(KeyError()) == "KeyError"
    assert len(reason_of(ValueError("x" * 10_000))) == REASON_CHARS_MAX


def test_dead_letters_hold_rows_of_any_schema() -> None:
    rows = pa.table({"a": ["x", "y"], "b": pa.array([[1, 2], None], pa.list_(pa.int8()))})
    table = dead_letters(
        processor="activity", role="reducer", worker=3, mappers=[0, 2], positions=[7, 9], reasons=["r", "s"], rows=rows
    )
    assert table.schema == DEAD_LETTER_SCHEMA
    assert table.drop_columns(["row"]).to_pylist() == [
        {"processor": "activity", "role": "reducer", "worker": 3, "mapper": 0, "position": 7, "reason": "r"},
        {"processor": "activity", "role": "reducer", "worker": 3, "mapper": 2, "position": 9, "reason": "s"},
    ]
    assert pa.concat_tables(decode_row(row) for row in table["row"].to_pylist()) == rows


def test_dead_letters_refuse_sequences_of_other_lengths() -> None:
    with pytest.raises(ValueError, match="2 rows, 1 mappers"):
        dead_letters(
            processor="p", role="mapper", worker=0, mappers=[0], positions=[1, 2], reasons=["a", "b"], rows=numbers(2)
        )


def test_split_rows_keeps_order_and_schema() -> None:
    good, bad = split_rows(numbers(5), [3, 0])
    assert (good["n"].to_pylist(), bad["n"].to_pylist()) == ([1, 2, 4], [0, 3])
    good, bad = split_rows(numbers(2), [])
    assert good.num_rows == 2
    assert bad.schema == good.schema


def test_locate_poison_of_no_rows() -> None:
    assert locate_poison(numbers(0), Attempt({0})) == []
