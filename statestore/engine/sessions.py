"""Sessions: the read views that a client holds at the daemon, which are released when it dies.

A read view keeps old versions of rows alive. A client that was killed cannot release its views, so they belong to a
session, and a session that is not renewed in time loses them. Plain logic: the time is an argument.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shuffle.errors import BadInput, Expired, TooLarge
from shuffle.statestore.store import ReadView

SESSION_TTL_MS_MAX = 3_600_000
"""The longest time in milliseconds that a session may live between renewals."""

VIEWS_PER_SESSION_MAX = 10_000
"""The most read views of one session: a client that holds more has forgotten to release them."""

SESSIONS_MAX = 10_000
"""The most open sessions. A client has one, and so has each shared snapshot. Ten thousand take two megabytes."""

SESSIONS_PER_PEER_MAX = 5_000
"""The most open sessions of the clients at one address: half of all is left for the others."""

VIEWS_MAX = 100_000
"""The most read views of all sessions together: each is a snapshot of RocksDB, which keeps old versions of rows."""


@dataclass(slots=True)
class _Session:
    ttl_ms: int
    expires_ms: int
    peer: str
    views: dict[int, ReadView] = field(default_factory=dict)


class Sessions:
    """The open sessions of a daemon."""

    def __init__(self, first_id: int) -> None:
        self._next_id = first_id
        self._sessions: dict[int, _Session] = {}
        self._by_peer: Counter[str] = Counter()
        self._views = 0
        """The number of read views that all sessions together hold."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, ttl_ms: int, now_ms: int, peer: str = "") -> int:
        if not 100 <= ttl_ms <= SESSION_TTL_MS_MAX:
            raise BadInput(f"a session lives 100 ms to {SESSION_TTL_MS_MAX} ms between renewals, not {ttl_ms}")
        if len(self._sessions) >= SESSIONS_MAX or self._by_peer[peer] >= SESSIONS_PER_PEER_MAX:
            raise TooLarge(
                f"{len(self._sessions)} sessions are open, {self._by_peer[peer]} of them from the address of this "
                f"client; there may be {SESSIONS_MAX}, and {SESSIONS_PER_PEER_MAX} from one address: close some clients"
            )
        self._next_id += 1
        self._sessions[self._next_id] = _Session(ttl_ms, now_ms + ttl_ms, peer)
        self._by_peer[peer] += 1
        return self._next_id

    def renew(self, session_id: int, now_ms: int) -> None:
        session = self._session(session_id)
        session.expires_ms = now_ms + session.ttl_ms

    def hold(self, session_id: int, view: ReadView) -> None:
        session = self._session(session_id)
        if len(session.views) >= VIEWS_PER_SESSION_MAX:
            raise TooLarge(f"{VIEWS_PER_SESSION_MAX} snapshots and transactions are open in this session: close some")
        if self._views >= VIEWS_MAX:
            raise TooLarge(f"{VIEWS_MAX} snapshots and transactions are open at this store: close some")
        self._views += view.view_id not in session.views
        session.views[view.view_id] = view

    def held(self, session_id: int, view_id: int) -> ReadView:
        view = self._session(session_id).views.get(view_id)
        if view is None:
            raise Expired("the snapshot or transaction is over: it was released, or its client was silent too long")
        return view

    def drop(self, session_id: int, view_id: int) -> ReadView | None:
        session = self._sessions.get(session_id)
        view = None if session is None else session.views.pop(view_id, None)
        self._views -= view is not None
        return view

    def close(self, session_id: int) -> list[ReadView]:
        """End a session; returns the read views to release."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return []
        self._by_peer[session.peer] -= 1
        if not self._by_peer[session.peer]:
            del self._by_peer[session.peer]
        self._views -= len(session.views)
        return list(session.views.values())

    def expire(self, now_ms: int) -> list[ReadView]:
        """End the sessions whose time is over; returns the read views to release."""
        over = [session_id for session_id, session in self._sessions.items() if session.expires_ms <= now_ms]
        return [view for session_id in over for view in self.close(session_id)]

    def _session(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise Expired("the session is over: its client was silent too long, or the store was restarted")
        return session
