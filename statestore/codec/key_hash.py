"""A 64-bit hash of each value of a binary array, computed on whole columns.

It is for tables in memory only: nothing that is stored or sent depends on it. The seed keeps people who choose the keys
from choosing ones whose hashes are the same.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from shuffle.statestore.codec.arrow_bytes import NumpyArray, data_of, equal_length, offsets_of, records_at

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


def hash_keys(keys: pa.BinaryArray, seed: int = 0) -> NumpyArray:
    """The hash of each value of ``keys``, which has no nulls."""
    offsets, data = offsets_of(keys), data_of(keys)
    lengths = np.diff(offsets)
    width = int(lengths[0]) if len(lengths) else 0
    hashes = np.full(len(lengths), np.uint64(seed) ^ _FINISH, np.uint64)
    if equal_length(offsets, width):
        used = data[offsets[0] : offsets[-1]].reshape(len(lengths), width)
        for word in _words(used):
            _mix(hashes, word)
    else:
        _hash_uneven(hashes, data, offsets, lengths)
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


def _hash_uneven(hashes: NumpyArray, data: NumpyArray, offsets: NumpyArray, lengths: NumpyArray) -> None:
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
        mixed = hashes[rows]
        _mix(mixed, words)
        hashes[rows] = mixed
        at += 8
        rows = rows[left > 8]


def _mix(hashes: NumpyArray, words: NumpyArray) -> None:
    hashes ^= words
    hashes *= _MULTIPLIER
    hashes ^= hashes >> _SHIFT
