"""The interface of a row cache: rows of earlier commits, which a transaction uses instead of reading them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class RowCache(Protocol):
    """Rows that are remembered from one transaction to the next (``StateClient.with_row_cache``).

    Keys and values are encoded; a value of None says that there is no such row. A cache may be out of date: every
    row that a transaction took from it becomes a precondition of the commit, so that a stale row makes the commit a
    conflict.
    """

    @property
    def keys_max(self) -> int:
        """The most keys of a lookup that uses the cache; a commit with a larger write empties it."""
        ...

    def among(self, keys: Iterable[bytes]) -> Mapping[bytes, bytes | None]:
        """The rows of these keys that the cache has."""
        ...

    def learn(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Add the rows that an acknowledged commit has read or written."""
        ...

    def forget(self) -> object:
        """Remove all rows: a commit was not acknowledged, or wrote more rows than the cache keeps."""
        ...
