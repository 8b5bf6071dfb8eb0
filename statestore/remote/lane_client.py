"""The client's end of the lane: a pool of connections, one request at a time on each, every wait bounded."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from shuffle.errors import BadInput, StoreUnavailable, from_wire
from shuffle.limits import BATCH_BYTES_MAX, KIB, MIB, RESPONSE_HEADER_BYTES_MAX
from shuffle.statestore.remote.transport import NothingSent, OnHeader, Response, short_cause
from shuffle.statestore.wire.lane_frames import (
    GREETING,
    RESPONSE_BYTES_MAX,
    decode_frame,
    encode_frame,
    frame_bytes,
    local_address,
    send_at_once,
)
from shuffle.statestore.wire.messages import Header, Rows
from shuffle.statestore.wire.operations import check_response

POOL_MAX = 64
"""The most idle connections that are kept."""

CONNECT_TIMEOUT_S = 5.0

NO_ROOM_S = 1.0
NO_ROOM_PAUSE_S = 0.02
"""The seconds for which, and after which, a connection that the daemon refused is tried again. A daemon that has all
the connections it takes closes an idle one for the new one. Only if all of them are busy does it refuse the new one;
most responses are sent within a millisecond, so it soon has room."""

FOLLOWING_BYTES_MAX = 2 * BATCH_BYTES_MAX
"""The most bytes that may follow a frame. A read returns at least one record, which is a batch and its head."""

_RECEIVE_BYTES = 64 * KIB
_FOLLOWING_BYTES = 4 * MIB
"""The bytes after a frame that are received in one call; the deadline is checked between two calls."""
_IDLE_S = 0.05
"""The seconds without a request after which a connection is checked before the next one is sent on it."""

_Received = tuple[Header, Rows | None, pa.Buffer | None]
"""The header and the rows of a response, and the bytes that follow it, if any do."""


def _ignore(header: Header) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """The address of a daemon's lane."""

    host: str
    port: int
    local_name: str
    """The name of the socket for clients on its own machine; empty where there is none."""


def _connect(address: LaneAddress) -> socket.socket:
    if address.local_name and sys.platform == "linux":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(local_address(address.local_name))
            return sock
        except OSError:
            # The daemon is on another machine, or in another container on this one.
            sock.close()
    return socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)


class _NoRoom(ConnectionError):
    """The daemon accepted the connection and closed it without the greeting."""


