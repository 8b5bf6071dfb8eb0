"""Rows of one table in memory, in the order in which they were written, with every version that a reader may need.

A row is added and never changed. Each knows the row before it that had the same key, and an index knows the newest row
of each key. So a reader that sees the log up to some row finds the newest version, and goes back from there while that
is too new for it. Rows that nobody needs any more go away when the log is compacted into a new one
(``table_logs``); readers of the old one keep it alive.

Rows are put into the index when something is looked up for the first time, not when they are added: a job that keeps
its state in its own memory looks up nothing, and pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.limits import MIB
from shuffle.statestore.codec.arrow_bytes import NumpyArray
from shuffle.statestore.codec.byte_rows import ByteRows, Growing
from shuffle.statestore.codec.key_hash import hash_keys
from shuffle.statestore.codec.key_index import KeyIndex

PIECE_ROWS = 1 << 18
PIECE_BYTES = 64 * MIB
"""The rows, and the bytes of keys and values, that are handled at once: enough for numpy to be fast, and few enough not
to hold up readers for long, nor to reach the 2 GiB that an Arrow array of bytes can have."""

Guard = AbstractContextManager[Any]
"""What holds a log still while it is read or extended: a lock, where there are threads."""


class RowLog:
    """All versions of the rows of a table since the log began. Not safe to use from several threads at once."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._keys = ByteRows()
        self._values = ByteRows()
        self._hashes = Growing("<u8")
        self._before = Growing("<i4")
        self._index = KeyIndex()
        self.blocks = 0
        """The number of blocks that were added."""

    def __len__(self) -> int:
        return self._keys.count

    @property
    def size_bytes(self) -> int:
        parts = (self._keys, self._values, self._hashes, self._before, self._index)
        return sum(part.size_bytes for part in parts)

    def append(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Add the rows of one block; a null value says that the row was deleted."""
        self._keys.extend(keys)
        self._values.extend(values)
        self.blocks += 1

    def cut(self, rows: int) -> None:
        """Remove the rows from number ``rows`` on: they were not written after all."""
        self._keys.cut(rows)
        self._values.cut(rows)
        if self._hashes.count > rows:
            # The index never forgets, so it is made anew.
            self._hashes.cut(0)
            self._before.cut(0)
            self._index = KeyIndex()

    def newest(self, keys: pa.BinaryArray, end: int) -> NumpyArray:
        """The newest row before ``end`` of each key; -1 where there is none."""
        rows = self._find(keys)
        late = np.flatnonzero(rows >= end)
        before = self._before.filled
        while len(late):
            rows[late] = before.take(rows[late])
            late = late[rows[late] >= end]
        return rows

    def has_since(self, first_row: int, keys: pa.BinaryArray) -> bool:
        """Whether one of the keys was written by a row from ``first_row`` on."""
        return first_row < len(self) and bool((self._find(keys) >= first_row).any())

    def pieces(self, begin: int, end: int) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
        """Keys and values of the rows from ``begin`` up to and without ``end``, in pieces of bounded size."""
        for piece in self.split(np.arange(begin, end), PIECE_ROWS):
            first, after = int(piece[0]), int(piece[-1]) + 1
            yield self._keys.slice(first, after), self._values.slice(first, after)

    def split(self, rows: NumpyArray, rows_max: int, bytes_max: int = PIECE_BYTES) -> list[NumpyArray]:
        """Cut row numbers into pieces of at most ``rows_max`` rows and ``bytes_max`` bytes, or of a single row."""
        ends = np.cumsum(self._keys.lengths(rows) + self._values.lengths(rows))
        pieces, begin, bytes_before = [], 0, 0
        while begin < len(rows):
            fitting = int(np.searchsorted(ends, bytes_before + bytes_max, side="right"))
            end = min(max(fitting, begin + 1), begin + rows_max)
            pieces.append(rows[begin:end])
            begin, bytes_before = end, int(ends[end - 1])
        return pieces

    def take(self, rows: NumpyArray) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        return self._keys.take(rows), self._values.take(rows)

    def key_at(self, row: int) -> bytes:
        key: bytes = self._keys.slice(row, row + 1)[0].as_py()
        return key

    def in_order(self, rows: NumpyArray) -> NumpyArray:
        """These rows in the order of their keys."""
        return rows[self._keys.order_of(rows)] if len(rows) else rows

    def values_of(self, rows: NumpyArray) -> pa.BinaryArray:
        return self._values.take(rows)

    def live(self, end: int) -> NumpyArray:
        """The newest rows before ``end`` of all keys, those among them too that say that a row was deleted."""
        self._put_into_index()
        is_newest = np.ones(end, np.bool_)
        before = self._before.filled[:end]
        is_newest[before[before >= 0]] = False
        return np.flatnonzero(is_newest)

    def are_deleted(self, rows: NumpyArray) -> NumpyArray | None:
        return self._values.are_null(rows)

    def _find(self, keys: pa.BinaryArray) -> NumpyArray:
        self._put_into_index()
        hashes = hash_keys(keys, self._seed)
        return self._index.find(hashes, partial(self._have_keys, keys))

    def put_next_into_index(self) -> bool:
        """Put some more rows into the index; False if all are in it. A part at a time, others can read meanwhile."""
        begin = self._hashes.count
        end = min(len(self), begin + PIECE_ROWS)
        if begin == end:
            return False
        keys = self._keys.slice(begin, begin + len(self.split(np.arange(begin, end), PIECE_ROWS)[0]))
        self._hashes.extend(hash_keys(keys, self._seed))
        hashes = self._hashes.filled
        self._before.extend(self._index.put(hashes[begin:], begin, partial(self._have_keys, keys), hashes))
        return True

    def _put_into_index(self) -> None:
        while self.put_next_into_index():
            pass

    def _have_keys(self, keys: pa.BinaryArray, rows: NumpyArray, which: NumpyArray) -> NumpyArray:
        """Where the row ``rows[i]`` has the key ``keys[which[i]]``."""
        return self._keys.equal(rows, keys, which)


@dataclass(slots=True)
class LogView:
    """The rows of a table as they are in its log up to some row: what one version of the store shows of it."""

    rows: RowLog
    end: int
    """The number of rows of the log that this view sees."""
    guard: Guard
    base_is_empty: bool
    """True if RocksDB has no rows of the table, so that nothing has to be looked for there."""
    version: int = 0
    """The version of the store at which the log was like this."""
    position: int = 0
    """The position in the changelog behind the newest row of the view."""
    _ordered: NumpyArray | None = field(default=None)

    def get(self, keys: pa.BinaryArray) -> tuple[pa.BinaryArray, NumpyArray]:
        """The values of the keys, and where the log has no row; a deleted row has the value null, too."""
        with self.guard:
            rows = self.rows.newest(keys, self.end)
            missing = rows < 0
            if not missing.any():
                return self.rows.values_of(rows), missing
            values = self.rows.values_of(rows[~missing])
        places = np.cumsum(~missing) - 1
        return values.take(pa.array(places, mask=missing)), missing

    def in_order(self) -> NumpyArray:
        """The newest rows in the order of their keys, deleted ones included. It is computed once for each view."""
        if self._ordered is None:
            with self.guard:
                self._ordered = self.rows.in_order(self.rows.live(self.end))
        return self._ordered

    def take(self, rows: NumpyArray) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        with self.guard:
            return self.rows.take(rows)

    def first_piece(self, rows: NumpyArray, rows_max: int, bytes_max: int) -> NumpyArray:
        """As many of the first of these rows as fit the bounds, one at least."""
        with self.guard:
            return self.rows.split(rows[:rows_max], rows_max, bytes_max)[0]

    def count_below(self, rows: NumpyArray, key: bytes) -> int:
        """The number of ``rows``, which are in the order of their keys, whose keys are smaller than ``key``."""
        low, high = 0, len(rows)
        with self.guard:
            while low < high:
                middle = (low + high) // 2
                if self.rows.key_at(int(rows[middle])) < key:
                    low = middle + 1
                else:
                    high = middle
        return low
