"""Conflict detection of optimistic transactions: which keys changed since a transaction read them.

Theory of operation. Every commit has a version, one higher than the commit before. A transaction reads at one
version and lists, when it commits, the keys (present or absent) and the ranges it read. It may commit when no later
commit has written any of them: then all its reads still hold, and it behaves as if it had run in one instant.

``ConflictHistory`` remembers the keys of recent commits for that. It forgets commits that no open transaction can
conflict with, and, so that memory stays bounded, the oldest ones beyond ``keys_max``; a transaction that reads at a
version older than what is remembered is refused, since its reads can no longer be checked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from shuffle.statestore.codec.arrow_bytes import Binary, to_list
from shuffle.statestore.key_range import KeyRange

HISTORY_KEYS_MAX = 2_000_000
"""The most keys that are remembered. Each takes about 200 bytes in CPython: some 400 MB while a transaction stays open
under full load. After that the transaction is refused."""


class _Commit:
    """The keys that one commit wrote, sorted only when a range has to be checked against them."""

    __slots__ = ("_sorted", "keys", "version")

    def __init__(self, version: int, keys: Sequence[bytes]) -> None:
        self.version = version
        self.keys = keys
        self._sorted: list[bytes] | None = None

    def touches(self, read_range: KeyRange) -> bytes | None:
        if self._sorted is None:
            self._sorted = sorted(self.keys)
        at = bisect_left(self._sorted, read_range.begin)
        if at < len(self._sorted) and read_range.contains(self._sorted[at]):
            return self._sorted[at]
        return None


class ConflictHistory:
    """The keys of recent commits, by version."""

    def __init__(self, version: int, keys_max: int = HISTORY_KEYS_MAX) -> None:
        self._floor = version
        self._keys_max = keys_max
        self._keys_count = 0
        self._commits: deque[_Commit] = deque()
        self._last_write: dict[bytes, int] = {}
        self._table_writes: dict[int, int] = {}
        """The version of the last commit that wrote to each table. It may be of a commit that was taken back."""

    @property
    def keys_count(self) -> int:
        return self._keys_count

    def conflict(self, version: int, keys_read: Iterable[tuple[int, Binary]], ranges: Iterable[KeyRange]) -> str | None:
        """Why reads made at ``version`` no longer hold, or None when they do. Keys come with the id of their table."""
        if version < self._floor:
            return f"it read at version {version}, and changes are only remembered since version {self._floor}"
        if not self._commits:
            return None
        last_write = self._last_write
        for table_id, keys in keys_read:
            if self._table_writes.get(table_id, 0) <= version:
                continue
            for key in to_list(keys):
                written = last_write.get(key)
                if written is not None and written > version:
                    return f"a key it read was written by the commit of version {written}"
        for read_range in ranges:
            for commit in reversed(self._commits):
                if commit.version <= version:
                    break
                if commit.touches(read_range) is not None:
                    return f"a range it read was written by the commit of version {commit.version}"
        return None

    def record(self, version: int, keys: Sequence[bytes], table_ids: Iterable[int]) -> None:
        """Remember what the commit of ``version`` wrote, and to which tables."""
        assert not self._commits or version > self._commits[-1].version
        self._commits.append(_Commit(version, keys))
        self._last_write.update(dict.fromkeys(keys, version))
        self._table_writes.update(dict.fromkeys(table_ids, version))
        self._keys_count += len(keys)
        while self._keys_count > self._keys_max and self._commits:
            self._forget_oldest()

    def take_back(self, version: int) -> None:
        """Remove the commits after ``version`` again: they were not written."""
        while self._commits and self._commits[-1].version > version:
            self._keys_count -= len(self._commits.pop().keys)
        self._last_write = {key: commit.version for commit in self._commits for key in commit.keys}

    def forget_before(self, version: int) -> None:
        """Forget what no open transaction needs: none of them read at a version below this one."""
        while self._commits and self._commits[0].version <= version:
            self._forget_oldest()
        # Without commits to check against, any version from here on is as good as the newest.
        self._floor = max(self._floor, version)

    def _forget_oldest(self) -> None:
        commit = self._commits.popleft()
        self._floor = max(self._floor, commit.version)
        self._keys_count -= len(commit.keys)
        last_write = self._last_write
        if not self._commits:
            last_write.clear()
            return
        for key in commit.keys:
            if last_write.get(key) == commit.version:
                del last_write[key]
