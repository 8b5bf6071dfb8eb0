"""GetRows over Arrow Flight, as single calls and as exchanges of many, with long poll; and the action ``status``.

Handlers hold the lock only for slicing: small batches are joined, and everything is sent, outside of it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyarrow as pa

from shuffle.durable.mapper_state import MapperState
from shuffle.errors import BadInput, NotServed, OutOfRange, ShuffleError, StoreUnavailable, to_wire
from shuffle.ids import ReducerIndex, ShuffleIndex, Token
from shuffle.limits import MIB, WAIT_MS_MAX
from shuffle.mapper.bucket import Bucket, ServedBatch
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.spill.spill import Spill, SpillHead, SpillRead
from shuffle.messages import METADATA_FIELDS, NO_ROWS, ROWS_EXCHANGE, STREAM_OVER, BatchTail, GetRows, SharedRows
from shuffle.support import crash_points, flight
from shuffle.support.shared_memory import BYTES_MIN, Outbox, machine
from shuffle.support.slots import Places

JOIN_BYTES_MAX = 1 * MIB
"""Adjacent batches are joined up to this size. Below it the cost of a message outweighs that of a copy."""

SHARED_BYTES_MAX = 32 * MIB
"""Memory for answers to reducers on this machine, for all of them together. It is taken off the window's limit."""

SHARED_OF_WINDOW = 4
"""And not more than the window's limit divided by this."""

OUTBOX_BYTES_MIN = 1 * MIB
"""Of that, for one reducer. Answers are cut to what it has, so with less they are better sent over the wire."""

WAITERS_PER_REDUCER_MAX = 4
"""Requests of one reducer that may wait at once: its own, and those of instances and calls that it has given up."""

CROWDED_WAIT_S = 0.1
"""The longest wait of one more request than those: long enough that who asks again at once is not always asking."""

EXCHANGES_PER_REDUCER_MAX = 8
EXCHANGES_MIN = 64
"""Exchanges and calls that are served at once, for each reducer and at least; each has a thread. A reducer has one, and
for a while those that it, or an instance before it, has given up; Spark's tasks and ``status`` come on top."""

FULL_WAIT_S = 0.02
"""The longest wait while the window is full and the caller has not committed all that it was given: the next request
may bring the news that makes room."""

CONFIRM_S = 0.05
"""How often at most the store is asked to confirm what requests say. Few requests need that, but anybody can send them;
an honest one that comes too soon is sent again after a moment."""

CANCEL_CHECK_S = 1.0
"""How often a waiting request looks whether its caller is still there."""


