"""Faults of discovery: lists of workers that are empty, out of date, or wrong."""

from __future__ import annotations

from shuffle.statestore.store import Member
from tests.sim import kernel
from tests.sim.kernel import World


class DiscoveryFaults:
    def __init__(self, world: World) -> None:
        self._world = world
        self.kind: str | None = None
        """The fault that is active: empty, stale or lies; None if there is none."""
        self._old_members: dict[str, tuple[int, list[Member]]] = {}

    def distort(self, group: str, found: tuple[int, list[Member]]) -> tuple[int, list[Member]]:
        """The members of a group after the active fault. A lie is a wrong address, or a guid that nobody has."""
        if self.kind is None:
            if found[1]:
                self._old_members[group] = found
            return found
        self._world.fault(f"discovery {self.kind}")
        revision, members = found
        kernel.sleep(0.02)
        if self.kind == "empty":
            return revision, []
        if self.kind == "stale":
            return self._old_members.get(group, found)
        addresses = [member.attributes.get("address", "") for member in members]
        rng = self._world.streams["chance"]
        lies = []
        for member in members:
            wrong = {**member.attributes, "address": rng.choice(addresses)}
            lies.append(Member(member.name if rng.random() < 0.6 else f"{rng.getrandbits(64):032x}", wrong))
        return revision, lies
