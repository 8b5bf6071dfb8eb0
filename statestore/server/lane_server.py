"""The daemon's end of the lane: small requests over plain sockets, all of them in one thread.

A Flight exchange costs a quarter of a millisecond of processor time for a request and its response, whatever they are,
and a thread for each client. A transaction of one row should not cost more than its sync does. So, for the lane,

1. one thread receives the requests of all connections that have one, and decodes them;
2. it hands the commits among them to the writer together, so that they become one group, and handles the rest at once;
3. the writer responds to each commit itself, by a send on its socket, as soon as the group is durable.

While the writer syncs, which it does without Python's lock, this thread decodes the next group.

The rows of a queue are a much larger response (``file_sender``). Sending them may wait for the disk, so a few sender
threads do it, and a connection belongs to one of them meanwhile; the connection of a client that takes its rows slowly
comes back to this thread, where waiting occupies no sender.

A socket is closed by this thread, but never while the writer has a commit of it (``committing``) or a thread is about
to write to it (``sending``): then the thread that writes last closes it. Else a response could be sent on a connection
that was opened since and has the same file descriptor.

An error while a connection is served ends that connection alone (``_failed``). Any other error ends this thread, which
is reported (``shuffle.support.vital_threads``).
"""

from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from shuffle.errors import BadInput, ShuffleError, TooLarge
from shuffle.limits import KIB
from shuffle.statestore.local.commit_queue import Pending
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.request import CommitRequest, Committed
from shuffle.statestore.server.file_sender import FileSend, Progress
from shuffle.statestore.server.handlers import Handlers, Request
from shuffle.statestore.server.lane_connections import Connection, Connections, Poll, peer_of
from shuffle.statestore.store import ReadView, Span
from shuffle.statestore.wire.lane_frames import (
    GREETING,
    REQUEST_BYTES_MAX,
    RESPONSE_BYTES_MAX,
    decode_frame,
    encode_committed,
    encode_frame,
    frame_bytes,
    is_small,
    local_address,
    send_at_once,
)
from shuffle.statestore.wire.messages import Header, Rows
from shuffle.statestore.wire.operations import check_request
from shuffle.support.logs import get_logger
from shuffle.support.vital_threads import OnDeath, start_vital

SENDERS = 4
"""The number of threads that send rows of queues: so many reads may wait for the disk at once."""

_RECEIVE_BYTES = 64 * KIB
_BACKLOG = 1024
_SELECT_S = 1.0
_ACCEPT_AGAIN_S = 0.01

_log = get_logger("statestore")


class _LaneCommit(Pending):
    """A commit for whose outcome a connection waits. The writer's thread sends the response."""

    __slots__ = ("_connection", "_finished", "_lane", "_view")

    def __init__(self, request: CommitRequest, view: ReadView | None, lane: LaneServer, connection: Connection) -> None:
        super().__init__(request)
        self._view = view
        self._lane = lane
        self._connection = connection
        self._finished = False

    def finish(self, outcome: Committed | ShuffleError) -> None:
        # The client would take a second response for that to its next request.
        if not self._finished:
            self._finished = True
            self._lane.finish(self._connection, self._view, outcome)


