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

A socket is closed by this thread, but never while the writer has a commit of it (``committing``) or somebody is about
to write to it (``sending``): then whoever writes last closes it. Else an answer could end up on a connection that was
made since under the same number.

Whatever goes wrong with what is done for one connection ends that connection alone (``_failed``). What goes wrong
elsewhere ends this thread, and that is not kept a secret (``shuffle.support.vital_threads``).
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
from shuffle.statestore.server.file_sender import Progress, Shipment
from shuffle.statestore.server.handlers import Questions
from shuffle.statestore.server.lane_connections import Connection, Connections, Poll, peer_of
from shuffle.statestore.store import Moment, Span
from shuffle.statestore.wire.lane_frames import (
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
from shuffle.statestore.wire.messages import Header, Rows
from shuffle.statestore.wire.operations import check_question
from shuffle.support.logs import get_logger
from shuffle.support.vital_threads import OnDeath, start_vital

CARRIERS = 4
"""Threads that send rows of queues: so many reads may wait for the disk at once."""

_RECEIVE_BYTES = 64 * KIB
_BACKLOG = 1024
_SELECT_S = 1.0
_ACCEPT_AGAIN_S = 0.01

_log = get_logger("statestore")


class _Asked(Pending):
    """A commit that a connection waits for. The writer's thread answers it."""

    __slots__ = ("_connection", "_finished", "_lane", "_moment")

    def __init__(self, request: CommitRequest, moment: Moment | None, lane: Lane, connection: Connection) -> None:
        super().__init__(request)
        self._moment = moment
        self._lane = lane
        self._connection = connection
        self._finished = False

    def finish(self, answer: Committed | ShuffleError) -> None:
        # A second answer would be taken for that to the next question.
        if not self._finished:
            self._finished = True
            self._lane.finish(self._connection, self._moment, answer)


class Lane:
    """Listens, reads and answers until it is closed."""

    def __init__(self, host: str, store: LocalStore, questions: Questions, on_death: OnDeath) -> None:
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
        self._told: deque[tuple[Connection | None, Callable[[], None]]] = deque()
        """What other threads want done by this one, and for which connection."""
        self._connections = Connections()
        self._polls: list[Poll] = []
        self._commits: list[Pending] = []
        self._now = self._swept_at = time.monotonic()
        """When the last turn of the loop began, which is good enough for bounds of seconds."""
        self._carriers = ThreadPoolExecutor(CARRIERS, thread_name_prefix="store-carrier")
        self._closed = False
        self._thread = start_vital(self._run, "store-lane", on_death)

    def close(self) -> None:
        """Nothing is read any more. Answers on their way have been given if the store was closed before."""
        self._closed = True
        self._tell(None, lambda: None)
        self._thread.join(5)

    # --- the one thread ---

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
            self._carriers.shutdown()
            self._hear()
        finally:
            # Whatever the reason is, nobody is left waiting at the other end.
            self._carriers.shutdown(wait=False)
            for connection in self._connections:
                self._drop(connection)
            self._selector.close()
            for sock in (*self._listeners, self._ear, self._mouth):
                sock.close()

    def _turn(self) -> None:
        ready = self._selector.select(self._select_s())
        self._now = time.monotonic()
        for key, events in ready:
            if not isinstance(key.data, Connection):
                key.data()
            elif not key.data.gone:
                try:
                    self._ready(key.data, events)
                except Exception as error:
                    self._failed(key.data, error)
        if self._commits:
            commits, self._commits = self._commits, []
            self._store.submit(commits)
        if self._polls:
            self._end_polls()
        if self._now > self._swept_at + _SELECT_S:
            self._sweep()

    def _attend(self, connection: Connection, act: Callable[..., None], *arguments: Any) -> None:
        """Do something for one connection. Whatever goes wrong with it, nobody else notices."""
        try:
            act(*arguments)
        except Exception as error:
            self._failed(connection, error)

    def _failed(self, connection: Connection, error: Exception) -> None:
        # Clients die, and some say what nobody understands: that is no news. Anything else is our own mistake.
        tell = _log.info if isinstance(error, OSError | ShuffleError) else _log.error
        tell("a connection of the lane is closed", peer=connection.peer, error=error)
        self._drop(connection)

    def _ready(self, connection: Connection, events: int) -> None:
        if events == selectors.EVENT_READ:
            self._receive(connection)
        elif connection.shipment is not None:
            self._carry(connection)
        else:
            self._send_rest(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)

    def _select_s(self) -> float:
        if not self._polls:
            return _SELECT_S
        return min(max(self._polls[0].deadline - time.monotonic(), 0), _SELECT_S)

    def _sweep(self) -> None:
        """End the connections whose clients have stopped in the middle of a question or an answer."""
        self._swept_at = self._now
        for connection in self._connections.overdue(self._now):
            _log.info("a client of the lane was silent too long", peer=connection.peer)
            self._drop(connection)

    def _tell(self, connection: Connection | None, what: Callable[[], None]) -> None:
        """Have this thread do something for ``connection``. Called by any thread."""
        self._told.append((connection, what))
        # With no room in the socket there are wake-ups enough in it; and after the end nobody listens.
        with contextlib.suppress(OSError):
            self._mouth.send(b"\0")

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(_RECEIVE_BYTES)
        while self._told:
            connection, what = self._told.popleft()
            if connection is None:
                what()
            else:
                self._attend(connection, what)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Most likely out of file numbers: the others must not starve while it lasts.
            _log.warning("the lane cannot take a connection", error=error)
            time.sleep(_ACCEPT_AGAIN_S)
            return
        peer, now = peer_of(sock, address), time.monotonic()
        if self._connections.is_full(peer):
            idle = self._connections.giving_way(peer, now)
            if idle is None:
                # Without the greeting the client knows that nobody listens to it.
                sock.close()
                return
            self._drop(idle)
        connection = Connection(sock, peer, now)
        self._connections.add(connection)
        self._attend(connection, self._greet, connection)

    def _greet(self, connection: Connection) -> None:
        connection.sock.setblocking(False)
        send_at_once(connection.sock)
        connection.sock.send(GREETING)
        self._look_for(connection, selectors.EVENT_READ)

    def _look_for(self, connection: Connection, events: int) -> None:
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
        """The connection is over. If an answer is on its way, whoever gives it closes the socket."""
        if connection in self._connections:
            self._connections.remove(connection)
            # The selector may have lost it already, if that is what went wrong.
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._look_for(connection, 0)
        if connection.waiting is not None:
            self._end_poll(connection)
        if connection.shipment is not None and not connection.sending:
            connection.shipment.close()
            connection.shipment = None
        connection.gone = True
        if not connection.is_used:
            connection.sock.close()

    # --- questions ---

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
        if connection.asked or connection.unsent:
            raise BadInput("a second question before the first was answered")
        if not connection.received:
            connection.since = self._now
        connection.heard = True
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

    def _refuse(self, connection: Connection, error: ShuffleError) -> None:
        """What comes after such a beginning cannot be understood: say so, and hang up."""
        with contextlib.suppress(OSError):
            connection.sock.send(encode_frame(self._questions.failed(error), None))
        self._drop(connection)

    def _answer(self, connection: Connection, data: bytes) -> None:
        try:
            header, rows = decode_frame(data)
            check_question(header)
            if not is_small(header, rows):
                raise BadInput(f"the operation {header.get('op')!r}, or so many rows, are asked over Flight")
            if header["op"] == "commit":
                self._commits.append(_Asked(*self._questions.commit_of(header, rows), self, connection))
                connection.committing = True
                return
            if header["op"] == "read":
                self._read(connection, header, time.monotonic() + header["wait_ms"] / 1000)
                return
            answer: tuple[Header, Any] = self._questions.answer(header, rows)
        except Exception as error:
            answer = self._questions.failed(error), None
        self._send(connection, *answer)

    def _read(self, connection: Connection, header: Header, deadline: float) -> None:
        """Where the rows are; when there are none, the question waits without a thread."""

        def arrived() -> None:
            self._tell(connection, lambda: self._look_again(connection))

        place = header["queue"], header["partition"]
        bounds = header["begin"], header["rows"], header["bytes"]
        span = self._store.locate_or_watch(*place, *bounds, connection, arrived)
        if span is None and deadline > time.monotonic() and not self._store.closed:
            connection.waiting = Poll(connection, header, deadline)
            heapq.heappush(self._polls, connection.waiting)
            return
        if span is None:
            self._store.unwatch(*place, connection)
        if span is None or header.get("local"):
            self._send(connection, self._questions.located(span), None)
        else:
            self._ship(connection, header, span)

    # --- rows of queues ---

    def _ship(self, connection: Connection, header: Header, span: Span) -> None:
        """Answer with the rows themselves, behind a frame that says how many bytes they are."""
        path = self._store.segment_path(span.file)
        answer = {"file": str(path), "offset": span.offset, "segment": span.segment_begin, "end": span.end}
        answer["bytes"] = span.size_bytes
        try:
            connection.shipment = Shipment(encode_frame(answer, None), path, span.offset, span.size_bytes)
        except FileNotFoundError:
            raise self._store.missing(path, header["queue"], header["partition"], header["begin"]) from None
        # A failure here is not an answer any more: nothing is read from the connection until it is carried.
        self._attend(connection, self._carry, connection)

    def _carry(self, connection: Connection) -> None:
        """Hand the connection to a carrier. Until it comes back, this thread neither uses nor closes it."""
        assert connection.shipment is not None
        self._look_for(connection, 0)
        self._carriers.submit(self._send_shipment, connection, connection.shipment)
        connection.sending = True

    def _send_shipment(self, connection: Connection, shipment: Shipment) -> None:
        """Called by a carrier."""
        before_bytes, progress = shipment.left_bytes, Progress.BROKEN
        try:
            progress = shipment.send(connection.sock)
        except Exception as error:
            _log.error("rows of a queue cannot be sent", peer=connection.peer, error=error)
        taken = shipment.left_bytes < before_bytes
        self._tell(connection, lambda: self._carried(connection, progress, taken))

    def _carried(self, connection: Connection, progress: Progress, taken: bool) -> None:
        connection.sending = False
        if taken:
            connection.since = time.monotonic()
        if connection.gone:
            self._drop(connection)
        elif progress is Progress.FULL:
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

    def _look_again(self, connection: Connection) -> None:
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
                self._attend(poll.connection, self._end_poll, poll.connection)
                self._send(poll.connection, self._questions.located(None), None)

    @staticmethod
    def _is_open(poll: Poll) -> bool:
        return poll.connection.waiting is poll

    def _end_poll(self, connection: Connection) -> None:
        poll, connection.waiting = connection.waiting, None
        if poll is not None:
            self._store.unwatch(poll.header["queue"], poll.header["partition"], connection)

    # --- answers ---

    def finish(self, connection: Connection, moment: Moment | None, answer: Committed | ShuffleError) -> None:
        """Answer a commit. Called by the writer, which nothing that happens here may stop."""
        if moment is not None:
            self._store.release_moment(moment)
        if isinstance(answer, ShuffleError):
            self._send(connection, self._questions.failed(answer), None)
        else:
            self._send(connection, self._questions.committed(answer), None)

    def _send(self, connection: Connection, header: Header, rows: Rows | None) -> None:
        """Give the answer to what the connection asked. Called by this thread or by the writer."""
        data = self._encoded(header, rows)
        connection.sending = True
        # Before it is sent: the client's next question may be here before this thread goes on.
        connection.asked = connection.committing = False
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The client is gone, as the selector will notice.
            sent = len(data)
        if sent < len(data):
            connection.since = time.monotonic()
            connection.unsent = data[sent:]
            self._tell(connection, lambda: self._send_rest(connection))
        connection.sending = False
        if connection.gone:
            connection.sock.close()

    def _encoded(self, header: Header, rows: Rows | None) -> bytes:
        try:
            data = encode_frame(header, rows)
        except Exception as error:
            _log.error("an answer cannot be told", error=error)
            return encode_frame(self._questions.failed(error), None)
        return data if len(data) <= ANSWER_BYTES_MAX else encode_frame({**header, "elsewhere": True}, None)

    def _send_rest(self, connection: Connection) -> None:
        if connection.gone:
            return
        with contextlib.suppress(BlockingIOError):
            sent = connection.sock.send(connection.unsent)
            connection.unsent = connection.unsent[sent:]
            connection.since = time.monotonic()
        self._look_for(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0))
