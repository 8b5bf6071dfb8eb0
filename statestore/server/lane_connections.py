"""The connections of the lane: what each of them is about, and how many there may be for how long.

Nobody is locked out by those who only take places: a connection on which nothing happens gives way to a new one, and
one that stops in the middle of a request or of a response is ended. Its client notices, and makes another when it needs
one. Plain logic: the time comes in as an argument.
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
"""Clients have one for each thread that asks at the same time, so this is enough for a few hundred workers."""

CONNECTIONS_PER_PEER_MAX = 500
"""Maximum of them for one process on this machine, or for one address of another: half is left for everybody else."""

FRAME_S_MAX = 10.0
"""A request must be here as a whole so long after its first byte. It is at most 256 KiB, which clients send at once; a
client that was paused in the middle of it for longer asks again."""

TAKE_S_MAX = 30.0
"""A client that takes nothing of its response for so long is hung up on. By then it has given the response up itself:
this is as long as a client waits for a response unless it was told otherwise."""

HALF_FRAME_S = 1.0
"""When all places are taken, half a request counts as idle after so long already."""

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
        """The beginning of a request whose rest has not come yet."""
        self.unsent = b""
        """The rest of a response for which the socket had no room."""
        self.has_request = False
        """A request has no response yet."""
        self.committing = False
        """The request is a commit, and the writer will respond to it."""
        self.sending = False
        """Somebody is about to write to the socket."""
        self.gone = False
        """It is over."""
        self.was_used = False
        """Any request ever came on it."""
        self.waiting: Poll | None = None
        self.file_send: FileSend | None = None
        """Rows of a queue that are being sent."""
        self.events = 0
        """What the selector looks for on it; nothing while a sender thread has it."""
        self.since = now
        """When it last got on: the first byte of a request came, or something of a response was taken."""

    @property
    def is_used(self) -> bool:
        """Whether somebody other than the lane's thread may write to it."""
        return self.committing or self.sending

    def is_idle(self, now: float) -> bool:
        if self.has_request or self.is_used or self.unsent or self.gone:
            return False
        return not self.received or now - self.since > HALF_FRAME_S

    def is_overdue(self, now: float) -> bool:
        """Whether its client has stopped in the middle of something."""
        if self.is_used:
            return False
        if self.unsent or self.file_send is not None:
            return now - self.since > TAKE_S_MAX
        return bool(self.received) and now - self.since > FRAME_S_MAX

    def has_more(self) -> bool:
        """Whether something was sent that is not read yet; or its end, which is to be read as well."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


class Connections:
    """All that are open, within their bounds."""

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
        """Whether there is no place for one more of ``peer``."""
        return len(self._open) >= CONNECTIONS_MAX or self._by_peer[peer] >= CONNECTIONS_PER_PEER_MAX

    def giving_way(self, peer: str, now: float) -> Connection | None:
        """The one that makes room for a new one of ``peer``: what was never used first, then the longest
        idle; None if all of them are in use."""
        own = self._by_peer[peer] >= CONNECTIONS_PER_PEER_MAX
        idle = [one for one in self._open if (one.peer == peer or not own) and one.is_idle(now)]
        for one in sorted(idle, key=lambda one: (one.was_used, one.since)):
            # A request that is on its way is not hung up on: its client could not tell what became of it.
            if one.received or not one.has_more():
                return one
        return None

    def overdue(self, now: float) -> list[Connection]:
        return [one for one in self._open if one.is_overdue(now)]


def peer_of(sock: socket.socket, address: object) -> str:
    """Who is at the other end: a process of this machine, or the address of a machine."""
    if sock.family == socket.AF_UNIX and sys.platform == "linux":
        with contextlib.suppress(OSError):
            found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            return f"process {_PEER_CREDENTIALS.unpack(found)[0]}"
    return str(address[0]) if isinstance(address, tuple) else "this machine"
