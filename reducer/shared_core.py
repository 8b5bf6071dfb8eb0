"""A ``ReducerCore`` shared by the fetchers and the thread that reduces and commits: one lock, and who waits for what.

The core makes all decisions but one that needs a clock: how long rows may add up before they are reduced. Every wait
ends when the reducer is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from shuffle.durable.reducer_state import ReducerState
from shuffle.errors import ShuffleError
from shuffle.ids import MapperIndex, ShuffleIndex
from shuffle.messages import Tail
from shuffle.reducer.core import FetchPlan, ReduceBatch, ReducerCore, Settled
from shuffle.reducer.pace import Pace

T = TypeVar("T")

_WAIT_S = 1.0
"""The seconds after which a waiting thread checks its condition again, should a wake-up ever be missed."""


class SharedCore:
    """The core of one reducer instance, behind one lock (see the module's text)."""

    def __init__(self, core: ReducerCore, pace: Pace | None = None) -> None:
        self._core = core
        self._pace = pace or Pace()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._empty_responses = 0
        self.failure: ShuffleError | None = None
        """The first error after which the reducer could not go on; None if there was none."""

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """No new requests and no new batches; what is being reduced is still committed."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: ShuffleError) -> None:
        """Stop because of ``error``; the first one is the one that is reported."""
        with self._changed:
            self.failure = self.failure or error
        self.stop()

    def sleep(self, seconds: float) -> bool:
        """Wait out a back-off; False when the reducer is stopped meanwhile."""
        return not self._stopping.wait(seconds)

    def wait_stopped(self, seconds: float) -> bool:
        return self._stopping.wait(seconds)

    # -- fetch --------------------------------------------------------------------------------------------------------

    def next_plan(self, mapper_index: MapperIndex) -> FetchPlan | None:
        """The next request to this mapper, as soon as there is room; None when stopped."""
        return self._wait(lambda: None if self.stopping else self._core.fetch_plan(mapper_index), lambda: self.stopping)

    def plan_now(self, mapper_index: MapperIndex) -> FetchPlan | None:
        """The next request to this mapper, or None if there is no room for its rows or the reducer is stopped."""
        with self._changed:
            return None if self.stopping else self._core.fetch_plan(mapper_index)

    def fetched(
        self,
        plan: FetchPlan,
        batches: Sequence[tuple[pa.RecordBatch, ShuffleIndex]],
        tails: Sequence[Tail] = (),
        is_early: bool = False,
    ) -> int:
        """Queue a response; the number of rows that were queued, 0 if the core was restarted since the request. One
        without rows ``is_early`` if the mapper has not waited for them, so that nothing follows from it."""
        with self._changed:
            rows = self._core.fetched(plan, batches, tails, is_early)
            if not rows:
                if is_early:
                    return 0
                self._empty_responses += 1
            # An empty response also matters to a reducer that lets rows add up: a mapper whose window is full sends it.
            self._changed.notify_all()
            return rows

    def pause(self, response_bytes: int) -> None:
        """Wait before the next request to a mapper whose response had ``response_bytes``, if the load asks for it."""
        pause_s = self.pause_s(response_bytes)
        if pause_s:
            self._stopping.wait(pause_s)

    def pause_s(self, response_bytes: int) -> float:
        """The seconds of that wait."""
        return self._pace.request_pause_s(response_bytes)

    def committed_row_index(self, mapper_index: MapperIndex) -> ShuffleIndex:
        with self._changed:
            return self._core.committed_state[mapper_index]

    @property
    def generation(self) -> int:
        """The generation of the processor, as the reducer's row in the store says."""
        with self._changed:
            return self._core.committed_state.generation

    # -- process ------------------------------------------------------------------------------------------------------

    def next_batch(self) -> ReduceBatch | None:
        """The next batch to reduce; None when stopped."""
        self._gather()
        # Once stopping, no batch is taken even if there is one, since the process would end during it.
        batch = self._wait(lambda: None if self.stopping else self._core.take(), lambda: self.stopping)
        self._pace.taken(0 if batch is None else batch.size_bytes, time.monotonic())
        return batch

    def _gather(self) -> None:
        """Under load, let rows add up for a short time: until there are many, or a mapper has none or no room for
        more."""
        with self._changed:
            now_s = time.monotonic()
            if not self._pace.is_loaded(now_s):
                return
            end_s, empty_before, seen_bytes = now_s + self._pace.gather_s, self._empty_responses, -1
            while now_s < end_s and not self.stopping and self._empty_responses == empty_before:
                queued_bytes = self._core.queued_bytes
                if queued_bytes == seen_bytes or self._core.has_enough:
                    return
                seen_bytes = queued_bytes
                self._changed.wait(min(self._pace.idle_s, end_s - now_s))
                now_s = time.monotonic()

    def is_current(self, batch: ReduceBatch) -> bool:
        with self._changed:
            return self._core.is_current(batch)

    # -- commit -------------------------------------------------------------------------------------------------------

    def committed(self, batch: ReduceBatch) -> bool:
        """Whether ``batch`` was still current; if not, the core was restarted while it was being committed."""
        with self._changed:
            current = self._core.is_current(batch)
            if current:
                self._core.committed(batch)
                self._changed.notify_all()
            return current

    def settle(self, batch: ReduceBatch, persisted: ReducerState) -> Settled | None:
        """See ``ReducerCore.settle``; None if the core was restarted meanwhile."""
        with self._changed:
            if not self._core.is_current(batch):
                return None
            settled = self._core.settle(batch, persisted)
            self._changed.notify_all()
            return settled

    # -- restart ------------------------------------------------------------------------------------------------------

    def restart(self, persisted: ReducerState) -> None:
        with self._changed:
            self._core.restart(persisted)
            self._changed.notify_all()

    def reconcile(self, read_state: Callable[[], ReducerState]) -> ReducerState | None:
        """Compare with the persisted state; start again from it, and return it, if another instance has moved it."""
        with self._changed:
            before = (self._core.epoch, self._core.committed_state)
        persisted = read_state()
        with self._changed:
            # If a commit of our own went through meanwhile, what was read may be older than what is known.
            if before != (self._core.epoch, self._core.committed_state) or self._core.agrees(persisted):
                return None
            self._core.restart(persisted)
            self._changed.notify_all()
            return persisted

    def _wait(self, find: Callable[[], T | None], ended: Callable[[], bool]) -> T | None:
        """The result of ``find``, as soon as it is not None, or what it is when ``ended`` says so."""
        with self._changed:
            while True:
                result = find()
                if result is not None or ended():
                    return result
                self._changed.wait(_WAIT_S)
