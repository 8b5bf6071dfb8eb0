"""Reading a queue ahead: while the caller uses one response, the next one is requested.

This is done only for reads over the wire, and only once a reader reads a partition in order. The header of a response
says where the response ends, so over the lane the next request is sent while the rows are still being received: the
daemon always has a request to work on.
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
"""The most partitions whose readers are followed at once."""

RESPONSES_MAX = 64
"""The most responses, of all partitions, that are requested ahead and not used yet; each has as many bytes as its
reader asks for."""

AHEAD_MAX = 1
"""The most responses of one partition that are requested ahead, beside the one that its reader waits for or uses. A
second gains nothing."""

_THREADS = 4


class SendRead(Protocol):
    """Sends a read to the daemon. ``on_end`` is called with the end position of the response, once it is known."""

    def __call__(
        self, request: ReadRequest, wait_ms: int, on_end: Callable[[int], None] | None = None
    ) -> ReadResponse | None: ...


@dataclass(slots=True, eq=False)
class _Run:
    """A reader that reads a partition in order."""

    expected: int = -1
    """The position at which its next request begins, if it goes on in order."""
    sent: deque[tuple[ReadRequest, Future[ReadResponse | None]]] = field(default_factory=deque)
    """The requests that were sent ahead, in order, with their responses."""
    following: ReadRequest | None = None
    """The request to send after the last of ``sent``, as soon as the bounds allow it."""


class ReadAhead:
    """Sends the reads that are likely to come next. Safe to use from many threads."""

    def __init__(self, send: SendRead) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="read-ahead")
        self._runs: dict[tuple[int, int], _Run] = {}
        self._closed = False

    def read(self, request: ReadRequest, wait_ms: int) -> ReadResponse | None:
        partition = request.queue_id, request.partition
        with self._lock:
            run = self._runs.get(partition)
            in_order = run is not None and run.expected == request.begin
            if run is None or not in_order or (run.sent and run.sent[0][0] != request):
                run = self._begin(partition)
            ahead = run.sent.popleft()[1] if run.sent else None
            self._send_more(run)
        response = ahead.result() if ahead is not None else None
        if response is None:
            # The requests that were sent after one that failed, or found no rows, are of no use either.
            with self._lock:
                run = self._begin(partition)
            response = self._send(request, wait_ms, self._make_on_end(run, request) if in_order else None)
        if response is not None:
            with self._lock:
                run.expected = request.after(response.end).begin
        return response

    def _begin(self, partition: tuple[int, int]) -> _Run:
        if len(self._runs) >= PARTITIONS_MAX:
            self._runs.clear()
        run = self._runs[partition] = _Run()
        return run

    def _make_on_end(self, run: _Run, request: ReadRequest) -> Callable[[int], None]:
        def on_end(end: int) -> None:
            with self._lock:
                run.following = request.after(end)
                self._send_more(run)

        return on_end

    def _send_more(self, run: _Run) -> None:
        """Send the following request, if it is known and the bounds allow it."""
        request = run.following
        if request is None or self._closed or len(run.sent) >= AHEAD_MAX:
            return
        if self._runs.get((request.queue_id, request.partition)) is not run:
            return  # Its reader has gone on at another position.
        if sum(len(each.sent) for each in self._runs.values()) < RESPONSES_MAX:
            run.following = None
            run.sent.append((request, self._pool.submit(self._send_ahead, request, self._make_on_end(run, request))))

    def _send_ahead(self, request: ReadRequest, on_end: Callable[[int], None]) -> ReadResponse | None:
        """Send a request ahead. Its errors are dropped: the reader sends the request again, and gets the error then."""
        try:
            return self._send(request, 0, on_end)
        except Exception:
            return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
