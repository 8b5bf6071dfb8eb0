"""A ``MapperCore`` that threads share: one lock, who waits for what, and the memory shared with local reducers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from shuffle.durable.mapper_state import MapperState
from shuffle.errors import NotServed, OutOfRange, StoreUnavailable
from shuffle.ids import ReducerIndex, ShuffleIndex, Token
from shuffle.limits import MIB, WAIT_MS_MAX
from shuffle.mapper.bucket import Bucket, ServedBatch
from shuffle.mapper.core import MapperCore
from shuffle.mapper.spill.format import SpillHead
from shuffle.mapper.spill.index import Spill
from shuffle.mapper.spill.response import SpillRead
from shuffle.mapper.window import MappedBatch
from shuffle.messages import GetRows, Tail
from shuffle.support.shared_memory import MemoryWriter

SHARED_BYTES_MAX = 32 * MIB
"""The most bytes of shared memory for responses to all reducers on this machine together. They are taken off the
window's limit."""

SHARED_OF_WINDOW = 4
"""Shared memory takes at most the window's limit divided by this number."""

WRITER_BYTES_MIN = 1 * MIB
"""The least bytes of shared memory for one reducer. Responses are cut to what there is, so with less than this they are
better sent over the wire."""

WAITERS_PER_REDUCER_MAX = 4
"""The number of requests of one reducer that may wait at once: its own, and those of calls that it, or an instance
before it, has abandoned."""

CROWDED_WAIT_S = 0.1
"""The longest wait, in seconds, of a request beyond ``WAITERS_PER_REDUCER_MAX``. It is not 0, so that a caller that
tries again at once does not keep the mapper busy."""

FULL_WINDOW_WAIT_S = 0.02
"""The longest wait, in seconds, while the window is full and the caller has not committed all that it was served: its
next request may say that rows are committed, which makes room."""

CONFIRM_S = 0.05
"""The least seconds between two reads of the store that confirm what requests call committed. Few requests need that,
but anybody can send them; an honest one that comes too soon is refused, and sent again by the reducer."""

CANCEL_CHECK_S = 1.0
"""The seconds after which a waiting request checks again that its caller has not cancelled it."""


