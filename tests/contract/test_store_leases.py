"""What every state store promises of leases."""

from __future__ import annotations

import threading
import time

import pytest

from shuffle.errors import BadInput, Expired
from shuffle.statestore import Member, StateClient
from tests.contract.accounts import WAIT_MS, new_name


def test_member_registers_renews_and_leaves(client: StateClient, other: StateClient) -> None:
    group = new_name("group")
    assert client.leases.members(group) == []
    lease = client.leases.register(group, "m1", {"address": "grpc://a:1"}, ttl_ms=60_000)
    other.leases.register(group, "m0", {}, ttl_ms=60_000)
    assert other.leases.members(group) == [Member("m0", {}), Member("m1", {"address": "grpc://a:1"})]
    assert group in other.leases.groups()
    lease.renew()
    lease.leave()
    assert client.leases.members(group) == [Member("m0", {})]
    with pytest.raises(Expired):
        lease.renew()


def test_member_that_does_not_renew_vanishes_and_watchers_learn_it(client: StateClient, other: StateClient) -> None:
    group = new_name("group")
    lease = client.leases.register(group, "m", {}, ttl_ms=300)
    revision, members = other.leases.watch(group, 0, wait_ms=0)
    assert [member.name for member in members] == ["m"]
    began_s = time.monotonic()
    changed, members = other.leases.watch(group, revision, wait_ms=WAIT_MS)
    assert members == []
    assert changed != revision
    assert time.monotonic() - began_s < WAIT_MS / 2000
    with pytest.raises(Expired):
        lease.renew()


def test_watch_returns_on_registration_and_at_the_end_of_its_time(client: StateClient, other: StateClient) -> None:
    group = new_name("group")
    began_s = time.monotonic()
    revision, members = client.leases.watch(group, -1, wait_ms=WAIT_MS)
    assert members == []
    assert time.monotonic() - began_s < WAIT_MS / 2000, "any other number returns at once"
    assert client.leases.watch(group, revision, wait_ms=50) == (revision, [])
    registered = threading.Timer(0.1, lambda: other.leases.register(group, "m", {"a": "b"}, ttl_ms=60_000))
    registered.start()
    changed, members = client.leases.watch(group, revision, wait_ms=WAIT_MS)
    registered.join()
    assert changed != revision
    assert members == [Member("m", {"a": "b"})]


@pytest.mark.parametrize(
    ("group", "member", "attributes", "ttl_ms"),
    [
        ("", "m", {}, 1000),
        ("g", "", {}, 1000),
        ("g", "m", {}, 0),
        ("g", "m", {}, -1),
        ("g", "m" * 300, {}, 1000),
        ("g", "m", {"big": "x" * 20_000}, 1000),
    ],
)
def test_bad_lease_is_refused(
    client: StateClient, group: str, member: str, attributes: dict[str, str], ttl_ms: int
) -> None:
    with pytest.raises(BadInput):
        client.leases.register(group, member, attributes, ttl_ms)
    assert client.leases.members("g") == []
