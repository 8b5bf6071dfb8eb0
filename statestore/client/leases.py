"""Leases for users and workers: membership in a named group, and the list of its members."""

from __future__ import annotations

from collections.abc import Mapping

from shuffle.statestore.store import Member, Store


class Lease:
    """Membership in a group. It ends when it is not renewed in time."""

    def __init__(self, store: Store, lease_id: int) -> None:
        self._store = store
        self.lease_id = lease_id

    def renew(self) -> None:
        """Prolong the lease by its time to live. Raises ``Expired`` if it is over already."""
        self._store.renew(self.lease_id)

    def leave(self) -> None:
        """End the lease now, instead of letting it expire."""
        self._store.leave(self.lease_id)


class Leases:
    """The named groups of members that are alive."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> Lease:
        """Join a group for ``ttl_ms`` milliseconds, again with each ``renew``; a member of that name is replaced."""
        return Lease(self._store, self._store.register(group, member, attributes, ttl_ms))

    def members(self, group: str) -> list[Member]:
        """The members of a group now; an unknown group is an empty one."""
        return self._store.members(group)[1]

    def watch(self, group: str, revision: int, wait_ms: int) -> tuple[int, list[Member]]:
        """Wait up to ``wait_ms`` until the group's revision is not ``revision``; the first call can pass any number.

        Returns the revision and the members; each change of a group gives it another revision.
        """
        return self._store.watch(group, revision, wait_ms)

    def groups(self) -> list[str]:
        """The groups that have members now."""
        return self._store.groups()
