"""The index of keys in memory: against a dict, with good hashes and with hashes that collide."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from shuffle.statestore.codec.key_hash import hash_keys
from shuffle.statestore.codec.key_index import KeyIndex, NumpyArray

GOOD = np.uint64(0xFFFFFFFFFFFFFFFF)
POOR = np.uint64(0xF000000000000003)
"""Leaves four slots and sixteen tags, so that keys meet in their slots and share their tags."""


class _Indexed:
    """Keys in a list, their index, and a dict that says what the index must say."""

    def __init__(self, mask: np.uint64) -> None:
        self.mask = mask
        self.index = KeyIndex()
        self.keys: list[bytes] = []
        self.newest: dict[bytes, int] = {}
        self.hashes = np.zeros(0, np.uint64)

    def hash(self, keys: list[bytes]) -> NumpyArray:
        return hash_keys(pa.array(keys, pa.binary()), seed=7) & self.mask

    def same(self, searched: list[bytes]) -> object:
        def same_key(rows: NumpyArray, which: NumpyArray) -> NumpyArray:
            pairs = zip(rows.tolist(), which.tolist(), strict=True)
            return np.array([self.keys[row] == searched[number] for row, number in pairs], np.bool_)

        return same_key

    def put(self, keys: list[bytes]) -> None:
        first = len(self.keys)
        self.keys += keys
        hashes = self.hash(keys)
        self.hashes = np.concatenate([self.hashes, hashes])
        before = self.index.put(hashes, first, self.same(keys), self.hashes)  # type: ignore[arg-type]
        expected = []
        for row, key in enumerate(keys, start=first):
            expected.append(self.newest.get(key, -1))
            self.newest[key] = row
        assert before.tolist() == expected
        assert len(self.index) == len(self.newest)

    def find(self, keys: list[bytes]) -> list[int]:
        return self.index.find(self.hash(keys), self.same(keys)).tolist()  # type: ignore[arg-type,no-any-return]


@pytest.mark.parametrize("mask", [GOOD, POOR])
@pytest.mark.parametrize("seed", range(40))
def test_index_finds_the_newest_row_of_each_key(mask: np.uint64, seed: int) -> None:
    rng = random.Random(seed)
    indexed = _Indexed(mask)
    for _ in range(rng.randint(1, 6)):
        kinds = [b"k%d" % rng.randrange(40), rng.randbytes(3), rng.randbytes(17)]
        indexed.put([rng.choice(kinds) if rng.random() < 0.2 else rng.randbytes(9) for _ in range(rng.randint(1, 150))])
    searched = [*indexed.newest, *(b"absent%d" % number for number in range(20))]
    assert indexed.find(searched) == [indexed.newest.get(key, -1) for key in searched]


def test_key_that_occurs_often_in_one_call_is_chained_in_order() -> None:
    indexed = _Indexed(GOOD)
    indexed.put([b"a", b"b", b"a", b"a", b"b", b"a"])
    assert indexed.find([b"a", b"b"]) == [5, 4]


def test_hash_depends_on_every_byte_and_on_the_length() -> None:
    keys = [b"", b"\0", b"\0\0", b"a" * 8, b"a" * 9, b"a" * 16, b"a" * 15 + b"b", b"b" + b"a" * 15]
    assert len(set(hash_keys(pa.array(keys, pa.binary())).tolist())) == len(keys)
    assert hash_keys(pa.array(keys, pa.binary()), 1).tolist() != hash_keys(pa.array(keys, pa.binary()), 2).tolist()


def test_hash_is_the_same_for_even_and_uneven_neighbours_and_slices() -> None:
    keys = [b"customer-%08d" % number for number in range(50)]
    alone = hash_keys(pa.array(keys, pa.binary())).tolist()
    assert hash_keys(pa.array([*keys, b"x"], pa.binary())).tolist()[:50] == alone
    assert hash_keys(pa.array([b"first", *keys, b"last"], pa.binary()).slice(1, 50)).tolist() == alone
