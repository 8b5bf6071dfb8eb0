"""The fast path: fetches record batches over a connection of its own, and reads them into columns as a whole.

The plain client makes an object of every record, which costs five times what the rest of the way of a row does. This
one asks the leader of the partition for bytes (``wire``), and the bytes become columns (``record_batches``). The next
request is on its way while a response is being read. It finds the leader through the plain client's metadata, and is
for connections without encryption and authentication: whatever else there is, and whatever goes wrong, is for the plain
client, which goes on at the same offset (``Unfit``). Both leave out the same records, so that it does not matter to the
numbering of rows which of them has read.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shuffle.limits import MIB
from shuffle.mapper.readers.kafka.positions import Partition, Position
from shuffle.mapper.readers.kafka.record_batches import Columns, Unfit, columns_of, committed_batches
from shuffle.mapper.readers.kafka.wire import BadResponse, FetchResponse, fetch_request, parse_response

FETCH_BYTES = 4 * MIB
"""The bytes of one response. A batch that is larger comes whole all the same."""
RESPONSE_BYTES_MAX = 256 * MIB
FETCH_WAIT_MS = 100
"""The milliseconds for which a request waits at the broker for a record, and after which it is seen whether the reader
is to stop."""
CONNECT_S_MAX = 5.0
RESPONSE_S_MAX = 10.0


class Rows(NamedTuple):
    """Rows that were read, and the position after them."""

    columns: Columns
    after: Position


class FastPath:
    """One partition over one connection. Only one thread uses it."""

    def __init__(self, partition: Partition, find_leader: Callable[[], tuple[str, int]]) -> None:
        self._partition = partition
        self._find_leader = find_leader
        self._socket: socket.socket | None = None
        self._correlation = 0
        self._asked: int | None = None
        """The offset that the request on its way asks for."""
        self._at: int | None = None
        """The offset of the next row to be returned."""
        self._waiting: deque[Columns] = deque()
        """Rows that came and were not returned yet."""
        self._fetched = -1
        """The offset behind everything that came."""
        self._epoch = -1
        self.last_stable_offset: int | None = None
        """Where the partition ends for a reader, as far as the broker has said."""

    def read(self, at: Position, rows_max: int, bytes_max: int, wait_ms: int, stop: threading.Event) -> Rows:
        """Rows from ``at`` on; after ``wait_ms`` none, and the position may have moved over a gap. Raises ``Unfit`` if
        the plain client has to go on, and then has returned nothing."""
        if self._at != at.offset:
            self._forget()
            self._at = self._fetched = at.offset
        deadline_s = time.monotonic() + wait_ms / 1000
        try:
            while not self._waiting:
                before = self._fetched
                self._fetch(FETCH_WAIT_MS if wait_ms else 0)
                if self._waiting or self._fetched != before:
                    break
                if stop.is_set() or time.monotonic() >= deadline_s:
                    break
        except (OSError, BadResponse, struct.error) as error:
            self.close()
            raise Unfit(f"{type(error).__name__}: {error}") from None
        except BaseException:
            self.close()
            raise
        columns = self._take(rows_max, bytes_max)
        self._at = int(self._waiting[0].offset[0]) if self._waiting else self._fetched
        epoch = self._epoch if self._epoch >= 0 else at.leader_epoch
        return Rows(columns, Position(at.topic_id, self._at, epoch))

    def _take(self, rows_max: int, bytes_max: int) -> Columns:
        """Rows of the first columns that wait: all of them, or as many as are asked for."""
        if not self._waiting:
            return columns_of([])
        first = self._waiting.popleft()
        count = len(first.offset)
        size = max(1, first.value.nbytes + first.key.nbytes)
        fits = min(count, rows_max, max(1, count * bytes_max // size))
        if fits < count:
            self._waiting.appendleft(_sliced(first, fits, count))
            first = _sliced(first, 0, fits)
        return first

    def _fetch(self, wait_ms: int) -> None:
        """One response, and the next request behind it."""
        if self._asked is None:
            self._ask(wait_ms)
        response = self._response()
        if response.error_code:
            raise Unfit(f"the broker's error {response.error_code}")
        self.last_stable_offset = response.last_stable_offset
        batches, after = committed_batches(response.records, response.aborted)
        if after < 0 and len(response.records):
            raise Unfit("records that are no whole batch")
        begin, self._fetched = self._fetched, max(self._fetched, after)
        if batches:
            self._ask(FETCH_WAIT_MS)  # It comes while these are being read.
            self._epoch = batches[-1].leader_epoch
            columns = columns_of(batches)
            # A response begins with the whole batch that has the offset.
            skipped = int((columns.offset < begin).sum())
            if skipped < len(columns.offset):
                self._waiting.append(_sliced(columns, skipped, len(columns.offset)) if skipped else columns)

    def _ask(self, wait_ms: int) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(self._find_leader(), CONNECT_S_MAX)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(RESPONSE_S_MAX)
        self._correlation = (self._correlation + 1) % (1 << 30)
        self._asked = self._fetched
        name, number = self._partition
        self._socket.sendall(fetch_request(self._correlation, name, number, self._fetched, -1, wait_ms, FETCH_BYTES))

    def _response(self) -> FetchResponse:
        (size,) = struct.unpack(">i", self._received(4))
        if not 0 < size <= RESPONSE_BYTES_MAX:
            raise BadResponse(f"a response of {size} bytes")
        data = self._received(size)
        self._asked = None
        return parse_response(data, self._correlation, self._partition.topic, self._partition.number)

    def _received(self, size: int) -> memoryview:
        assert self._socket is not None
        data = memoryview(bytearray(size))
        done = 0
        while done < size:
            count = self._socket.recv_into(data[done:])
            if not count:
                raise BadResponse("the broker has closed the connection")
            done += count
        return data

    def _forget(self) -> None:
        """Drop what was fetched; a request on its way is for another offset, so the connection goes, too."""
        if self._asked is not None:
            self.close()
        self._waiting.clear()
        self._at = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._asked = self._at = None
        self._waiting.clear()


def _sliced(columns: Columns, begin: int, end: int) -> Columns:
    return Columns(
        columns.offset[begin:end],
        columns.timestamp_ms[begin:end],
        columns.key.slice(begin, end - begin),
        columns.value.slice(begin, end - begin),
        None if columns.headers is None else columns.headers[begin:end],
    )
