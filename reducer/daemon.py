"""One reducer as a running thing: threads around the core, and what happens when the world does not cooperate.

    fetch (a thread for each mapper) -> process (user code), then commit (one thread)

Fetching runs ahead. Process and commit take turns, and so they share a thread: a transaction that reads before its
predecessor is committed would read the state of the day before, lose the race against it, and be run again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from shuffle.api import Reducer, WorkerSpec
from shuffle.discovery import MapperDirectory, Membership, reducers_group
from shuffle.durable.query_lease import refuse_beside_query
from shuffle.durable.reducer_state import ReducerState
from shuffle.errors import (
    BadInput,
    CommitConflict,
    CommitUnknown,
    CorruptData,
    Expired,
    FormatTooNew,
    ShuffleError,
    SpecError,
    SplitBrain,
    StoreError,
    StoreLocked,
    StoreNotWritable,
    StoreUnavailable,
    UserCodeError,
)
from shuffle.ids import MapperIndex, ReducerIndex, new_guid
from shuffle.jobs.library import check_config
from shuffle.metrics import ReducerMetrics, serve_metrics
from shuffle.reducer.commit import Committer
from shuffle.reducer.connections import ClientPool
from shuffle.reducer.core import Limits, ReducerCore, Settled, Work
from shuffle.reducer.fetch import Fetcher, RowLocator
from shuffle.reducer.reduce import Reduced, ReduceStage, user_code_error
from shuffle.reducer.row_cache import KnowingClient, KnownRows
from shuffle.reducer.shared_core import Pipeline
from shuffle.spec.config import ProcessorSpec, check_against_store, load_class
from shuffle.statestore import StateClient
from shuffle.support import crash_points
from shuffle.support.logs import get_logger
from shuffle.support.retry import Backoff
from shuffle.support.vital_threads import start_vital
from shuffle.user_code.poison import is_transient, place_of, reason_of

CONFLICTS_MAX = 50
"""Conflicts of one work in a row. Races are lost a few times; with waits that grow, fifty is not a race but a fault."""

STOP_S_MAX = 10.0
"""For the reduce and the commit that are under way when the reducer is told to stop; then it leaves without them."""

LASTING = (MemoryError, CorruptData, FormatTooNew, StoreNotWritable, StoreLocked)
"""Not the fault of any row, but nothing that waiting would mend either: the worker ends with it."""

WINDOWS_WAITING = 4
"""Of a reducer's share of all windows, the part that it may let add up: a quarter."""

_STOP_CHECK_S = 0.2

T = TypeVar("T")

_log = get_logger(__name__)


def run(spec: ProcessorSpec, index: int, *, stop: threading.Event | None = None) -> int:
    """Run one reducer until ``stop`` is set or user code fails. The exit code; errors are told on stderr."""
    from shuffle.cli import report

    stop = stop or threading.Event()
    backoff = Backoff(spec.reducer.backoff_ms, spec.reducer.backoff_ms_max)
    try:
        client = _patiently(spec.open_state, "the state store", backoff, stop)
        if client is None:
            return 0
        with client:
            mapper_count = _patiently(lambda: _checked(spec, client), "the state store", backoff, stop)
            if mapper_count is not None:
                ReducerDaemon(spec, index, client, mapper_count).run(stop)
            return 0
    except ShuffleError as error:
        return report(error)


def _checked(spec: ProcessorSpec, client: StateClient) -> int:
    """The number of mappers, of a spec that fits the store and a processor that no Spark query reads."""
    mapper_count = check_against_store(spec, client)
    refuse_beside_query(client, spec.processor)
    return mapper_count


def _patiently(ask: Callable[[], T], whom: str, backoff: Backoff, stop: threading.Event) -> T | None:
    """Ask until there is an answer, or None when stopped: a store that is being restarted is no reason to die."""
    while not stop.is_set():
        try:
            answer = ask()
        except ShuffleError as error:
            if isinstance(error, LASTING) or not is_transient(error):
                raise
            wait_s = backoff.next_s()
            _log.warning(f"waiting for {whom}", error=error, wait_s=round(wait_s, 3))
            stop.wait(wait_s)
        else:
            backoff.reset()
            return answer
    return None


