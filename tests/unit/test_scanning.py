"""Scans in chunks, with and without a transaction's own writes, against the same thing done at once."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shuffle.statestore.client import scan
from shuffle.statestore.client.scan import Chunk, FetchChunk, overlay_writes, scan_chunks, split_ranges
from shuffle.statestore.key_range import KeyRange

KEYS = st.binary(max_size=2)


def fetch_from(stored: dict[bytes, bytes], reverse: bool, requested: list[int] | None = None) -> FetchChunk:
    def fetch(begin: bytes, end: bytes | None, rows_max: int) -> Chunk:
        if requested is not None:
            requested.append(rows_max)
        key_range = KeyRange(begin, end)
        keys = sorted((key for key in stored if key_range.contains(key)), reverse=reverse)[:rows_max]
        return pa.array(keys, pa.binary()), pa.array([stored[key] for key in keys], pa.binary())

    return fetch


def scanned(
    fetch: FetchChunk, key_range: KeyRange, limit: int | None, reverse: bool
) -> tuple[list[tuple[bytes, bytes]], list[KeyRange]]:
    seen: list[KeyRange] = []
    pairs = [
        pair
        for keys, values in scan_chunks(fetch, key_range, limit, reverse, seen.append)
        for pair in zip(keys.to_pylist(), values.to_pylist(), strict=True)
    ]
    return pairs, seen


@pytest.mark.parametrize("reverse", [False, True])
def test_first_chunk_is_small_and_no_chunk_exceeds_the_limit(reverse: bool) -> None:
    stored = {b"%05d" % n: b"" for n in range(20_000)}
    requested: list[int] = []
    pairs, _ = scanned(fetch_from(stored, reverse, requested), KeyRange(b"", None), 18_000, reverse)
    assert [key for key, _ in pairs] == sorted(stored, reverse=reverse)[:18_000]
    assert requested == [scan.FIRST_SCAN_ROWS, scan.SCAN_ROWS_MAX, 18_000 - 1_024 - 16_384]


def test_limit_of_nothing_asks_nothing() -> None:
    requested: list[int] = []
    assert scanned(fetch_from({b"a": b""}, False, requested), KeyRange(b"", None), 0, False) == ([], [])
    assert requested == []


@given(
    stored=st.dictionaries(KEYS, st.just(b"s"), max_size=12),
    written=st.dictionaries(KEYS, st.none() | st.just(b"w"), max_size=8),
    begin=KEYS,
    end=st.none() | KEYS,
    limit=st.none() | st.integers(0, 8),
    reverse=st.booleans(),
    chunk=st.integers(1, 4),
)
def test_own_writes_lie_over_what_is_stored(
    stored: dict[bytes, bytes],
    written: dict[bytes, bytes | None],
    begin: bytes,
    end: bytes | None,
    limit: int | None,
    reverse: bool,
    chunk: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "FIRST_SCAN_ROWS", chunk)
        patch.setattr(scan, "SCAN_ROWS_MAX", chunk + 1)
        fetch = (
            overlay_writes(fetch_from(stored, reverse), written, reverse) if written else fetch_from(stored, reverse)
        )
        pairs, seen = scanned(fetch, KeyRange(begin, end), limit, reverse)
    both = {**stored, **written}
    key_range = KeyRange(begin, end)
    expected = sorted(
        ((key, value) for key, value in both.items() if value is not None and key_range.contains(key)), reverse=reverse
    )
    assert pairs == expected[:limit]
    # What was read is remembered: a key inserted between two rows that came out would have been seen.
    if limit is None or limit > len(expected):
        assert all(any(part.contains(key) for part in seen) for key in [*stored, *written] if key_range.contains(key))
    elif limit:
        last = pairs[-1][0]
        between = KeyRange(last, end) if reverse else KeyRange(begin, last + b"\0")
        assert all(any(part.contains(key) for part in seen) for key in stored if between.contains(key))
    assert all(part.begin >= begin for part in seen)


@given(stored=st.sets(st.binary(max_size=6), max_size=40), parts=st.integers(1, 8))
def test_pieces_of_a_table_have_all_of_its_rows_once(stored: set[bytes], parts: int) -> None:
    rows = dict.fromkeys(stored, b"")

    def find(backwards: bool, begin: bytes, end: bytes | None) -> pa.BinaryArray:
        return fetch_from(rows, backwards)(begin, end, 1)[0]

    pieces = split_ranges(find, [KeyRange(b"", None)], parts)
    keys_by_piece = [sorted(key for key in stored if piece.contains(key)) for piece in pieces]
    assert [key for piece in keys_by_piece for key in piece] == sorted(stored)
    assert all(keys_by_piece)