class LaneServer:
    """Listens, reads and responds until it is closed."""

    def __init__(self, host: str, store: LocalStore, handlers: Handlers, on_death: OnDeath) -> None:
        self._store = store
        self._handlers = handlers
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        tcp = socket.create_server((host.strip("[]"), 0), family=family, backlog=_BACKLOG)
        self.port: int = tcp.getsockname()[1]
        self._listeners = [tcp]
        self.local_name = ""
        if sys.platform == "linux":
            self.local_name = f"shuffle-statestore-{uuid.uuid4().hex}"
            local = socket.socket(socket.AF_UNIX)
            local.bind(local_address(self.local_name))
            local.listen(_BACKLOG)
            self._listeners.append(local)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        self._wakeup_sender.setblocking(False)
        self._selector.register(self._wakeup_receiver, selectors.EVENT_READ, self._run_calls)
        self._calls: deque[tuple[Connection | None, Callable[[], None]]] = deque()
        """The calls that other threads want this one to make, each with its connection, if it is for one."""
        self.connections = Connections()
        self._polls: list[Poll] = []
        self._commits: list[Pending] = []
        self._now = self._swept_at = time.monotonic()
        """The time at which the last turn of the loop began, which is exact enough for bounds of seconds."""
        self._senders = ThreadPoolExecutor(SENDERS, thread_name_prefix="store-sender")
        self._closed = False
        self._thread = start_vital(self._run, "store-lane", on_death)

    def close(self) -> None:
        """Receive nothing more. If the store was closed before, the responses to all commits have been sent."""
        self._closed = True
        self._call_from_outside(None, lambda: None)
        self._thread.join(5)

    # --- the one thread ---

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
            self._senders.shutdown()
            self._run_calls()
        finally:
            # Whatever ended this thread, no client is left waiting.
            self._senders.shutdown(wait=False)
            for connection in self.connections:
                self._drop(connection)
            self._selector.close()
            for sock in (*self._listeners, self._wakeup_receiver, self._wakeup_sender):
                sock.close()

    def _turn(self) -> None:
        ready = self._selector.select(self._select_s())
        self._now = time.monotonic()
        for key, events in ready:
            connection = key.data
            if not isinstance(connection, Connection):
                connection()
            elif not connection.gone:
                try:
                    self._ready(connection, events)
                except Exception as error:
                    self._failed(connection, error)
        if self._commits:
            commits, self._commits = self._commits, []
            self._store.submit(commits)
        if self._polls:
            self._end_polls()
        if self._now > self._swept_at + _SELECT_S:
            self._sweep()

    def _run_for(self, connection: Connection, act: Callable[..., None], *arguments: Any) -> None:
        """Call ``act`` for one connection. An error ends that connection and affects no other."""
        try:
            act(*arguments)
        except Exception as error:
            self._failed(connection, error)

    def _failed(self, connection: Connection, error: Exception) -> None:
        # That clients die, or send what cannot be decoded, is expected. Any other error is a bug of the lane.
        log = _log.info if isinstance(error, OSError | ShuffleError) else _log.error
        log("a connection of the lane is closed", peer=connection.peer, error=error)
        self._drop(connection)

    def _ready(self, connection: Connection, events: int) -> None:
        if events == selectors.EVENT_READ:
            self._receive(connection)
        elif connection.file_send is not None:
            self._send_file(connection)
        else:
            self._send_rest(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)

    def _select_s(self) -> float:
        if not self._polls:
            return _SELECT_S
        return min(max(self._polls[0].deadline - time.monotonic(), 0), _SELECT_S)

    def _sweep(self) -> None:
        """End the connections whose clients have stopped for too long in the middle of a request or a response."""
        self._swept_at = self._now
        for connection in self.connections.overdue(self._now):
            _log.info("a client of the lane was silent too long", peer=connection.peer)
            self._drop(connection)

    def _call_from_outside(self, connection: Connection | None, call: Callable[[], None]) -> None:
        """Have this thread make a call for ``connection``. Used by any thread."""
        self._calls.append((connection, call))
        # If the socket is full, it already holds a wake-up; after ``close``, none is needed.
        with contextlib.suppress(OSError):
            self._wakeup_sender.send(b"\0")

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup_receiver.recv(_RECEIVE_BYTES)
        while self._calls:
            connection, call = self._calls.popleft()
            if connection is None:
                call()
            else:
                self._run_for(connection, call)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Most likely there are no file descriptors left: a pause leaves the processor to the other threads.
            _log.warning("the lane cannot take a connection", error=error)
            time.sleep(_ACCEPT_AGAIN_S)
            return
        peer, now = peer_of(sock, address), time.monotonic()
        if self.connections.is_full(peer):
            idle = self.connections.find_idle(peer, now)
            if idle is None:
                # A client that gets no greeting knows that it was refused.
                sock.close()
                return
            self._drop(idle)
        connection = Connection(sock, peer, now)
        self.connections.add(connection)
        self._run_for(connection, self._greet, connection)

    def _greet(self, connection: Connection) -> None:
        connection.sock.setblocking(False)
        send_at_once(connection.sock)
        connection.sock.send(GREETING)
        self._select_events(connection, selectors.EVENT_READ)

    def _select_events(self, connection: Connection, events: int) -> None:
        """Have the selector wait for ``events`` on a connection, instead of those before."""
        if events == connection.events:
            return
        if not connection.events:
            self._selector.register(connection.sock, events, connection)
        elif not events:
            self._selector.unregister(connection.sock)
        else:
            self._selector.modify(connection.sock, events, connection)
        connection.events = events

    def _drop(self, connection: Connection) -> None:
        """End the connection. If another thread is sending a response, that thread closes the socket."""
        if connection in self.connections:
            self.connections.remove(connection)
            # If the selector itself failed, it may not know the socket any more.
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._select_events(connection, 0)
        if connection.waiting is not None:
            self._end_poll(connection)
        if connection.file_send is not None and not connection.sending:
            connection.file_send.close()
            connection.file_send = None
        connection.gone = True
        if not connection.is_used:
            connection.sock.close()

    # --- requests ---

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        if connection.has_request or connection.unsent:
            raise BadInput("a second request before the response to the first")
        if not connection.received:
            connection.since = self._now
        connection.was_used = True
        data = connection.received + data
        whole = frame_bytes(data)
        if whole is not None and whole > REQUEST_BYTES_MAX:
            self._refuse(connection, TooLarge(f"a request of {whole} bytes, more than {REQUEST_BYTES_MAX}"))
        elif whole is None or len(data) < whole:
            connection.received = data
        elif len(data) > whole:
            self._refuse(connection, BadInput("more than one request at a time"))
        else:
            connection.received = b""
            connection.has_request = True
            self._respond(connection, data)

    def _refuse(self, connection: Connection, error: ShuffleError) -> None:
        """Send the error and end the connection, since the bytes after such a beginning cannot be decoded."""
        with contextlib.suppress(OSError):
            connection.sock.send(encode_frame(self._handlers.error_header(error), None))
        self._drop(connection)

    def _respond(self, connection: Connection, data: bytes) -> None:
        try:
            header, rows = decode_frame(data)
            check_request(header)
            if not is_small(header, rows):
                raise BadInput(f"the operation {header.get('op')!r}, or so many rows, are sent over Flight")
            operation = header["op"]
            if operation == "commit":
                self._commits.append(_LaneCommit(*self._handlers.take_commit(header, rows), self, connection))
                connection.committing = True
                return
            if operation == "read":
                self._read(connection, header, time.monotonic() + header["wait_ms"] / 1000)
                return
            response: tuple[Header, Any] = self._handlers.handle(Request(header, rows))
        except Exception as error:
            response = self._handlers.error_header(error), None
        self._send(connection, *response)

    def _read(self, connection: Connection, header: Header, deadline: float) -> None:
        """Respond to a read of a queue; while there are no rows, the request waits without a thread."""

        def arrived() -> None:
            self._call_from_outside(connection, lambda: self._retry_read(connection))

        partition = header["queue"], header["partition"]
        bounds = header["begin"], header["rows"], header["bytes"]
        span = self._store.locate_or_watch(*partition, *bounds, connection, arrived)
        if span is None and deadline > time.monotonic() and not self._store.closed:
            connection.waiting = Poll(connection, header, deadline)
            heapq.heappush(self._polls, connection.waiting)
            return
        if span is None:
            self._store.unwatch(*partition, connection)
        if span is None or header.get("local"):
            self._send(connection, self._handlers.location_header(header, span), None)
        else:
            self._send_records(connection, header, span)

    # --- rows of queues ---

    def _send_records(self, connection: Connection, header: Header, span: Span) -> None:
        """Respond with the records themselves, after a frame that says how many bytes they have."""
        mapped = self._handlers.map_records(header, span)
        connection.file_send = FileSend(encode_frame(self._handlers.records_header(header, span), None), mapped)
        # An error here ends the connection instead of being sent: nothing is received on it until all records are sent.
        self._run_for(connection, self._send_file, connection)

    def _send_file(self, connection: Connection) -> None:
        """Hand the connection to a sender thread. Until that returns it, this thread neither uses nor closes it."""
        assert connection.file_send is not None
        self._select_events(connection, 0)
        self._senders.submit(self._send_part, connection, connection.file_send)
        connection.sending = True

    def _send_part(self, connection: Connection, file_send: FileSend) -> None:
        """Send as much of a response as the client takes now. Called by a sender thread."""
        before_bytes, progress = file_send.unsent_bytes, Progress.BROKEN
        try:
            progress = file_send.send(connection.sock)
        except Exception as error:
            _log.error("rows of a queue cannot be sent", peer=connection.peer, error=error)
        taken = file_send.unsent_bytes < before_bytes
        self._call_from_outside(connection, lambda: self._part_sent(connection, progress, taken))

    def _part_sent(self, connection: Connection, progress: Progress, taken: bool) -> None:
        connection.sending = False
        if taken:
            connection.since = time.monotonic()
        if connection.gone:
            self._drop(connection)
        elif progress is Progress.FULL:
            self._select_events(connection, selectors.EVENT_WRITE)
        elif progress is Progress.BROKEN:
            # A client with a part of a response can only send the request again, on another connection.
            self._drop(connection)
        else:
            assert connection.file_send is not None
            connection.file_send.close()
            connection.file_send = None
            connection.has_request = False
            self._select_events(connection, selectors.EVENT_READ)

    def _retry_read(self, connection: Connection) -> None:
        poll, connection.waiting = connection.waiting, None
        if poll is None:
            return
        try:
            self._read(connection, poll.header, poll.deadline)
        except Exception as error:
            self._send(connection, self._handlers.error_header(error), None)

    def _end_polls(self) -> None:
        """Respond to the polls whose deadline has passed, and remove those that have their response."""
        now = time.monotonic()
        while self._polls and (self._polls[0].deadline <= now or not self._is_open(self._polls[0])):
            poll = heapq.heappop(self._polls)
            if self._is_open(poll):
                self._run_for(poll.connection, self._end_poll, poll.connection)
                self._send(poll.connection, self._handlers.location_header(poll.header, None), None)

    @staticmethod
    def _is_open(poll: Poll) -> bool:
        return poll.connection.waiting is poll

    def _end_poll(self, connection: Connection) -> None:
        poll, connection.waiting = connection.waiting, None
        if poll is not None:
            self._store.unwatch(poll.header["queue"], poll.header["partition"], connection)

    # --- responses ---

    def finish(self, connection: Connection, view: ReadView | None, outcome: Committed | ShuffleError) -> None:
        """Respond to a commit. Called by the writer, which no error in here may stop."""
        if view is not None:
            self._store.release_view(view)
        if isinstance(outcome, ShuffleError):
            self._send(connection, self._handlers.error_header(outcome), None)
        elif outcome.appended:
            self._send(connection, self._handlers.committed_header(outcome), None)
        else:
            self._send_frame(connection, encode_committed(outcome.version))

    def _send(self, connection: Connection, header: Header, rows: Rows | None) -> None:
        self._send_frame(connection, self._encoded(header, rows))

    def _send_frame(self, connection: Connection, data: bytes) -> None:
        """Send the response to the connection's request. Called by this thread or by the writer."""
        connection.sending = True
        # This is done before the send: the client's next request may arrive before this thread goes on.
        connection.has_request = connection.committing = False
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The client is gone, which the selector will report.
            sent = len(data)
        if sent < len(data):
            connection.since = time.monotonic()
            connection.unsent = data[sent:]
            self._call_from_outside(connection, lambda: self._send_rest(connection))
        connection.sending = False
        if connection.gone:
            connection.sock.close()

    def _encoded(self, header: Header, rows: Rows | None) -> bytes:
        try:
            data = encode_frame(header, rows)
        except Exception as error:
            _log.error("a response cannot be encoded", error=error)
            return encode_frame(self._handlers.error_header(error), None)
        return data if len(data) <= RESPONSE_BYTES_MAX else encode_frame({**header, "elsewhere": True}, None)

    def _send_rest(self, connection: Connection) -> None:
        if connection.gone:
            return
        with contextlib.suppress(BlockingIOError):
            sent = connection.sock.send(connection.unsent)
            connection.unsent = connection.unsent[sent:]
            connection.since = time.monotonic()
        self._select_events(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0))
