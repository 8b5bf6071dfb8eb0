"""Sessions: what a client holds ends with it. No test here waits: the time is an argument."""

from __future__ import annotations

import pytest

from shuffle.errors import BadInput, Expired, TooLarge
from statestore import sessions as sessions_module
from statestore.sessions import SESSION_TTL_MS_MAX, Sessions
from statestore.store import Moment


def test_silent_session_gives_its_moments_back() -> None:
    sessions = Sessions(first_id=100)
    silent, lively = sessions.open(1000, now_ms=0), sessions.open(1000, now_ms=0)
    first, second, third = Moment(1, 7), Moment(2, 7), Moment(3, 8)
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
    sessions.hold(one, Moment(1, 7))
    with pytest.raises(Expired):
        sessions.held(other, 1)
    assert sessions.drop(other, 1) is None
    assert sessions.drop(one, 1) == Moment(1, 7)
    assert sessions.drop(one, 1) is None
    with pytest.raises(Expired):
        sessions.held(one, 1)


def test_closed_session_gives_its_moments_back_once() -> None:
    sessions = Sessions(first_id=100)
    session = sessions.open(1000, 0)
    sessions.hold(session, Moment(1, 7))
    assert sessions.close(session) == [Moment(1, 7)]
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
    monkeypatch.setattr(sessions_module, "MOMENTS_MAX", 2)
    session = sessions.open(1000, 0)
    for moment_id in range(2):
        sessions.hold(session, Moment(moment_id, 1))
    with pytest.raises(TooLarge, match="close some"):
        sessions.hold(session, Moment(9, 1))
