"""Ingestion: read rows, map them, check that this is the only instance, push them into the window.

One thread runs it. It is also the only one that restarts the core, and holds ``trim_mutex`` to do so: a trim that was
planned before a restart must not be recorded after it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from shuffle.durable.mapper_state import MapperState, PersistedState, lookup_committed, lookup_state, state_rows
from shuffle.durable.tables import mappers_table
from shuffle.errors import (
    CommitConflict,
    CommitUnknown,
    FalseClaim,
    OutOfRange,
    SplitBrain,
    UserCodeError,
)
from shuffle.ids import InputIndex, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.mapping import MapStage
from shuffle.mapper.read_size import ReadSize
from shuffle.mapper.reader import PartitionReader
from shuffle.mapper.shared_core import SharedCore
from shuffle.mapper.spill.store import SpillStore
from shuffle.metrics import MapperMetrics
from shuffle.spec.config import ProcessorSpec
from shuffle.support import crash_points
from shuffle.support.logs import get_logger
from shuffle.support.retry import Backoff, passes_by_itself

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

ROOM_WAIT_S = 1.0
"""The seconds after which a mapper whose window is full checks again that it is the only instance."""

GIVE_BACK_WAIT_S = 0.004
"""The seconds for which the window must have been full before freed memory is given back to the system. Every page that
is given back has to be faulted in again, and a mapper that goes on at once would pay for that with each batch."""

PIN_ATTEMPTS_MAX = 10
"""The number of attempts at writing the first state. Only other instances that start at the same time can make one
fail."""

BACKOFF_MS = 50
BACKOFF_MS_MAX = 2_000
"""The shortest and the longest wait, in milliseconds, between attempts while the store cannot be used. They are short
enough for a restart of the store to go unnoticed."""

_log = get_logger(__name__)


class Ingestion:
    """Reads, maps and pushes the batches of one mapper instance (see the module's text)."""

    def __init__(
        self,
        client: StateClient,
        spec: ProcessorSpec,
        index: MapperIndex,
        shared: SharedCore,
        reader: PartitionReader,
        map_stage: MapStage,
        metrics: MapperMetrics,
        spill: SpillStore,
    ) -> None:
        self._client = client
        self._spill = spill
        self._spec = spec
        self._index = index
        self._shared = shared
        self._core = shared.core
        self._reader = reader
        self._map_stage = map_stage
        self._metrics = metrics
        self._persisted = PersistedState(client, spec.processor, index)
        self._read_size = ReadSize(spec.mapper.batch_rows_max)
        self._poisoned: UserCodeError | None = None
        self._keeps_freed = False
        """Whether the allocator may still keep memory that was freed since the last batch."""
        self.trim_mutex = threading.Lock()
        self.other_instance_seen = threading.Event()
        """Set by the trim when it finds that another instance has written the persisted state."""
        self.false_claim_seen = threading.Event()
        """Set by the trim when rows were freed that are not committed: they must be read and served again."""

    def restart(self) -> None:
        """Drop everything and go on from the persisted state, which is written first if there is none."""
        with self.trim_mutex:
            pinned = self._pinned_state()
            # Both come from one read view: what is before that state and not committed is in that spill.
            persisted, spills = self._spill.load()
            state = persisted or pinned
            committed = self._committed()
            self._shared.restart(state, committed, spills)
            self._poisoned = None
            self.other_instance_seen.clear()
            self.false_claim_seen.clear()
        _log.info(
            "reading from",
            input_unread_row_index=state.input_unread_row_index,
            shuffle_unread_row_index=state.shuffle_unread_row_index,
        )

    def _pinned_state(self) -> MapperState:
        """The persisted state. Without one, the position where the input begins now becomes the numbering's origin."""
        for _ in range(PIN_ATTEMPTS_MAX):
            state = self._fetch()
            if state is not None:
                return state
            origin = MapperState(continuation_token=self._reader.start())
            try:
                with self._client.transaction() as tx:
                    if lookup_state(tx, self._spec.processor, self._index) is None:
                        tx.write(mappers_table(self._spec.processor), state_rows(self._index, origin))
                        tx.commit()
                        crash_points.reach("mapper.after_first_state")
            except (CommitConflict, CommitUnknown):
                continue  # Whoever wrote it: read it.
        raise SplitBrain(f"mapper {self._index}: its first state could not be written {PIN_ATTEMPTS_MAX} times")

    def _committed(self) -> dict[ReducerIndex, ShuffleIndex]:
        """For each reducer, the last of this mapper's rows that it has committed."""
        return lookup_committed(self._client, self._spec.processor, self._index, self._spec.reducer.count)

    def _fetch(self) -> MapperState | None:
        return self._persisted.fetch()

    def observe(self) -> None:
        """Raise SplitBrain if the persisted state is not ours."""
        state = self._fetch()
        with self._shared.lock:
            self._core.observe(state)

    def step(self) -> None:
        """Ingest the rows of one read:

        1. wait for room in the window;
        2. read the next rows;
        3. map them, a batch at a time, then fetch the persisted state (side by side would cost more in threads than it
           saves);
        4. if that is not the state this instance knows, another one is alive: none of the rows is exposed;
        5. push the entry.
        """
        if self.other_instance_seen.is_set():
            raise SplitBrain(f"mapper {self._index}: the trim found the state of another instance")
        if self.false_claim_seen.is_set():
            raise FalseClaim(f"mapper {self._index}: the trim found rows freed that are not committed")
        # 1
        if not self._wait_for_room():
            self.observe()
            return
        # 2
        begin, token = self._core.next_input_index, self._core.token
        asked_rows = self._read_size.rows
        rows, token_after = self._read(begin, asked_rows)
        if rows.num_rows == 0:
            if self._keeps_freed:
                self._give_back()  # Once: rows come in bursts.
            self.observe()
            if token_after != token:
                with self._shared.lock:
                    self._core.skip_to(token_after)
            return
        self._keeps_freed = True
        crash_points.reach("mapper.after_read")
        # 3
        began_s = time.perf_counter()
        try:
            mapped = self._map_stage.apply(rows, begin, self._spec.mapper.batch_rows_max)
        except UserCodeError as error:
            self._stop_before(error, begin)
            return
        map_s = time.perf_counter() - began_s
        self._metrics.map_seconds.observe(map_s)
        self._read_size.mapped(asked_rows, rows.num_rows, map_s)
        crash_points.reach("mapper.after_map")
        state = self._fetch()
        # 4 and 5
        crash_points.reach("mapper.after_state_check")
        mapped = replace(mapped, ingested_us=time.time_ns() // 1000)
        self._shared.ingest(state, rows.num_rows, token_after, mapped)
        crash_points.reach("mapper.after_push")
        self._metrics.input_rows.inc(rows.num_rows)
        self._metrics.input_bytes.inc(rows.nbytes)
        self._metrics.shuffle_rows.inc(mapped.rows_out)
        self._metrics.shuffle_bytes.inc(sum(part.rows.get_total_buffer_size() for part in mapped.parts))

    def _wait_for_room(self) -> bool:
        """Whether the window has room, after waiting for it for a while. The allocator keeps freed memory for the next
        batch; while no batch can come and the window is at its limit, that memory is given back."""
        if self._shared.wait_for_room(GIVE_BACK_WAIT_S):
            return True
        self._give_back()
        return self._shared.wait_for_room(ROOM_WAIT_S)

    def _give_back(self) -> None:
        """Return freed memory to the system."""
        pa.default_memory_pool().release_unused()
        self._keeps_freed = False

    def _read(self, begin: InputIndex, rows_max: int) -> tuple[pa.Table, Token]:
        end = begin + rows_max
        if self._poisoned is not None:
            bad: int = self._poisoned.input_begin_row_index
            if bad <= begin:
                raise self._poisoned
            end = min(end, bad)
        try:
            return self._reader.read(begin, end, self._core.token)
        except OutOfRange:
            # Somebody trimmed rows that this instance has not read. If another instance of this mapper has processed
            # and trimmed them, the persisted state shows it (SplitBrain), and nothing is lost.
            self.observe()
            raise

    def _stop_before(self, error: UserCodeError, begin: InputIndex) -> None:
        """Arrange that the rows before the bad one are read again, up to it, and processed. Raise ``error`` if the bad
        row is the first one or is not known, or if this was done before."""
        bad = error.fields.get("input_begin_row_index")
        if bad is None or bad <= begin or self._poisoned is not None:
            raise error
        self._poisoned = error

    def run(self, stop: threading.Event) -> None:
        """Ingest until ``stop`` is set. Raises errors that do not pass by themselves."""
        delay_s = self._spec.mapper.split_brain_delay_ms / 1000
        backoff = store_backoff()
        fresh = True
        while not stop.is_set():
            try:
                if fresh:
                    self.restart()
                    fresh = False
                self.step()
                backoff.reset()
            except SplitBrain as error:
                _log.warning(
                    "this instance is a zombie, or has a twin: dropping the window and starting again from the "
                    "persisted state",
                    reason=error.message,
                    delay_s=delay_s,
                )
                self._metrics.split_brains.inc()
                with self.trim_mutex, self._shared.lock:
                    self._core.restart(self._core.persisted)
                    self._core.forget_spill()
                fresh = True
                stop.wait(delay_s)
            except FalseClaim as error:
                _log.warning("dropping the window and starting again from the persisted state", reason=error.message)
                fresh = True
            except Exception as error:
                if not passes_by_itself(error):
                    raise
                wait_s = backoff.next_s()
                _log.warning("ingestion interrupted, trying again", error=error, in_s=wait_s)
                stop.wait(wait_s)


def store_backoff() -> Backoff:
    """The waits of a mapper while the store cannot be used."""
    return Backoff(BACKOFF_MS, BACKOFF_MS_MAX, jitter=0.0)
