"""Key groups, their reducers, and the split of a mapped batch into buckets."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import BadInput, SchemaMismatch
from shuffle.limits import KEY_GROUPS_DEFAULT
from shuffle.partition import (
    hash_partition,
    key_group_range,
    key_groups,
    reducer_of_key_group,
    split_by_partition,
)

pytestmark = pytest.mark.usefixtures("kernels")


def log_rows(count: int) -> pa.Table:
    numbers = np.arange(count)
    return pa.table(
        {
            "number": numbers,
            "user": pa.array([None if n % 7 == 0 else f"user-{n % 101}" for n in numbers.tolist()]),
            "tags": pa.array([["a", str(n)] for n in numbers.tolist()]),
            "kind": pa.array([f"k{n % 3}" for n in numbers.tolist()]).dictionary_encode(),
        }
    ).replace_schema_metadata({"from": "test"})


@pytest.mark.parametrize(("reducers", "max_parallelism"), [(1, 1), (3, 7), (7, 7), (5, 4096), (256, 4096), (300, 1000)])
def test_reducers_own_contiguous_ranges_that_cover_every_key_group_once(reducers: int, max_parallelism: int) -> None:
    ranges = [key_group_range(reducer, reducers, max_parallelism) for reducer in range(reducers)]
    assert [group for owned in ranges for group in owned] == list(range(max_parallelism))
    for reducer, owned in enumerate(ranges):
        assert {reducer_of_key_group(group, reducers, max_parallelism) for group in owned} == {reducer}
    sizes = [len(owned) for owned in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("reducers", [1, 2, 5, 300])
def test_hash_partition_follows_the_key_groups(reducers: int) -> None:
    rows = log_rows(1000)
    groups = key_groups(rows, ["user", "number"])
    partitioned = hash_partition(rows, by=["user", "number"], reducers=reducers)
    assert partitioned.rows is rows
    expected = [reducer_of_key_group(int(group), reducers) for group in groups]
    assert partitioned.partition_indexes.tolist() == expected


def test_a_row_goes_to_the_same_reducer_however_the_rows_are_chunked() -> None:
    rows = log_rows(30_000)
    whole = key_groups(rows, ["user", "kind"]).tolist()
    few = pa.concat_tables([rows.slice(0, 12_000), rows.slice(12_000)])
    many = pa.concat_tables([rows.slice(begin, 37) for begin in range(0, 30_000, 37)])
    assert key_groups(few, ["user", "kind"]).tolist() == whole
    assert key_groups(many, ["user", "kind"]).tolist() == whole
    assert key_groups(rows.slice(0, 0), ["user"]).tolist() == []


def test_no_reducer_gets_much_more_than_its_share_of_many_keys() -> None:
    rows = pa.table({"key": np.arange(100_000)})
    counts = Counter(hash_partition(rows, ["key"], 8).partition_indexes.tolist())
    assert sorted(counts) == list(range(8))
    assert max(counts.values()) < 1.1 * 100_000 / 8


def test_misuse_is_refused_with_names() -> None:
    rows = log_rows(3)
    with pytest.raises(SchemaMismatch, match=r"no column 'usr'.*did you mean 'user'"):
        hash_partition(rows, ["usr"], 2)
    with pytest.raises(BadInput, match="a list of key columns, not 'user'"):
        hash_partition(rows, "user", 2)
    with pytest.raises(BadInput, match="5000 reducers cannot share 4096 key groups"):
        hash_partition(rows, ["user"], 5000)
    with pytest.raises(BadInput, match="0 reducers"):
        hash_partition(rows, ["user"], 0)
    maps = pa.table({"m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))})
    with pytest.raises(BadInput, match="cannot partition by column 'm'"):
        hash_partition(maps, ["m"], 2)
    with pytest.raises(BadInput, match="no reducer 4"):
        key_group_range(4, 4)
    with pytest.raises(BadInput, match="no key group 4096"):
        reducer_of_key_group(KEY_GROUPS_DEFAULT, 4)
    with pytest.raises(BadInput, match="max_parallelism"):
        key_groups(rows, ["user"], 0)


@pytest.mark.parametrize("reducers", [1, 2, 3, 4, 40, 400])
@pytest.mark.parametrize("chunk_rows", [1000, 33])
def test_split_keeps_order_schema_and_every_row(reducers: int, chunk_rows: int) -> None:
    rows = log_rows(1000)
    chunked = pa.concat_tables([rows.slice(begin, chunk_rows) for begin in range(0, 1000, chunk_rows)])
    indexes = np.random.default_rng(reducers).integers(0, reducers, 1000)
    parts = split_by_partition(chunked, indexes, reducers)
    assert len(parts) == reducers
    for reducer, (batch, positions) in enumerate(parts):
        expected = np.flatnonzero(indexes == reducer)
        assert positions.tolist() == expected.tolist()
        if batch is None:
            assert not len(expected)
            continue
        batch.validate(full=True)
        assert batch.schema.equals(rows.schema, check_metadata=True)
        assert batch.to_pylist() == rows.take(pa.array(expected)).to_pylist()


@pytest.mark.parametrize("reducers", [2, 16])
def test_dropping_one_bucket_frees_its_memory_while_others_live(reducers: int) -> None:
    rows = pa.table({"text": pa.array(["x" * 1000] * 20_000)})
    indexes = np.arange(20_000) % reducers
    before = pa.total_allocated_bytes()
    parts = split_by_partition(rows, indexes, reducers)
    kept = parts[0]
    del parts
    gc.collect()
    held = pa.total_allocated_bytes() - before
    assert kept[0] is not None
    assert held < 1.5 * rows.nbytes / reducers
    assert kept[1].base is None or kept[1].base.nbytes == kept[1].nbytes


def test_split_of_no_rows_and_of_rows_for_one_reducer() -> None:
    rows = log_rows(5)
    empty = split_by_partition(rows.slice(0, 0), np.empty(0, np.int64), 3)
    assert [(batch, len(positions)) for batch, positions in empty] == [(None, 0)] * 3
    parts = split_by_partition(rows, np.full(5, 2), 3)
    assert [batch is None for batch, _ in parts] == [True, True, False]
    assert parts[2][1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [-1, 3, 300, 2**40])
def test_split_names_the_first_row_outside_the_reducers(bad: int) -> None:
    with pytest.raises(BadInput, match=f"row 2 of its result to reducer {bad}, .* 0 to 2") as caught:
        split_by_partition(log_rows(4), np.array([0, 2, bad, bad]), 3)
    assert caught.value.fields == {"row": 2, "index": bad}
