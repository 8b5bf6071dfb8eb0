"""The leases of a store, with a clock and with waiting. Their rules are in ``engine.leases``."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from shuffle.limits import WAIT_MS_MAX
from shuffle.statestore.engine.leases import LeaseTable
from shuffle.statestore.store import Member


class WatchedLeases:
    """The lease table of a store, whose groups can be watched for changes. Safe to use from many threads."""

    def __init__(self) -> None:
        # Lease ids that an earlier process gave out are unknown here, so their holders learn that they have to register
        # again.
        self._table = LeaseTable(first_id=time.time_ns() // 1_000_000 << 20)
        self._changed = threading.Condition()
        self._closed = False

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> int:
        with self._changed:
            lease_id = self._table.register(group, member, attributes, ttl_ms, _now_ms())
            self._changed.notify_all()
            return lease_id

    def renew(self, lease_id: int) -> None:
        with self._changed:
            self._table.renew(lease_id, _now_ms())

    def leave(self, lease_id: int) -> None:
        with self._changed:
            self._table.leave(lease_id)
            self._changed.notify_all()

    def members(self, group: str) -> tuple[int, list[Member]]:
        with self._changed:
            return self._members(group)

    def _members(self, group: str) -> tuple[int, list[Member]]:
        now_ms = _now_ms()
        self._table.expire(now_ms)
        return self._table.revision(group), self._table.members(group, now_ms)

    def watch(self, group: str, revision: int, wait_ms: int) -> tuple[int, list[Member]]:
        deadline_ms = _now_ms() + min(wait_ms, WAIT_MS_MAX)
        with self._changed:
            while True:
                current, members = self._members(group)
                now_ms = _now_ms()
                if current != revision or now_ms >= deadline_ms or self._closed:
                    return current, members
                next_expiry_ms = self._table.next_expiry_ms()
                until_ms = deadline_ms if next_expiry_ms is None else min(deadline_ms, next_expiry_ms)
                self._changed.wait(max(until_ms - now_ms, 1) / 1000)

    def groups(self) -> list[str]:
        with self._changed:
            self._table.expire(_now_ms())
            return self._table.groups()

    def close(self) -> None:
        """End every watch: each returns the members that there are now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
