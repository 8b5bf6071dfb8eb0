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
from shuffle.statestore.remote.transport import NothingSent, OnHeader, Response, words_of
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
"""Idle connections kept."""

CONNECT_TIMEOUT_S = 5.0

NO_ROOM_S = 1.0
NO_ROOM_PAUSE_S = 0.02
"""A daemon with as many connections as it takes gives up one that nothing is asked on. Should all of them be busy, it
refuses the next one, which is tried again for a moment: most responses are sent within a millisecond."""

FOLLOWING_BYTES_MAX = 2 * BATCH_BYTES_MAX
"""Maximum bytes behind a frame. A read gives at least one record, and that is a batch and its head."""

_RECEIVE_BYTES = 64 * KIB
_FOLLOWING_BYTES = 4 * MIB
"""Received at once of what follows a frame; in between the deadline is looked at."""
_IDLE_S = 0.05
"""After so long without a request, a connection is looked at before it is trusted with one."""


_Received = tuple[Header, Rows | None, pa.Buffer | None]
"""A response with the bytes that follow it, if any do."""


def _ignore(header: Header) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """Where a daemon's lane is."""

    host: str
    port: int
    local_name: str
    """The name of the socket for clients on its own machine; empty where there is none."""


def _connected(address: LaneAddress) -> socket.socket:
    if address.local_name and sys.platform == "linux":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(local_address(address.local_name))
            return sock
        except OSError:
            # Another machine, or another container on this one.
            sock.close()
    return socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)


class _NoRoom(ConnectionError):
    """The daemon took the connection and hung up without a word."""


class _Connection:
    def __init__(self, address: LaneAddress) -> None:
        self._sock = _connected(address)
        try:
            send_at_once(self._sock)
            if self._received(len(GREETING)) != GREETING:
                raise _NoRoom("it has no room for another connection, or is no state store")
            # From here on the kernel keeps the time: Python's own timeouts would poll before each call.
            self._sock.settimeout(None)
        except BaseException:
            self._sock.close()
            raise
        self._timeout_s = 0.0
        self._used_at = time.monotonic()

    def is_alive(self) -> bool:
        """False when the daemon is known to have closed it. Worth a look only when it has been idle."""
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
            # The daemon does nothing about a part of a request.
            raise NothingSent(f"the connection broke before the request was sent ({words_of(error)})") from error
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
        """``size_bytes`` bytes, the first of which came with the frame."""
        if not len(begin) <= size_bytes <= FOLLOWING_BYTES_MAX:
            raise BadInput(f"{size_bytes} bytes are to follow a response, more than {FOLLOWING_BYTES_MAX} or too few")
        buffer = pa.allocate_buffer(size_bytes)
        view = memoryview(buffer).cast("B")
        view[: len(begin)] = begin
        at = len(begin)
        while at < size_bytes:
            if time.monotonic() > deadline:
                raise TimeoutError("its time is over")
            # The kernel waits for all of it: waking up for each packet would take this thread as long as the copy.
            received = self._sock.recv_into(view[at : at + _FOLLOWING_BYTES], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("it closed the connection")
            at += received
        return buffer

    def _rest(self, begin: bytes, deadline: float) -> tuple[bytes, int]:
        """At least the whole frame that begins like this, and how long the frame is."""
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

    def hang_up(self) -> None:
        """Ends the wait of a thread that has a request on it, too."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class LaneClient:
    """A ``Transport`` over connections to one daemon. One that broke is thrown away; the next request makes another."""

    def __init__(self, locate: Callable[[], LaneAddress], who: str) -> None:
        """``locate`` tells where the daemon's lane is now: after a restart it is elsewhere."""
        self._locate = locate
        self._who = who
        self._idle: list[_Connection] = []
        self._in_use: set[_Connection] = set()
        self._closed = False

    def send(self, header: Header, rows: Rows | None, timeout_s: float) -> Response:
        response, found, _ = self._send(header, rows, timeout_s, _ignore)
        return response, found

    def read(self, header: Header, timeout_s: float, on_header: OnHeader) -> tuple[Header, pa.Buffer | None]:
        response, _, following = self._send(header, None, timeout_s, on_header)
        return response, following

    def _send(self, header: Header, rows: Rows | None, timeout_s: float, on_header: OnHeader) -> _Received:
        request = encode_frame(header, rows)
        connection = self._take()
        self._in_use.add(connection)
        try:
            response, found, following = connection.send(header["op"], request, timeout_s, on_header)
        except BaseException as error:
            self._in_use.discard(connection)
            connection.close()
            # The idle ones lead to the same daemon; if it was restarted they are as dead as this one.
            self._throw_away()
            if not isinstance(error, OSError | BadInput):
                raise
            raise StoreUnavailable(
                f"the state store at {self._who} went away or did not answer within {timeout_s:g} s "
                f"({words_of(error)})",
                address=self._who,
            ) from error
        self._in_use.discard(connection)
        self._keep(connection)
        if "error" in response:
            raise from_wire(response["error"])
        return response, found, following

    def close(self) -> None:
        self._closed = True
        for connection in list(self._in_use):
            connection.hang_up()
        self._throw_away()

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
        return NothingSent(f"the state store at {self._who} cannot be reached ({words_of(error)})")

    def _keep(self, connection: _Connection) -> None:
        if len(self._idle) < POOL_MAX:
            self._idle.append(connection)
        else:
            connection.close()
        if self._closed:
            self._throw_away()

    def _throw_away(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()
