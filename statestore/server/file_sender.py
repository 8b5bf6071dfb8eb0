"""Sending rows of a queue to a client: bytes of a segment file, which the kernel reads and sends without Python.

The file is mapped and the mapping sent: one copy, from the page cache to the socket. The client receives into the
memory of its Arrow batches, which is the second and last copy. (``sendfile`` saves the first, but it hands over single
pages, and over the loopback the client takes longer to copy those than the daemon saves.)
"""

from __future__ import annotations

import enum
import select
import socket

import pyarrow as pa

SEND_WAIT_MS = 20
"""The milliseconds that a thread waits until a client takes more, before it sends the rows of another client."""


class Progress(enum.Enum):
    """The outcome of an attempt to send."""

    SENT = "all of it is sent"
    FULL = "the client does not take more for now"
    BROKEN = "the client is gone, or the file cannot be read"


class FileSend:
    """The unsent rest of one response: its head, then a range of a file. Used by one thread at a time."""

    def __init__(self, head: bytes, mapped: pa.Buffer) -> None:
        """``mapped`` is the range of the file."""
        self._unsent = [memoryview(head), memoryview(mapped)]

    @property
    def unsent_bytes(self) -> int:
        return sum(len(part) for part in self._unsent)

    def send(self, sock: socket.socket) -> Progress:
        """Send as much as ``sock``, which does not block, takes within a short time."""
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        while self._unsent:
            try:
                sent = sock.send(self._unsent[0])
            except BlockingIOError:
                if not writable.poll(SEND_WAIT_MS):
                    return Progress.FULL
            except OSError:
                # A page that cannot be read is an error of this call too, since the kernel reads it, not this process.
                return Progress.BROKEN
            else:
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    del self._unsent[0]
        return Progress.SENT

    def close(self) -> None:
        """Send nothing more. The mapping is released with its last memory view."""
        self._unsent.clear()
