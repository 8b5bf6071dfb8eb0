"""The ways to the daemon's data plane, behind one small Protocol, and the one place that chooses between them.

A request is a header and, where it has any, rows; so is its response (``wire.messages``). ``LaneClient`` sends small
ones over plain sockets, ``FlightClient`` sends any. The lane may be off, at the daemon or at the client: then
everything goes over Flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from shuffle.statestore.codec.segment import decode_records, split_records
from shuffle.statestore.store import QueueRead
from shuffle.statestore.wire.lane_frames import is_small
from shuffle.statestore.wire.messages import Header, Rows
from shuffle.support import flight

Response = tuple[Header, Rows | None]

OnHeader = Callable[[Header], None]

WORDS_CHARS_MAX = 200
"""Maximum length of a cause that is named in another error's message: Flight's causes are pages long."""


class NothingSent(Exception):
    """The request did not reach the store as a whole, so sending it again is safe."""


def words_of(error: BaseException) -> str:
    """What was wrong, in a few words, for the end of a sentence about it."""
    text = getattr(error, "strerror", None) or flight.message_of(error)
    first = text.splitlines()[0][:WORDS_CHARS_MAX] if text else ""
    return first or type(error).__name__


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One read of a queue."""

    queue_id: int
    partition: int
    begin: int
    max_rows: int
    max_bytes: int

    def after(self, end: int) -> ReadRequest:
        """The next one, when the response to this goes up to ``end``: no more is used of it than was asked for."""
        begin = min(end, self.begin + self.max_rows)
        return ReadRequest(self.queue_id, self.partition, begin, self.max_rows, self.max_bytes)

    def header(self, wait_ms: int) -> Header:
        return {
            "op": "read",
            "queue": self.queue_id,
            "partition": self.partition,
            "begin": self.begin,
            "rows": self.max_rows,
            "bytes": self.max_bytes,
            "wait_ms": wait_ms,
        }


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """Records of a queue as they stand in their segment file."""

    file: str
    offset: int
    """Where the first record begins in the file."""
    records: Sequence[pa.Buffer]
    segment_begin: int
    """The position of the segment's row 0: records count their rows from there."""
    end: int
    """The position after the last row of the records."""

    @staticmethod
    def of(header: Header, data: pa.Buffer) -> ReadResponse:
        """``data`` are the records that the daemon has sent, side by side."""
        file, offset = header["file"], header["offset"]
        return ReadResponse(file, offset, split_records(data, file, offset), header["segment"], header["end"])

    def decoded(self, schema: pa.Schema) -> QueueRead:
        batches = decode_records(self.records, schema, self.file, self.offset, self.segment_begin)
        return QueueRead(batches, self.end)


class Transport(Protocol):
    """One way to the daemon's data plane. Safe to use from many threads; reconnects by itself.

    Both methods raise the store's own error, ``StoreUnavailable`` when the exchange broke off on the way, or
    ``NothingSent`` when the store could not even be asked.
    """

    def send(self, header: Header, rows: Rows | None, timeout_s: float) -> Response:
        """Send one request and wait for its response."""
        ...

    def read(self, header: Header, timeout_s: float, on_header: OnHeader) -> tuple[Header, pa.Buffer | None]:
        """Send a ``read`` of a queue: the response's header, and the records, if there are any.

        ``on_header`` is called as soon as the header is there, which may be before the records are.
        """
        ...

    def close(self) -> None: ...


class Transports:
    """A ``Transport`` that chooses: the lane for what is small and for reads of queues, while it is there."""

    def __init__(self, lane: Transport, flight: Transport, lane_is_open: Callable[[], bool]) -> None:
        """``lane_is_open`` says whether the daemon, as it was last seen, has a lane that this client may use."""
        self._lane = lane
        self._flight = flight
        self._lane_is_open = lane_is_open

    def send(self, header: Header, rows: Rows | None, timeout_s: float) -> Response:
        if not (self._lane_is_open() and is_small(header, rows)):
            return self._flight.send(header, rows, timeout_s)
        response, found = self._lane.send(header, rows, timeout_s)
        if "elsewhere" not in response:
            return response, found
        # The response is too large for the lane. What the request has opened is there, and need not be opened again.
        again = {**header, "hold": False, "view": response.get("view", header.get("view"))}
        more, found = self._flight.send(again, rows, timeout_s)
        return {**response, **more}, found

    def read(self, header: Header, timeout_s: float, on_header: OnHeader) -> tuple[Header, pa.Buffer | None]:
        chosen = self._lane if self._lane_is_open() else self._flight
        return chosen.read(header, timeout_s, on_header)

    def close(self) -> None:
        self._flight.close()
        self._lane.close()
