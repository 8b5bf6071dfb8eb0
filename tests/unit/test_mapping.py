from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shuffle.api import Mapper, PartitionedRowset, WorkerSpec
from shuffle.errors import StoreUnavailable, UserCodeError
from shuffle.formats.base import BadValue, Decoded
from shuffle.ids import Guid, InputIndex
from shuffle.mapper.core import MappedBatch
from shuffle.mapper.mapping import MapStage, cut, own, plain
from shuffle.spec.config import OnError
from shuffle.user_code.poison import decode_row

SPEC = WorkerSpec("job", 4, Guid("g"), 5, 3)
SCHEMA = pa.schema([("n", pa.int64())])


class Custom(Mapper):
    def __init__(self, function: Callable[[pa.Table], Any]) -> None:
        super().__init__({}, SPEC, None, SCHEMA)  # type: ignore[arg-type]
        self.function = function

    def map(self, rows: pa.Table) -> PartitionedRowset:
        result: PartitionedRowset = self.function(rows)
        return result


def mapping(function: Callable[[pa.Table], Any], on_error: OnError = "stop") -> MapStage:
    return MapStage(Custom(function), SPEC, on_error)


def spread(rows: pa.Table) -> PartitionedRowset:
    """Each row goes out twice; thirteens and their multiples cannot be mapped."""
    values = rows["n"].to_numpy()
    if (values % 13 == 0).any():
        raise ValueError("thirteen")
    doubled = np.repeat(values, 2)
    return PartitionedRowset(pa.table({"n": doubled}, schema=SCHEMA), doubled % 3)


def numbers(begin: int, end: int) -> pa.Table:
    return pa.table({"n": list(range(begin, end))}, schema=SCHEMA)


def ordered(mapped: MappedBatch) -> list[int]:
    """The rows of all parts in the order of their shuffle indexes."""
    rows = [
        (int(place), value)
        for part in mapped.parts
        for place, value in zip(part.row_offsets, part.rows.column("n").to_pylist(), strict=True)
    ]
    assert [place for place, _ in sorted(rows)] == list(range(mapped.rows_out))
    return [value for _, value in sorted(rows)]


def test_parts_hold_each_reducers_rows_with_their_places() -> None:
    mapped = mapping(spread).apply(numbers(1, 5), InputIndex(0))
    assert ordered(mapped) == [1, 1, 2, 2, 3, 3, 4, 4]
    for part in mapped.parts:
        assert all(value % 3 == part.reducer_index for value in part.rows.column("n").to_pylist())


def test_stop_names_the_first_bad_row_and_the_exception() -> None:
    with pytest.raises(
        UserCodeError, match=r"job: mapper 4: Custom.map failed at input row 112: ValueError: thirteen"
    ) as e:
        mapping(spread).apply(numbers(1, 50), InputIndex(100))
    assert (e.value.input_begin_row_index, e.value.input_end_row_index, e.value.worker) == (112, 113, 4)


def test_dead_letter_gives_the_rows_of_the_batch_without_the_bad_ones() -> None:
    mapped = mapping(spread, "dead_letter").apply(numbers(1, 50), InputIndex(100))
    assert ordered(mapped) == [n for n in range(1, 50) if n % 13 for _ in range(2)]
    assert mapped.dead_letters is not None
    found = mapped.dead_letters.to_pylist()
    assert [row["position"] for row in found] == [112, 125, 138]
    assert [decode_row(row["row"]).to_pylist() for row in found] == [[{"n": 13}], [{"n": 26}], [{"n": 39}]]
    assert {(row["role"], row["worker"], row["mapper"], row["reason"]) for row in found} == {
        ("mapper", 4, 4, "ValueError: thirteen")
    }


@pytest.mark.parametrize("size", [1, 7, 49])
def test_dead_letters_do_not_depend_on_the_batches(size: int) -> None:
    one = mapping(spread, "dead_letter")
    rows: list[int] = []
    positions: list[int] = []
    for begin in range(1, 50, size):
        mapped = one.apply(numbers(begin, min(begin + size, 50)), InputIndex(begin))
        rows.extend(ordered(mapped))
        positions.extend([] if mapped.dead_letters is None else mapped.dead_letters["position"].to_pylist())
    assert rows == [n for n in range(1, 50) if n % 13 for _ in range(2)]
    assert positions == [13, 26, 39]


@pytest.mark.parametrize("rows_max", [1, 7, 48, 49, 1000])
def test_rows_of_one_read_are_one_mapped_batch_however_many_calls_they_take(rows_max: int) -> None:
    calls: list[int] = []

    def counted(rows: pa.Table) -> PartitionedRowset:
        calls.append(rows.num_rows)
        return spread(rows)

    mapped = mapping(counted, "dead_letter").apply(numbers(1, 50), InputIndex(101), rows_max)
    assert max(calls) <= rows_max
    assert ordered(mapped) == [n for n in range(1, 50) if n % 13 for _ in range(2)]
    assert mapped.dead_letters is not None
    assert mapped.dead_letters["position"].to_pylist() == [113, 126, 139]


def test_bad_row_in_a_later_call_is_named_by_its_place_in_the_input() -> None:
    with pytest.raises(UserCodeError, match="failed at input row 112"):
        mapping(spread).apply(numbers(1, 50), InputIndex(100), 5)


def test_batch_that_fails_only_as_a_whole_blames_no_row() -> None:
    def fails_when_large(rows: pa.Table) -> PartitionedRowset:
        if rows.num_rows > 3:
            raise RuntimeError("too many")
        return spread(rows)

    for on_error in ("stop", "dead_letter"):
        with pytest.raises(UserCodeError, match=r"input rows 10 to 18.*no row of it fails alone"):
            mapping(fails_when_large, on_error).apply(numbers(1, 10), InputIndex(10))


