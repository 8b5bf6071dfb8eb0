"""Rows of a table in memory: versions, reads of earlier ones, blocks as bytes, and the order of keys."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import CorruptData
from shuffle.statestore.codec.arrow_bytes import sort_order
from shuffle.statestore.codec.byte_rows import ByteRows
from shuffle.statestore.codec.row_block import BlockBody, decode_block
from shuffle.statestore.engine.row_log import LogView, RowLog

Rows = list[tuple[bytes, bytes | None]]


def arrays(rows: Rows) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    return pa.array([key for key, _ in rows], pa.binary()), pa.array([value for _, value in rows], pa.binary())


def random_rows(rng: random.Random, even: bool) -> Rows:
    def key() -> bytes:
        return b"k%02d" % rng.randrange(30) if even else b"k" * rng.randrange(1, 12)

    def value() -> bytes | None:
        return (
            None if rng.random() < 0.2 else b"v%02d" % rng.randrange(100) if even else rng.randbytes(rng.randrange(5))
        )

    return [(key(), value()) for _ in range(rng.randint(1, 30))]


def view_of(log: RowLog, end: int) -> LogView:
    return LogView(log, end, contextlib.nullcontext(), base_is_empty=False)


@pytest.mark.parametrize("seed", range(60))
def test_every_version_stays_readable_while_rows_are_added_and_cut(seed: int) -> None:
    rng = random.Random(seed)
    log, history, seen = RowLog(3), Rows(), [0]
    for _ in range(rng.randint(1, 12)):
        added = random_rows(rng, even=seed % 2 == 0)
        log.append(*arrays(added))
        history += added
        if rng.random() < 0.2:
            kept = rng.randint(max(seen), len(history))
            log.cut(kept)
            del history[kept:]
        seen.append(len(history))
        end = rng.choice(seen)
        expected = dict(history[:end])
        searched = sorted({key for key, _ in history} | {b"absent"})
        values, missing = view_of(log, end).get(pa.array(searched, pa.binary()))
        assert values.to_pylist() == [expected.get(key) for key in searched]
        assert missing.tolist() == [key not in expected for key in searched]
        view = view_of(log, end)
        keys, values = view.take(view.in_order())
        assert list(zip(keys.to_pylist(), values.to_pylist(), strict=True)) == sorted(expected.items())
        since = rng.randint(0, len(history))
        changed = {key for key, _ in history[since:]}
        assert all(log.has_since(since, pa.array([key], pa.binary())) == (key in changed) for key in searched)


def test_rows_are_cut_into_pieces_by_count_and_by_bytes() -> None:
    log = RowLog(0)
    log.append(*arrays([(b"k%d" % number, bytes(number % 7)) for number in range(100)]))
    rows = np.arange(100)
    for rows_max, bytes_max in ((7, 1 << 20), (1_000, 20), (1, 1), (1_000, 1 << 20)):
        pieces = log.split(rows, rows_max, bytes_max)
        assert np.concatenate(pieces).tolist() == rows.tolist()
        for piece in pieces:
            assert len(piece) <= rows_max
            keys, values = log.take(piece)
            assert len(piece) == 1 or sum(map(len, keys.to_pylist() + values.to_pylist())) <= bytes_max
    assert [key for keys, _ in log.pieces(30, 60) for key in keys.to_pylist()] == [b"k%d" % n for n in range(30, 60)]


@pytest.mark.parametrize("seed", range(60))
def test_block_is_read_as_it_was_written(seed: int) -> None:
    rng = random.Random(seed)
    rows = [row for _ in range(rng.choice([1, 3, 100])) for row in random_rows(rng, even=seed % 2 == 0)]
    keys, values = arrays([(b"before", b"x"), *rows, (b"after", None)])
    body = BlockBody(keys.slice(1, len(rows)), values.slice(1, len(rows)))
    stored = body.encode(9)
    assert len(stored) == body.size_bytes
    assert len(stored) % 8 == 0
    block = decode_block(pa.py_buffer(stored), "here")
    assert block.version == 9
    for column in (block.keys, block.values):
        column.validate(full=True)
    assert list(zip(block.keys.to_pylist(), block.values.to_pylist(), strict=True)) == rows


def test_rows_that_resemble_each_other_take_little_space() -> None:
    keys = pa.array([b"customer-%011d" % number for number in range(0, 50_000, 7)], pa.binary())
    values = pa.array([number.to_bytes(8, "little") for number in range(len(keys))], pa.binary())
    assert BlockBody(keys, values).size_bytes < 6 * len(keys)


@pytest.mark.parametrize("seed", range(300))
def test_damaged_block_is_an_error_or_still_a_block(seed: int) -> None:
    """Checksums are checked before this; what gets past them must not crash a process."""
    rng = random.Random(seed)
    stored = bytearray(BlockBody(*arrays(random_rows(rng, even=seed % 2 == 0))).encode(1))
    if seed % 3:
        stored[rng.randrange(len(stored))] ^= 1 << rng.randrange(8)
    else:
        del stored[rng.randrange(len(stored)) :]
    with contextlib.suppress(CorruptData):
        block = decode_block(pa.py_buffer(bytes(stored)), "segment 7")
        assert len(block.keys) == len(block.values)
        block.keys.validate(full=True)
        block.values.validate(full=True)


def test_error_of_a_damaged_block_names_its_place() -> None:
    with pytest.raises(CorruptData, match="segment 7"):
        decode_block(pa.py_buffer(b"no block" * 9), "segment 7")


@pytest.mark.parametrize("seed", range(60))
def test_byte_rows_are_taken_compared_and_cut(seed: int) -> None:
    rng = random.Random(seed)
    rows, expected = ByteRows(), list[Any]()
    for _ in range(rng.randint(1, 6)):
        added = [value for _, value in random_rows(rng, even=rng.random() < 0.7)]
        rows.extend(pa.array([b"x", *added], pa.binary()).slice(1))
        expected += added
        if rng.random() < 0.3:
            kept = rng.randint(0, len(expected))
            rows.cut(kept)
            del expected[kept:]
    numbers = np.array([rng.randrange(len(expected)) for _ in range(40 if expected else 0)], np.int64)
    assert rows.take(numbers).to_pylist() == [expected[number] for number in numbers]
    assert rows.slice(0, len(expected)).to_pylist() == expected
    there = numbers[[expected[number] is not None for number in numbers]] if len(numbers) else numbers
    others = pa.array([b"v01", *(expected[number] for number in there)], pa.binary())
    assert rows.equal(there, others, np.arange(1, len(there) + 1)).all()
    same = rows.equal(there, others, np.zeros(len(there), np.int64)).tolist()
    assert same == [expected[number] == b"v01" for number in there]


@pytest.mark.parametrize("width", [0, 1, 8, 13, None])
def test_sort_order_is_that_of_bytes(width: int | None) -> None:
    rng = random.Random(width)
    keys = [rng.choice([b"", b"ab"]) + rng.randbytes(rng.randrange(4) if width is None else width) for _ in range(300)]
    if width is not None:
        keys = [key[-width:] if width else b"" for key in keys]
    order = sort_order(pa.array(keys, pa.binary())).tolist()
    assert order == sorted(range(len(keys)), key=lambda number: (keys[number], number))
