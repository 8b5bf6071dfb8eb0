"""The client's end of the Flight exchange: a pool of streams, one request at a time on each, every wait bounded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput, ShuffleError, StoreUnavailable, TooBusy, from_wire
from shuffle.limits import RESPONSE_HEADER_BYTES_MAX
from shuffle.statestore.remote.transport import NothingSent, OnHeader, Response, short_cause
from shuffle.statestore.wire.messages import (
    EXCHANGE,
    FRAME,
    Header,
    Rows,
    as_buffers,
    check_rows,
    decode_header,
    encode_header,
    frame,
    rows_in,
)
from shuffle.statestore.wire.operations import check_response
from shuffle.support import flight
from shuffle.support.vital_threads import OnDeath, start_vital

POOL_MAX = 64
"""The most idle streams that are kept; each occupies a thread of the daemon."""

_WATCH_PERIOD_S = 0.25
"""The seconds between two checks for requests that are past their deadline."""


class _Stream:
    """One ``DoExchange`` stream, which carries one request at a time."""

    def __init__(self, client: Any) -> None:
        descriptor = flight.FlightDescriptor.for_command(EXCHANGE)
        self._writer, self._reader = client.do_exchange(descriptor)
        self._writer.begin(FRAME)

    def send(self, operation: str, header: bytes, batch: pa.RecordBatch | None) -> Response:
        if batch is None:
            self._writer.write_metadata(header)
        else:
            self._writer.write_with_metadata(batch, header)
        chunk = self._reader.read_chunk()
        metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        response = decode_header(metadata, RESPONSE_HEADER_BYTES_MAX)
        check_response(operation, response)
        if chunk.data is not None:
            check_rows(chunk.data)
        return response, rows_in(chunk.data)

    def cancel(self) -> None:
        self._reader.cancel()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._reader.cancel()
        with contextlib.suppress(Exception):
            self._writer.close()


class FlightClient:
    """A ``Transport`` over streams to one daemon. A broken stream is discarded; the next request opens another."""

    def __init__(self, connect: Callable[[], Any], who: str, on_death: OnDeath) -> None:
        """``on_death``: see ``vital_threads``. Without the thread for deadlines, a request could wait for ever."""
        self._connect = connect
        self._who = who
        self._lock = threading.Lock()
        self._client: Any = None
        self._idle: list[_Stream] = []
        self._in_use: dict[_Stream, float] = {}
        self._closed = threading.Event()
        self._watchdog = start_vital(self._watch, "store-deadlines", on_death)

    def read(self, header: Header, timeout_s: float, on_header: OnHeader) -> tuple[Header, pa.Buffer | None]:
        response, rows = self.send(header, None, timeout_s)
        if "bytes" not in response:
            return response, None
        on_header(response)
        pieces = [] if rows is None else as_buffers(rows[1])
        if len(pieces) != 1 or pieces[0].size != response["bytes"]:
            raise StoreUnavailable(f"the state store at {self._who} sent other rows than it said", address=self._who)
        return response, _aligned(pieces[0])

    def send(self, header: Header, rows: Rows | None, timeout_s: float) -> Response:
        stream = self._take()
        encoded, batch = encode_header(header), None if rows is None else frame(*rows)
        with self._lock:
            self._in_use[stream] = time.monotonic() + timeout_s
        try:
            response, received = stream.send(header["op"], encoded, batch)
        except BaseException as error:
            self._finished(stream, alive=False)
            # After an invalid response (``BadInput``) it is unknown whether the request was executed, as without one.
            if not isinstance(error, Exception) or (
                isinstance(error, ShuffleError) and not isinstance(error, BadInput)
            ):
                raise
            if isinstance(refused := flight.sent_error(error), TooBusy):
                raise NothingSent(refused.message) from refused
            raise StoreUnavailable(
                f"the state store at {self._who} went away or did not answer within {timeout_s:g} s "
                f"({short_cause(error)})",
                address=self._who,
            ) from error
        self._finished(stream, alive=True)
        if "error" in response:
            raise from_wire(response["error"])
        return response, received

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            streams, self._idle = self._idle + list(self._in_use), []
            client, self._client = self._client, None
        for stream in streams:
            stream.close()
        if client is not None:
            with contextlib.suppress(Exception):
                client.close()

    def _take(self) -> _Stream:
        if self._closed.is_set():
            raise NothingSent("the client is closed")
        with self._lock:
            if self._idle:
                return self._idle.pop()
            client = self._client
        try:
            if client is None:
                client = self._connect()
                with self._lock:
                    self._client = client
            return _Stream(client)
        except Exception as error:
            with self._lock:
                self._client = None
            raise NothingSent(f"the state store at {self._who} cannot be reached ({short_cause(error)})") from error

    def _finished(self, stream: _Stream, alive: bool) -> None:
        with self._lock:
            self._in_use.pop(stream, None)
            if alive and len(self._idle) < POOL_MAX and not self._closed.is_set():
                self._idle.append(stream)
                return
            if not alive:
                # The idle streams lead to the same daemon; if it was restarted, they are broken as well.
                broken, self._idle, self._client = self._idle, [], None
            else:
                broken = []
        for one in [stream, *broken]:
            one.close()

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_PERIOD_S):
            now = time.monotonic()
            with self._lock:
                overdue = [stream for stream, deadline in self._in_use.items() if deadline < now]
            for stream in overdue:
                with contextlib.suppress(Exception):
                    stream.cancel()


def _aligned(data: pa.Buffer) -> pa.Buffer:
    """``data`` in memory whose address is a multiple of 8, so that each record is aligned as it is in its file.

    gRPC does not align messages, and some of the code that computes on columns requires it.
    """
    return data if data.address % 8 == 0 else pa.py_buffer(data.to_pybytes())
