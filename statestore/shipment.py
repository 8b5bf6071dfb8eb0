"""Rows of a queue on their way to a client: bytes of a segment file that the kernel sends, and Python never sees.

A read over Flight copies each byte four times at the daemon and twice more at the client, most of it in one thread per
client. ``sendfile`` hands the pages of the file to the socket, so the daemon does next to nothing, and the client
receives into the memory that its Arrow batches will lie in.
"""

from __future__ import annotations

import enum
import os
import select
import socket
from pathlib import Path

from shuffle.errors import CorruptData
from shuffle.limits import MIB

CHUNK_BYTES_MAX = 8 * MIB
"""Handed to the kernel at once; it stops earlier, where the socket's buffer is full."""

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
        """``FileNotFoundError`` if the file is gone. Once open, its bytes stay, whoever removes its name."""
        self._head = head
        self._offset = offset
        self._left_bytes = size_bytes
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found_bytes = os.fstat(self._descriptor).st_size
        if found_bytes < offset + size_bytes:
            self.close()
            raise CorruptData(
                f"{path}: {found_bytes} bytes, but {offset + size_bytes} were acknowledged: the file was cut",
                file=str(path),
                offset=found_bytes,
            )

    def send(self, sock: socket.socket) -> Progress:
        """Send as much as ``sock``, which does not block, takes within a short time."""
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        while self._head or self._left_bytes:
            try:
                if not self._send_some(sock):
                    return Progress.BROKEN
            except BlockingIOError:
                if not writable.poll(PATIENCE_MS):
                    return Progress.FULL
            except OSError:
                return Progress.BROKEN
        return Progress.SENT

    def _send_some(self, sock: socket.socket) -> int:
        if self._head:
            sent = sock.send(self._head)
            self._head = self._head[sent:]
            return sent
        sent = os.sendfile(sock.fileno(), self._descriptor, self._offset, min(self._left_bytes, CHUNK_BYTES_MAX))
        self._offset += sent
        self._left_bytes -= sent
        return sent

    def close(self) -> None:
        os.close(self._descriptor)
