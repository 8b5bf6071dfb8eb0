"""The transports to the daemon's data plane: their Protocol, and the one class that chooses between them.

A request is a header and, where it has any, rows; so is its response (``wire.messages``). ``LaneClient`` sends small
requests over plain sockets, ``FlightClient`` sends any. The lane may be off, at the daemon or at the client: then every
request is sent over Flight.
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
"""The header and the rows of a response."""

OnHeader = Callable[[Header], None]
"""Called with the header of a response as soon as it is received."""

CAUSE_CHARS_MAX = 200
"""The most characters of a cause in another error's message: Flight's causes are pages long."""


class NothingSent(Exception):
    """The request did not reach the store as a whole, so sending it again is safe."""


def short_cause(error: BaseException) -> str:
    """The cause that ``error`` names, cut to one short line, for the end of another error's message."""
    text = getattr(error, "strerror", None) or flight.message_of(error)
    first = text.splitlines()[0][:CAUSE_CHARS_MAX] if text else ""
    return first or type(error).__name__


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request to read one partition of a queue from the position ``begin`` on."""

    queue_id: int
    partition: int
    begin: int
    max_rows: int
    max_bytes: int

    def after(self, end: int) -> ReadRequest:
        """The request that continues this one. ``end`` is where its response ends, of which ``max_rows`` are used."""
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
    """Records of a queue as they are stored in their segment file."""

    file: str
    offset: int
    """The offset in the file at which the first record begins."""
    records: Sequence[pa.Buffer]
    segment_begin: int
    """The position of the segment's row 0: records count their rows from there."""
    end: int
    """The position after the last row of the records."""

    @staticmethod
    def of(header: Header, data: pa.Buffer) -> ReadResponse:
        """The response with this header; ``data`` holds the records that the daemon has sent, one after the other."""
        file, offset = header["file"], header["offset"]
        return ReadResponse(file, offset, split_records(data, file, offset), header["segment"], header["end"])

    def decoded(self, schema: pa.Schema) -> QueueRead:
        batches = decode_records(self.records, schema, self.file, self.offset, self.segment_begin)
        return QueueRead(batches, self.end)


class Transport(Protocol):
    """One transport to the daemon's data plane. Safe to use from many threads; reconnects by itself.

    ``send`` and ``read`` raise the store's own error, ``StoreUnavailable`` when the connection broke after the request
    was sent, or ``NothingSent`` when the request could not be sent.
    """

    def send(self, header: Header, rows: Rows | None, timeout_s: float) -> Response:
        """Send one request and wait for its response."""
        ...

    def read(self, header: Header, timeout_s: float, on_header: OnHeader) -> tuple[Header, pa.Buffer | None]:
        """Send a ``read`` of a queue. Returns the response's header, and the records, if there are any.

        ``on_header`` is called as soon as the header is received, which may be before the records are.
        """
        ...

    def close(self) -> None: ...


class Transports:
    """A ``Transport`` that uses the lane, where there is one, for small requests and reads of queues; else Flight."""

    def __init__(self, lane: Transport, flight: Transport, lane_is_open: Callable[[], bool]) -> None:
        """``lane_is_open`` says whether the daemon, as it was last seen, has a lane that this client may use."""
        self._lane = lane
        self._flight = flight
        self._lane_is_open = lane_is_open

    def send(self, header: Header, rows: Rows | None, timeout_s: float) -> Response:
        if not (self._lane_is_open() and is_small(header, rows)):
            return self._flight.send(header, rows, timeout_s)
        response, received = self._lane.send(header, rows, timeout_s)
        if "elsewhere" not in response:
            return response, received
        # The response is too large for the lane. A read view that the request has opened is open, and is used again.
        again = {**header, "hold": False, "view": response.get("view", header.get("view"))}
        more, received = self._flight.send(again, rows, timeout_s)
        return {**response, **more}, received

    def read(self, header: Header, timeout_s: float, on_header: OnHeader) -> tuple[Header, pa.Buffer | None]:
        chosen = self._lane if self._lane_is_open() else self._flight
        return chosen.read(header, timeout_s, on_header)

    def close(self) -> None:
        self._flight.close()
        self._lane.close()
