"""The connections of the lane: the state of each, how many there may be, and how long each may take.

No client is locked out by the idle connections of others: when all are taken, an idle one is closed for a new one, and
one that stops in the middle of a request or of a response is closed in any case. Its client notices, and opens another
when it needs one. This is plain logic: the time is passed as an argument.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator

from shuffle.statestore.server.file_sender import FileSend
from shuffle.statestore.wire.messages import Header

CONNECTIONS_MAX = 1000
"""The most connections at once. A client has one for each thread that sends requests at the same time, so this is
enough for a few hundred workers."""

CONNECTIONS_PER_PEER_MAX = 500
"""The most connections of one process on this machine, or of one address of another: half is left for the others."""

FRAME_S_MAX = 10.0
"""The most seconds from the first byte of a request to its last. It has at most 256 KiB, which clients send at once; a
client that was paused in the middle of it for longer sends it again."""

TAKE_S_MAX = 30.0
"""The most seconds in which a client takes nothing of its response, before its connection is closed. By then it has
given up waiting: this is the default timeout of a client."""

HALF_FRAME_S = 1.0
"""The seconds after which a connection with a part of a request counts as idle, when all connections are taken."""

_PEER_CREDENTIALS = struct.Struct("3i")


class Poll:
    """A read of a queue that waits for rows."""

    __slots__ = ("connection", "deadline", "header")

    def __init__(self, connection: Connection, header: Header, deadline: float) -> None:
        self.connection = connection
        self.header = header
        self.deadline = deadline

    def __lt__(self, other: Poll) -> bool:
        return self.deadline < other.deadline


class Connection:
    """One client's connection. Only the lane's thread reads and closes it; ``committing`` and ``sending`` say whether
    another thread may still write to it."""

    __slots__ = (
        "committing",
        "events",
        "file_send",
        "gone",
        "has_request",
        "peer",
        "received",
        "sending",
        "since",
        "sock",
        "unsent",
        "waiting",
        "was_used",
    )

    def __init__(self, sock: socket.socket, peer: str, now: float) -> None:
        self.sock = sock
        self.peer = peer
        self.received = b""
        """The beginning of a request whose rest has not been received yet."""
        self.unsent = b""
        """The rest of a response for which the socket had no room."""
        self.has_request = False
        """Whether a request was received that has no response yet."""
        self.committing = False
        """Whether the request is a commit, to which the writer will respond."""
        self.sending = False
        """Whether a thread is writing to the socket, or is about to."""
        self.gone = False
        """Whether the connection has ended. Its socket may still be open while another thread uses it."""
        self.was_used = False
        """Whether anything was ever received on it."""
        self.waiting: Poll | None = None
        """The read that waits for rows, if the request is one."""
        self.file_send: FileSend | None = None
        """The rows of a queue that are being sent, if any are."""
        self.events = 0
        """The events that the selector waits for on it; 0 while a sender thread has it."""
        self.since = now
        """The time of its last progress: the first byte of a request came, or a part of a response was taken."""

    @property
    def is_used(self) -> bool:
        """Whether another thread than the lane's may write to it."""
        return self.committing or self.sending

    def is_idle(self, now: float) -> bool:
        if self.has_request or self.is_used or self.unsent or self.gone:
            return False
        return not self.received or now - self.since > HALF_FRAME_S

    def is_overdue(self, now: float) -> bool:
        """Whether its client has stopped for too long in the middle of a request or a response."""
        if self.is_used:
            return False
        if self.unsent or self.file_send is not None:
            return now - self.since > TAKE_S_MAX
        return bool(self.received) and now - self.since > FRAME_S_MAX

    def has_input(self) -> bool:
        """Whether bytes that were sent, or the end of the connection, have not been read yet."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


class Connections:
    """All open connections, within their bounds."""

    def __init__(self) -> None:
        self._open: set[Connection] = set()
        self._by_peer: Counter[str] = Counter()

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._open

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        self._open.add(connection)
        self._by_peer[connection.peer] += 1

    def remove(self, connection: Connection) -> None:
        self._open.remove(connection)
        self._by_peer[connection.peer] -= 1
        if not self._by_peer[connection.peer]:
            del self._by_peer[connection.peer]

    def is_full(self, peer: str) -> bool:
        """Whether ``peer`` may not have one more connection."""
        return len(self._open) >= CONNECTIONS_MAX or self._by_peer[peer] >= CONNECTIONS_PER_PEER_MAX

    def find_idle(self, peer: str, now: float) -> Connection | None:
        """The connection to close for a new one of ``peer``: one that was never used, or else the one that is idle for
        the longest time; None if all of them are in use."""
        own = self._by_peer[peer] >= CONNECTIONS_PER_PEER_MAX
        idle = [one for one in self._open if (one.peer == peer or not own) and one.is_idle(now)]
        for one in sorted(idle, key=lambda one: (one.was_used, one.since)):
            # A connection with an unread request is not closed: its client could not know whether it was executed.
            if one.received or not one.has_input():
                return one
        return None

    def overdue(self, now: float) -> list[Connection]:
        return [one for one in self._open if one.is_overdue(now)]


def peer_of(sock: socket.socket, address: object) -> str:
    """The name of the other end: a process of this machine, or the address of a machine."""
    if sock.family == socket.AF_UNIX and sys.platform == "linux":
        with contextlib.suppress(OSError):
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            return f"process {_PEER_CREDENTIALS.unpack(credentials)[0]}"
    return str(address[0]) if isinstance(address, tuple) else "this machine"
