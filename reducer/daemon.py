"""Reducers as a process: the threads around the core of each, and what they do when the store or a mapper fails.

    fetch (a thread for each mapper) -> process (user code), then commit (one thread)

Fetching runs ahead. Process and commit take turns, and so they share a thread: a transaction that reads before the one
before it is committed would read an outdated state, conflict with it, and be run again (``cycle``).

A process hosts one reducer or several. They share the client of the store, the directory of the mappers, the
connections to them and the endpoint of the metrics (``ProcessParts``); all else is each one's own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from shuffle.api import WorkerSpec
from shuffle.discovery import MapperDirectory, Membership
from shuffle.durable.query_lease import refuse_beside_query
from shuffle.durable.tables import reducers_group
from shuffle.errors import (
    Outgrown,
    ShuffleError,
    SpecError,
    SplitBrain,
    StoreError,
)
from shuffle.ids import MapperIndex, ReducerIndex, new_guid
from shuffle.metrics import ReducerMetrics, serve_metrics
from shuffle.preflight.check import check_against_store
from shuffle.reducer.commit import Committer
from shuffle.reducer.connections import ClientPool
from shuffle.reducer.core import FetchLimits, ReducerCore
from shuffle.reducer.cycle import CycleEnvironment, ReduceCycle
from shuffle.reducer.fetch import Fetcher, RowLocator
from shuffle.reducer.link import Links
from shuffle.reducer.outputs.opening import emitter
from shuffle.reducer.pace import Pace
from shuffle.reducer.reduce import ReduceStage
from shuffle.reducer.row_cache import CommittedRowCache
from shuffle.reducer.shared_core import SharedCore
from shuffle.spec.config import ProcessorSpec
from shuffle.statestore import StateClient
from shuffle.support import crash_points
from shuffle.support.exit_codes import report
from shuffle.support.logs import get_logger, logged_as_worker
from shuffle.support.retry import Backoff, patiently
from shuffle.support.vital_threads import start_vital
from shuffle.user_code.create import create_reducer
from shuffle.user_code.load import load_class

STOP_S_MAX = 10.0
"""The seconds that a reducer which is to stop waits for the reduce and the commit that are under way; then it ends
without them."""

WINDOWS_WAITING = 4
WINDOWS_WAITING_CROWDED = 2
CROWDED_REDUCERS = 4
"""A reducer lets rows add up to its share of all mappers' windows, divided by the first of these numbers; or by the
second if a core has more than ``CROWDED_REDUCERS``, whose shares are small."""

GROWTH_RETRY_S = 1.0
"""The seconds before reducers that have seen a mapper with an unknown index ask the store again about it."""

_STOP_CHECK_S = 0.2
"""The seconds between two checks of the event that stops the reducer."""

T = TypeVar("T")

Fail = Callable[[ShuffleError], None]
"""A function that is told, by any thread, why the process cannot go on."""

_log = get_logger(__name__)


def run(spec: ProcessorSpec, indexes: int | Sequence[int], *, stop: threading.Event | None = None) -> int:
    """Run the reducers ``indexes`` of ``spec`` in this process, until ``stop`` is set or the code of one of them fails.
    Returns the exit code; errors are printed to stderr."""
    hosted = [indexes] if isinstance(indexes, int) else list(indexes)
    stop = stop or threading.Event()
    backoff = Backoff(spec.reducer.backoff_ms, spec.reducer.backoff_ms_max)
    try:
        client = _patiently(spec.open_state, "the state store", backoff, stop)
        if client is None:
            return 0
        with client:
            mapper_count = _patiently(lambda: _check(spec, client), "the state store", backoff, stop)
            if mapper_count is not None:
                _run_hosted(spec, hosted, client, mapper_count, stop)
            return 0
    except ShuffleError as error:
        return report(error)


def _check(spec: ProcessorSpec, client: StateClient) -> int:
    """Check that the spec fits the store and that no Spark query reads the processor; the number of mappers."""
    mapper_count = check_against_store(spec, client)
    refuse_beside_query(client, spec.processor)
    return mapper_count


def _patiently(call: Callable[[], T], peer: str, backoff: Backoff, stop: threading.Event) -> T | None:
    """Call until there is a result, or None when stopped: a store that is being restarted is no reason to end."""

    def log_wait(error: ShuffleError, wait_s: float) -> None:
        _log.warning(f"waiting for {peer}", error=error, wait_s=round(wait_s, 3))

    return patiently(call, backoff, stop, log_wait)


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """What the reducers of one process share, besides the client of the store."""

    directory: MapperDirectory
    clients: ClientPool
    attributes: Mapping[str, str]
    """What their leases tell about the process."""
    links: Links | None
    """What sends their requests together; None if the process has one reducer, and each mapper a process of its own."""
    grown: threading.Event = field(default_factory=threading.Event)
    """Set once the processor has more mappers than the reducers were started with: all of them begin again."""


@contextmanager
def _process_parts(
    spec: ProcessorSpec, client: StateClient, metrics: ReducerMetrics, port: int | None, fail: Fail, reducers: int = 1
) -> Iterator[ProcessParts]:
    """The parts of a process of so many reducers that serves its metrics on ``port``, or none if it is None."""
    with ExitStack() as stack:
        attributes = {}
        if port is not None:
            metrics_server = serve_metrics(metrics.registry, fail, port=port)
            attributes["metrics"] = stack.enter_context(metrics_server).address
        directory = stack.enter_context(MapperDirectory(client, spec.processor, fail))
        clients = ClientPool()
        has_many = reducers > 1 or spec.mapper.per_process > 1
        links = Links(clients, spec.reducer.share_memory, reducers) if has_many else None
        yield ProcessParts(directory, clients, attributes, links)


def _run_hosted(
    spec: ProcessorSpec, indexes: Sequence[int], client: StateClient, mapper_count: int, stop: threading.Event
) -> None:
    """Run reducers side by side until ``stop`` is set. An error after which one of them cannot go on ends all of them,
    and is raised; whoever started the process starts it again. If the input gets more partitions, they begin again from
    what is persisted, with the mappers that there are then."""
    backoff = Backoff(spec.reducer.backoff_ms, spec.reducer.backoff_ms_max)
    known: int | None = mapper_count
    while known is not None and _run_until_grown(spec, indexes, client, known, stop):
        before = known
        known = _patiently(lambda: _check(spec, client), "the state store", backoff, stop)
        if known == before:
            stop.wait(GROWTH_RETRY_S)  # A mapper is there that the store does not know of yet.
        _log.info("the processor has more mappers: beginning again with all of them", mappers=known)


def _run_until_grown(
    spec: ProcessorSpec, indexes: Sequence[int], client: StateClient, mapper_count: int, stop: threading.Event
) -> bool:
    """Run reducers until ``stop`` is set, and return False; or until there are more mappers, and return True."""
    if len(indexes) == 1:
        return ReducerDaemon(spec, indexes[0], client, mapper_count).run(stop)
    failures: list[ShuffleError] = []

    def fail(error: ShuffleError) -> None:
        failures.append(error)
        stop.set()

    daemons: list[ReducerDaemon] = []
    for index in indexes:
        daemons.append(ReducerDaemon(spec, index, client, mapper_count, daemons[0].metrics if daemons else None))
    port = spec.metrics_port("reducer", indexes[0])
    with _process_parts(spec, client, daemons[0].metrics, port, fail, len(indexes)) as parts:
        threads = []
        for daemon in daemons:
            with logged_as_worker(daemon.index):
                run_one = partial(daemon.run_reporting, stop, parts, fail)
                threads.append(start_vital(run_one, f"reducer-{daemon.index}", fail))
        for thread in threads:
            thread.join()
        grown = parts.grown.is_set()
    if failures:
        raise failures[0]
    return grown and not stop.is_set()


class ReducerDaemon:
    """One instance of one reducer."""

    def __init__(
        self,
        spec: ProcessorSpec,
        index: int,
        client: StateClient,
        mapper_count: int,
        beside: ReducerMetrics | None = None,
    ) -> None:
        """``beside`` are the metrics of another reducer of this process, if there is one."""
        if not 0 <= index < spec.reducer.count:
            raise SpecError(
                f"there is no reducer {index}: {spec.path} has {spec.reducer.count}, counted from 0",
                field="reducer.count",
            )
        self.guid = new_guid()
        self.index = ReducerIndex(index)
        self._metrics_port = spec.metrics_port("reducer", index)
        self.metrics = ReducerMetrics(spec.processor, index, self._metrics_port is not None, beside)
        self._spec = spec
        self._client = client
        self._mapper_count = mapper_count
        self._committer = Committer(client, spec.reducers_table, self.index, mapper_count)
        self._core = ReducerCore(mapper_count, limits_of(spec, mapper_count))
        self._shared = SharedCore(self._core, Pace(reducers_per_core(spec)))
        self._row_cache = CommittedRowCache()
        self._split_brains = self._backoff()

    def _backoff(self) -> Backoff:
        return Backoff(self._spec.reducer.backoff_ms, self._spec.reducer.backoff_ms_max)

    def run_reporting(self, stop: threading.Event, parts: ProcessParts, fail: Fail) -> None:
        """``run`` in a process with other reducers: an error goes to ``fail``, and names the reducer."""
        try:
            if self.run(stop, parts):
                parts.grown.set()
        except ShuffleError as error:
            _log.error("stopped", error=error, **error.fields)
            named = f"reducer {self.index}" in error.message
            fail(error if named else type(error)(f"reducer {self.index}: {error.message}", **error.fields))

    def run(self, stop: threading.Event, parts: ProcessParts | None = None) -> bool:
        """Run until ``stop`` is set, and return False; or until there are more mappers than this reducer knows of, and
        return True. Raises the error after which the reducer cannot go on. ``parts`` are those of the process, if it
        hosts others beside this one."""
        try:
            return self._run(stop, parts)
        except Outgrown as error:
            _log.info("begins again", reason=error.message)
            return True

    def _run(self, stop: threading.Event, parts: ProcessParts | None) -> bool:
        spec = self._spec
        persisted = _patiently(self._committer.read_state, "the state store", self._backoff(), stop)
        if persisted is None:
            return False
        crash_points.reach("reducer.after_state_read")
        self._shared.restart(persisted)
        with ExitStack() as stack:
            if parts is None:
                own = _process_parts(spec, self._client, self.metrics, self._metrics_port, self._shared.fail)
                parts = stack.enter_context(own)
            attributes = {"index": str(self.index), **parts.attributes}
            group, ttl_ms = reducers_group(spec.processor), spec.lease_ttl_ms
            stack.enter_context(Membership(self._client, group, self.guid, attributes, ttl_ms, self._shared.fail))
            _log.info("reducer started", guid=self.guid, committed=list(persisted.committed_row_indices))
            self._run_stages(parts, stop)
            grown = parts.grown.is_set()
        if self._shared.failure is not None:
            raise self._shared.failure
        _log.info("reducer stopped", committed=list(self._core.committed_state.committed_row_indices))
        return grown and not stop.is_set()

    def _run_stages(self, parts: ProcessParts, stop: threading.Event) -> None:
        shared, directory = self._shared, parts.directory
        stage = _patiently(lambda: self._reduce_stage(directory), "the state store", self._backoff(), stop)
        if stage is None:
            return
        fetchers = [
            Fetcher(
                MapperIndex(i),
                self.index,
                shared,
                directory,
                self._backoff(),
                self.metrics,
                self._rows_gone,
                self._spec.reducer.share_memory,
                parts.clients,
                parts.links,
            )
            for i in range(self._mapper_count)
        ]
        process = start_vital(lambda: self._process(self._cycle(stage)), "process", shared.fail)
        for fetcher in fetchers:
            fetcher.start()
        while not stop.is_set() and not parts.grown.is_set() and not shared.wait_stopped(_STOP_CHECK_S):
            if any(index >= self._mapper_count for index in directory.mappers()):
                parts.grown.set()
        shared.stop()
        for fetcher in fetchers:
            fetcher.interrupt()
        process.join(STOP_S_MAX)
        if process.is_alive():
            # Whatever it does now, the reducer's row shows the next instance whether it was committed.
            _log.warning("left without waiting any longer", stage=process.name, waited_s=STOP_S_MAX)
        directory.wake()  # Fetchers may wait for a mapper.
        # A request that was only being sent when the others were interrupted waits for its response.
        deadline_s = time.monotonic() + self._spec.reducer.fetch_wait_ms / 1000 + 1.0
        for fetcher in fetchers:
            fetcher.join(max(0.0, deadline_s - time.monotonic()))

    def _reduce_stage(self, directory: MapperDirectory) -> ReduceStage:
        spec = self._spec
        worker = WorkerSpec(
            spec.processor, self.index, self.guid, self._mapper_count, spec.reducer.count, spec.max_parallelism
        )
        # Rows that are read or written through this client are cached between commits (see ``row_cache``).
        state = self._client.with_row_cache(self._row_cache)
        emit = emitter(spec, self._client, self.index)
        reducer = create_reducer(load_class(spec, "reducer"), spec.reducer.config, worker, state, emit)
        return ReduceStage(
            reducer,
            self._client,
            processor=spec.processor,
            index=self.index,
            on_error=spec.reducer.on_error,
            dead_letter_queue=spec.reducer.dead_letter_queue,
            locate=RowLocator(self.index, self._shared, directory),
            forget=self._row_cache.forget,
        )

    def _cycle(self, stage: ReduceStage) -> ReduceCycle:
        environment = CycleEnvironment(
            metrics=self.metrics,
            backoff=self._backoff,
            clock=time.monotonic,
            sleep=self._shared.sleep,
            on_wait=_log_wait,
            forget=self._row_cache.forget,
        )
        return ReduceCycle(
            stage, self._committer, self._shared, environment, processor=self._spec.processor, index=self.index
        )

    # -- process ------------------------------------------------------------------------------------------------------

    def _process(self, cycle: ReduceCycle) -> None:
        try:
            while (batch := self._shared.next_batch()) is not None:
                try:
                    if cycle.run(batch):
                        self._split_brains.reset()
                except SplitBrain as error:
                    self._split_brain(str(error))
        except ShuffleError as error:
            self._shared.fail(error)

    def _rows_gone(self) -> None:
        """A mapper says that this reducer has committed more than it knows of."""
        try:
            persisted = self._shared.reconcile(self._committer.read_state)
        except StoreError as error:
            _log.warning("state not read", error=error)
            return
        if persisted is not None:
            self._row_cache.forget()
            self._split_brain("a mapper was told of commits that this instance did not make", wait=False)

    def _split_brain(self, evidence: str, wait: bool = True) -> None:
        """Log that another instance is alive, and wait, so that it can go on: with both at work the result would be
        right, but their conflicts would make both slow."""
        self.metrics.split_brains.inc()
        self.metrics.restarts.inc()
        wait_s = self._split_brains.next_s()
        _log.error(
            f"split brain: another instance of reducer {self.index} of processor {self._spec.processor} is alive and "
            "has moved its state. What this instance had under way is dropped, nothing of it was committed; it goes on "
            "from the persisted state. If nobody meant to start two, stop this one",
            guid=self.guid,
            evidence=evidence,
            wait_s=round(wait_s, 3) if wait else 0,
        )
        if wait:
            self._shared.sleep(wait_s)


def _log_wait(error: Exception, waited_s: float) -> None:
    """Log the wait, and never raise: a reducer process waits for the store until it is stopped."""
    _log.warning("the store could not be used, trying again", error=error, waited_s=round(waited_s, 3))


def reducers_per_core(spec: ProcessorSpec) -> float:
    """The reducers that share a core of this machine, if all of them run on it."""
    return spec.reducer.count / (os.cpu_count() or 1)


def limits_of(spec: ProcessorSpec, mapper_count: int) -> FetchLimits:
    reducer = spec.reducer
    windows_bytes = mapper_count * (spec.mapper.memory_bytes // spec.mapper.per_process) // reducer.count
    is_crowded = reducers_per_core(spec) > CROWDED_REDUCERS
    return FetchLimits(
        fetch_rows_max=reducer.fetch_rows_max,
        fetch_bytes_max=reducer.fetch_bytes_max,
        fetch_wait_ms=reducer.fetch_wait_ms,
        batch_rows_max=reducer.batch_rows_max,
        batch_bytes_max=reducer.batch_bytes_max,
        # Room for one batch that is fetched while another one is reduced.
        queued_bytes_max=2 * reducer.batch_bytes_max,
        # Rows that wait here stay in the mappers' windows, too, and a mapper whose window is full reads no more.
        enough_bytes=min(
            reducer.batch_bytes_max // 2, windows_bytes // (WINDOWS_WAITING_CROWDED if is_crowded else WINDOWS_WAITING)
        ),
    )
