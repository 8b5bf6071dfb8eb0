"""Checks from requests and responses that no commit was applied whose reads had changed. It uses no code of the
product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Commit:
    version: int
    read_at: int | None
    """The version at which it read; None: it read nothing."""
    keys: frozenset[bytes]
    ranges: tuple[tuple[bytes, bytes | None], ...]
    written: frozenset[bytes]

    def overlooked(self, other: _Commit) -> bytes | None:
        """A key that this one read, and that the other wrote after that and before this one was applied."""
        if self.read_at is None or not self.read_at < other.version < self.version:
            return None
        for key in other.written:
            if key in self.keys or any(begin <= key and (end is None or key < end) for begin, end in self.ranges):
                return key
        return None


class TransactionChecker:
    """All commits of a run that the store has acknowledged. One that it could not acknowledge proves nothing here."""

    def __init__(self) -> None:
        self._commits: list[_Commit] = []

    def problem(self, request: Any, version: int) -> str | None:
        """What is wrong with this commit, beside those seen before: answers may come in another order than versions."""
        reads = request.reads
        new = _Commit(
            version,
            reads.version if reads is not None else None,
            frozenset(_keys(reads.keys)) if reads is not None else frozenset(),
            tuple((read.begin, read.end) for read in reads.ranges) if reads is not None else (),
            frozenset(_keys(write.keys for write in request.writes)),
        )
        self._commits.append(new)
        for other in self._commits:
            for late, early in ((new, other), (other, new)):
                key = late.overlooked(early)
                if key is not None:
                    return (
                        f"version {late.version} was applied, and had read {key!r} at version {late.read_at}: "
                        f"version {early.version} wrote it"
                    )
        return None


def _keys(arrays: Any) -> list[bytes]:
    return [key for keys in arrays for key in (keys if isinstance(keys, list) else keys.to_pylist())]