class _Connection:
    """One connection to the lane, which carries one request at a time."""

    def __init__(self, address: LaneAddress) -> None:
        self._sock = _connect(address)
        try:
            send_at_once(self._sock)
            if self._received(len(GREETING)) != GREETING:
                raise _NoRoom("it has no room for another connection, or is no state store")
            # From here on the kernel enforces the timeouts: Python's own would poll before each call.
            self._sock.settimeout(None)
        except BaseException:
            self._sock.close()
            raise
        self._timeout_s = 0.0
        self._used_at = time.monotonic()

    def is_alive(self) -> bool:
        """False when the daemon is known to have closed it, which is checked only after it was idle."""
        if time.monotonic() - self._used_at < _IDLE_S:
            return True
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def send(self, operation: str, request: bytes, timeout_s: float, on_header: OnHeader) -> _Received:
        """The response's header and rows, and the bytes that follow them, if the header says so."""
        if timeout_s != self._timeout_s:
            self._set_timeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            self._sock.sendall(request)
        except OSError as error:
            # The daemon ignores a request that it has received only in part.
            raise NothingSent(f"the connection broke before the request was sent ({short_cause(error)})") from error
        data = self._sock.recv(_RECEIVE_BYTES)
        whole = frame_bytes(data)
        if whole is None or len(data) < whole:
            data, whole = self._rest(data, deadline)
        header, rows = decode_frame(data[:whole], RESPONSE_HEADER_BYTES_MAX)
        check_response(operation, header)
        following = None
        if "bytes" in header:
            on_header(header)
            following = self._following(data[whole:], header["bytes"], deadline)
        elif len(data) > whole:
            raise BadInput("more than one response")
        self._used_at = time.monotonic()
        return header, rows, following

    def _following(self, begin: bytes, size_bytes: int, deadline: float) -> pa.Buffer:
        """The ``size_bytes`` bytes that follow a frame; ``begin`` are those that were received with the frame."""
        if not len(begin) <= size_bytes <= FOLLOWING_BYTES_MAX:
            raise BadInput(f"{size_bytes} bytes are to follow a response, more than {FOLLOWING_BYTES_MAX} or too few")
        buffer = pa.allocate_buffer(size_bytes)
        view = memoryview(buffer).cast("B")
        view[: len(begin)] = begin
        at = len(begin)
        while at < size_bytes:
            if time.monotonic() > deadline:
                raise TimeoutError("its time is over")
            # The kernel waits for all bytes: to wake up for each packet would take this thread as long as the copy.
            received = self._sock.recv_into(view[at : at + _FOLLOWING_BYTES], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("it closed the connection")
            at += received
        return buffer

    def _rest(self, begin: bytes, deadline: float) -> tuple[bytes, int]:
        """Receive the rest of the frame that begins with ``begin``: the bytes received, and how many of them it has."""
        data = bytearray(begin)
        while True:
            whole = frame_bytes(data)
            if whole is not None and whole > RESPONSE_BYTES_MAX:
                raise BadInput(f"a response of {whole} bytes, more than {RESPONSE_BYTES_MAX}")
            if whole is not None and len(data) >= whole:
                return bytes(data), whole
            if time.monotonic() > deadline:
                raise TimeoutError("its time is over")
            piece = self._sock.recv(_RECEIVE_BYTES)
            if not piece:
                raise ConnectionError("it closed the connection")
            data += piece

    def _received(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (piece := self._sock.recv(count - len(data))):
            data += piece
        return data

    def _set_timeout(self, timeout_s: float) -> None:
        seconds, rest = divmod(max(timeout_s, 0.001), 1)
        timeval = struct.pack("ll", int(seconds), int(rest * 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._timeout_s = timeout_s

    def shut_down(self) -> None:
        """Shut the socket down, which also wakes a thread that waits for a response on it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class LaneClient:
    """A ``Transport`` over connections to one daemon. A broken one is discarded; the next request opens another."""

    def __init__(self, locate: Callable[[], LaneAddress], who: str) -> None:
        """``locate`` returns the current address of the daemon's lane, which changes with a restart."""
        self._locate = locate
        self._who = who
        self._idle: list[_Connection] = []
        self._in_use: set[_Connection] = set()
        self._closed = False

    def send(self, header: Header, rows: Rows | None, timeout_s: float) -> Response:
        response, received, _ = self._send(header, rows, timeout_s, _ignore)
        return response, received

    def read(self, header: Header, timeout_s: float, on_header: OnHeader) -> tuple[Header, pa.Buffer | None]:
        response, _, following = self._send(header, None, timeout_s, on_header)
        return response, following

    def _send(self, header: Header, rows: Rows | None, timeout_s: float, on_header: OnHeader) -> _Received:
        request = encode_frame(header, rows)
        connection = self._take()
        self._in_use.add(connection)
        try:
            response, received, following = connection.send(header["op"], request, timeout_s, on_header)
        except BaseException as error:
            self._in_use.discard(connection)
            connection.close()
            # The idle connections lead to the same daemon; if it was restarted, they are broken as well.
            self._close_idle()
            if not isinstance(error, OSError | BadInput):
                raise
            raise StoreUnavailable(
                f"the state store at {self._who} went away or did not answer within {timeout_s:g} s "
                f"({short_cause(error)})",
                address=self._who,
            ) from error
        self._in_use.discard(connection)
        self._keep(connection)
        if "error" in response:
            raise from_wire(response["error"])
        return response, received, following

    def close(self) -> None:
        self._closed = True
        for connection in list(self._in_use):
            connection.shut_down()
        self._close_idle()

    def _take(self) -> _Connection:
        if self._closed:
            raise NothingSent("the client is closed")
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if connection.is_alive():
                return connection
            connection.close()
        deadline = time.monotonic() + NO_ROOM_S
        while True:
            try:
                return _Connection(self._locate())
            except _NoRoom as error:
                if time.monotonic() > deadline:
                    raise self._unreachable(error) from error
            except (OSError, StoreUnavailable) as error:
                raise self._unreachable(error) from error
            time.sleep(NO_ROOM_PAUSE_S)

    def _unreachable(self, error: Exception) -> NothingSent:
        return NothingSent(f"the state store at {self._who} cannot be reached ({short_cause(error)})")

    def _keep(self, connection: _Connection) -> None:
        if len(self._idle) < POOL_MAX:
            self._idle.append(connection)
        else:
            connection.close()
        if self._closed:
            self._close_idle()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()
