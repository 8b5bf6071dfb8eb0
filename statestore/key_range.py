"""A range of encoded keys: what a scan reads, and what a transaction lists in its read set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyRange:
    """``begin <= key < end``; an ``end`` of None is unbounded."""

    begin: bytes
    end: bytes | None

    def contains(self, key: bytes) -> bool:
        return self.begin <= key and (self.end is None or key < self.end)
