"""The daemon's end of the lane: small questions over plain sockets, all of them in one thread.

A Flight exchange costs a quarter of a millisecond of processor time for a question and its answer, whatever they are,
and a thread for each client. A transaction of one row should not cost more than its sync does. So here

1. one thread reads the questions of all connections that have one, and decodes them;
2. commits among them go to the writer as one run, and become one group; everything else is answered at once;
3. the writer answers each commit itself, by a send on its socket, as soon as the group is durable.

While the writer syncs, which it does without Python's lock, this thread decodes the next group.

The rows of a queue are an answer of another size (``shipment``). Sending them may wait for the disk, so a few threads
beside this one do it, and a connection is theirs meanwhile; a client that takes its rows slowly comes back here, where
waiting costs nobody a thread.

A socket is closed by this thread, but never while a question is unanswered (``asked``) or somebody is about to write to
it (``sending``): else an answer could end up on a connection that was made since under the same number.
"""

from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from shuffle.errors import BadInput, ShuffleError, TooLarge
from shuffle.limits import KIB, WAIT_MS_MAX
from shuffle.logs import get_logger
from statestore.group import Span
from statestore.lane_frames import (
    ANSWER_BYTES_MAX,
    GREETING,
    QUESTION_BYTES_MAX,
    decode_frame,
    encode_frame,
    frame_bytes,
    is_small,
    local_address,
    send_at_once,
)
from statestore.local import LocalStore
from statestore.pending import Pending
from statestore.questions import Questions
from statestore.request import CommitRequest, Committed
from statestore.shipment import Progress, Shipment
from statestore.store import Moment
from statestore.wire import Header, Rows

CONNECTIONS_MAX = 1000
"""Clients have one for each thread that asks at the same time."""

CARRIERS = 4
"""Threads that send rows of queues: so many reads may wait for the disk at once."""

_RECEIVE_BYTES = 64 * KIB
_BACKLOG = 1024
_SELECT_S = 1.0
_ACCEPT_AGAIN_S = 0.01

_log = get_logger("statestore")


class _Connection:
    __slots__ = ("asked", "events", "gone", "received", "sending", "shipment", "sock", "unsent", "waiting")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        """The beginning of a question whose rest has not come yet."""
        self.unsent = b""
        """The rest of an answer for which the socket had no room."""
        self.asked = False
        self.sending = False
        self.gone = False
        """The client hung up."""
        self.waiting: _Poll | None = None
        self.shipment: Shipment | None = None
        """Rows of a queue that are being sent."""
        self.events = 0
        """What the selector looks for on it; nothing while a carrier has it."""


class _Poll:
    """A read of a queue that waits for rows."""

    __slots__ = ("connection", "deadline", "header")

    def __init__(self, connection: _Connection, header: Header, deadline: float) -> None:
        self.connection = connection
        self.header = header
        self.deadline = deadline

    def __lt__(self, other: _Poll) -> bool:
        return self.deadline < other.deadline


class _Asked(Pending):
    """A commit that a connection waits for. The writer's thread answers it."""

    __slots__ = ("_connection", "_lane", "_moment")

    def __init__(self, request: CommitRequest, moment: Moment | None, lane: Lane, connection: _Connection) -> None:
        super().__init__(request)
        self._moment = moment
        self._lane = lane
        self._connection = connection

    def finish(self, answer: Committed | ShuffleError) -> None:
        self._lane.finish(self._connection, self._moment, answer)