class SharedCore:
    """A ``MapperCore`` shared by the ingestion, the trim and the handlers: one lock, and who is woken by what."""

    def __init__(
        self,
        core: MapperCore,
        reducer_count: int,
        read_spill: Callable[[SpillRead], tuple[list[SpillHead], list[ServedBatch]]] | None = None,
        read_committed: Callable[[], Mapping[ReducerIndex, ShuffleIndex]] = dict,
    ) -> None:
        """``read_spill`` reads spilled rows from the store; without it there are none. ``read_committed`` reads what
        the reducers' rows in the store say."""
        self.core = core
        self._read_spill = read_spill
        self._read_committed = read_committed
        self._is_confirming = False
        self._confirmed_s = -math.inf
        """When the store was last asked what is committed, to confirm what a request said."""
        self.lock = threading.RLock()
        self._room = threading.Condition(self.lock)
        """Notified when rows were committed, so that the ingestion may go on."""
        self._new_rows = [threading.Condition(self.lock) for _ in range(reducer_count)]
        """Notified when there are new rows for a reducer."""
        self.reducer_count = reducer_count
        self.closing = False
        """Nothing more is waited for: calls get what there is, and exchanges end."""

    def restart(
        self,
        persisted: MapperState,
        committed: Mapping[ReducerIndex, ShuffleIndex],
        spills: Mapping[ReducerIndex, Spill],
    ) -> None:
        """As that of the core, with what is in the spill."""
        with self.lock:
            self.core.restart(persisted, committed)
            self.core.load_spill(spills)
            # Who came before that was known, and waits for new rows, may have rows in the spill.
            for condition in self._new_rows:
                condition.notify_all()

    def ingest(self, observed: MapperState | None, rows_in: int, token_after: Token, mapped: MappedBatch) -> None:
        with self.lock:
            schema_was_known = self.core.schema is not None
            woken = self.core.ingest(observed, rows_in, token_after, mapped)
            reducers: Iterable[int] = woken if schema_was_known else range(len(self._new_rows))
            for reducer_index in reducers:
                self._new_rows[reducer_index].notify_all()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Waits until the window is below its limit; whether it is."""
        with self.lock:
            if not self.core.wants_input:
                for condition in self._new_rows:
                    condition.notify_all()  # Those who wait for rows are not to wait as long now.
            self._room.wait_for(lambda: self.core.wants_input or self.closing, timeout_s)
            return self.core.wants_input

    def trimmed(self) -> None:
        """Dead letters that were persisted leave room too."""
        with self.lock:
            self._room.notify_all()

    def get_rows(
        self, request: GetRows, is_cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[pa.Schema | None, list[ServedBatch]]:
        """The schema, None if nothing was mapped yet, and rows: at once, or as soon as there are some."""
        try:
            return self._answer(request, is_cancelled)
        except NotServed:
            # This instance may have been started while the reducer's commit was under way: the store knows.
            if not self._confirm():
                raise
        return self._answer(request, is_cancelled)

    def _confirm(self) -> bool:
        """Ask the store what is committed, without the lock; False if it was asked a moment ago.

        It is asked for all reducers at once, so that whoever says what is not true cannot keep it from being asked for
        the others.
        """
        with self.lock:
            if self._is_confirming or time.monotonic() - self._confirmed_s < CONFIRM_S:
                return False
            self._is_confirming = True
        try:
            committed = self._read_committed()
        finally:
            with self.lock:
                self._is_confirming = False
                self._confirmed_s = time.monotonic()
        with self.lock:
            self.core.learn_committed(committed)
        return True

    def _answer(self, request: GetRows, is_cancelled: Callable[[], bool]) -> tuple[pa.Schema | None, list[ServedBatch]]:
        begin_s = time.monotonic()
        deadline_s = begin_s + min(max(request.wait_ms, 0), WAIT_MS_MAX) / 1000
        settling = request.from_row_index > request.committed_row_index
        with self.lock:
            rows = self._get_rows(request)
            reducer = request.reducer_index
            spilled = self.core.spill_read(request)
            if spilled is None:
                if rows:
                    return self.core.schema, rows
                if self.core.waiting[reducer] >= WAITERS_PER_REDUCER_MAX:
                    deadline_s = min(deadline_s, begin_s + CROWDED_WAIT_S)
                self.core.waiting[reducer] += 1
                try:
                    while not rows and spilled is None and not self.closing:
                        if settling and not self.core.wants_input:
                            deadline_s = min(deadline_s, begin_s + FULL_WAIT_S)
                        left_s = deadline_s - time.monotonic()
                        if left_s <= 0 or is_cancelled():
                            break
                        self._new_rows[reducer].wait(min(left_s, CANCEL_CHECK_S))
                        rows = self._get_rows(request)
                        spilled = self.core.spill_read(request)
                finally:
                    self.core.waiting[reducer] -= 1
            if spilled is None:
                return self.core.schema, rows
        return self._from_spill(spilled)

    def _from_spill(self, spilled: SpillRead) -> tuple[pa.Schema | None, list[ServedBatch]]:
        """Without the lock: others are served while the store is asked."""
        assert self._read_spill is not None
        try:
            heads, rows = self._read_spill(spilled)
        except OutOfRange:
            # Trimmed meanwhile, by a commit of this reducer that this request, or this instance, does not know of.
            with self.lock:
                self.core.forget_spill()
            raise StoreUnavailable("the rows were trimmed while they were being read: ask again soon") from None
        with self.lock:
            spilled.spill.learn(heads)
            self.core.note_served(spilled.reducer_index, rows)
        return self.core.schema, rows

    def _get_rows(self, request: GetRows) -> list[ServedBatch]:
        bytes_before = self.core.nbytes
        rows = self.core.get_rows(request)
        if self.core.nbytes < bytes_before:
            self._room.notify_all()
        return rows

    def close(self) -> None:
        """Everybody who waits gets what there is."""
        with self.lock:
            self.closing = True
            self._room.notify_all()
            for condition in self._new_rows:
                condition.notify_all()

    def status(self) -> dict[str, Any]:
        with self.lock:
            core = self.core
            size = core.window_size
            return {
                "guid": core.guid,
                "index": core.mapper_index,
                "next_input_index": core.next_input_index,
                "next_shuffle_index": core.next_shuffle_index,
                "token": core.token.hex(),
                "persisted_input_row_index": core.persisted.input_unread_row_index,
                "persisted_shuffle_row_index": core.persisted.shuffle_unread_row_index,
                "local_input_row_index": core.local.input_unread_row_index,
                "local_shuffle_row_index": core.local.shuffle_unread_row_index,
                "window_entries": size.entries,
                "window_rows": size.rows,
                "window_bytes": core.nbytes,
                "window_bytes_max": core.memory_bytes_max,
                "spill_blocked": core.spilling.blocked,
                "buckets": [self._bucket_status(bucket) for bucket in core.buckets],
            }

    def _bucket_status(self, bucket: Bucket) -> dict[str, Any]:
        spilling = self.core.spilling
        spill = spilling.spills.get(bucket.reducer_index)
        has_spill = spill is not None and not spill.is_empty
        return {
            "rows": bucket.rows,
            "bytes": bucket.nbytes,
            "committed_row_index": bucket.committed,
            "first_row_index": bucket.first_row_index,
            "last_row_index": bucket.last_row_index,
            "is_straggler": bucket.reducer_index in spilling.stragglers,
            "spilled_rows": spill.rows if spill is not None else 0,
            "spilled_bytes": spill.nbytes if spill is not None else 0,
            "spilled_since_ms": spill.end.since_ms if spill is not None and has_spill else None,
            "spilled_bytes_ever": spill.end.nbytes if spill is not None else 0,
        }


def joined(batches: Iterable[ServedBatch], join_bytes_max: int = JOIN_BYTES_MAX) -> Iterator[ServedBatch]:
    """The same rows in batches of a sensible size: small neighbours are copied together, large ones pass untouched."""
    small: list[ServedBatch] = []
    small_bytes = 0
    for served in batches:
        nbytes = served.rows.nbytes
        if small and small_bytes + nbytes > join_bytes_max:
            yield _join(small)
            small, small_bytes = [], 0
        small.append(served)
        small_bytes += nbytes
    if small:
        yield _join(small)


def _join(batches: list[ServedBatch]) -> ServedBatch:
    if len(batches) == 1:
        return batches[0]
    return ServedBatch(pa.concat_batches([served.rows for served in batches]), batches[-1].last_row_index)


def _with_more(batches: Iterable[ServedBatch]) -> Iterator[tuple[ServedBatch, bool]]:
    """Each batch, and whether another one comes after it."""
    before: ServedBatch | None = None
    for served in batches:
        if before is not None:
            yield before, True
        before = served
    if before is not None:
        yield before, False


_NO_COLUMNS = pa.schema([])


class MapperServer(flight.FlightServerBase):
    """Serves one mapper's rows."""

    def __init__(
        self,
        shared: SharedCore,
        listen: str = "127.0.0.1:0",
        *,
        status: Callable[[], dict[str, Any]] | None = None,
        on_served: Callable[[int, int], None] = lambda rows, nbytes: None,
    ) -> None:
        super().__init__(flight.location(listen))
        self._shared = shared
        reducers = shared.reducer_count
        self._outbox_bytes = min(SHARED_BYTES_MAX, shared.core.memory_bytes_max // SHARED_OF_WINDOW) // reducers
        self._outboxes_left = reducers if self._outbox_bytes >= OUTBOX_BYTES_MIN else 0
        self._status = status or shared.status
        self._on_served = on_served
        self._places = Places("exchanges", max(EXCHANGES_MIN, EXCHANGES_PER_REDUCER_MAX * reducers))
        host = listen.rpartition(":")[0].rpartition("//")[2] or "127.0.0.1"
        self.address = f"grpc://{host}:{self.port}"

    def do_get(self, context: Any, ticket: Any) -> Any:
        with self._places.taken():
            schema, rows = self._rows(GetRows.decode(ticket.ticket), context)
        if schema is None:
            return flight.GeneratorStream(pa.schema([]), iter(()))
        return flight.GeneratorStream(schema, self._stream(rows))

    def _stream(self, rows: list[ServedBatch]) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        for served in joined(rows):
            yield served.rows, BatchTail(served.last_row_index).encode()
            self._on_served(served.rows.num_rows, served.rows.nbytes)

    def _rows(self, request: GetRows, context: Any) -> tuple[pa.Schema | None, list[ServedBatch]]:
        schema, rows = self._shared.get_rows(request, context.is_cancelled)
        if rows:
            crash_points.reach("mapper.before_answer")
            # Their own schema: spilled rows may be served before this instance has mapped any.
            return rows[0].rows.schema, rows
        if schema is not None and request.with_metadata:
            schema = pa.schema([*schema, *METADATA_FIELDS], schema.metadata)
        return schema, rows

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """GetRows, again and again on one stream (see ``messages``), while the answers have the schema of the first."""
        if descriptor.command != ROWS_EXCHANGE:
            raise BadInput(f"unknown exchange {descriptor.command!r}: mapper and reducer are of different versions")
        flight.check_schema(reader, _NO_COLUMNS)
        with self._places.taken(), ExitStack() as stack:
            self._answer_all(context, reader, writer, stack)

    def _outbox(self, stack: ExitStack) -> Outbox | None:
        """Memory for the answers of one exchange; None: there are more exchanges than reducers, and these have it."""
        if not self._outboxes_left:
            return None
        with self._shared.lock:
            if not self._outboxes_left:
                return None
            self._outboxes_left -= 1
            self._shared.core.reserved_bytes += self._outbox_bytes
        outbox = Outbox(self._outbox_bytes)
        stack.callback(self._give_back, outbox)
        return outbox

    def _give_back(self, outbox: Outbox) -> None:
        outbox.close()
        with self._shared.lock:
            self._outboxes_left += 1
            self._shared.core.reserved_bytes -= self._outbox_bytes

    def _answer_all(self, context: Any, reader: Any, writer: Any, stack: ExitStack) -> None:
        outbox: Outbox | None = None
        begun_with: pa.Schema | None = None
        has_begun = False
        while True:
            try:
                ticket = flight.read_chunk(reader).app_metadata
            except StopIteration:
                return
            error: ShuffleError | None = None
            schema, rows = begun_with, list[ServedBatch]()
            sharing: Outbox | None = None
            try:
                request = GetRows.decode(b"" if ticket is None else bytes(ticket))
                if request.machine is not None and request.machine == machine():
                    outbox = outbox or self._outbox(stack)
                    sharing = None if outbox is None or outbox.is_refused else outbox
                if sharing is not None and request.to_row_index is None:
                    request = replace(request, max_bytes=min(request.max_bytes, sharing.bytes_max))
                schema, rows = self._rows(request, context)
            except ShuffleError as refused:
                error = refused
            if not has_begun:
                begun_with, has_begun = schema, True
                writer.begin(schema or _NO_COLUMNS)
            if error is not None:
                writer.write_metadata(to_wire(error).encode())
                continue
            if schema != begun_with or self._shared.closing:
                writer.write_metadata(STREAM_OVER)
                return
            if not rows:
                writer.write_metadata(NO_ROWS)
                continue
            nbytes = sum(served.rows.nbytes for served in rows)
            if sharing is None or nbytes < BYTES_MIN or not self._share(writer, sharing, rows):
                for served, more in _with_more(joined(rows)):
                    writer.write_with_metadata(served.rows, BatchTail(served.last_row_index, more).encode())
            self._on_served(sum(served.rows.num_rows for served in rows), nbytes)

    def _share(self, writer: Any, outbox: Outbox, rows: list[ServedBatch]) -> bool:
        """Answer by way of shared memory, unless there are too many rows for it."""
        batches = list(joined(rows))
        note = outbox.put([served.rows for served in batches])
        if note is None:
            return False
        writer.write_metadata(SharedRows(note, tuple(served.last_row_index for served in batches)).encode())
        return True

    def do_action(self, context: Any, action: Any) -> Any:
        if action.type != "status":
            raise BadInput(f"unknown action {action.type!r}: a mapper knows only status")
        return [flight.Result(pa.py_buffer(json.dumps(self._status()).encode()))]

    def list_actions(self, context: Any) -> Any:
        return [("status", "what this mapper holds, as JSON")]

    def close(self, timeout_s: float = 5.0) -> bool:
        """Answer those who wait and stop; whether all calls ended in time."""
        self._shared.close()
        return flight.shutdown(self, timeout_s)