def test_store_that_is_away_is_not_a_poison_row() -> None:
    def asks_the_store(rows: pa.Table) -> PartitionedRowset:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        mapping(asks_the_store, "dead_letter").apply(numbers(0, 5), InputIndex(0))


def test_reducer_that_does_not_exist_is_the_row_s_fault() -> None:
    def wrong(rows: pa.Table) -> PartitionedRowset:
        return PartitionedRowset(rows, rows["n"].to_numpy())

    what = r"input row 3: BadInput: Custom.map sent row 0 of its result to reducer 3, but the reducers go from 0 to 2"
    with pytest.raises(UserCodeError, match=what):
        mapping(wrong).apply(numbers(0, 4), InputIndex(0))


def test_result_of_the_wrong_type() -> None:
    with pytest.raises(UserCodeError, match="must return a PartitionedRowset, not Table"):
        mapping(lambda rows: rows, "dead_letter").apply(numbers(0, 4), InputIndex(0))


def test_schema_that_changes_between_batches_is_refused_with_the_column() -> None:
    def inferred(rows: pa.Table) -> PartitionedRowset:
        values = [None if n < 10 else str(n) for n in rows["n"].to_pylist()]
        return PartitionedRowset(pa.table({"s": values}), np.zeros(rows.num_rows, np.int32))

    one = mapping(inferred)
    one.apply(numbers(0, 3), InputIndex(0))
    with pytest.raises(UserCodeError, match="s: null before, string now"):
        one.apply(numbers(20, 23), InputIndex(3))


def test_metadata_that_changes_between_batches_is_no_other_schema() -> None:
    def marked(rows: pa.Table) -> PartitionedRowset:
        return PartitionedRowset(
            rows.replace_schema_metadata({"first": str(rows["n"][0])}), np.zeros(rows.num_rows, int)
        )

    one = mapping(marked)
    first = one.apply(numbers(0, 3), InputIndex(0))
    second = one.apply(numbers(3, 6), InputIndex(3))
    assert first.parts[0].rows.schema.equals(second.parts[0].rows.schema, check_metadata=True)


def test_part_of_a_large_batch_does_not_keep_all_of_it() -> None:
    rows = pa.table({"n": np.arange(1_000_000)})
    indexes = np.zeros(1_000_000, np.int64)
    indexes[5] = 1
    small = cut(rows, indexes, 2)[1]
    assert small.rows.get_total_buffer_size() < 1000
    large = rows.to_batches()[0]
    assert own(large.slice(7, 3)).to_pylist() == large.slice(7, 3).to_pylist()
    assert own(large.slice(7, 3)).get_total_buffer_size() < 1000
    assert own(large) is large


def test_dictionaries_become_plain_columns() -> None:
    rows = pa.table({"a": [1, 2], "s": pa.array(["x", "y"]).dictionary_encode()})
    assert plain(rows).to_pylist() == rows.to_pylist()
    assert plain(rows).schema == pa.schema([("a", pa.int64()), ("s", pa.string())])


def test_views_become_plain_columns() -> None:
    rows = pa.table({"s": pa.array(["x", None], pa.string_view()), "b": pa.array([b"y", b""], pa.binary_view())})
    assert plain(rows).to_pylist() == rows.to_pylist()
    assert plain(rows).schema == pa.schema([("s", pa.string()), ("b", pa.binary())])


# Rows that cannot be decoded -----------------------------------------------------------------------------------------


def decoding(on_error: OnError = "stop") -> MapStage:
    """Rows of the input are texts; each becomes as many rows as it has numbers, and those with letters are bad."""

    def decode(rows: pa.Table) -> Decoded:
        numbers: list[int] = []
        of: list[int] = []
        bad = []
        for index, text in enumerate(rows["text"].to_pylist()):
            if text.isalpha():
                bad.append(BadValue(index, f"{text} is no number"))
                continue
            numbers += [int(part) for part in text.split()]
            of += [index] * len(text.split())
        return Decoded(pa.table({"n": numbers}, schema=SCHEMA), bad, np.array(of, dtype=np.int64))

    return MapStage(Custom(spread), SPEC, on_error, decode=decode)


def texts(*values: str) -> pa.Table:
    return pa.table({"text": list(values)})


def test_decoded_rows_are_mapped() -> None:
    assert ordered(decoding().apply(texts("1 2", "3"), InputIndex(0))) == [1, 1, 2, 2, 3, 3]


def test_row_that_cannot_be_decoded_stops_the_mapper_at_its_position() -> None:
    with pytest.raises(UserCodeError, match="mapper 4: input row 12: x is no number") as caught:
        decoding().apply(texts("1", "2", "x", "y"), InputIndex(10))
    assert caught.value.input_begin_row_index == 12


def test_rows_that_cannot_be_decoded_or_mapped_are_dead_letters_with_their_positions() -> None:
    for rows_max in (None, 2):
        mapped = decoding("dead_letter").apply(texts("1 2", "x", "3 13", "4", "yz"), InputIndex(10), rows_max)
        assert ordered(mapped) == [1, 1, 2, 2, 3, 3, 4, 4]
        assert mapped.dead_letters is not None
        letters = sorted(mapped.dead_letters.to_pylist(), key=lambda letter: letter["position"])
        assert [letter["position"] for letter in letters] == [11, 12, 14]
        assert decode_row(letters[0]["row"]).to_pylist() == [{"text": "x"}], "the row as it is in the input"
        assert decode_row(letters[1]["row"]).to_pylist() == [{"n": 13}]
        assert "yz is no number" in letters[2]["reason"]
