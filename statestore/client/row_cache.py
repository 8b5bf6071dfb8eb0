"""What a transaction can make use of instead of reading: rows that somebody remembers from earlier commits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class RowCache(Protocol):
    """Rows that are remembered from one transaction to the next (``StateClient.with_row_cache``).

    Keys and values are encoded; a value of None says that there is no such row. What a cache says need not be true: a
    transaction names every row that it took from a cache as one that the store must hold when it commits, so that a
    row that is not true any more makes the commit a conflict.
    """

    @property
    def keys_max(self) -> int:
        """Lookups of more keys go to the store as if there were no cache, and after larger writes it is emptied."""
        ...

    def among(self, keys: Iterable[bytes]) -> Mapping[bytes, bytes | None]:
        """The rows that are known, of these keys."""
        ...

    def learn(self, rows: Mapping[bytes, bytes | None]) -> None:
        """A commit was acknowledged that has read or written these."""
        ...

    def forget(self) -> object:
        """A commit was not acknowledged, or wrote more than can be remembered: nothing is known any more."""
        ...
