"""Discovery against the leases of an embedded store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shuffle.discovery import MapperAddress, MapperDirectory, Membership, arrange_mappers
from shuffle.durable.tables import mappers_group
from shuffle.errors import StoreUnavailable
from shuffle.ids import Guid, MapperIndex
from shuffle.statestore import Member, StateClient
from tests import waiting
from tests.deaths import unexpected

WAIT_S = 10.0
wait_until = partial(waiting.wait_until, wait_s=WAIT_S)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "store") as client:
        yield client


def mapper_attributes(index: int, port: int) -> dict[str, str]:
    return {"index": str(index), "address": f"grpc://127.0.0.1:{port}"}


class FlakyLeases:
    """The leases of a store that cannot be reached while ``down`` is set."""

    def __init__(self, client: StateClient) -> None:
        self._leases = client.leases
        self.down = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.down.is_set():
            raise StoreUnavailable("the store is being restarted")
        return getattr(self._leases, name)

    def register(self, group: str, member: str, attributes: dict[str, str], ttl_ms: int) -> Any:
        lease = self.__getattr__("register")(group, member, attributes, ttl_ms)
        return FlakyLease(self, lease)


class FlakyLease:
    def __init__(self, leases: FlakyLeases, lease: Any) -> None:
        self._leases, self._lease = leases, lease

    def __getattr__(self, name: str) -> Any:
        if self._leases.down.is_set():
            raise StoreUnavailable("the store is being restarted")
        return getattr(self._lease, name)


class FlakyClient:
    def __init__(self, client: StateClient) -> None:
        self.leases = FlakyLeases(client)


def test_members_are_arranged_by_index_youngest_first() -> None:
    def member(name: str, since_ns: int, **attributes: str) -> Member:
        return Member(name, {"since_ns": str(since_ns), **attributes})

    arranged = arrange_mappers(
        [
            member("a", 1, index="1", address="grpc://h:1"),
            member("b", 9, index="1", address="grpc://h:2"),
            member("c", 5, index="0", address="grpc://h:3"),
            member("no address", 5, index="0"),
            member("no number", 5, index="x", address="grpc://h:4"),
        ]
    )
    assert list(arranged.items()) == [
        (0, [MapperAddress(Guid("c"), "grpc://h:3")]),
        (1, [MapperAddress(Guid("b"), "grpc://h:2"), MapperAddress(Guid("a"), "grpc://h:1")]),
    ]


def test_membership_is_visible_while_it_lasts(client: StateClient) -> None:
    with Membership(client, "job/mappers", "guid", mapper_attributes(0, 1), ttl_ms=5_000, on_death=unexpected):
        assert [member.name for member in client.leases.members("job/mappers")] == ["guid"]
    assert client.leases.members("job/mappers") == []


def test_membership_outlives_its_time_to_live(client: StateClient) -> None:
    with Membership(
        client, "job/mappers", "guid", mapper_attributes(0, 1), ttl_ms=150, on_death=unexpected
    ) as membership:
        begin_s = time.monotonic()
        wait_until(lambda: time.monotonic() - begin_s > 0.5)
        assert [member.name for member in client.leases.members("job/mappers")] == ["guid"]
        assert not membership.lost.is_set()


def test_membership_registers_again_after_its_lease_was_lost(client: StateClient) -> None:
    with Membership(client, "job/mappers", "guid", mapper_attributes(0, 1), ttl_ms=300, on_death=unexpected):
        # Another holder of the name replaces the lease and leaves: the first one is then over.
        client.leases.register("job/mappers", "guid", {}, 5_000).leave()
        assert client.leases.members("job/mappers") == []
        wait_until(lambda: len(client.leases.members("job/mappers")) == 1)


def test_membership_survives_a_store_that_is_away(client: StateClient) -> None:
    flaky = FlakyClient(client)
    with Membership(
        flaky, "job/mappers", "guid", mapper_attributes(0, 1), ttl_ms=150, on_death=unexpected
    ) as membership:  # type: ignore[arg-type]
        flaky.leases.down.set()
        wait_until(membership.lost.is_set)
        wait_until(lambda: client.leases.members("job/mappers") == [])
        flaky.leases.down.clear()
        wait_until(lambda: len(client.leases.members("job/mappers")) == 1)
        wait_until(lambda: not membership.lost.is_set())


def test_membership_starts_while_the_store_is_away(client: StateClient) -> None:
    flaky = FlakyClient(client)
    flaky.leases.down.set()
    with Membership(flaky, "job/mappers", "guid", mapper_attributes(0, 1), ttl_ms=150, on_death=unexpected):  # type: ignore[arg-type]
        flaky.leases.down.clear()
        wait_until(lambda: len(client.leases.members("job/mappers")) == 1)


def test_directory_sees_mappers_come_and_go(client: StateClient) -> None:
    with MapperDirectory(client, "job", wait_ms=200, on_death=unexpected) as directory:
        assert directory.mappers() == {}
        with Membership(
            client, mappers_group("job"), "one", mapper_attributes(1, 7), ttl_ms=5_000, on_death=unexpected
        ):
            wait_until(lambda: 1 in directory.mappers())
            assert directory.mappers()[MapperIndex(1)] == [MapperAddress(Guid("one"), "grpc://127.0.0.1:7")]
            seen = directory.changes
        assert directory.wait_for_change(WAIT_S, since=seen)
        assert directory.mappers() == {}
        assert not directory.wait_for_change(0.05)


def test_directory_lists_both_instances_of_a_mapper(client: StateClient) -> None:
    group = mappers_group("job")
    with MapperDirectory(client, "job", wait_ms=200, on_death=unexpected) as directory:
        with Membership(client, group, "old", mapper_attributes(0, 1), ttl_ms=5_000, on_death=unexpected):
            with Membership(client, group, "new", mapper_attributes(0, 2), ttl_ms=5_000, on_death=unexpected):
                wait_until(lambda: len(directory.mappers().get(MapperIndex(0), [])) == 2)
                assert [mapper.guid for mapper in directory.mappers()[MapperIndex(0)]] == ["new", "old"]


def test_directory_goes_on_after_the_store_was_away(client: StateClient) -> None:
    flaky = FlakyClient(client)
    flaky.leases.down.set()
    with MapperDirectory(flaky, "job", wait_ms=200, on_death=unexpected) as directory:  # type: ignore[arg-type]
        client.leases.register(mappers_group("job"), "one", mapper_attributes(0, 1), 5_000)
        flaky.leases.down.clear()
        wait_until(lambda: 0 in directory.mappers())
