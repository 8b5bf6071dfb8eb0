"""Scans in chunks: each is one question to the store, so that neither side holds more than a chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa

from shuffle.statestore.key_range import KeyRange

SCAN_ROWS_MAX = 16_384
"""Rows of one chunk: some milliseconds of work for the store, some megabytes for the client."""

FIRST_SCAN_ROWS = 1_024
"""The first chunk is small, so that a person who looks at a large table sees its first rows at once."""

Chunk = tuple[pa.BinaryArray, pa.BinaryArray]
FetchChunk = Callable[[bytes, bytes | None, int], Chunk]
"""(begin, end, rows_max) -> keys and values; bound to a store, a moment, a table and a direction."""


def scan_chunks(
    fetch: FetchChunk,
    wanted: KeyRange,
    limit: int | None,
    reverse: bool,
    saw: Callable[[KeyRange], None] = lambda seen: None,
) -> Iterator[Chunk]:
    """The rows of a range, chunk by chunk. ``saw`` is told which part of the range each chunk has covered."""
    begin, end = wanted.begin, wanted.end
    remaining = limit
    rows_max = FIRST_SCAN_ROWS
    while remaining is None or remaining > 0:
        keys, values = fetch(begin, end, rows_max if remaining is None else min(rows_max, remaining))
        if not len(keys):
            saw(KeyRange(begin, end))
            return
        last = keys[-1].as_py()
        if reverse:
            saw(KeyRange(last, end))
            end = last
        else:
            after = last + b"\0"
            saw(KeyRange(begin, after))
            begin = after
        if remaining is not None:
            remaining -= len(keys)
        rows_max = SCAN_ROWS_MAX
        yield keys, values


def overlay_writes(fetch: FetchChunk, written: Mapping[bytes, bytes | None], reverse: bool) -> FetchChunk:
    """``fetch`` as a transaction sees it: with its own writes over what the store has."""
    ordered = sorted(written)

    def fetch_both(begin: bytes, end: bytes | None, rows_max: int) -> Chunk:
        while True:
            keys, values = fetch(begin, end, rows_max)
            stored = dict(zip(keys.to_pylist(), values.to_pylist(), strict=True))
            # A full chunk ends at its last key; own writes beyond it belong to a later chunk.
            low, high = begin, end
            if stored and reverse:
                low = keys[-1].as_py()
            elif stored:
                high = keys[-1].as_py() + b"\0"
            covered = KeyRange(low, high)
            for key in ordered:
                if covered.contains(key):
                    stored[key] = written[key]
            merged = sorted(((key, value) for key, value in stored.items() if value is not None), reverse=reverse)[
                :rows_max
            ]
            if merged or not len(keys):
                return _arrays(merged)
            # Every row of the chunk was deleted by this transaction: look at what follows.
            begin, end = (begin, low) if reverse else (high or begin, end)

    return fetch_both


def _arrays(pairs: list[tuple[bytes, bytes]]) -> Chunk:
    return (
        pa.array([key for key, _ in pairs], pa.binary()),
        pa.array([value for _, value in pairs], pa.binary()),
    )


FindKeys = Callable[[bool, bytes, bytes | None], pa.BinaryArray]
"""(backwards, begin, end) -> the first key of a range, or the last one; none if the range is empty."""

_POINT_BYTES = 8
"""How many bytes behind the common beginning of two keys take part in finding the middle between them."""


def split_ranges(find: FindKeys, ranges: Sequence[KeyRange], parts: int) -> list[KeyRange]:
    """``ranges`` in pieces, in order, each with at least one row; they are halved in turn until there are ``parts``."""
    pieces = deque(piece for wanted in ranges if (piece := _shrunk(find, wanted)) is not None)
    done: list[KeyRange] = []
    while pieces and len(pieces) + len(done) < parts:
        piece = pieces.popleft()
        halves = _halves(find, piece)
        if halves is None:
            done.append(piece)
        else:
            pieces.extend(halves)
    return sorted([*done, *pieces], key=lambda piece: piece.begin)


def _shrunk(find: FindKeys, wanted: KeyRange) -> KeyRange | None:
    """From the first key of the range to just behind the last."""
    first, last = find(False, wanted.begin, wanted.end), find(True, wanted.begin, wanted.end)
    if not len(first) or not len(last):
        return None
    return KeyRange(first[0].as_py(), last[0].as_py() + b"\0")


def _halves(find: FindKeys, piece: KeyRange) -> tuple[KeyRange, KeyRange] | None:
    assert piece.end is not None
    middle = _middle(piece.begin, piece.end)
    # Where the second half begins is the first key there; where the first one ends is the last key before it.
    after = _shrunk(find, KeyRange(middle, piece.end))
    before = _shrunk(find, KeyRange(piece.begin, middle))
    if after is None or before is None:
        return None
    return before, after


def _middle(begin: bytes, end: bytes) -> bytes:
    """Bytes about half way between two keys."""
    common = 0
    while common < min(len(begin), len(end)) and begin[common] == end[common]:
        common += 1
    low = int.from_bytes(begin[common : common + _POINT_BYTES].ljust(_POINT_BYTES, b"\0"), "big")
    high = int.from_bytes(end[common : common + _POINT_BYTES].ljust(_POINT_BYTES, b"\0"), "big")
    return begin[:common] + ((low + high + 1) // 2).to_bytes(_POINT_BYTES, "big")
