"""Tasks that are switched by hand: exactly one runs, and it runs until it gives up its turn.

With ``greenlet`` installed all of them share one thread. Without it each has a thread of its own that is let go only
while it has the turn; the order of events is the same, a switch costs some fifty times more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

try:
    import greenlet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from greenlet import getcurrent  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:
    greenlet = getcurrent = None

HAS_GREENLET = greenlet is not None


class _Carrier:
    """A greenlet that runs one body after the other: a new one maps memory for its stack, and gives it back."""

    __slots__ = ("body", "greenlet", "hub")

    def __init__(self) -> None:
        self.body: Callable[[], None] | None = None
        self.hub: Any = None
        self.greenlet = greenlet.greenlet(self._run)

    def _run(self) -> None:
        while True:
            assert self.body is not None
            self.body()
            self.body = None
            _idle.append(self)
            self.hub.switch()


_idle: list[_Carrier] = []


class GreenletTurn:
    """``resume`` lets the body run until it calls ``pause`` or ends."""

    __slots__ = ("_body", "_carrier")

    def __init__(self, body: Callable[[], None]) -> None:
        self._body: Callable[[], None] | None = body
        self._carrier: _Carrier | None = None

    def resume(self) -> None:
        carrier = self._carrier
        if carrier is None:
            carrier = self._carrier = _idle.pop() if _idle else _Carrier()
            carrier.body, self._body = self._body, None
        # Whoever resumes is also the one to come back to.
        carrier.hub = getcurrent()
        carrier.greenlet.switch()

    def pause(self) -> None:
        self._carrier.hub.switch()  # type: ignore[union-attr]


class ThreadTurn:
    """The same with a thread and two locks."""

    __slots__ = ("_body", "_mine", "_theirs", "_thread")

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._mine = threading.Lock()
        self._theirs = threading.Lock()
        self._mine.acquire()
        self._theirs.acquire()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._mine.release()
        self._theirs.acquire()

    def pause(self) -> None:
        self._theirs.release()
        self._mine.acquire()

    def _run(self) -> None:
        try:
            self._body()
        finally:
            self._theirs.release()


def new_turn(body: Callable[[], None]) -> GreenletTurn | ThreadTurn:
    return GreenletTurn(body) if HAS_GREENLET else ThreadTurn(body)
