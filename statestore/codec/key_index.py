"""A hash index over rows that are kept elsewhere: it finds thousands of keys at a time, without a Python step per key.

Theory of operation. The table is one array of 64-bit entries with open addressing: a key's search begins at the slot
that the low bits of its hash name, and goes on slot by slot until it meets the key or an empty slot. An entry holds
the number of the row, plus one so that no entry is zero, and the upper bits of the key's hash, its *tag*. A search
looks at all keys at once: each round handles the slot that every unfinished search has come to, and few searches need
more than two rounds while at most half of the slots are used. Nearly always an entry with the right tag has the right
key; the caller compares the keys themselves, since nearly always is not enough.

Entries are replaced but never removed. Whoever removes rows makes a new index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

NumpyArray = np.ndarray[Any, Any]

SameKey = Callable[[NumpyArray, NumpyArray], NumpyArray]
"""Gets row numbers, and for each the number of the key that is searched for; returns where both are the same key."""

_ROW_BITS = 36
ROWS_MAX = (1 << _ROW_BITS) - 2
"""The most rows that an entry can name."""
_ROW = np.uint64((1 << _ROW_BITS) - 1)
_TAG = ~_ROW
_ONE = np.uint64(1)

_SLOTS_MIN = 1 << 10
_SLOTS_PER_ENTRY = 2
"""The table is doubled before it has fewer slots than this for each entry."""


class KeyIndex:
    """The newest row of each key. One thread at a time may use it."""

    def __init__(self) -> None:
        self._table = np.zeros(_SLOTS_MIN, np.uint64)
        self._mask = np.uint64(_SLOTS_MIN - 1)
        self._count = 0

    def __len__(self) -> int:
        """The number of keys."""
        return self._count

    @property
    def size_bytes(self) -> int:
        return int(self._table.nbytes)

    def find(self, hashes: NumpyArray, same_key: SameKey) -> NumpyArray:
        """The row of each key, by the hash of the key; -1 where the index does not have it."""
        rows = np.full(len(hashes), -1, np.int64)
        which, slots, tags = self._start(hashes)
        while len(which):
            entries = self._table.take(slots)
            hit = ((entries & _TAG) == tags) & (entries != 0)
            if hit.any():
                candidates = which[hit]
                found = _row_of(entries[hit])
                right = same_key(found, candidates)
                rows[candidates[right]] = found[right]
                hit[hit] = right
            # A search ends at its key or at an empty slot.
            which, slots, tags = self._advance(~hit & (entries != 0), which, slots, tags)
        return rows

    def put(self, hashes: NumpyArray, first_row: int, same_key: SameKey, hash_of_row: NumpyArray) -> NumpyArray:
        """Make rows from ``first_row`` on the newest of their keys. Returns the row before each of them, or -1.

        A key may occur several times among the rows: each such row has the one before it as its predecessor.
        ``hash_of_row`` has the hash of every row in the index, by row number; it is needed when the table grows.
        """
        self._make_room(len(hashes), hash_of_row)
        before = np.full(len(hashes), -1, np.int64)
        repeated: list[NumpyArray] = []
        which, slots, tags = self._start(hashes)
        while len(which):
            entries = self._table.take(slots)
            empty = entries == 0
            hit = ((entries & _TAG) == tags) & ~empty
            if hit.any():
                candidates = which[hit]
                found = _row_of(entries[hit])
                right = same_key(found, candidates)
                hit[hit] = right
                # A row of this very call has the slot: it is a later one, since the last writer of a slot wins.
                again = right & (found >= first_row)
                repeated.append(candidates[again])
                replaced = right & ~again
                before[candidates[replaced]] = found[replaced]
                done = hit.copy()
                hit[hit] = ~again[right]
            else:
                done = hit
            written = empty | hit
            if written.any():
                added = tags[written] | (which[written] + first_row).astype(np.uint64) + _ONE
                at = slots[written]
                self._table[at] = added
                won = self._table.take(at) == added
                self._count += int(np.count_nonzero(won & empty[written]))
                # Of several rows that wanted one slot the last has it. The others look at the slot again.
                done[written] = won
                written[written] = ~won
            which, slots, tags = self._advance(~done, which, slots, tags, stay=written)
        if repeated:
            self._link_repeated(np.concatenate(repeated), hashes, first_row, before, same_key)
        return before

    def _link_repeated(
        self, repeated: NumpyArray, hashes: NumpyArray, first_row: int, before: NumpyArray, same_key: SameKey
    ) -> None:
        """Put the earlier rows of keys that occur several times into the chains behind the newest rows.

        Behind the newest row of a key come the other ones, from the last to the first, and behind those the row that
        had the key before.
        """
        newest = self.find(hashes[repeated], lambda rows, which: same_key(rows, repeated[which])) - first_row
        order = np.lexsort((-repeated, newest))
        repeated, newest = repeated[order], newest[order]
        is_first = np.ones(len(newest), np.bool_)
        is_first[1:] = newest[1:] != newest[:-1]
        is_last = np.roll(is_first, -1)
        oldest = before[newest[is_last]]
        before[newest[is_first]] = repeated[is_first] + first_row
        before[repeated[~is_last]] = repeated[np.flatnonzero(~is_last) + 1] + first_row
        before[repeated[is_last]] = oldest

    def _start(self, hashes: NumpyArray) -> tuple[NumpyArray, NumpyArray, NumpyArray]:
        return np.arange(len(hashes)), (hashes & self._mask).astype(np.int64), hashes & _TAG

    def _advance(
        self,
        unfinished: NumpyArray,
        which: NumpyArray,
        slots: NumpyArray,
        tags: NumpyArray,
        stay: NumpyArray | None = None,
    ) -> tuple[NumpyArray, NumpyArray, NumpyArray]:
        """The unfinished searches, each at its next slot, or at the same one where ``stay`` is true."""
        left = np.flatnonzero(unfinished)
        step: NumpyArray = np.ones(len(left), np.int64) if stay is None else (~stay[left]).astype(np.int64)
        return which[left], (slots[left] + step) & np.int64(self._mask), tags[left]

    def _make_room(self, added: int, hash_of_row: NumpyArray) -> None:
        needed = (self._count + added) * _SLOTS_PER_ENTRY
        if needed <= len(self._table):
            return
        size = len(self._table)
        while size < needed:
            size *= 2
        entries = self._table[self._table != 0]
        self._table = np.zeros(size, np.uint64)
        self._mask = np.uint64(size - 1)
        hashes = hash_of_row.take(_row_of(entries))
        slots = (hashes & self._mask).astype(np.int64)
        while len(entries):
            free = self._table.take(slots) == 0
            self._table[slots[free]] = entries[free]
            left = np.flatnonzero(self._table.take(slots) != entries)
            entries, slots = entries[left], (slots[left] + 1) & np.int64(self._mask)


def _row_of(entries: NumpyArray) -> NumpyArray:
    return (entries & _ROW).astype(np.int64) - 1
