"""Appends of few rows, many a second: what comes while one append is under way goes with the next.

A synced append takes a millisecond or so whatever is in it, and so does a commit of the reducers that it wakes up. An
``Appender`` lets rows gather for a moment, appends them together, and says of each piece where it is once that is
durable.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Protocol

import pyarrow as pa

from shuffle.errors import BadInput, ShuffleError, StoreUnavailable, TooBusy
from shuffle.limits import MIB
from shuffle.support.retry import Backoff, passes_by_itself
from shuffle.support.vital_threads import start_vital

LINGER_MS_DEFAULT = 1.0
"""The milliseconds for which the first rows of an append wait for others, unless the caller wants another number."""

LINGER_MS_MAX = 10_000.0

TIMEOUT_S_DEFAULT = 30.0
"""The seconds for which an append is repeated while the store cannot be reached, and for which a full appender
waits."""

TOGETHER_BYTES_MAX = 4 * MIB
"""The most bytes that are appended together; a single larger piece is appended alone."""

PENDING_BYTES_MAX = 64 * MIB
"""The most bytes that wait in an appender. Whoever appends more waits as well."""

PIECE_OVERHEAD_BYTES = 1024
"""What a waiting piece takes beside its rows, so that pieces of one row are bounded, too."""

BACKOFF_MS = 20
BACKOFF_MS_MAX = 1_000

Positions = tuple[int, int]


class Appendable(Protocol):
    """What an appender needs of its queue."""

    @property
    def name(self) -> str: ...

    def conform(self, rows: pa.Table | pa.RecordBatch) -> pa.RecordBatch: ...

    def append(self, partition: int, rows: pa.RecordBatch, producer: str, sequence: int) -> Positions: ...


class _Piece(NamedTuple):
    rows: pa.RecordBatch
    nbytes: int
    positions: Future[Positions]


class Appender:
    """Appends pieces of rows to one partition, in their order, several together. Threads may share it.

    If the store cannot be reached, an append is repeated for ``timeout_s``; it appears once, however often it is sent.
    After an error that remains, the rows that wait are not appended: every ``Future`` and every further call raises
    it.
    """

    def __init__(self, queue: Appendable, partition: int, linger_ms: float, timeout_s: float) -> None:
        if not 0 <= linger_ms <= LINGER_MS_MAX:
            raise BadInput(f"linger_ms must be from 0 to {LINGER_MS_MAX:.0f}, not {linger_ms!r}")
        if not timeout_s > 0:
            raise BadInput(f"timeout_s must be above 0, not {timeout_s!r}")
        self._queue = queue
        self._partition = partition
        self._linger_s = linger_ms / 1000
        self._timeout_s = timeout_s
        self._producer = f"appender-{uuid.uuid4().hex}"
        self._sequence = 0
        self._changed = threading.Condition()
        self._pending: deque[_Piece] = deque()
        self._pending_bytes = 0
        self._under_way: list[_Piece] = []
        """The pieces that have been taken out of ``_pending`` and are not settled yet."""
        self._hurry = False
        """Whether somebody waits for what is pending: it does not linger then."""
        self._closing = False
        self._error: ShuffleError | None = None
        self._thread = start_vital(self._run, f"append-{queue.name}-{partition}", self._fail)

    def append(self, rows: pa.Table | pa.RecordBatch) -> Future[Positions]:
        """Take rows to be appended soon. The result has their positions, from ``begin`` up to and without ``end``, once
        they are durable.

        Rows that do not fit the queue are refused at once. If too many rows wait, so does this call.
        """
        batch = self._queue.conform(rows)
        piece = _Piece(batch, batch.get_total_buffer_size() + PIECE_OVERHEAD_BYTES, Future())
        with self._changed:
            self._check_usable()
            if not self._changed.wait_for(self._has_room, self._timeout_s):
                raise TooBusy(f"queue {self._queue.name!r}: {self._pending_bytes} bytes wait to be appended already")
            self._check_usable()
            self._pending.append(piece)
            self._pending_bytes += piece.nbytes
            if len(self._pending) == 1:
                self._changed.notify_all()
        return piece.positions

    def flush(self) -> None:
        """Return when all rows are durable that were passed to ``append`` before; raise if some are not."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            waited_s = 2 * self._timeout_s + self._linger_s
            if not self._changed.wait_for(self._is_settled, waited_s):
                raise StoreUnavailable(f"queue {self._queue.name!r}: rows are not appended after {waited_s:.0f} s")
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Append what waits, and end. Raise if something could not be appended."""
        try:
            if not self._closing:
                self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join(self._timeout_s)

    def __enter__(self) -> Appender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise BadInput("the appender is closed")

    def _has_room(self) -> bool:
        return self._pending_bytes < PENDING_BYTES_MAX or self._error is not None or self._closing

    def _is_settled(self) -> bool:
        return (not self._pending and not self._under_way) or self._error is not None

    def _run(self) -> None:
        while pieces := self._next_pieces():
            try:
                begin, _ = self._send(pieces)
            except ShuffleError as error:
                self._fail(error)
                return
            for piece in pieces:
                piece.positions.set_result((begin, begin + piece.rows.num_rows))
                begin += piece.rows.num_rows
            with self._changed:
                self._under_way = []
                self._pending_bytes -= sum(piece.nbytes for piece in pieces)
                self._changed.notify_all()

    def _next_pieces(self) -> list[_Piece]:
        """The pieces of the next append, as soon as they have gathered; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            if self._linger_s:
                self._changed.wait_for(self._is_due, self._linger_s)
            pieces: list[_Piece] = []
            nbytes = 0
            while self._pending and (not pieces or nbytes + self._pending[0].nbytes <= TOGETHER_BYTES_MAX):
                pieces.append(self._pending.popleft())
                nbytes += pieces[-1].nbytes
            self._under_way = pieces
            self._hurry = self._hurry and bool(self._pending)
            return pieces

    def _is_due(self) -> bool:
        return self._hurry or self._closing or self._pending_bytes >= TOGETHER_BYTES_MAX

    def _send(self, pieces: list[_Piece]) -> Positions:
        rows = pieces[0].rows if len(pieces) == 1 else pa.concat_batches([piece.rows for piece in pieces])
        self._sequence += 1
        backoff = Backoff(BACKOFF_MS, BACKOFF_MS_MAX)
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._queue.append(self._partition, rows, self._producer, self._sequence)
            except ShuffleError as error:
                # The store knows the producer and its sequence, so an append whose response was lost may be repeated.
                wait_s = backoff.next_s()
                if not passes_by_itself(error) or time.monotonic() + wait_s > deadline_s:
                    raise
                time.sleep(wait_s)

    def _fail(self, error: ShuffleError) -> None:
        """Settle everything that waits with ``error``."""
        with self._changed:
            self._error = error
            failed = [*self._under_way, *self._pending]
            self._under_way, self._pending_bytes = [], 0
            self._pending.clear()
            self._changed.notify_all()
        for piece in failed:
            piece.positions.set_exception(error)
