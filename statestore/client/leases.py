"""Leases, as users and workers have them: being a member of a named group, and seeing who else is."""

from __future__ import annotations

from collections.abc import Mapping

from shuffle.statestore.store import Member, Store


class Lease:
    """A place in a group. It is lost when it is not renewed in time."""

    def __init__(self, store: Store, lease_id: int) -> None:
        self._store = store
        self.lease_id = lease_id

    def renew(self) -> None:
        """Keep the place for as long again. Raises ``Expired`` when it is too late for that."""
        self._store.renew(self.lease_id)

    def leave(self) -> None:
        """Give the place up now, instead of letting it run out."""
        self._store.leave(self.lease_id)


class Leases:
    """Named groups of members that are alive."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> Lease:
        """Join a group for ``ttl_ms`` milliseconds, again with each ``renew``; a member of that name is replaced."""
        return Lease(self._store, self._store.register(group, member, attributes, ttl_ms))

    def members(self, group: str) -> list[Member]:
        """Who is in a group now; an unknown group is an empty one."""
        return self._store.members(group)[1]

    def watch(self, group: str, revision: int, wait_ms: int) -> tuple[int, list[Member]]:
        """Wait up to ``wait_ms`` until the group's revision is not ``revision`` (to begin, any other number will do).

        Returns the revision and the members; each change of a group gives it another revision.
        """
        return self._store.watch(group, revision, wait_ms)

    def groups(self) -> list[str]:
        """The groups that have members now."""
        return self._store.groups()