class ReducerDaemon:
    """One instance of one reducer."""

    def __init__(self, spec: ProcessorSpec, index: int, client: StateClient, mapper_count: int) -> None:
        if not 0 <= index < spec.reducer.count:
            raise SpecError(
                f"there is no reducer {index}: {spec.path} has {spec.reducer.count}, counted from 0",
                field="reducer.count",
            )
        self.guid = new_guid()
        self.index = ReducerIndex(index)
        self._metrics_port = spec.metrics_port("reducer", index)
        self.metrics = ReducerMetrics(spec.processor, index, self._metrics_port is not None)
        self._spec = spec
        self._client = client
        self._mapper_count = mapper_count
        self._committer = Committer(client, spec.reducers_table, self.index, mapper_count)
        self._core = ReducerCore(mapper_count, limits_of(spec, mapper_count))
        self._pipeline = Pipeline(self._core)
        self._known = KnownRows()
        self._retries = self._backoff()
        self._conflicts_in_a_row = 0
        self._split_brains = self._backoff()

    def _backoff(self) -> Backoff:
        return Backoff(self._spec.reducer.backoff_ms, self._spec.reducer.backoff_ms_max)

    def run(self, stop: threading.Event) -> None:
        """Until ``stop`` is set; raises what made it impossible to go on."""
        spec = self._spec
        persisted = _patiently(self._committer.read_state, "the state store", self._backoff(), stop)
        if persisted is None:
            return
        crash_points.reach("reducer.after_state_read")
        self._pipeline.restart(persisted)
        with ExitStack() as stack:
            attributes = {"index": str(self.index)}
            if self._metrics_port is not None:
                served = serve_metrics(self.metrics.registry, self._pipeline.fail, port=self._metrics_port)
                attributes["metrics"] = stack.enter_context(served).address
            group, ttl_ms = reducers_group(spec.processor), spec.lease_ttl_ms
            stack.enter_context(Membership(self._client, group, self.guid, attributes, ttl_ms, self._pipeline.fail))
            directory = MapperDirectory(self._client, spec.processor, self._pipeline.fail)
            stack.callback(directory.close)
            if spec.reducer.pipeline_depth > 1:
                _log.warning("pipeline_depth is taken as 1: the store cannot chain transactions")
            _log.info("reducer started", guid=self.guid, committed=list(persisted.committed_row_indices))
            self._run_stages(directory, stop)
        if self._pipeline.failure is not None:
            raise self._pipeline.failure
        _log.info("reducer stopped", committed=list(self._core.committed_state.committed_row_indices))

    def _run_stages(self, directory: MapperDirectory, stop: threading.Event) -> None:
        pipeline = self._pipeline
        stage = _patiently(lambda: self._reduce_stage(directory), "the state store", self._backoff(), stop)
        if stage is None:
            return
        clients = ClientPool()
        fetchers = [
            Fetcher(
                MapperIndex(i),
                self.index,
                pipeline,
                directory,
                self._backoff(),
                self.metrics,
                self._rows_gone,
                self._spec.reducer.share_memory,
                clients,
            )
            for i in range(self._mapper_count)
        ]
        process = start_vital(lambda: self._process(stage), "process", pipeline.fail)
        for fetcher in fetchers:
            fetcher.start()
        while not stop.is_set() and not pipeline.wait_stopped(_STOP_CHECK_S):
            pass
        pipeline.stop()
        process.join(STOP_S_MAX)
        if process.is_alive():
            # Whatever it does now, the positions tell the next instance whether it was committed.
            _log.warning("left without waiting any longer", stage=process.name, waited_s=STOP_S_MAX)
        directory.close()  # Also wakes the fetchers that wait for a mapper.
        wait_s = self._spec.reducer.fetch_wait_ms / 1000 + 1.0
        deadline_s = time.monotonic() + wait_s
        for fetcher in fetchers:
            fetcher.join(max(0.0, deadline_s - time.monotonic()))

    def _reduce_stage(self, directory: MapperDirectory) -> ReduceStage:
        spec = self._spec
        cls = load_class(spec, "reducer")
        config = check_config(cls, spec.reducer.config)
        worker = WorkerSpec(
            spec.processor, self.index, self.guid, self._mapper_count, spec.reducer.count, spec.max_parallelism
        )
        try:
            # What goes through here is remembered between commits (see ``known``).
            reducer: Reducer = cls(config, worker, KnowingClient(self._client, self._known))
        except Exception as error:
            if is_transient(error):
                raise
            raise UserCodeError(
                f"processor {spec.processor}, reducer {self.index}: {spec.reducer.class_name} could not be created: "
                f"{reason_of(error)}{place_of(error)}",
                processor=spec.processor,
                reducer=self.index,
            ) from error
        return ReduceStage(
            reducer,
            self._client,
            processor=spec.processor,
            index=self.index,
            on_error=spec.reducer.on_error,
            dead_letter_queue=spec.reducer.dead_letter_queue,
            locate=RowLocator(self.index, self._pipeline, directory),
            forget=self._known.forget,
        )

    # -- process ------------------------------------------------------------------------------------------------------

    def _process(self, stage: ReduceStage) -> None:
        backoff = self._backoff()
        try:
            while (work := self._pipeline.next_work()) is not None:
                reduced = self._reduce(stage, work, backoff)
                if reduced is None:
                    continue
                if self._pipeline.is_current(work):
                    self._commit(reduced)
                else:
                    reduced.abort()  # The pipeline was restarted while the user's code ran.
        except ShuffleError as error:
            self._pipeline.fail(error)

    def _reduce(self, stage: ReduceStage, work: Work, backoff: Backoff) -> Reduced | None:
        """Reduce ``work``, as often as the store makes it necessary; None when it is not wanted any more."""
        while self._pipeline.is_current(work):
            begin_s = time.monotonic()
            try:
                crash_points.reach("reducer.before_reduce")
                reduced = stage.reduce(work)
                crash_points.reach("reducer.after_reduce")
            except Exception as error:
                if isinstance(error, LASTING) or not is_transient(error):
                    raise
                wait_s = backoff.next_s()
                _log.warning("reduce could not use the store, trying again", error=error, wait_s=round(wait_s, 3))
                if not self._pipeline.sleep(wait_s):
                    return None
                continue
            finally:
                self.metrics.reduce_seconds.observe(time.monotonic() - begin_s)
            backoff.reset()
            if reduced.dead_letter_rows:
                _log.warning("rows set aside", rows=reduced.dead_letter_rows, of_rows=work.row_count)
            return reduced
        return None

    # -- commit -------------------------------------------------------------------------------------------------------

    def _commit(self, reduced: Reduced) -> None:
        """Commit one work; after anything but success, let the persisted row decide (``ReducerCore.settle``)."""
        work = reduced.work
        begin_s = time.monotonic()
        try:
            self._committer.commit(reduced)
        except BadInput as error:
            raise user_code_error(self._spec.processor, self.index, work, error) from error
        except LASTING:
            raise
        except (CommitConflict, CommitUnknown, SplitBrain, StoreError, Expired) as error:
            self._not_acknowledged(work, error)
        else:
            self._pipeline.committed(work)
            crash_points.reach("reducer.after_commit_known")
            self._count(work)
            self.metrics.dead_letters.inc(reduced.dead_letter_rows)
        finally:
            self.metrics.commit_seconds.observe(time.monotonic() - begin_s)

    def _count(self, work: Work) -> None:
        self.metrics.commits.inc()
        self.metrics.reduced_rows.inc(work.row_count)
        self.metrics.reduced_bytes.inc(work.size_bytes)
        self._retries.reset()
        self._conflicts_in_a_row = 0
        self._split_brains.reset()

    def _not_acknowledged(self, work: Work, error: ShuffleError) -> None:
        self._known.forget()
        if isinstance(error, CommitConflict):
            self.metrics.conflicts.inc()
            self._conflicts_in_a_row += 1
            if self._conflicts_in_a_row >= CONFLICTS_MAX:
                raise CommitConflict(
                    f"processor {self._spec.processor}, reducer {self.index}: {CONFLICTS_MAX} commits in a row lost a "
                    f"race over rows that others write: {error.message}. Let each reducer write keys of its own",
                    **error.fields,
                ) from error
        if not isinstance(error, SplitBrain):
            _log.warning("commit not acknowledged", work=work.number, attempt=work.attempt, error=error)
            self._pipeline.sleep(self._retries.next_s())
        persisted = self._read_state()
        settled = None if persisted is None else self._pipeline.settle(work, persisted)
        if settled is Settled.COMMITTED:
            _log.info("the commit had happened", work=work.number)
            self._count(work)
        elif settled is Settled.SPLIT_BRAIN:
            self._split_brain(str(error))

    def _read_state(self) -> ReducerState | None:
        """The persisted row, waiting for the store if it must be; None when stopped."""
        backoff = self._backoff()
        while True:
            try:
                return self._committer.read_state()
            except StoreUnavailable as error:
                if self._pipeline.stopping:
                    return None
                wait_s = backoff.next_s()
                _log.warning("waiting for the state store", error=error, wait_s=round(wait_s, 3))
                self._pipeline.sleep(wait_s)

    def _rows_gone(self) -> None:
        """A mapper says that this reducer has committed more than it knows of."""
        try:
            persisted = self._pipeline.reconcile(self._committer.read_state)
        except StoreError as error:
            _log.warning("state not read", error=error)
            return
        if persisted is not None:
            self._known.forget()
            self._split_brain("a mapper was told of commits that this instance did not make", wait=False)

    def _split_brain(self, evidence: str, wait: bool = True) -> None:
        """Say so plainly, and leave the field to the other instance for a while: both would be exact, but slow."""
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
            self._pipeline.sleep(wait_s)


def limits_of(spec: ProcessorSpec, mapper_count: int) -> Limits:
    reducer = spec.reducer
    windows_bytes = mapper_count * (spec.mapper.memory_bytes // spec.mapper.per_process) // reducer.count
    return Limits(
        fetch_rows_max=reducer.fetch_rows_max,
        fetch_bytes_max=reducer.fetch_bytes_max,
        fetch_wait_ms=reducer.fetch_wait_ms,
        batch_rows_max=reducer.batch_rows_max,
        batch_bytes_max=reducer.batch_bytes_max,
        # One batch being made ready while another one is reduced.
        queued_bytes_max=2 * reducer.batch_bytes_max,
        # What waits here stays in the mappers' windows, too, and a mapper without room stands still.
        enough_bytes=min(reducer.batch_bytes_max // 2, windows_bytes // WINDOWS_WAITING),
        pipeline_depth=1,
    )
