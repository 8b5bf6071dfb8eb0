"""A 64-bit hash of each value of a binary array, computed on whole columns.

It is for tables in memory only: nothing that is stored or sent depends on it. Each word of 8 bytes is two numbers of 32
bits; to each a secret number of its place is added, and their product is added to the hash. So people who choose the
keys, and do not know the seed, cannot choose many whose hashes are the same.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa

from shuffle.statestore.codec.arrow_bytes import NumpyArray, data_of, equal_length, offsets_of, records_at

_STEP = 0x9E3779B97F4A7C15
_LOW = np.uint64(0xFFFFFFFF)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_ALL = (1 << 64) - 1


def hash_keys(keys: pa.BinaryArray, seed: int = 0) -> NumpyArray:
    """The hash of each value of ``keys``, which has no nulls."""
    offsets, data = offsets_of(keys), data_of(keys)
    lengths = np.diff(offsets)
    width = int(lengths[0]) if len(lengths) else 0
    hashes = np.full(len(lengths), np.uint64(seed) ^ _FINISH, np.uint64)
    if equal_length(offsets, width):
        used = data[offsets[0] : offsets[-1]].reshape(len(lengths), width)
        for place, word in enumerate(_words(used)):
            _add(hashes, word, seed, place)
    else:
        _hash_uneven(hashes, data, offsets, lengths, seed)
    hashes ^= lengths.astype(np.uint64)
    hashes ^= hashes >> _SHIFT
    hashes *= _FINISH
    hashes ^= hashes >> _SHIFT
    return hashes


def _words(used: NumpyArray) -> list[NumpyArray]:
    """The columns of 8 bytes of rows of one length, the last one filled up with zeros."""
    count, width = used.shape
    padded = np.zeros((count, (width + 7) // 8 * 8), np.uint8)
    padded[:, :width] = used
    return list(padded.view(np.uint64).T)


def _hash_uneven(hashes: NumpyArray, data: NumpyArray, offsets: NumpyArray, lengths: NumpyArray, seed: int) -> None:
    """Mix in the words of values of different lengths: all first words, then all second ones, and so on."""
    begins, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    # So that a word may be read at every position: what is behind the end of a value is cut off below.
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    rows = np.flatnonzero(lengths)
    at = 0
    while len(rows):
        words = records_at(padded, begins[rows] + at, np.dtype("<u8"))
        left = ends[rows] - begins[rows] - at
        short = np.flatnonzero(left < 8)
        words[short] &= (np.uint64(1) << (np.uint64(8) * left[short].astype(np.uint64))) - np.uint64(1)
        added = hashes[rows]
        _add(added, words, seed, at // 8)
        hashes[rows] = added
        at += 8
        rows = rows[left > 8]


def _add(hashes: NumpyArray, words: NumpyArray, seed: int, place: int) -> None:
    """Add the words at one place of all values to their hashes."""
    secret = _secret(seed, place)
    low = (words + np.uint64(secret & 0xFFFFFFFF)) & _LOW
    high = ((words >> _SHIFT) + np.uint64(secret >> 32)) & _LOW
    low *= high
    hashes += low


@functools.lru_cache(maxsize=1024)
def _secret(seed: int, place: int) -> int:
    """The secret numbers of one place, 64 bits (splitmix64)."""
    number = (seed + (place + 1) * _STEP) & _ALL
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _ALL
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _ALL
    return number ^ number >> 31
