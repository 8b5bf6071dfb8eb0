"""One mapper instance: all that belongs to one partition of the input.

Its core and window, the ingestion, the trim, the reader, the user's mapper and the lease are its own. The process that
hosts it (``daemon``), alone or beside others, has the rest: signals, the client of the store, the server, the endpoint
of the metrics, and the memory limit, of which each instance gets a share.

Threads: one ingests, one trims, one keeps the lease. An error that ends one of them is passed to the process, by
``fail``, which ends them all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from shuffle.api import WorkerSpec
from shuffle.discovery import Membership
from shuffle.durable.mapper_state import lookup_committed
from shuffle.durable.spill_ends import SpillEnd
from shuffle.durable.tables import mappers_group
from shuffle.errors import FalseClaim, ShuffleError, SplitBrain, UserCodeError
from shuffle.ids import MapperIndex, ReducerIndex
from shuffle.mapper.core import MapperCore
from shuffle.mapper.ingest import Ingestion
from shuffle.mapper.mapping import MapStage
from shuffle.mapper.reader import PartitionReader
from shuffle.mapper.serve import HostedMapper
from shuffle.mapper.shared_core import SharedCore
from shuffle.mapper.spill.store import SpillStore
from shuffle.mapper.trim import Trimmer
from shuffle.metrics import MapperMetrics
from shuffle.spec.config import ProcessorSpec
from shuffle.support import crash_points
from shuffle.support.logs import get_logger, logged_as_worker
from shuffle.support.retry import passes_by_itself
from shuffle.support.vital_threads import start_vital

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

DRAIN_S = 10.0
"""The seconds for which rows that were mapped before a bad one are still served, after the bad one has stopped the
mapper."""

_log = get_logger(__name__)


class MapperInstance:
    """The parts of one running mapper."""

    def __init__(
        self,
        spec: ProcessorSpec,
        client: StateClient,
        worker: WorkerSpec,
        reader: PartitionReader,
        map_stage: MapStage,
        dead_letter_queue: str,
        memory_bytes_max: int,
        metrics: MapperMetrics,
        fail: Callable[[ShuffleError], None],
        is_alone: bool = True,
    ) -> None:
        """``fail`` is called, by any thread, with the error after which this instance cannot go on. ``is_alone`` says
        that its process hosts no other instance."""
        index = MapperIndex(worker.index)
        self.index = index
        self._spec = spec
        self._client = client
        self._worker = worker
        self._reader = reader
        self._metrics = metrics
        self._fail = fail
        self._is_alone = is_alone
        reducers = worker.reducer_count
        self._core = MapperCore(worker.guid, index, reducers, memory_bytes_max, spec.spill, spec.processor)
        spill = SpillStore(client, spec.processor, index, reducers, spec.spill.compression)
        committed = partial(lookup_committed, client, spec.processor, index, reducers)
        self._shared = SharedCore(self._core, reducers, spill.read, committed)
        self._trimmer = Trimmer(
            client,
            spec.processor,
            self._core,
            reader,
            self._shared.lock,
            dead_letter_queue,
            spill,
            spec.mapper.trim_period_ms / 1000,
        )
        self._trimmer.on_conflict = metrics.conflicts.inc
        self._trimmer.on_dead_letters = metrics.dead_letters.inc
        self._trimmer.on_spilled = self._spilled
        self._ingestion = Ingestion(client, spec, index, self._shared, reader, map_stage, metrics, spill)
        self._stop_trim = threading.Event()
        self._lag_rows: int | None = None
        self._measured_s = 0.0

    def served(self) -> HostedMapper:
        """This instance, for the server of its process."""
        return HostedMapper.of(self._shared, self._status, self._served)

    def interrupt(self) -> None:
        """Wake a reader that waits for rows, and an ingestion that waits for room, so that they stop at once."""
        self._reader.interrupt()
        self._shared.close()

    # Registration

    @contextmanager
    def registered(self, attributes: Mapping[str, str]) -> Iterator[None]:
        """Keeps the lease with which reducers find this instance; ``attributes`` are the process's."""
        own = {"index": str(self.index), **attributes}
        group, ttl_ms = mappers_group(self._spec.processor), self._spec.lease_ttl_ms
        membership = Membership(self._client, group, self._worker.guid, own, ttl_ms, self._fail)
        with logged_as_worker(self.index):
            membership.start()
            crash_points.reach("mapper.after_registering")
            _log.info("serving", guid=self._worker.guid, **attributes)
        try:
            yield
        finally:
            with logged_as_worker(self.index):
                membership.close()

    # Ingestion

    def start_ingesting(self, stop: threading.Event) -> threading.Thread:
        with logged_as_worker(self.index):
            return start_vital(lambda: self._ingest(stop), "ingest", self._fail)

    def _ingest(self, stop: threading.Event) -> None:
        try:
            self._ingestion.run(stop)
        except UserCodeError as error:
            _log.error("map failed, reading no further", error=error)
            self._drain(stop)
            self._fail(error)
        except ShuffleError as error:
            self._fail(error)

    def _drain(self, stop: threading.Event) -> None:
        """Wait until the rows that were mapped before the bad one, also the spilled ones, are fetched and committed.

        If the process hosts other instances, always wait for the whole time, in which they can go on: they end with
        this one, and the process that is started next will soon come to the same row.
        """
        deadline_s = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline_s and not stop.wait(0.05):
            with self._shared.lock:
                if self._is_alone and self._core.is_drained:
                    return

    # Trim

    def start_trimming(self) -> threading.Thread:
        with logged_as_worker(self.index):
            return start_vital(self._trim_regularly, "trim", self._fail)

    def stop_trimming(self) -> None:
        """Make the trim end after one more round. Returns at once."""
        self._stop_trim.set()

    def _trim_regularly(self) -> None:
        while True:
            last = self._stop_trim.wait(self._trimmer.pause_s)
            if last:
                self._trimmer.hurry()
            try:
                with self._ingestion.trim_mutex:
                    moved = self._trimmer.trim()
                if moved:
                    self._metrics.trims.inc()
                    self._shared.trimmed()
                self._measure()
            except SplitBrain as error:
                _log.info("trim found another instance's state", reason=error.message)
                self._ingestion.other_instance_seen.set()
            except FalseClaim as error:
                self._false_claim(error)
            except Exception as error:
                if not passes_by_itself(error):
                    _log.error("the input cannot be trimmed", error=error)
                    if not isinstance(error, ShuffleError):
                        raise
                    self._fail(error)
                    return
                _log.warning("trim not possible now", error=error)
            if last:
                return

    def _false_claim(self, error: FalseClaim) -> None:
        """Report a false claim once: until the ingestion has started again, every trim finds the same one."""
        if not self._ingestion.false_claim_seen.is_set():
            _log.error("rows were called committed that are not", error=error, **error.fields)
            self._metrics.false_claims.inc()
            self._ingestion.false_claim_seen.set()

    # Status and metrics

    def _measure(self) -> None:
        """Set the gauges, at most once in a trim period."""
        now_s = time.monotonic()
        if now_s - self._measured_s < self._spec.mapper.trim_period_ms / 1000:
            return  # The trim runs more often than that while it spills.
        self._measured_s = now_s
        with self._shared.lock:
            token, nbytes, rows = self._core.token, self._core.nbytes, self._core.window_size.rows
            spills = [(reducer, spill.rows, spill.nbytes) for reducer, spill in self._core.spilling.spills.items()]
            stragglers = len(self._core.spilling.stragglers)
        self._metrics.stragglers.set(stragglers)
        for reducer, spilled_rows, spilled_bytes in spills:
            self._metrics.spill_rows(reducer).set(spilled_rows)
            self._metrics.spill_bytes(reducer).set(spilled_bytes)
        self._metrics.window_bytes.set(nbytes)
        self._metrics.window_rows.set(rows)
        self._lag_rows = self._reader.lag_rows(token)
        if self._lag_rows is not None:
            self._metrics.read_lag_rows.set(self._lag_rows)

    def _served(self, rows: int, nbytes: int) -> None:
        self._metrics.served_rows.inc(rows)
        self._metrics.served_bytes.inc(nbytes)

    def _spilled(self, reducer: ReducerIndex, before: SpillEnd, after: SpillEnd) -> None:
        self._metrics.spilled_rows.inc(after.rows - before.rows)
        self._metrics.spilled_bytes.inc(after.nbytes - before.nbytes)
        self._metrics.spilled_stored_bytes.inc(after.stored_bytes - before.stored_bytes)

    def _status(self) -> dict[str, Any]:
        return {**self._shared.status(), "read_lag_rows": self._lag_rows}
