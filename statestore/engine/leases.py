"""Leases: which members of a group are alive now.

A member of a group holds a lease for its time to live and renews it; a member that does not renew is removed. There is
no clock here: the time is an argument of every call, in milliseconds. A lease is over in the millisecond up to which it
was granted.

Each change of a group gives it a revision never used before, by any group. So a watcher that holds an old revision sees
that something changed, even if the group was empty for a while. Renewals are not changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from shuffle.errors import BadInput, Expired, TooLarge
from shuffle.limits import KIB, MIB, NAME_BYTES_MAX
from shuffle.statestore.store import Member

TTL_MS_MIN = 100
"""The shortest time to live, in milliseconds. With a shorter one, delays of a busy network alone end leases."""

TTL_MS_MAX = 24 * 60 * 60 * 1000
"""The longest time to live, in milliseconds: one day. A member that renews less often belongs in the configuration."""

ATTRIBUTES_BYTES_MAX = 16 * KIB
"""The most bytes of the names and values of one member's attributes; every listing of the group contains them all."""

GROUP_MEMBERS_MAX = 100_000
"""The most members of one group; the listing must still fit into one response."""

GROUPS_MAX = 100_000
"""The most groups that have members."""

LEASES_MAX = 100_000
"""The most members of all groups together."""

ATTRIBUTES_IN_ALL_BYTES_MAX = 64 * MIB
"""The most bytes of the attributes of all members together: they are kept in memory only."""


@dataclass(slots=True)
class _ActiveLease:
    group: str
    member: Member
    ttl_ms: int
    expires_ms: int
    attributes_bytes: int


