"""Rows of a queue on their way to a client: bytes of a segment file that the kernel sends, and Python never sees.

The file is mapped and the mapping sent: one copy, from the page cache to the socket. The client receives into the
memory that its Arrow batches will lie in, which is the second and last one. (``sendfile`` saves the first, but what it
hands over are single pages, and over the loopback the client takes longer to copy those than the daemon saves.)
"""

from __future__ import annotations

import enum
import select
import socket

import pyarrow as pa

PATIENCE_MS = 20
"""How long a thread waits for a client to take more, before somebody else's rows come first."""


class Progress(enum.Enum):
    """What became of an attempt to send."""

    SENT = "all of it is sent"
    FULL = "the client does not take more for now"
    BROKEN = "the client is gone, or the file cannot be read"


class FileSend:
    """What is still to be sent of one response: its head, then a range of a file. Used by one thread at a time."""

    def __init__(self, head: bytes, mapped: pa.Buffer) -> None:
        """``mapped`` is the range of the file."""
        self._left = [memoryview(head), memoryview(mapped)]

    @property
    def left_bytes(self) -> int:
        return sum(len(part) for part in self._left)

    def send(self, sock: socket.socket) -> Progress:
        """Send as much as ``sock``, which does not block, takes within a short time."""
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        while self._left:
            try:
                sent = sock.send(self._left[0])
            except BlockingIOError:
                if not writable.poll(PATIENCE_MS):
                    return Progress.FULL
            except OSError:
                # A page that cannot be read is an error of the call, too: the kernel meets it, not this process.
                return Progress.BROKEN
            else:
                self._left[0] = self._left[0][sent:]
                if not self._left[0]:
                    del self._left[0]
        return Progress.SENT

    def close(self) -> None:
        """Nothing more is sent; the mapping ends with its last view."""
        self._left.clear()
