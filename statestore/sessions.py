"""Sessions: what a client holds at the daemon, and gives back when it dies.

A moment keeps old versions of rows alive. A client that was killed cannot release its moments, so they belong to a
session, and a session that is not renewed in time loses them. Plain logic: the time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shuffle.errors import BadInput, Expired, TooLarge
from statestore.store import Moment

SESSION_TTL_MS_DEFAULT = 10_000
SESSION_TTL_MS_MAX = 3_600_000
MOMENTS_MAX = 10_000
"""Moments of one session: a client that holds more has forgotten to release them."""


@dataclass(slots=True)
class _Session:
    ttl_ms: int
    expires_ms: int
    moments: dict[int, Moment] = field(default_factory=dict)


class Sessions:
    """The open sessions of a daemon."""

    def __init__(self, first_id: int) -> None:
        self._next_id = first_id
        self._sessions: dict[int, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, ttl_ms: int, now_ms: int) -> int:
        if not 100 <= ttl_ms <= SESSION_TTL_MS_MAX:
            raise BadInput(f"a session lives 100 ms to {SESSION_TTL_MS_MAX} ms between renewals, not {ttl_ms}")
        self._next_id += 1
        self._sessions[self._next_id] = _Session(ttl_ms, now_ms + ttl_ms)
        return self._next_id

    def renew(self, session_id: int, now_ms: int) -> None:
        session = self._session(session_id)
        session.expires_ms = now_ms + session.ttl_ms

    def hold(self, session_id: int, moment: Moment) -> None:
        session = self._session(session_id)
        if len(session.moments) >= MOMENTS_MAX:
            raise TooLarge(f"{MOMENTS_MAX} snapshots and transactions are open in this session: close some")
        session.moments[moment.moment_id] = moment

    def held(self, session_id: int, moment_id: int) -> Moment:
        moment = self._session(session_id).moments.get(moment_id)
        if moment is None:
            raise Expired("the snapshot or transaction is over: it was released, or its client was silent too long")
        return moment

    def drop(self, session_id: int, moment_id: int) -> Moment | None:
        session = self._sessions.get(session_id)
        return None if session is None else session.moments.pop(moment_id, None)

    def close(self, session_id: int) -> list[Moment]:
        """Returns the moments to release."""
        session = self._sessions.pop(session_id, None)
        return [] if session is None else list(session.moments.values())

    def expire(self, now_ms: int) -> list[Moment]:
        """End the sessions whose time is over; returns the moments to release."""
        over = [session_id for session_id, session in self._sessions.items() if session.expires_ms <= now_ms]
        return [moment for session_id in over for moment in self.close(session_id)]

    def _session(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise Expired("the session is over: its client was silent too long, or the store was restarted")
        return session
