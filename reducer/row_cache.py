"""A reducer's cache of its tables: the rows that its acknowledged commits have read or written.

A reducer's keys are its own, so what it wrote last is what the store holds, and a lookup of a few keys needs no request
to the store. The cache is not trusted blindly: every row that a transaction took from it is a precondition of its
commit (``Transaction.expect``). Should somebody else have written such a row, the commit is a conflict like any other,
the cache is emptied, and the rows are reduced again with what the store holds.

Large lookups always go to the store: for them the round trip is a small part of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shuffle.limits import MIB

KEYS_MAX = 512
"""The most keys of a lookup that is served from the cache, and of a write that is kept in it."""

CACHE_BYTES_MAX = 16 * MIB
"""The most bytes of all keys and values in the cache. Those that were read or written longest ago are evicted first."""

ROW_BYTES = 200
"""The bytes that are counted for a row besides its key and value."""


class CommittedRowCache:
    """The encoded keys and values of rows of any tables; a value of None says that there is no such row.

    It implements ``RowCache``: ``StateClient.with_row_cache`` makes transactions use it.
    """

    keys_max = KEYS_MAX

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._rows: dict[bytes, bytes | None] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def among(self, keys: Iterable[bytes]) -> dict[bytes, bytes | None]:
        """The rows of these keys that are in the cache."""
        rows = self._rows
        return {key: rows[key] for key in keys if key in rows}

    def learn(self, rows: Mapping[bytes, bytes | None]) -> None:
        """A commit that has read or written these rows was acknowledged: put them into the cache."""
        for key, value in rows.items():
            if key in self._rows:
                self._size_bytes -= _size_of(key, self._rows.pop(key))
            self._rows[key] = value
            self._size_bytes += _size_of(key, value)
        while self._size_bytes > self._bytes_max:
            oldest = next(iter(self._rows))
            self._size_bytes -= _size_of(oldest, self._rows.pop(oldest))

    def forget(self) -> bool:
        """Empty the cache; whether there was something in it. To be called after any commit that was not
        acknowledged."""
        had_some = bool(self._rows)
        self._rows, self._size_bytes = {}, 0
        return had_some


def _size_of(key: bytes, value: bytes | None) -> int:
    return len(key) + len(value or b"") + ROW_BYTES
