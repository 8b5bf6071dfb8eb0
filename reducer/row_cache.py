"""What a reducer knows of its tables without asking: the rows that its acknowledged commits have read or written.

A reducer's keys are its own, so what it wrote last is what is there, and a lookup of a few keys need not travel. It is
not taken on trust: whatever a transaction was told from memory, it names as what the store must hold when it commits
(``Transaction.expect``). Should somebody else have written there, the commit is a conflict like any other, everything
known is forgotten, and the rows are reduced again with what the store says.

Large lookups go to the store as ever: for them the way there is not what takes the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shuffle.limits import MIB

KEYS_MAX = 512
"""Keys of a lookup that is answered from memory, and of a write that is remembered."""

CACHE_BYTES_MAX = 16 * MIB
"""Of all keys and values known; the longest known go first."""

ROW_BYTES = 200
"""What a row costs besides its key and value."""


class CommittedRowCache:
    """Encoded keys and values of any tables; a value of None says that there is no such row.

    It is a ``RowCache``: ``StateClient.with_row_cache`` makes transactions use it.
    """

    keys_max = KEYS_MAX

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._rows: dict[bytes, bytes | None] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def among(self, keys: Iterable[bytes]) -> dict[bytes, bytes | None]:
        """The rows that are known, of these keys."""
        rows = self._rows
        return {key: rows[key] for key in keys if key in rows}

    def learn(self, rows: Mapping[bytes, bytes | None]) -> None:
        """A commit was acknowledged that has read or written these."""
        for key, value in rows.items():
            if key in self._rows:
                self._size_bytes -= _size_of(key, self._rows.pop(key))
            self._rows[key] = value
            self._size_bytes += _size_of(key, value)
        while self._size_bytes > self._bytes_max:
            oldest = next(iter(self._rows))
            self._size_bytes -= _size_of(oldest, self._rows.pop(oldest))

    def forget(self) -> bool:
        """After anything but an acknowledged commit; whether there was something to forget."""
        had_some = bool(self._rows)
        self._rows, self._size_bytes = {}, 0
        return had_some


def _size_of(key: bytes, value: bytes | None) -> int:
    return len(key) + len(value or b"") + ROW_BYTES
