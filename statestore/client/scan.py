"""Scans in chunks: each chunk is one request to the store, so that neither side holds more than a chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa

from shuffle.statestore.key_range import KeyRange

SCAN_ROWS_MAX = 16_384
"""The most rows of one chunk: some milliseconds of work for the store, some megabytes for the client."""

FIRST_SCAN_ROWS = 1_024
"""The rows of the first chunk. It is small, so that a person who looks at a large table sees its first rows at once."""

Chunk = tuple[pa.BinaryArray, pa.BinaryArray]
FetchChunk = Callable[[bytes, bytes | None, int], Chunk]
"""(begin, end, rows_max) -> keys and values; bound to a store, a read view, a table and a direction."""


def scan_chunks(
    fetch: FetchChunk,
    key_range: KeyRange,
    limit: int | None,
    reverse: bool,
    on_covered: Callable[[KeyRange], None] = lambda covered: None,
) -> Iterator[Chunk]:
    """The rows of a range, chunk by chunk. ``on_covered`` is called with the part of the range of each chunk."""
    begin, end = key_range.begin, key_range.end
    remaining = limit
    rows_max = FIRST_SCAN_ROWS
    while remaining is None or remaining > 0:
        keys, values = fetch(begin, end, rows_max if remaining is None else min(rows_max, remaining))
        if not len(keys):
            on_covered(KeyRange(begin, end))
            return
        last = keys[-1].as_py()
        if reverse:
            on_covered(KeyRange(last, end))
            end = last
        else:
            after = last + b"\0"
            on_covered(KeyRange(begin, after))
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
            # A full chunk ends at its last key; writes of the transaction beyond it belong to a later chunk.
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
            # This transaction has deleted every row of the chunk: read the next one.
            begin, end = (begin, low) if reverse else (high or begin, end)

    return fetch_both


def _arrays(pairs: list[tuple[bytes, bytes]]) -> Chunk:
    return (
        pa.array([key for key, _ in pairs], pa.binary()),
        pa.array([value for _, value in pairs], pa.binary()),
    )


FindKeys = Callable[[bool, bytes, bytes | None], pa.BinaryArray]
"""(backwards, begin, end) -> the first key of a range, or the last one; an empty array if the range is empty."""

_POINT_BYTES = 8
"""The number of bytes after the common prefix of two keys from which the midpoint between them is computed."""


def split_ranges(find: FindKeys, ranges: Sequence[KeyRange], parts: int) -> list[KeyRange]:
    """``ranges`` in pieces, in order, each with at least one row; they are halved in turn until there are ``parts``."""
    pieces = deque(piece for key_range in ranges if (piece := _shrink(find, key_range)) is not None)
    done: list[KeyRange] = []
    while pieces and len(pieces) + len(done) < parts:
        piece = pieces.popleft()
        halves = _split_in_half(find, piece)
        if halves is None:
            done.append(piece)
        else:
            pieces.extend(halves)
    return sorted([*done, *pieces], key=lambda piece: piece.begin)


def _shrink(find: FindKeys, key_range: KeyRange) -> KeyRange | None:
    """The part of the range from its first key to just after its last; None if it has no keys."""
    first, last = find(False, key_range.begin, key_range.end), find(True, key_range.begin, key_range.end)
    if not len(first) or not len(last):
        return None
    return KeyRange(first[0].as_py(), last[0].as_py() + b"\0")


def _split_in_half(find: FindKeys, piece: KeyRange) -> tuple[KeyRange, KeyRange] | None:
    assert piece.end is not None
    middle = _midpoint(piece.begin, piece.end)
    # The second half begins at the first key after the midpoint; the first half ends at the last key before it.
    after = _shrink(find, KeyRange(middle, piece.end))
    before = _shrink(find, KeyRange(piece.begin, middle))
    if after is None or before is None:
        return None
    return before, after


def _midpoint(begin: bytes, end: bytes) -> bytes:
    """Bytes about half way between two keys."""
    common = 0
    while common < min(len(begin), len(end)) and begin[common] == end[common]:
        common += 1
    low = int.from_bytes(begin[common : common + _POINT_BYTES].ljust(_POINT_BYTES, b"\0"), "big")
    high = int.from_bytes(end[common : common + _POINT_BYTES].ljust(_POINT_BYTES, b"\0"), "big")
    return begin[:common] + ((low + high + 1) // 2).to_bytes(_POINT_BYTES, "big")