class LeaseTable:
    """All leases of one store."""

    def __init__(self, first_id: int = 1) -> None:
        """``first_id`` starts the counter of lease ids and revisions; a store that restarts gives one above all it has
        given before, or holders of old ids could be taken for new ones."""
        self._last_id = first_id - 1
        self._held: dict[int, _ActiveLease] = {}
        self._attributes_bytes = 0
        """The bytes of the attributes of all members."""
        self._groups: dict[str, dict[str, int]] = {}
        self._revisions: dict[str, int] = {}
        # (millisecond, lease id): the lease ends at that time or later, since a renewal does not change the entry.
        self._expiries: list[tuple[int, int]] = []

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int, now_ms: int) -> int:
        """The id of a new lease. A lease that this member held before is over."""
        _check_name("group", group)
        _check_name("member", member)
        attributes_bytes = _check_attributes(group, member, attributes)
        if not isinstance(ttl_ms, int) or isinstance(ttl_ms, bool) or not TTL_MS_MIN <= ttl_ms <= TTL_MS_MAX:
            raise BadInput(
                f"group {group!r}, member {member!r}: a time to live of {ttl_ms!r} ms is not between {TTL_MS_MIN} and"
                f" {TTL_MS_MAX}",
                group=group,
                member=member,
            )
        self._check_room(group, member, attributes_bytes, now_ms)
        members = self._groups.setdefault(group, {})
        self._forget(members.get(member, -1))
        lease_id = self._next_id()
        new_member = Member(member, dict(attributes))
        self._held[lease_id] = _ActiveLease(group, new_member, ttl_ms, now_ms + ttl_ms, attributes_bytes)
        self._attributes_bytes += attributes_bytes
        members[member] = lease_id
        self._push(now_ms + ttl_ms, lease_id)
        self._changed(group)
        return lease_id

    def renew(self, lease_id: int, now_ms: int) -> int:
        """Prolongs a lease by its time to live; returns its end in milliseconds. ``Expired`` if it is over already."""
        held = self._held.get(lease_id)
        if held is None:
            raise Expired(f"the lease {lease_id} is over or was replaced: register again", lease_id=lease_id)
        if held.expires_ms <= now_ms:
            raise Expired(
                f"group {held.group!r}, member {held.member.name!r}: the lease {lease_id} ended"
                f" {now_ms - held.expires_ms} ms ago: register again",
                lease_id=lease_id,
                group=held.group,
                member=held.member.name,
            )
        # A clock that went back must not shorten what was promised.
        held.expires_ms = max(held.expires_ms, now_ms + held.ttl_ms)
        return held.expires_ms

    def leave(self, lease_id: int) -> str | None:
        """Ends a lease; the group that changed by it, or ``None`` if it was over already."""
        held = self._held.get(lease_id)
        if held is None:
            return None
        self._drop(lease_id, held)
        return held.group

    def expire(self, now_ms: int) -> set[str]:
        """Drops every lease whose time is over; the groups that changed by it."""
        changed = set()
        while (expiry := self.next_expiry_ms()) is not None and expiry <= now_ms:
            lease_id = self._expiries[0][1]
            changed.add(self._held[lease_id].group)
            self._drop(lease_id, self._held[lease_id])
        return changed

    def members(self, group: str, now_ms: int) -> list[Member]:
        """The members of a group by name; never one whose time is over, even if ``expire`` has not been called yet."""
        held = (self._held[lease_id] for lease_id in self._groups.get(group, {}).values())
        return sorted((one.member for one in held if one.expires_ms > now_ms), key=lambda member: member.name)

    def revision(self, group: str) -> int:
        """Changes whenever the members or their attributes do; 0 for a group without members."""
        return self._revisions.get(group, 0)

    def next_expiry_ms(self) -> int | None:
        """The millisecond at which the next lease ends unless it is renewed; ``None`` if there is no lease."""
        while self._expiries:
            not_before_ms, lease_id = self._expiries[0]
            held = self._held.get(lease_id)
            if held is None:
                heapq.heappop(self._expiries)
            elif held.expires_ms != not_before_ms:
                heapq.heapreplace(self._expiries, (held.expires_ms, lease_id))
            else:
                return not_before_ms
        return None

    def groups(self) -> list[str]:
        """The groups that have members, by name."""
        return sorted(self._groups)

    def _check_room(self, group: str, member: str, attributes_bytes: int, now_ms: int) -> None:
        if len(self._held) >= LEASES_MAX or self._attributes_bytes + attributes_bytes > ATTRIBUTES_IN_ALL_BYTES_MAX:
            self.expire(now_ms)
        members = self._groups.get(group)
        held = self._held.get((members or {}).get(member, -1))
        if held is None and len(self._held) >= LEASES_MAX:
            raise TooLarge(f"group {group!r}: there are {LEASES_MAX} members of groups already", limit=LEASES_MAX)
        more_bytes = attributes_bytes - (0 if held is None else held.attributes_bytes)
        if self._attributes_bytes + more_bytes > ATTRIBUTES_IN_ALL_BYTES_MAX:
            raise TooLarge(
                f"group {group!r}, member {member!r}: the attributes of all members would be more than "
                f"{ATTRIBUTES_IN_ALL_BYTES_MAX} bytes",
                limit=ATTRIBUTES_IN_ALL_BYTES_MAX,
            )
        if members is None:
            if len(self._groups) >= GROUPS_MAX:
                raise TooLarge(f"group {group!r}: there are {GROUPS_MAX} groups already", group=group, limit=GROUPS_MAX)
        elif member not in members and len(members) >= GROUP_MEMBERS_MAX:
            alive = sum(self._held[lease_id].expires_ms > now_ms for lease_id in members.values())
            if alive >= GROUP_MEMBERS_MAX:
                raise TooLarge(
                    f"group {group!r} has {GROUP_MEMBERS_MAX} members already; {member!r} does not fit",
                    group=group,
                    member=member,
                    limit=GROUP_MEMBERS_MAX,
                )

    def _drop(self, lease_id: int, held: _ActiveLease) -> None:
        self._forget(lease_id)
        members = self._groups[held.group]
        del members[held.member.name]
        self._changed(held.group)
        if not members:
            del self._groups[held.group]
            del self._revisions[held.group]

    def _forget(self, lease_id: int) -> None:
        held = self._held.pop(lease_id, None)
        if held is not None:
            self._attributes_bytes -= held.attributes_bytes

    def _changed(self, group: str) -> None:
        self._revisions[group] = self._next_id()

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _push(self, expires_ms: int, lease_id: int) -> None:
        # Leases that were left or replaced stay in the heap until their time; when they are most of it, clear them out.
        if len(self._expiries) > 2 * len(self._held) + 64:
            self._expiries = [(held.expires_ms, held_id) for held_id, held in self._held.items()]
            heapq.heapify(self._expiries)
        else:
            heapq.heappush(self._expiries, (expires_ms, lease_id))


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not name:
        raise BadInput(f"the name of a {what} must be text and not empty, not {name!r}")
    if len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise TooLarge(
            f"the {what} {name[:40]!r}… has a name of more than {NAME_BYTES_MAX} bytes", limit=NAME_BYTES_MAX
        )


def _check_attributes(group: str, member: str, attributes: Mapping[str, str]) -> int:
    """Checks the attributes of a member and returns their bytes."""
    bytes_total = 0
    for name, value in attributes.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadInput(
                f"group {group!r}, member {member!r}: attributes are text, not {name!r}: {value!r}",
                group=group,
                member=member,
            )
        bytes_total += len(name.encode("utf-8", "surrogatepass")) + len(value.encode("utf-8", "surrogatepass"))
    if bytes_total > ATTRIBUTES_BYTES_MAX:
        raise TooLarge(
            f"group {group!r}, member {member!r}: {bytes_total} bytes of attributes, more than {ATTRIBUTES_BYTES_MAX}",
            group=group,
            member=member,
            limit=ATTRIBUTES_BYTES_MAX,
        )
    return bytes_total
