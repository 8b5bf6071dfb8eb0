"""Sessions: what a client holds ends with it. No test here waits: the time is an argument."""

from __future__ import annotations

import pytest

from shuffle.errors import BadInput, Expired, TooLarge
from shuffle.statestore.engine import sessions as sessions_module
from shuffle.statestore.engine.sessions import SESSION_TTL_MS_MAX, Sessions
from shuffle.statestore.store import ReadView


def test_silent_session_gives_its_moments_back() -> None:
    sessions = Sessions(first_id=100)
    silent, lively = sessions.open(1000, now_ms=0), sessions.open(1000, now_ms=0)
    first, second, third = ReadView(1, 7), ReadView(2, 7), ReadView(3, 8)
    sessions.hold(silent, first)
    sessions.hold(silent, second)
    sessions.hold(lively, third)
    assert sessions.expire(999) == []
    sessions.renew(lively, 999)
    assert sessions.expire(1000) == [first, second]
    assert sessions.expire(1998) == []
    assert sessions.held(lively, 3) == third
    with pytest.raises(Expired):
        sessions.renew(silent, 1000)
    with pytest.raises(Expired):
        sessions.hold(silent, first)
    assert len(sessions) == 1


def test_moment_is_held_by_its_session_only_and_dropped_once() -> None:
    sessions = Sessions(first_id=100)
    one, other = sessions.open(1000, 0), sessions.open(1000, 0)
    sessions.hold(one, ReadView(1, 7))
    with pytest.raises(Expired):
        sessions.held(other, 1)
    assert sessions.drop(other, 1) is None
    assert sessions.drop(one, 1) == ReadView(1, 7)
    assert sessions.drop(one, 1) is None
    with pytest.raises(Expired):
        sessions.held(one, 1)


def test_closed_session_gives_its_moments_back_once() -> None:
    sessions = Sessions(first_id=100)
    session = sessions.open(1000, 0)
    sessions.hold(session, ReadView(1, 7))
    assert sessions.close(session) == [ReadView(1, 7)]
    assert sessions.close(session) == []
    assert sessions.drop(session, 1) is None


def test_ids_of_another_life_of_the_daemon_are_unknown() -> None:
    before = Sessions(first_id=100).open(1000, 0)
    after = Sessions(first_id=200)
    assert after.open(1000, 0) != before
    with pytest.raises(Expired, match="restarted"):
        after.renew(before, 0)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(first_id=1)
    for ttl_ms in (0, 99, SESSION_TTL_MS_MAX + 1):
        with pytest.raises(BadInput):
            sessions.open(ttl_ms, 0)
    monkeypatch.setattr(sessions_module, "VIEWS_PER_SESSION_MAX", 2)
    session = sessions.open(1000, 0)
    for view_id in range(2):
        sessions.hold(session, ReadView(view_id, 1))
    with pytest.raises(TooLarge, match="close some"):
        sessions.hold(session, ReadView(9, 1))


def test_sessions_are_bounded_in_all_and_for_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 3)
    monkeypatch.setattr(sessions_module, "SESSIONS_PER_PEER_MAX", 2)
    sessions = Sessions(first_id=1)
    first, _ = sessions.open(1000, 0, "here"), sessions.open(1000, 0, "here")
    with pytest.raises(TooLarge, match="2 of them from the address"):
        sessions.open(1000, 0, "here")
    sessions.open(1000, 0, "there")
    with pytest.raises(TooLarge, match="3 sessions are open"):
        sessions.open(1000, 0, "there")
    sessions.close(first)
    sessions.open(1000, 0, "here")
    sessions.expire(1000)
    assert len(sessions) == 0
    assert [sessions.open(1000, 0, "here") > 0 for _ in range(2)] == [True, True]


def test_views_of_all_sessions_are_bounded_and_counted_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "VIEWS_MAX", 3)
    sessions = Sessions(first_id=1)
    one, two = sessions.open(1000, 0), sessions.open(2000, 0)
    sessions.hold(one, ReadView(1, 7))
    sessions.hold(two, ReadView(2, 7))
    sessions.hold(two, ReadView(3, 7))
    with pytest.raises(TooLarge, match="at this store"):
        sessions.hold(one, ReadView(4, 7))
    assert sessions.drop(two, 2) is not None
    assert sessions.drop(two, 2) is None
    sessions.hold(one, ReadView(4, 7))
    sessions.expire(1000)
    for view_id in (5, 6):
        sessions.hold(two, ReadView(view_id, 7))
    with pytest.raises(TooLarge):
        sessions.hold(two, ReadView(7, 7))
