"""XXH64 of many rows at once, each with a seed of its own.

Rows are hashed in lock step with numpy: every step of the algorithm is one operation over a block of rows, and a step
that only some rows take (a longer string) gathers those rows first. Blocks are small enough to stay in the cache.

Where the installation has compiled kernels (``shuffle.support.native``), they hash instead, row by row, in less
time.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np

from shuffle.support.native import address_of, kernels

# Arrays of 64-bit words, of integers (offsets, lengths, indexes) and of bytes.
Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Int64Array: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Octets: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_M = 0xFFFFFFFFFFFFFFFF
_PRIME_1, _PRIME_2, _PRIME_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME_4, _PRIME_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_P1, _P2, _P3, _P4, _P5 = (np.uint64(prime) for prime in (_PRIME_1, _PRIME_2, _PRIME_3, _PRIME_4, _PRIME_5))
_SHIFT = [np.uint64(bits) for bits in range(65)]
_LOW_32 = np.uint64(0xFFFFFFFF)
_LOW_8 = np.uint64(0xFF)

_BLOCK_ROWS = 16384
"""The rows of one block: 128 KiB per array of 64-bit words, measured as best. With fewer, numpy calls cost more; with
more, arrays leave the processor's cache."""

_SCALAR_ROWS_MAX = 16
"""The most rows for which plain integers are faster than the fixed cost of the hundred numpy calls of a block."""


def _rotate(words: Words, bits: int) -> None:
    high = words >> _SHIFT[64 - bits]
    words <<= _SHIFT[bits]
    words |= high


def _finish(hashes: Words) -> None:
    hashes ^= hashes >> _SHIFT[33]
    hashes *= _P2
    hashes ^= hashes >> _SHIFT[29]
    hashes *= _P3
    hashes ^= hashes >> _SHIFT[32]


def _mix_word(hashes: Words, words: Words) -> None:
    """Folds 8 bytes into each hash. ``words`` is overwritten."""
    words *= _P2
    _rotate(words, 31)
    words *= _P1
    hashes ^= words
    _rotate(hashes, 27)
    hashes *= _P1
    hashes += _P4


def _mix_half_word(hashes: Words, halves: Words) -> None:
    """Folds 4 bytes (the low half of each word) into each hash. ``halves`` is overwritten."""
    halves *= _P1
    hashes ^= halves
    _rotate(hashes, 23)
    hashes *= _P2
    hashes += _P3


def _mix_byte(hashes: Words, octets: Words) -> None:
    """Folds one byte (the low one of each word) into each hash. ``octets`` is overwritten."""
    octets *= _P5
    hashes ^= octets
    _rotate(hashes, 11)
    hashes *= _P1


def _hash_natively(kernel: Any, values: Words, seeds: Words) -> Words:
    values, hashes = np.ascontiguousarray(values), np.array(seeds, np.uint64)
    kernel(address_of(values), len(values), address_of(hashes))
    return hashes


def hash_ints(values: Words, seeds: Words) -> Words:
    """Spark's ``hashInt``: ``values`` hold the 32 bits of each integer, zero-extended."""
    library = kernels()
    if library is not None:
        return _hash_natively(library.hash_ints, values, seeds)
    out = np.empty(len(values), np.uint64)
    for begin in range(0, len(values), _BLOCK_ROWS):
        block = slice(begin, begin + _BLOCK_ROWS)
        hashes = seeds[block] + np.uint64((_PRIME_5 + 4) & _M)
        _mix_half_word(hashes, values[block].copy())
        _finish(hashes)
        out[block] = hashes
    return out


def hash_longs(values: Words, seeds: Words) -> Words:
    """Spark's ``hashLong``: ``values`` hold the 64 bits of each integer."""
    library = kernels()
    if library is not None:
        return _hash_natively(library.hash_longs, values, seeds)
    out = np.empty(len(values), np.uint64)
    for begin in range(0, len(values), _BLOCK_ROWS):
        block = slice(begin, begin + _BLOCK_ROWS)
        hashes = seeds[block] + np.uint64((_PRIME_5 + 8) & _M)
        _mix_word(hashes, values[block].copy())
        _finish(hashes)
        out[block] = hashes
    return out


