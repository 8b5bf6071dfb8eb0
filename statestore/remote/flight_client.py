"""The client's end of the exchange: a pool of open streams, one question at a time on each, every wait bounded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput, ShuffleError, StoreUnavailable, TooBusy, from_wire
from shuffle.limits import ANSWER_HEADER_BYTES_MAX
from shuffle.statestore.wire.messages import (
    EXCHANGE,
    FRAME,
    Header,
    Rows,
    check_rows,
    decode_header,
    encode_header,
    frame,
    rows_in,
)
from shuffle.statestore.wire.operations import check_answer
from shuffle.support import flight
from shuffle.support.vital_threads import OnDeath, start_vital

Answer = tuple[Header, Rows | None]

POOL_MAX = 64
"""Idle streams kept; each is a thread at the daemon."""

WORDS_CHARS_MAX = 200
"""Of a cause that is named in another error's message: Flight's are pages long."""

_WATCH_PERIOD_S = 0.25


class NothingSent(Exception):
    """The question did not reach the store as a whole, so asking it again is safe."""


def words_of(error: BaseException) -> str:
    """What was wrong, in a few words, for the end of a sentence about it."""
    text = getattr(error, "strerror", None) or flight.words_of(error)
    told = text.splitlines()[0][:WORDS_CHARS_MAX] if text else ""
    return told or type(error).__name__


class _Stream:
    def __init__(self, client: Any) -> None:
        descriptor = flight.FlightDescriptor.for_command(EXCHANGE)
        self._writer, self._reader = client.do_exchange(descriptor)
        self._writer.begin(FRAME)

    def ask(self, operation: str, header: bytes, batch: pa.RecordBatch | None) -> Answer:
        if batch is None:
            self._writer.write_metadata(header)
        else:
            self._writer.write_with_metadata(batch, header)
        chunk = self._reader.read_chunk()
        metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        answer = decode_header(metadata, ANSWER_HEADER_BYTES_MAX)
        check_answer(operation, answer)
        if chunk.data is not None:
            check_rows(chunk.data)
        return answer, rows_in(chunk.data)

    def cancel(self) -> None:
        self._reader.cancel()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._reader.cancel()
        with contextlib.suppress(Exception):
            self._writer.close()


class StreamPool:
    """Streams to one daemon. A stream that broke is thrown away; the next question opens another."""

    def __init__(self, connect: Callable[[], Any], who: str, on_death: OnDeath) -> None:
        """``on_death``: see ``vital_threads``. Without the thread behind it, the wait for an answer has no end."""
        self._connect = connect
        self._who = who
        self._lock = threading.Lock()
        self._client: Any = None
        self._idle: list[_Stream] = []
        self._asking: dict[_Stream, float] = {}
        self._closed = threading.Event()
        self._watchdog = start_vital(self._watch, "store-deadlines", on_death)

    def ask(self, header: Header, rows: Rows | None, timeout_s: float) -> Answer:
        """The answer to one question.

        Raises the store's own error, ``StoreUnavailable`` when it broke off on the way, or ``NothingSent`` (from it)
        when the store could not even be asked.
        """
        stream = self._take()
        encoded, batch = encode_header(header), None if rows is None else frame(*rows)
        with self._lock:
            self._asking[stream] = time.monotonic() + timeout_s
        try:
            answer, found = stream.ask(header["op"], encoded, batch)
        except BaseException as error:
            self._finished(stream, alive=False)
            # An answer that is none (``BadInput``) leaves open what has happened, as one that never came.
            if not isinstance(error, Exception) or (
                isinstance(error, ShuffleError) and not isinstance(error, BadInput)
            ):
                raise
            if isinstance(refused := flight.told(error), TooBusy):
                raise NothingSent(refused.message) from refused
            raise StoreUnavailable(
                f"the state store at {self._who} went away or did not answer within {timeout_s:g} s "
                f"({words_of(error)})",
                address=self._who,
            ) from error
        self._finished(stream, alive=True)
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer, found

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            streams, self._idle = self._idle + list(self._asking), []
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
            raise NothingSent(f"the state store at {self._who} cannot be reached ({words_of(error)})") from error

    def _finished(self, stream: _Stream, alive: bool) -> None:
        with self._lock:
            self._asking.pop(stream, None)
            if alive and len(self._idle) < POOL_MAX and not self._closed.is_set():
                self._idle.append(stream)
                return
            if not alive:
                # The others lead to the same daemon; if it was restarted they are as dead as this one.
                dead, self._idle, self._client = self._idle, [], None
            else:
                dead = []
        for one in [stream, *dead]:
            one.close()

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_PERIOD_S):
            now = time.monotonic()
            with self._lock:
                overdue = [stream for stream, deadline in self._asking.items() if deadline < now]
            for stream in overdue:
                with contextlib.suppress(Exception):
                    stream.cancel()