class Lane:
    """Listens, reads and answers until it is closed."""

    def __init__(self, host: str, store: LocalStore, questions: Questions) -> None:
        self._store = store
        self._questions = questions
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        far = socket.create_server((host.strip("[]"), 0), family=family, backlog=_BACKLOG)
        self.port: int = far.getsockname()[1]
        self._listeners = [far]
        self.local_name = ""
        if sys.platform == "linux":
            self.local_name = f"shuffle-statestore-{uuid.uuid4().hex}"
            near = socket.socket(socket.AF_UNIX)
            near.bind(local_address(self.local_name))
            near.listen(_BACKLOG)
            self._listeners.append(near)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ, self._hear)
        self._told: deque[Callable[[], None]] = deque()
        """What other threads want done by this one."""
        self._connections: set[_Connection] = set()
        self._polls: list[_Poll] = []
        self._commits: list[Pending] = []
        self._carriers = ThreadPoolExecutor(CARRIERS, thread_name_prefix="store-carrier")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-lane", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is read any more. Answers on their way have been given if the store was closed before."""
        self._closed = True
        self._tell(lambda: None)
        self._thread.join(5)

    # --- the one thread ---

    def _run(self) -> None:
        while not self._closed:
            for key, events in self._selector.select(self._select_s()):
                if not isinstance(key.data, _Connection):
                    key.data()
                    continue
                try:
                    if events & selectors.EVENT_WRITE and key.data.shipment is not None:
                        self._carry(key.data)
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._send_rest(key.data)
                    if events & selectors.EVENT_READ:
                        self._receive(key.data)
                except Exception as error:
                    _log.warning("a connection of the lane is closed", error=error)
                    self._drop(key.data)
            if self._commits:
                commits, self._commits = self._commits, []
                self._store.submit(commits)
            if self._polls:
                self._end_polls()
        self._carriers.shutdown()
        self._hear()
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        for sock in (*self._listeners, self._ear, self._mouth):
            sock.close()

    def _select_s(self) -> float:
        if not self._polls:
            return _SELECT_S
        return min(max(self._polls[0].deadline - time.monotonic(), 0), _SELECT_S)

    def _tell(self, what: Callable[[], None]) -> None:
        """Have this thread do something. Called by any thread."""
        self._told.append(what)
        # With no room in the socket there are wake-ups enough in it; and after the end nobody listens.
        with contextlib.suppress(OSError):
            self._mouth.send(b"\0")

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(_RECEIVE_BYTES)
        while self._told:
            self._told.popleft()()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Most likely out of file numbers: the others must not starve while it lasts.
            _log.warning("the lane cannot take a connection", error=error)
            time.sleep(_ACCEPT_AGAIN_S)
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            # Without the greeting the client knows that nobody listens to it.
            sock.close()
            return
        sock.setblocking(False)
        send_at_once(sock)
        try:
            sock.send(GREETING)
        except OSError:
            sock.close()
            return
        connection = _Connection(sock)
        self._connections.add(connection)
        self._look_for(connection, selectors.EVENT_READ)

    def _look_for(self, connection: _Connection, events: int) -> None:
        if events == connection.events:
            return
        if not connection.events:
            self._selector.register(connection.sock, events, connection)
        elif not events:
            self._selector.unregister(connection.sock)
        else:
            self._selector.modify(connection.sock, events, connection)
        connection.events = events

    def _drop(self, connection: _Connection) -> None:
        """The connection is over. If an answer is on its way, whoever gives it closes the socket."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._look_for(connection, 0)
        if connection.waiting is not None:
            self._end_poll(connection)
            connection.asked = False
        if connection.shipment is not None and not connection.sending:
            connection.shipment.close()
            connection.shipment = None
            connection.asked = False
        connection.gone = True
        if not (connection.asked or connection.sending):
            connection.sock.close()

    # --- questions ---

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        if connection.asked or connection.unsent:
            raise BadInput("a second question before the first was answered")
        data = connection.received + data
        whole = frame_bytes(data)
        if whole is not None and whole > QUESTION_BYTES_MAX:
            self._refuse(connection, TooLarge(f"a question of {whole} bytes, more than {QUESTION_BYTES_MAX}"))
        elif whole is None or len(data) < whole:
            connection.received = data
        elif len(data) > whole:
            self._refuse(connection, BadInput("more than one question at a time"))
        else:
            connection.received = b""
            connection.asked = True
            self._answer(connection, data)

    def _refuse(self, connection: _Connection, error: ShuffleError) -> None:
        """What comes after such a beginning cannot be understood: say so, and hang up."""
        with contextlib.suppress(OSError):
            connection.sock.send(encode_frame(self._questions.failed(error), None))
        self._drop(connection)

    def _answer(self, connection: _Connection, data: bytes) -> None:
        try:
            header, rows = decode_frame(data)
            if not is_small(header, rows):
                raise BadInput(f"the operation {header.get('op')!r}, or so many rows, are asked over Flight")
            if header["op"] == "commit":
                self._commits.append(_Asked(*self._questions.commit_of(header, rows), self, connection))
                return
            if header["op"] == "read":
                self._read(connection, header, time.monotonic() + min(header["wait_ms"], WAIT_MS_MAX) / 1000)
                return
            answer: tuple[Header, Any] = self._questions.answer(header, rows)
        except Exception as error:
            answer = self._questions.failed(error), None
        self._send(connection, *answer)

    def _read(self, connection: _Connection, header: Header, deadline: float) -> None:
        """Where the rows are; when there are none, the question waits without a thread."""

        def arrived() -> None:
            self._tell(lambda: self._look_again(connection))

        place = header["queue"], header["partition"]
        bounds = header["begin"], header["rows"], header["bytes"]
        span = self._store.locate_or_watch(*place, *bounds, connection, arrived)
        if span is None and deadline > time.monotonic() and not self._store.closed:
            connection.waiting = _Poll(connection, header, deadline)
            heapq.heappush(self._polls, connection.waiting)
            return
        if span is None:
            self._store.unwatch(*place, connection)
        if span is None or header.get("local"):
            self._send(connection, self._questions.located(span), None)
        else:
            self._ship(connection, header, span)

    # --- rows of queues ---

    def _ship(self, connection: _Connection, header: Header, span: Span) -> None:
        """Answer with the rows themselves, behind a frame that says how many bytes they are."""
        path = self._store.segment_path(span.file)
        answer = {"file": str(path), "offset": span.offset, "segment": span.segment_begin, "end": span.end}
        answer["bytes"] = span.size_bytes
        try:
            connection.shipment = Shipment(encode_frame(answer, None), path, span.offset, span.size_bytes)
        except FileNotFoundError:
            raise self._store.missing(path, header["queue"], header["partition"], header["begin"]) from None
        self._carry(connection)

    def _carry(self, connection: _Connection) -> None:
        """Hand the connection to a carrier. Until it comes back, this thread neither uses nor closes it."""
        assert connection.shipment is not None
        self._look_for(connection, 0)
        connection.sending = True
        self._carriers.submit(self._send_shipment, connection, connection.shipment)

    def _send_shipment(self, connection: _Connection, shipment: Shipment) -> None:
        """Called by a carrier."""
        progress = shipment.send(connection.sock)
        self._tell(lambda: self._carried(connection, progress))

    def _carried(self, connection: _Connection, progress: Progress) -> None:
        connection.sending = False
        if progress is Progress.FULL:
            self._look_for(connection, selectors.EVENT_WRITE)
        elif progress is Progress.BROKEN:
            # Whoever has half of an answer can only ask again, on another connection.
            self._drop(connection)
        else:
            assert connection.shipment is not None
            connection.shipment.close()
            connection.shipment = None
            connection.asked = False
            self._look_for(connection, selectors.EVENT_READ)

    def _look_again(self, connection: _Connection) -> None:
        poll, connection.waiting = connection.waiting, None
        if poll is None:
            return
        try:
            self._read(connection, poll.header, poll.deadline)
        except Exception as error:
            self._send(connection, self._questions.failed(error), None)

    def _end_polls(self) -> None:
        """Answer the polls whose time is over, and forget those that were answered before."""
        now = time.monotonic()
        while self._polls and (self._polls[0].deadline <= now or not self._is_open(self._polls[0])):
            poll = heapq.heappop(self._polls)
            if self._is_open(poll):
                self._end_poll(poll.connection)
                self._send(poll.connection, self._questions.located(None), None)

    @staticmethod
    def _is_open(poll: _Poll) -> bool:
        return poll.connection.waiting is poll

    def _end_poll(self, connection: _Connection) -> None:
        poll, connection.waiting = connection.waiting, None
        if poll is not None:
            self._store.unwatch(poll.header["queue"], poll.header["partition"], connection)

    # --- answers ---

    def finish(self, connection: _Connection, moment: Moment | None, answer: Committed | ShuffleError) -> None:
        """Answer a commit. Called by the writer."""
        if moment is not None:
            self._store.release_moment(moment)
        if isinstance(answer, ShuffleError):
            self._send(connection, self._questions.failed(answer), None)
        else:
            self._send(connection, self._questions.committed(answer), None)

    def _send(self, connection: _Connection, header: Header, rows: Rows | None) -> None:
        """Give the answer to what the connection asked. Called by this thread or by the writer."""
        data = encode_frame(header, rows)
        if len(data) > ANSWER_BYTES_MAX:
            data = encode_frame({**header, "elsewhere": True}, None)
        connection.sending = True
        # Before it is sent: the client's next question may be here before this thread goes on.
        connection.asked = False
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The client is gone, as the selector will notice.
            sent = len(data)
        if sent < len(data):
            connection.unsent = data[sent:]
            self._tell(lambda: self._send_rest(connection))
        connection.sending = False
        if connection.gone:
            connection.sock.close()

    def _send_rest(self, connection: _Connection) -> None:
        if connection.gone:
            return
        with contextlib.suppress(BlockingIOError):
            sent = connection.sock.send(connection.unsent)
            connection.unsent = connection.unsent[sent:]
        self._look_for(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0))
