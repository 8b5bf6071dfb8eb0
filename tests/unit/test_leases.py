"""Leases: who is there at which millisecond. No test here waits: the time is an argument."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shuffle.errors import BadInput, Expired, TooLarge
from shuffle.statestore.engine import leases as leases_module
from shuffle.statestore.engine.leases import ATTRIBUTES_BYTES_MAX, TTL_MS_MAX, TTL_MS_MIN, LeaseTable
from shuffle.statestore.store import Member


def names(table: LeaseTable, group: str, now_ms: int) -> list[str]:
    return [member.name for member in table.members(group, now_ms)]


def test_member_vanishes_at_its_millisecond_unless_renewed() -> None:
    table = LeaseTable()
    lease_id = table.register("g", "a", {"address": "x"}, 1000, now_ms=0)
    assert table.members("g", 999) == [Member("a", {"address": "x"})]
    assert names(table, "g", 1000) == []
    assert table.renew(lease_id, 999) == 1999
    assert names(table, "g", 1998) == ["a"]
    assert table.expire(1998) == set()
    assert table.expire(1999) == {"g"}
    assert table.groups() == []


def test_expired_lease_cannot_be_renewed_even_before_the_sweep() -> None:
    table = LeaseTable()
    lease_id = table.register("g", "a", {}, 1000, now_ms=0)
    with pytest.raises(Expired, match="'g', member 'a'"):
        table.renew(lease_id, 1000)
    table.expire(1000)
    with pytest.raises(Expired, match="register again"):
        table.renew(lease_id, 1000)


def test_registering_again_replaces_and_ends_the_old_lease() -> None:
    table = LeaseTable()
    old = table.register("g", "a", {"try": "1"}, 1000, now_ms=0)
    before = table.revision("g")
    new = table.register("g", "a", {"try": "2"}, 1000, now_ms=10)
    assert table.members("g", 10) == [Member("a", {"try": "2"})]
    assert table.revision("g") != before
    with pytest.raises(Expired):
        table.renew(old, 10)
    assert table.leave(old) is None
    assert names(table, "g", 10) == ["a"]
    assert table.leave(new) == "g"


def test_renewal_is_no_change_of_the_group() -> None:
    table = LeaseTable()
    lease_id = table.register("g", "a", {}, 1000, now_ms=0)
    before = table.revision("g")
    table.renew(lease_id, 500)
    assert table.revision("g") == before


def test_revision_is_never_used_twice_even_if_the_group_was_gone() -> None:
    table = LeaseTable()
    seen = {table.revision("g")}
    for step in range(5):
        lease_id = table.register("g", "a", {}, 1000, now_ms=step)
        assert table.revision("g") not in seen
        seen.add(table.revision("g"))
        table.leave(lease_id)
        assert table.revision("g") == 0


def test_ids_continue_from_where_the_caller_says() -> None:
    first = LeaseTable(first_id=1000)
    assert first.register("g", "a", {}, 1000, now_ms=0) >= 1000
    assert first.revision("g") >= 1000


def test_clock_that_goes_back_does_not_shorten_a_lease() -> None:
    table = LeaseTable()
    lease_id = table.register("g", "a", {}, 1000, now_ms=5000)
    assert table.renew(lease_id, 0) == 6000


def test_attributes_are_a_copy() -> None:
    table = LeaseTable()
    attributes = {"a": "1"}
    table.register("g", "a", attributes, 1000, now_ms=0)
    attributes["a"] = "2"
    assert table.members("g", 0)[0].attributes == {"a": "1"}


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"group": ""}, BadInput, "name of a group"),
        ({"member": ""}, BadInput, "name of a member"),
        ({"member": 5}, BadInput, "must be text"),
        ({"group": "é" * 128}, TooLarge, "255"),
        ({"ttl_ms": TTL_MS_MIN - 1}, BadInput, "time to live"),
        ({"ttl_ms": TTL_MS_MAX + 1}, BadInput, "time to live"),
        ({"ttl_ms": 1000.0}, BadInput, "time to live"),
        ({"attributes": {"a": 5}}, BadInput, "attributes are text"),
        ({"attributes": {"a": "x" * ATTRIBUTES_BYTES_MAX}}, TooLarge, "attributes"),
    ],
)
def test_registration_refused_changes_nothing(changed: dict[str, Any], error: type[BadInput], words: str) -> None:
    table = LeaseTable()
    given: dict[str, Any] = {"group": "g", "member": "a", "attributes": {}, "ttl_ms": 1000, "now_ms": 0} | changed
    with pytest.raises(error, match=words):
        table.register(**given)
    assert (table.groups(), table.next_expiry_ms()) == ([], None)


def test_full_group_takes_nobody_new_until_somebody_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "GROUP_MEMBERS_MAX", 2)
    table = LeaseTable()
    table.register("g", "a", {}, 1000, now_ms=0)
    table.register("g", "b", {}, 5000, now_ms=0)
    with pytest.raises(TooLarge, match="'c' does not fit"):
        table.register("g", "c", {}, 1000, now_ms=999)
    table.register("g", "b", {}, 5000, now_ms=999)
    table.register("g", "c", {}, 1000, now_ms=1000)
    assert names(table, "g", 1000) == ["b", "c"]


def test_leases_left_or_replaced_do_not_pile_up() -> None:
    table = LeaseTable()
    for step in range(5000):
        table.register("g", "a", {}, TTL_MS_MAX, now_ms=step)
    assert len(table._expiries) < 100
    assert table.next_expiry_ms() == 4999 + TTL_MS_MAX


class LeasesAgainstModel(RuleBasedStateMachine):
    """``LeaseTable`` beside the plainest thing that could be right: a dict, looked through from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.model: dict[tuple[str, str], tuple[int, int, int]] = {}
        self.ids: list[int] = []
        self.now_ms = 0

    def holder(self, lease_id: int) -> tuple[str, str] | None:
        return next((who for who, (held, _, _) in self.model.items() if held == lease_id), None)

    @rule(group=st.sampled_from("gh"), member=st.sampled_from("abc"), ttl_ms=st.integers(100, 400))
    def register(self, group: str, member: str, ttl_ms: int) -> None:
        before = self.table.revision(group)
        lease_id = self.table.register(group, member, {}, ttl_ms, self.now_ms)
        assert lease_id not in self.ids
        assert self.table.revision(group) != before
        self.ids.append(lease_id)
        self.model[group, member] = (lease_id, ttl_ms, self.now_ms + ttl_ms)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.ids))
        who = self.holder(lease_id)
        if who is None or self.model[who][2] <= self.now_ms:
            with pytest.raises(Expired):
                self.table.renew(lease_id, self.now_ms)
        else:
            self.table.renew(lease_id, self.now_ms)
            self.model[who] = (lease_id, self.model[who][1], self.now_ms + self.model[who][1])

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.ids))
        who = self.holder(lease_id)
        assert self.table.leave(lease_id) == (who[0] if who else None)
        if who:
            del self.model[who]

    @rule(passed_ms=st.integers(1, 300))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @rule()
    def expire(self) -> None:
        gone = {who for who, (_, _, expires_ms) in self.model.items() if expires_ms <= self.now_ms}
        assert self.table.expire(self.now_ms) == {group for group, _ in gone}
        for who in gone:
            del self.model[who]

    @invariant()
    def same_view(self) -> None:
        for group in "gh":
            alive = sorted(m for (g, m), (_, _, until) in self.model.items() if g == group and until > self.now_ms)
            assert names(self.table, group, self.now_ms) == alive
        assert self.table.groups() == sorted({group for group, _ in self.model})
        assert self.table.next_expiry_ms() == min((until for _, _, until in self.model.values()), default=None)


LeasesAgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_leases_against_model = LeasesAgainstModel.TestCase


def test_members_of_all_groups_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "LEASES_MAX", 2)
    table = LeaseTable()
    table.register("a", "m", {}, 1000, 0)
    table.register("b", "m", {}, 2000, 0)
    with pytest.raises(TooLarge, match="members of groups"):
        table.register("c", "m", {}, 1000, 0)
    table.register("a", "m", {"again": "yes"}, 1000, 500)
    table.register("c", "m", {}, 1000, 1500)
    assert table.groups() == ["b", "c"], "one whose time is over has made room"


def test_attributes_of_all_members_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "ATTRIBUTES_IN_ALL_BYTES_MAX", 10)
    table = LeaseTable()
    first = table.register("a", "m", {"k": "12345"}, 1000, 0)
    with pytest.raises(TooLarge, match="all members"):
        table.register("a", "n", {"k": "1234"}, 1000, 0)
    table.register("a", "m", {"k": "123456789"}, 1000, 0)
    assert table.leave(first) is None
    for _ in range(5):
        table.leave(table.register("a", "m", {"k": "123456789"}, 1000, 0))
    table.register("a", "n", {"k": "123456789"}, 1000, 0)
