"""The sessions of a daemon's clients, and the read views they hold."""

from __future__ import annotations

import threading
import time

from shuffle.errors import ShuffleError
from shuffle.statestore.engine.sessions import Sessions
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.store import ReadView
from shuffle.support.vital_threads import start_vital


class SessionRegistry:
    """The sessions of all clients, and the read views they hold at the store. Safe to use from many threads."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._sessions = Sessions(first_id=time.time_ns() // 1_000)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reaper = start_vital(self._reap, "session-reaper", store.fail)

    def __len__(self) -> int:
        return len(self._sessions)

    def open_session(self, ttl_ms: int, peer: str = "") -> int:
        """``peer`` is the machine of the client: the sessions of one machine are bounded."""
        with self._lock:
            return self._sessions.open(ttl_ms, _now_ms(), peer)

    def renew_session(self, session_id: int) -> None:
        with self._lock:
            self._sessions.renew(session_id, _now_ms())

    def close_session(self, session_id: int) -> None:
        with self._lock:
            views = self._sessions.close(session_id)
        self._release(views)

    def hold(self, session_id: int, view: ReadView) -> None:
        try:
            with self._lock:
                self._sessions.hold(session_id, view)
        except ShuffleError:
            self._store.release_view(view)
            raise

    def held(self, session_id: int, view_id: int) -> ReadView:
        with self._lock:
            return self._sessions.held(session_id, view_id)

    def take(self, session_id: int, view_id: int) -> ReadView | None:
        with self._lock:
            return self._sessions.drop(session_id, view_id)

    def close(self) -> None:
        self._closed.set()

    def _release(self, views: list[ReadView]) -> None:
        for view in views:
            self._store.release_view(view)

    def _reap(self) -> None:
        while not self._closed.wait(0.5):
            with self._lock:
                views = self._sessions.expire(_now_ms())
            self._release(views)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
