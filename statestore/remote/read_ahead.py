"""Reading a queue ahead: while one response is being used, the next ones are on their way.

Only for reads over the wire, and only once a reader is seen to go through a partition in order. A response says at its
front where it ends, so over the lane the next request is sent while its rows are still coming: the daemon is never
without one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from shuffle.statestore.remote.transport import ReadRequest, ReadResponse

PARTITIONS_MAX = 64
"""Partitions that are followed at once."""

RESPONSES_MAX = 64
"""Responses that are on their way, or wait to be used, at once; each has as many bytes as its reader asks for."""

AHEAD_MAX = 1
"""Maximum of them for one partition, beside the one that its reader waits for or uses. A second gains nothing."""

_THREADS = 4


class Send(Protocol):
    """Sends a request to the daemon. ``on_end`` is called as soon as it is known where the response ends."""

    def __call__(
        self, request: ReadRequest, wait_ms: int, on_end: Callable[[int], None] | None = None
    ) -> ReadResponse | None: ...


@dataclass(slots=True, eq=False)
class _Run:
    """A reader's way through a partition, from response to response."""

    expected: int = -1
    """Where its next request begins, if it goes on in order."""
    sent: deque[tuple[ReadRequest, Future[ReadResponse | None]]] = field(default_factory=deque)
    following: ReadRequest | None = None
    """The request to send after the last of those, as soon as there is room."""


class ReadAhead:
    """Sends the reads that are likely to come next. Safe to use from many threads."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="read-ahead")
        self._runs: dict[tuple[int, int], _Run] = {}
        self._closed = False

    def read(self, request: ReadRequest, wait_ms: int) -> ReadResponse | None:
        place = request.queue_id, request.partition
        with self._lock:
            run = self._runs.get(place)
            sort_by_key = run is not None and run.expected == request.begin
            if run is None or not sort_by_key or (run.sent and run.sent[0][0] != request):
                run = self._begin(place)
            response = run.sent.popleft()[1] if run.sent else None
            self._send_more(run)
        found = response.result() if response is not None else None
        if found is None:
            # What was sent after a request whose response did not come is of no use either.
            with self._lock:
                run = self._begin(place)
            found = self._send(request, wait_ms, self._listener(run, request) if sort_by_key else None)
        if found is not None:
            with self._lock:
                run.expected = request.after(found.end).begin
        return found

    def _begin(self, place: tuple[int, int]) -> _Run:
        if len(self._runs) >= PARTITIONS_MAX:
            self._runs.clear()
        run = self._runs[place] = _Run()
        return run

    def _listener(self, run: _Run, request: ReadRequest) -> Callable[[int], None]:
        def on_end(end: int) -> None:
            with self._lock:
                run.following = request.after(end)
                self._send_more(run)

        return on_end

    def _send_more(self, run: _Run) -> None:
        """Send what follows, if that is known and there is room for it."""
        request = run.following
        if request is None or self._closed or len(run.sent) >= AHEAD_MAX:
            return
        if self._runs.get((request.queue_id, request.partition)) is not run:
            return  # Its reader has gone elsewhere.
        if sum(len(each.sent) for each in self._runs.values()) < RESPONSES_MAX:
            run.following = None
            run.sent.append((request, self._pool.submit(self._quietly, request, self._listener(run, request))))

    def _quietly(self, request: ReadRequest, on_end: Callable[[int], None]) -> ReadResponse | None:
        """What goes wrong here is not the caller's business yet: it sends the request again, and learns then."""
        try:
            return self._send(request, 0, on_end)
        except Exception:
            return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
