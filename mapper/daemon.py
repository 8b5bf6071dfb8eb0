"""One mapper as a process: ingestion, server, trim, lease and metrics, wired together.

Threads: the one that calls ``run`` ingests; one trims; Flight's own serve; one keeps the lease; one serves metrics; one
waits to be told to stop. None of them dies alone (``shuffle.support.vital_threads``): the mapper stops, and ``run``
says why. Everything is closed in the opposite order of its beginning, so that the last trim still finds a store.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from shuffle.api import WorkerSpec
from shuffle.discovery import Membership, mappers_group
from shuffle.durable.mapper_state import lookup_committed
from shuffle.errors import FalseClaim, ShuffleError, SpecError, SplitBrain, TableExists, UserCodeError
from shuffle.ids import MapperIndex, ReducerIndex, new_guid
from shuffle.mapper.core import MapperCore
from shuffle.mapper.ingest import BACKOFF_S_MAX, BACKOFF_S_MIN, Ingestion, passes
from shuffle.mapper.mapping import Mapping, create
from shuffle.mapper.reader import PartitionReader
from shuffle.mapper.readers.opening import open_reader
from shuffle.mapper.serve import MapperServer, SharedCore
from shuffle.mapper.spill.spill import SpillEnd
from shuffle.mapper.spill.store import SpillStore
from shuffle.mapper.trim import Trimmer
from shuffle.metrics import MapperMetrics, serve_metrics
from shuffle.spec.config import ProcessorSpec, check_against_store, load_class
from shuffle.support import crash_points
from shuffle.support.logs import get_logger, setup_logging
from shuffle.support.vital_threads import start_vital
from shuffle.user_code.poison import DEAD_LETTER_SCHEMA

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

DRAIN_S = 10.0
"""After a row that stops the mapper: how long what was mapped before it is still served."""

CLOSE_S = 3.0
"""How long calls that run may take to end."""

_log = get_logger(__name__)


def run(
    spec: ProcessorSpec,
    index: int,
    *,
    listen: str | None = None,
    stop: threading.Event | None = None,
    on_ready: Callable[[str], None] = lambda address: None,
) -> int:
    """Run mapper ``index`` of ``spec`` until ``stop`` is set or a signal asks for it; the exit code.

    ``on_ready`` is called with the address once the mapper serves.
    """
    from shuffle.cli import report

    setup_logging("mapper", spec.processor, index)
    stop = stop or threading.Event()
    try:
        with _signals(stop), ExitStack() as closing:
            client = _open_state(spec, stop)
            if client is None:
                return 0
            closing.callback(client.close)
            _run(spec, MapperIndex(index), client, listen or spec.mapper.listen, stop, on_ready)
        return 0
    except ShuffleError as error:
        _log.error("stopped", error=error, **error.fields)
        return report(error)


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT ask for a clean end. Only the main thread may say so, and tests run others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, before in asked.items():
            signal.signal(number, before)


def _open_state(spec: ProcessorSpec, stop: threading.Event) -> StateClient | None:
    """A client whose store answers; None if ``stop`` came first."""
    backoff_s = BACKOFF_S_MIN
    while not stop.is_set():
        client: StateClient | None = None
        try:
            client = spec.open_state()
            client.tables()
            return client
        except ShuffleError as error:
            if client is not None:
                client.close()
            if not passes(error):
                raise
            _log.warning("waiting for the state store", state=spec.state, error=error)
            stop.wait(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_S_MAX)
    return None


def _patiently(stop: threading.Event, what: Callable[[], Any]) -> Any:
    """``what()``, again and again while the store is away; None if ``stop`` came first."""
    backoff_s = BACKOFF_S_MIN
    while not stop.is_set():
        try:
            return what()
        except ShuffleError as error:
            if not passes(error):
                raise
            _log.warning("waiting for the state store", error=error)
            stop.wait(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_S_MAX)
    return None


def _run(
    spec: ProcessorSpec,
    index: MapperIndex,
    client: StateClient,
    listen: str,
    stop: threading.Event,
    on_ready: Callable[[str], None],
) -> None:
    mapper_count = _patiently(stop, lambda: check_against_store(spec, client))
    if mapper_count is None:
        return
    if not 0 <= index < mapper_count:
        raise SpecError(f"{spec.path}: there is no mapper {index}: the input has {mapper_count} partitions, from 0")
    dead_letter_queue = _patiently(stop, lambda: _dead_letter_queue(spec, client))
    reader = _patiently(stop, lambda: open_reader(spec, index, client))
    schema = _patiently(stop, lambda: reader.schema)
    if schema is None:
        return
    worker = WorkerSpec(spec.processor, index, new_guid(), mapper_count, spec.reducer.count, spec.max_parallelism)
    user = create(load_class(spec, "mapper"), spec.mapper.config, worker, client, schema)
    daemon = _Daemon(spec, client, worker, reader, Mapping(user, worker, spec.mapper.on_error), dead_letter_queue)
    daemon.run(listen, stop, on_ready)


def _dead_letter_queue(spec: ProcessorSpec, client: StateClient) -> str:
    name = spec.mapper.dead_letter_queue or f"{spec.processor}/mapper_dead_letters"
    if spec.mapper.on_error == "dead_letter":
        try:
            client.create_queue(name, schema=DEAD_LETTER_SCHEMA, partitions=1, if_not_exists=True)
        except TableExists as error:
            raise SpecError(f"{spec.path}: mapper.dead_letter_queue {name} is not one: {error}") from None
    return name


class _Daemon:
    """The parts of one running mapper."""

    def __init__(
        self,
        spec: ProcessorSpec,
        client: StateClient,
        worker: WorkerSpec,
        reader: PartitionReader,
        mapping: Mapping,
        dead_letter_queue: str,
    ) -> None:
        index = MapperIndex(worker.index)
        self._spec = spec
        self._client = client
        self._worker = worker
        self._reader = reader
        self._metrics_port = spec.metrics_port("mapper", index)
        self._metrics = MapperMetrics(spec.processor, index, self._metrics_port is not None)
        reducers = worker.reducer_count
        self._core = MapperCore(worker.guid, index, reducers, spec.mapper.memory_bytes, spec.spill, spec.processor)
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
        self._trimmer.on_conflict = self._metrics.conflicts.inc
        self._trimmer.on_dead_letters = self._metrics.dead_letters.inc
        self._trimmer.on_spilled = self._spilled
        self._ingestion = Ingestion(client, spec, index, self._shared, reader, mapping, self._metrics, spill)
        self._stop_trim = threading.Event()
        self._stop = threading.Event()
        self._failure: ShuffleError | None = None
        self._lag_rows: int | None = None
        self._measured_s = 0.0

    def run(self, listen: str, stop: threading.Event, on_ready: Callable[[str], None]) -> None:
        self._stop = stop
        with ExitStack() as closing:
            closing.callback(self._reader.close)
            server = MapperServer(self._shared, listen, status=self._status, on_served=self._served)
            closing.callback(server.close, CLOSE_S)
            address = advertised(server.address)
            attributes = {"index": str(self._worker.index), "address": address}
            if self._metrics_port is not None:
                server_of_metrics = serve_metrics(self._metrics.registry, self._fail, port=self._metrics_port)
                attributes["metrics"] = closing.enter_context(server_of_metrics).address
            closing.enter_context(self._trimming())
            group = mappers_group(self._spec.processor)
            ttl_ms = self._spec.lease_ttl_ms
            membership = Membership(self._client, group, self._worker.guid, attributes, ttl_ms, self._fail)
            closing.enter_context(membership)
            crash_points.reach("mapper.after_registering")
            _log.info("serving", guid=self._worker.guid, **attributes)
            on_ready(address)
            closing.enter_context(self._interrupting(stop))
            try:
                self._ingestion.run(stop)
            except UserCodeError as error:
                _log.error("map failed, reading no further", error=error)
                self._drain(stop)
                raise
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: ShuffleError) -> None:
        """The mapper cannot go on, and ``run`` is to end with ``error``. Called by any thread."""
        self._failure = self._failure or error
        self._stop.set()
        self._interrupt()

    def _interrupt(self) -> None:
        self._reader.interrupt()
        self._shared.close()

    @contextmanager
    def _interrupting(self, stop: threading.Event) -> Iterator[None]:
        """A reader that waits, and an ingestion that waits for room, hear of ``stop`` at once."""
        ended = threading.Event()

        def wait() -> None:
            while not ended.is_set():
                if stop.wait(0.5):
                    self._interrupt()
                    return

        start_vital(wait, "wait-for-stop", self._fail)
        try:
            yield
        finally:
            ended.set()

    def _drain(self, stop: threading.Event) -> None:
        """What was mapped before the bad row can still be fetched and committed, also what was spilled."""
        deadline_s = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline_s and not stop.wait(0.05):
            with self._shared.lock:
                if self._core.is_drained:
                    return

    # Trim

    @contextmanager
    def _trimming(self) -> Iterator[None]:
        thread = start_vital(self._trim_regularly, "trim", self._fail)
        try:
            yield
        finally:
            self._stop_trim.set()
            thread.join(timeout=CLOSE_S)

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
                self._ingestion.twin_seen.set()
            except FalseClaim as error:
                self._false_claim(error)
            except Exception as error:
                if not passes(error):
                    _log.error("the input cannot be trimmed", error=error)
                    if not isinstance(error, ShuffleError):
                        raise
                    self._fail(error)
                    return
                _log.warning("trim not possible now", error=error)
            if last:
                return

    def _false_claim(self, error: FalseClaim) -> None:
        """Once: until the ingestion has started again, every trim finds the same."""
        if not self._ingestion.false_claim_seen.is_set():
            _log.error("rows were called committed that are not", error=error, **error.fields)
            self._metrics.false_claims.inc()
            self._ingestion.false_claim_seen.set()

    # Seeing

    def _measure(self) -> None:
        now_s = time.monotonic()
        if now_s - self._measured_s < self._spec.mapper.trim_period_ms / 1000:
            return  # The trim may run more often than that while it spills.
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


def advertised(address: str) -> str:
    """An address that others can reach: not the one that stands for all of this machine's."""
    for everywhere in ("grpc://0.0.0.0:", "grpc://[::]:"):
        if address.startswith(everywhere):
            return f"grpc://{socket.gethostname()}:{address.removeprefix(everywhere)}"
    return address