class _Cursor:
    """Reads little-endian 8-byte words at any byte position, out of aligned words.

    An unaligned gather costs numpy eight times an aligned one, so two aligned words are shifted together; the second is
    the first of the next read.
    """

    __slots__ = ("_current", "_index", "_left", "_right", "_words")

    def __init__(self, words: Words, starts: Int64Array) -> None:
        self._words = words
        self._index = starts >> 3
        self._right = ((starts & 7) << 3).view(np.uint64)
        self._left = _SHIFT[63] - self._right
        self._current: Words = words.take(self._index)

    def next(self) -> Words:
        self._index += 1
        following = self._words.take(self._index, mode="clip")
        value = self._current >> self._right
        # Two shifts, as shifting 64 bits by 64 is undefined when the position is aligned.
        high = following << self._left
        high <<= _SHIFT[1]
        value |= high
        self._current = following
        return value

    def narrow(self, kept: Int64Array) -> None:
        self._index = self._index.take(kept)
        self._right = self._right.take(kept)
        self._left = self._left.take(kept)
        self._current = self._current.take(kept)


def _aligned_words(data: Octets) -> Words:
    """A copy of ``data`` as whole words, with a word of zeros behind it, so that reads never leave it."""
    words = np.empty(len(data) // 8 + 2, np.uint64)
    octets = words.view(np.uint8)
    octets[: len(data)] = data
    octets[len(data) :] = 0
    return words


def _hash_stripe_rows(words: Words, starts: Int64Array, lengths: Int64Array, seeds: Words) -> Words:
    """The 32-byte stripes of rows that have some: the state before the last 0 to 31 bytes, without the length."""
    lanes = [
        seeds + np.uint64((_PRIME_1 + _PRIME_2) & _M),
        seeds + _P2,
        seeds.copy(),
        seeds - _P1,
    ]
    stripes = lengths >> 5
    active = np.arange(len(starts))
    for stripe in range(int(stripes.max())):
        active = active[stripes[active] > stripe]
        if len(active) <= _SCALAR_ROWS_MAX:
            _finish_stripes_one_by_one(words, starts, stripes, lanes, active, stripe)
            break
        cursor = _Cursor(words, starts[active] + 32 * stripe)
        for lane in lanes:
            taken = cursor.next()
            taken *= _P2
            taken += lane[active]
            _rotate(taken, 31)
            taken *= _P1
            lane[active] = taken
    hashes = np.zeros(len(starts), np.uint64)
    for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
        turned = lane.copy()
        _rotate(turned, bits)
        hashes += turned
    for lane in lanes:
        lane *= _P2
        _rotate(lane, 31)
        lane *= _P1
        hashes ^= lane
        hashes *= _P1
        hashes += _P4
    return hashes


def _finish_stripes_one_by_one(
    words: Words, starts: Int64Array, stripes: Int64Array, lanes: list[Words], rows: Int64Array, first_stripe: int
) -> None:
    """The rest of a few very long rows. Lock step would pay for a numpy call per 8 bytes."""
    octets = words.view(np.uint8)
    for row in rows.tolist():
        begin, end = int(starts[row]) + 32 * first_stripe, int(starts[row]) + 32 * int(stripes[row])
        products = np.frombuffer(octets[begin:end].tobytes(), "<u8") * _P2
        for position, lane in enumerate(lanes):
            state = int(lane[row])
            for product in products[position::4].tolist():
                state = (state + product) & _M
                state = (state << 31 | state >> 33) * _PRIME_1 & _M
            lane[row] = state


def _hash_block(words: Words, starts: Int64Array, lengths: Int64Array, seeds: Words) -> Words:
    """XXH64 of ``lengths[i]`` bytes from ``starts[i]`` with seed ``seeds[i]``, for a block of rows."""
    hashes = seeds + _P5
    lengths_max = int(lengths.max())
    rest = lengths
    if lengths_max >= 32:
        long_rows = np.flatnonzero(lengths >= 32)
        hashes[long_rows] = _hash_stripe_rows(words, starts[long_rows], lengths[long_rows], seeds[long_rows])
        rest = lengths & 31
        starts = starts + (lengths - rest)
    hashes += lengths.view(np.uint64)
    tails = _mix_whole_words(hashes, words, starts, rest)

    # The last word holds what is left: 4 bytes if there are so many, then up to 3 single ones.
    active = np.flatnonzero(rest & 4)
    if len(active):
        tail, some = tails.take(active), hashes.take(active)
        tails[active] = tail >> _SHIFT[32]
        tail &= _LOW_32
        _mix_half_word(some, tail)
        hashes[active] = some
    left = rest & 3
    for position in range(3):
        active = np.flatnonzero(left > position)
        if not len(active):
            break
        octets, some = tails.take(active), hashes.take(active)
        octets >>= _SHIFT[8 * position]
        octets &= _LOW_8
        _mix_byte(some, octets)
        hashes[active] = some
    _finish(hashes)
    return hashes


def _mix_whole_words(hashes: Words, words: Words, starts: Int64Array, rest: Int64Array) -> Words:
    """Folds the whole 8-byte words of the last 0 to 31 bytes into ``hashes``; returns the word behind them, per row."""
    cursor = _Cursor(words, starts)
    tails = cursor.next()
    whole = rest >> 3
    active: Int64Array | None = None
    for step in range(int(whole.max())):
        kept = np.flatnonzero((whole if active is None else whole[active]) > step)
        count = len(hashes) if active is None else len(active)
        if len(kept) < count:
            cursor.narrow(kept)
            active = kept if active is None else active[kept]
        if active is None:
            _mix_word(hashes, tails)
            tails = cursor.next()
        else:
            some = hashes.take(active)
            _mix_word(some, tails.take(active))
            hashes[active] = some
            tails[active] = cursor.next()
    return tails


def hash_one(value: bytes, seed: int) -> int:
    """XXH64 of one value, in plain integers."""
    size, position = len(value), 0
    state = (seed + _PRIME_5) & _M
    if size >= 32:
        state = _stripes_of_one(value, seed)
        position = size & ~31
    state = (state + size) & _M
    while position + 8 <= size:
        word = int.from_bytes(value[position : position + 8], "little") * _PRIME_2 & _M
        state ^= (word << 31 | word >> 33) * _PRIME_1 & _M
        state = ((state << 27 | state >> 37) * _PRIME_1 + _PRIME_4) & _M
        position += 8
    if position + 4 <= size:
        state ^= int.from_bytes(value[position : position + 4], "little") * _PRIME_1 & _M
        state = ((state << 23 | state >> 41) * _PRIME_2 + _PRIME_3) & _M
        position += 4
    for octet in value[position:]:
        state ^= octet * _PRIME_5 & _M
        state = ((state << 11 | state >> 53) & _M) * _PRIME_1 & _M
    state = (state ^ state >> 33) * _PRIME_2 & _M
    state = (state ^ state >> 29) * _PRIME_3 & _M
    return state ^ state >> 32


def _stripes_of_one(value: bytes, seed: int) -> int:
    lanes = [(seed + _PRIME_1 + _PRIME_2) & _M, (seed + _PRIME_2) & _M, seed, (seed - _PRIME_1) & _M]
    for position in range(0, len(value) & ~31, 8):
        lane = position // 8 % 4
        word = int.from_bytes(value[position : position + 8], "little")
        mixed = (lanes[lane] + word * _PRIME_2) & _M
        lanes[lane] = (mixed << 31 | mixed >> 33) * _PRIME_1 & _M
    state = sum(lane << bits | lane >> (64 - bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _M
    for lane in lanes:
        mixed = lane * _PRIME_2 & _M
        state ^= (mixed << 31 | mixed >> 33) * _PRIME_1 & _M
        state = (state * _PRIME_1 + _PRIME_4) & _M
    return state


def hash_bytes(data: Octets, offsets: Int64Array, seeds: Words) -> Words:
    """Spark's ``hashUnsafeBytes`` of ``data[offsets[i]:offsets[i + 1]]``: the layout of Arrow's strings."""
    row_count = len(seeds)
    library = kernels()
    if library is not None:
        hashes = np.array(seeds, np.uint64)
        bounds = np.ascontiguousarray(offsets)
        kernel = library.hash_bytes_32 if bounds.itemsize == 4 else library.hash_bytes_64
        kernel(address_of(data), address_of(bounds), row_count, address_of(hashes))
        return hashes
    if row_count <= _SCALAR_ROWS_MAX and int(offsets[-1] - offsets[0]) <= 64 * _SCALAR_ROWS_MAX:
        values = (data[begin:end].tobytes() for begin, end in itertools.pairwise(offsets.tolist()))
        return np.array([hash_one(value, seed) for value, seed in zip(values, seeds.tolist(), strict=True)], np.uint64)
    out = np.empty(row_count, np.uint64)
    for begin in range(0, row_count, _BLOCK_ROWS):
        block = slice(begin, begin + _BLOCK_ROWS)
        bounds = offsets[begin : begin + _BLOCK_ROWS + 1].astype(np.int64)
        words = _aligned_words(data[bounds[0] : bounds[-1]])
        bounds -= bounds[0]
        out[block] = _hash_block(words, bounds[:-1], np.diff(bounds), seeds[block])
    return out


def hash_pieces(data: Octets, starts: Int64Array, lengths: Int64Array, seeds: Words) -> Words:
    """Spark's ``hashUnsafeBytes`` of ``data[starts[i]:starts[i] + lengths[i]]``; the ranges may lie anywhere."""
    out = np.empty(len(seeds), np.uint64)
    words = _aligned_words(data)
    for begin in range(0, len(seeds), _BLOCK_ROWS):
        block = slice(begin, begin + _BLOCK_ROWS)
        out[block] = _hash_block(words, starts[block], lengths[block], seeds[block])
    return out
