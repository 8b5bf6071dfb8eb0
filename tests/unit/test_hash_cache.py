"""Hashes that are found by value are those that would have been computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from shuffle.partition import hash_cache, key_groups
from shuffle.partition.hash_cache import ROWS_MIN, HashCache, cacheable
from shuffle.partition.xxhash64 import xxhash64

pytestmark = pytest.mark.usefixtures("kernels")

ROWS = 2 * ROWS_MIN


def column(rng: np.random.Generator, kind: pa.DataType, distinct: int, rows: int = ROWS) -> pa.Array:
    """Values of ``kind``, of which some are null; a slice, as columns often are."""
    numbers = rng.integers(0, distinct, rows + 3)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        values = pa.array([f"{'x' * (n % 40)}{n}" for n in numbers.tolist()]).cast(kind)
    else:
        values = pa.array(numbers % 100, pa.int64() if pa.types.is_timestamp(kind) else pa.int32()).cast(kind)
    nulls = pa.array(numbers % 13 == 0)
    return pc.if_else(nulls, pa.scalar(None, kind), values).slice(3)


def found(cache: HashCache, columns: list[pa.Array]) -> Any:
    answer = cache.find(columns)
    return None if answer is None else answer[0].take(answer[1])


@pytest.mark.parametrize(
    "kinds",
    [
        [pa.string()],
        [pa.string(), pa.string()],
        [pa.int32(), pa.binary(), pa.uint8()],
        [pa.timestamp("ms"), pa.date32()],
    ],
)
def test_what_is_found_is_the_hash(kinds: list[pa.DataType]) -> None:
    rng = np.random.default_rng(1)
    cache = HashCache()
    for distinct in (3, 10, 10, 12, 4):
        columns = [column(rng, kind, distinct) for kind in kinds]
        hashes = found(cache, columns)
        assert hashes is not None
        assert hashes.tolist() == xxhash64(columns).tolist()


def test_values_of_earlier_batches_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    cache = HashCache()
    columns = [column(rng, pa.string(), 50), column(rng, pa.string(), 5)]
    first = found(cache, columns)
    assert first is not None
    monkeypatch.setattr(hash_cache, "xxhash64", lambda columns: pytest.fail("hashed again"))
    again = found(cache, [each.take(pa.array(np.arange(ROWS)[::-1])) for each in columns])
    assert again is not None
    assert again.tolist() == first[::-1].tolist()


def test_keys_that_do_not_repeat_are_left_alone_for_a_while() -> None:
    rng = np.random.default_rng(3)
    cache = HashCache()
    many, few = column(rng, pa.string(), 10 * ROWS), column(rng, pa.string(), 10)
    assert cache.find([many]) is None
    assert cache.find([few]) is None, "it pauses"
    for _ in range(hash_cache._PAUSE_BATCHES):
        cache.find([few])
    assert cache.find([few]) is not None


def test_more_combinations_than_rows_can_pay_for_are_forgotten() -> None:
    rng = np.random.default_rng(4)
    cache = HashCache()
    assert cache.find([column(rng, pa.string(), 10), column(rng, pa.string(), 10)]) is not None
    assert cache.find([column(rng, pa.string(), 10), column(rng, pa.string(), 2000)]) is None
    assert cache._known is None


def test_only_types_whose_values_are_their_bytes_are_looked_up() -> None:
    kinds = [pa.float64(), pa.decimal128(10, 2), pa.list_(pa.string()), pa.dictionary(pa.int32(), pa.string())]
    assert not any(cacheable(kind) for kind in kinds)


def test_key_groups_are_the_same_with_and_without_it() -> None:
    rng = np.random.default_rng(6)
    rows = pa.table({"user": column(rng, pa.string(), 300), "cluster": column(rng, pa.string(), 5)})
    whole = key_groups(rows, ["user", "cluster"])
    small = [key_groups(rows.slice(begin, 1000), ["user", "cluster"]) for begin in range(0, ROWS, 1000)]
    assert whole.tolist() == np.concatenate(small).tolist()