class Served(NamedTuple):
    """The response to one GetRows."""

    schema: pa.Schema | None
    """The schema of the rows; None if nothing was mapped yet."""
    rows: list[ServedBatch]
    tail: Tail
    """The tail of the last batch or, if there are no rows, of the response."""


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
        reducers have committed from their rows in the store."""
        self.core = core
        self._read_spill = read_spill
        self._read_committed = read_committed
        self._is_confirming = False
        self._confirmed_s = -math.inf
        """The monotonic time at which the store was last read to confirm what a request called committed."""
        self.lock = threading.RLock()
        self._room = threading.Condition(self.lock)
        """The condition that is notified when rows were committed, so that the ingestion may go on."""
        self._new_rows = [threading.Condition(self.lock) for _ in range(reducer_count)]
        """For each reducer, the condition that is notified when there are new rows for it."""
        self._listening: list[list[threading.Event]] = [[] for _ in range(reducer_count)]
        """For each reducer, the events that are set then, too: those of requests that wait for several reducers, or for
        rows of several mappers."""
        self.wakes = 0
        """The number of times that requests which wait have been told to look again."""
        self.reducer_count = reducer_count
        self.closing = False
        """Whether the process stops: nothing is waited for any more, calls get what there is, and exchanges end."""

    def restart(
        self,
        persisted: MapperState,
        committed: Mapping[ReducerIndex, ShuffleIndex],
        spills: Mapping[ReducerIndex, Spill],
    ) -> None:
        """Restart the core (``MapperCore.restart``), with what is in the spill."""
        with self.lock:
            self.core.restart(persisted, committed)
            self.core.load_spill(spills)
            # A request that came before the spill was known, and waits for new rows, may have rows in the spill.
            self._wake(range(self.reducer_count))

    def ingest(self, observed: MapperState | None, rows_in: int, token_after: Token, mapped: MappedBatch) -> None:
        with self.lock:
            schema_was_known = self.core.schema is not None
            woken = self.core.ingest(observed, rows_in, token_after, mapped)
            self._wake(woken if schema_was_known else range(self.reducer_count))

    def _wake(self, reducers: Iterable[int]) -> None:
        """Have the requests that wait for rows of these reducers look again. The caller has the lock."""
        self.wakes += 1
        for reducer_index in reducers:
            self._new_rows[reducer_index].notify_all()
            for event in self._listening[reducer_index]:
                event.set()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until the window is below its limit; whether it is."""
        with self.lock:
            if not self.core.wants_input:
                # Requests that wait for rows wait only ``FULL_WINDOW_WAIT_S`` now.
                self._wake(range(self.reducer_count))
            self._room.wait_for(lambda: self.core.wants_input or self.closing, timeout_s)
            return self.core.wants_input

    def trimmed(self) -> None:
        """The persisted state has moved: dead letters and spilled rows have left memory, so there may be room."""
        with self.lock:
            self._room.notify_all()

    def get_rows(self, request: GetRows, is_cancelled: Callable[[], bool] = lambda: False) -> Served:
        """The rows for one request: at once, or as soon as there are some."""
        try:
            return self._respond(request, is_cancelled)
        except NotServed:
            # This instance may have been started while the reducer's commit was under way: the store can tell.
            if not self._confirm():
                raise
        return self._respond(request, is_cancelled)

    def _confirm(self) -> bool:
        """Read from the store what is committed, without the lock; False if that was done a moment ago.

        It is read for all reducers at once, so that false requests in the name of one reducer cannot keep the claims of
        the others from being confirmed.
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

    def _respond(self, request: GetRows, is_cancelled: Callable[[], bool]) -> Served:
        begin_s = time.monotonic()
        deadline_s = begin_s + min(max(request.wait_ms, 0), WAIT_MS_MAX) / 1000
        settling = request.from_row_index > request.committed_row_index
        with self.lock:
            rows = self._get_rows(request)
            reducer = request.reducer_index
            spilled = self.core.spill_read(request)
            if spilled is None:
                if rows:
                    return Served(self.core.schema, rows, self.core.tail(request, rows))
                if self.core.waiting[reducer] >= WAITERS_PER_REDUCER_MAX:
                    deadline_s = min(deadline_s, begin_s + CROWDED_WAIT_S)
                self.core.waiting[reducer] += 1
                try:
                    while not rows and spilled is None and not self.closing:
                        if settling and not self.core.wants_input:
                            deadline_s = min(deadline_s, begin_s + FULL_WINDOW_WAIT_S)
                        left_s = deadline_s - time.monotonic()
                        if left_s <= 0 or is_cancelled():
                            break
                        self._new_rows[reducer].wait(min(left_s, CANCEL_CHECK_S))
                        rows = self._get_rows(request)
                        spilled = self.core.spill_read(request)
                finally:
                    self.core.waiting[reducer] -= 1
            if spilled is None:
                return Served(self.core.schema, rows, self.core.tail(request, rows))
        return self._from_spill(request, spilled)

    # -- one request of many ------------------------------------------------------------------------------------------

    def get_rows_now(self, request: GetRows) -> Served | None:
        """The rows that the window has for a request, perhaps none, without any wait; None if the store is needed for
        the response: ``get_rows`` reads it."""
        with self.lock:
            try:
                rows = self._get_rows(request)
            except NotServed:
                return None
            if self.core.spill_read(request) is not None:
                return None
            return Served(self.core.schema, rows, self.core.tail(request, rows))

    @contextmanager
    def listening(self, requests: Sequence[GetRows], event: threading.Event) -> Iterator[None]:
        """These requests wait during the block: ``event`` is set whenever they should look again."""
        reducers = [request.reducer_index for request in requests]
        with self.lock:
            for reducer in reducers:
                self.core.waiting[reducer] += 1
                self._listening[reducer].append(event)
        try:
            yield
        finally:
            with self.lock:
                for reducer in reducers:
                    self._listening[reducer].remove(event)
                    self.core.waiting[reducer] -= 1

    def wait_s(self, requests: Sequence[GetRows]) -> float:
        """The seconds for which requests that are ``listening`` may wait, from their beginning on: the shortest time of
        any of them."""
        wait_s = min(min(max(request.wait_ms, 0), WAIT_MS_MAX) / 1000 for request in requests)
        with self.lock:
            if any(self.core.waiting[request.reducer_index] > WAITERS_PER_REDUCER_MAX for request in requests):
                wait_s = min(wait_s, CROWDED_WAIT_S)
            if not self.core.wants_input and any(one.from_row_index > one.committed_row_index for one in requests):
                wait_s = min(wait_s, FULL_WINDOW_WAIT_S)
            return wait_s

    def _from_spill(self, request: GetRows, spilled: SpillRead) -> Served:
        """Respond with spilled rows. The store is read without the lock, so that others are served meanwhile."""
        assert self._read_spill is not None
        try:
            heads, rows = self._read_spill(spilled)
        except OutOfRange:
            # The rows were trimmed after a commit of this reducer that this request, or this instance, does not know.
            with self.lock:
                self.core.forget_spill()
            raise StoreUnavailable("the rows were trimmed while they were being read: ask again soon") from None
        with self.lock:
            spilled.spill.learn(heads)
            self.core.note_served(spilled.reducer_index, rows)
            return Served(self.core.schema, rows, self.core.tail(request, rows))

    def _get_rows(self, request: GetRows) -> list[ServedBatch]:
        bytes_before = self.core.nbytes
        rows = self.core.get_rows(request)
        if self.core.nbytes < bytes_before:
            self._room.notify_all()
        return rows

    def close(self) -> None:
        """Stop waiting: every request that waits gets what there is."""
        with self.lock:
            self.closing = True
            self._room.notify_all()
            self._wake(range(self.reducer_count))

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


class MemoryBudget:
    """The shared memory of one mapper for reducers on this machine: a part of the window's limit for each reducer."""

    def __init__(self, shared: SharedCore) -> None:
        self._shared = shared
        self.reducers = shared.reducer_count
        bytes_max = min(SHARED_BYTES_MAX, shared.core.memory_bytes_max // SHARED_OF_WINDOW)
        self._share_bytes = bytes_max // self.reducers
        self._shares_left = self.reducers

    def take(self, stack: ExitStack, shares: int = 1) -> MemoryWriter | None:
        """Shared memory for one exchange with as many reducers as ``shares``, given back when ``stack`` is closed. None
        if it would be too little, or if none is left, because there are more exchanges than reducers."""
        if self._shares_left < shares or shares * self._share_bytes < WRITER_BYTES_MIN:
            return None
        with self._shared.lock:
            if self._shares_left < shares:
                return None
            self._shares_left -= shares
            self._shared.core.reserved_bytes += shares * self._share_bytes
        memory = MemoryWriter(shares * self._share_bytes)
        stack.callback(self._give_back, memory, shares)
        return memory

    def _give_back(self, memory: MemoryWriter, shares: int) -> None:
        memory.close()
        with self._shared.lock:
            self._shares_left += shares
            self._shared.core.reserved_bytes -= shares * self._share_bytes
