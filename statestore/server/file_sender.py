"""Rows of a queue on their way to a client: bytes of a segment file that the kernel sends, and Python never sees.

The file is mapped and the mapping sent: one copy, from the page cache to the socket. The client receives into the
memory that its Arrow batches will lie in, which is the second and last one. (``sendfile`` saves the first, but what it
hands over are single pages, and over the loopback the client takes longer to copy those than the daemon saves.)
"""

from __future__ import annotations

import enum
import select
import socket
from pathlib import Path

from shuffle.errors import CorruptData
from shuffle.support.mapped_files import map_range

PATIENCE_MS = 20
"""How long a thread waits for a client to take more, before somebody else's rows come first."""


class Progress(enum.Enum):
    """What became of an attempt to send."""

    SENT = "all of it is sent"
    FULL = "the client does not take more for now"
    BROKEN = "the client is gone, or the file cannot be read"


class Shipment:
    """What is still to be sent of one answer: its head, then a range of a file. Used by one thread at a time."""

    def __init__(self, head: bytes, path: Path, offset: int, size_bytes: int) -> None:
        """``FileNotFoundError`` if the file is gone. Once mapped, its bytes stay, whoever removes its name."""
        mapped = map_range(path, offset, size_bytes)
        if mapped.size < size_bytes:
            raise CorruptData(
                f"{path}: {offset + mapped.size} bytes, but {offset + size_bytes} were acknowledged: the file was cut",
                file=str(path),
                offset=offset + mapped.size,
            )
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
