"""A mapper process: signals, the client of the store, the server and the metrics, for one mapper instance or several.

Threads: the one that calls ``run`` waits for the stop; Flight's own threads serve requests; one serves metrics; each
instance has its own (``instance``). When one of them dies, the process stops, and ``run`` reports why
(``shuffle.support.vital_threads``). Everything is closed in the opposite order of its start, so that the last trim can
still use the store.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shuffle.api import WorkerSpec
from shuffle.errors import ServiceUnavailable, ShuffleError, SpecError, TableExists
from shuffle.ids import MapperIndex, new_guid
from shuffle.mapper.ingest import store_backoff
from shuffle.mapper.instance import MapperInstance
from shuffle.mapper.mapping import MapStage
from shuffle.mapper.readers.opening import open_reader
from shuffle.mapper.serve import MapperServer
from shuffle.metrics import MapperMetrics, serve_metrics
from shuffle.preflight.check import check_against_store
from shuffle.spec.config import ProcessorSpec
from shuffle.support.endpoint import advertised_endpoint
from shuffle.support.exit_codes import report
from shuffle.support.logs import get_logger, logged_as_worker, setup_logging
from shuffle.support.retry import patiently
from shuffle.user_code.create import create
from shuffle.user_code.load import load_class
from shuffle.user_code.poison import DEAD_LETTER_SCHEMA

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

CLOSE_S = 3.0
"""The seconds within which calls that are being served, and threads that are to stop, must have ended."""

_log = get_logger(__name__)


def run(
    spec: ProcessorSpec,
    indexes: int | Sequence[int],
    *,
    listen: str | None = None,
    advertise: str | None = None,
    stop: threading.Event | None = None,
    on_ready: Callable[[str], None] = lambda address: None,
) -> int:
    """Run the mappers ``indexes`` of ``spec`` in this process, until ``stop`` is set or a signal asks for it; the exit
    code.

    ``listen`` and ``advertise`` come before what the spec says. ``on_ready`` is called with the address once the
    mappers are served.
    """
    hosted = [MapperIndex(index) for index in ([indexes] if isinstance(indexes, int) else indexes)]
    setup_logging("mapper", spec.processor, hosted[0] if len(hosted) == 1 else None)
    stop = stop or threading.Event()
    if advertise is not None:
        spec = replace(spec, mapper=replace(spec.mapper, advertise=advertise))
    try:
        with _signals(stop), ExitStack() as closing:
            client = _open_state(spec, stop)
            if client is None:
                return 0
            closing.callback(client.close)
            _run(spec, hosted, client, listen or spec.mapper.listen, stop, on_ready)
        return 0
    except ShuffleError as error:
        _log.error("stopped", error=error, **error.fields)
        return report(error)


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT ask for a clean end. Only the main thread may install handlers; tests run in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _open_state(spec: ProcessorSpec, stop: threading.Event) -> StateClient | None:
    """A client whose store responds; None if ``stop`` came first."""

    def connect() -> StateClient:
        client = spec.open_state()
        try:
            client.tables()
        except BaseException:
            client.close()
            raise
        return client

    client: StateClient | None = _patiently(stop, connect, state=spec.state)
    return client


def _patiently(stop: threading.Event, what: Callable[[], Any], **fields: str) -> Any:
    """Call ``what`` again and again while the store, or what the input needs, is away, and return its result; None if
    ``stop`` came first."""

    def log_wait(error: ShuffleError, wait_s: float) -> None:
        whom = "a service of the input" if isinstance(error, ServiceUnavailable) else "the state store"
        _log.warning(f"waiting for {whom}", error=error, **fields)

    return patiently(what, store_backoff(), stop, log_wait)


def _run(
    spec: ProcessorSpec,
    indexes: Sequence[MapperIndex],
    client: StateClient,
    listen: str,
    stop: threading.Event,
    on_ready: Callable[[str], None],
) -> None:
    mapper_count = _patiently(stop, lambda: check_against_store(spec, client))
    if mapper_count is None:
        return
    for index in indexes:
        if not 0 <= index < mapper_count:
            raise SpecError(f"{spec.path}: there is no mapper {index}: the input has {mapper_count} partitions, from 0")
    dead_letter_queue = _patiently(stop, lambda: _dead_letter_queue(spec, client))
    if dead_letter_queue is not None:
        MapperProcess(spec, client, indexes, mapper_count, stop).run(listen, dead_letter_queue, on_ready)


def _dead_letter_queue(spec: ProcessorSpec, client: StateClient) -> str:
    name = spec.dead_letter_queue("mapper")
    if spec.mapper.on_error == "dead_letter":
        try:
            client.create_queue(name, schema=DEAD_LETTER_SCHEMA, partitions=1, if_not_exists=True)
        except TableExists as error:
            raise SpecError(f"{spec.path}: mapper.dead_letter_queue {name} is not one: {error}") from None
    return name


class MapperProcess:
    """Hosts the mapper instances ``indexes``: one server, one metrics endpoint and one memory limit for all of them.

    An error after which one of the instances cannot go on ends the process, and names the instance. Whoever started
    the process starts it again; all that is durable is in the store.
    """

    def __init__(
        self,
        spec: ProcessorSpec,
        client: StateClient,
        indexes: Sequence[MapperIndex],
        mapper_count: int,
        stop: threading.Event,
    ) -> None:
        self._spec = spec
        self._client = client
        self._indexes = indexes
        self._mapper_count = mapper_count
        self._memory_bytes_max = memory_share(spec, len(indexes))
        self._metrics_port = spec.metrics_port("mapper", indexes[0])
        self._metrics: MapperMetrics | None = None
        """The metrics of the first instance. Those of the others are in the same registry."""
        self._stop = stop
        self._failure: ShuffleError | None = None
        self._instances: list[MapperInstance] = []

    def run(self, listen: str, dead_letter_queue: str, on_ready: Callable[[str], None]) -> None:
        """Serve until ``stop`` is set. Raises the error of the instance that could not go on, if there is one."""
        with ExitStack() as closing:
            for index in self._indexes:
                if not self._add(index, dead_letter_queue, closing):
                    return
            server = MapperServer([instance.served() for instance in self._instances], listen)
            closing.callback(server.close, CLOSE_S)
            address = str(advertised_endpoint(server.endpoint, self._spec.mapper.advertise))
            attributes = {"address": address}
            if self._metrics_port is not None:
                assert self._metrics is not None
                metrics_server = serve_metrics(self._metrics.registry, self._fail, port=self._metrics_port)
                attributes["metrics"] = closing.enter_context(metrics_server).address
            closing.callback(_join, [instance.start_trimming() for instance in self._instances])
            for instance in self._instances:
                closing.callback(instance.stop_trimming)
            for instance in self._instances:
                closing.enter_context(instance.registered(attributes))
            on_ready(address)
            closing.callback(_join, [instance.start_ingesting(self._stop) for instance in self._instances])
            self._stop.wait()
            for instance in self._instances:
                instance.interrupt()
        if self._failure is not None:
            raise self._failure

    def _add(self, index: MapperIndex, dead_letter_queue: str, closing: ExitStack) -> bool:
        """Create instance ``index``; False if ``stop`` was set meanwhile."""
        spec, client = self._spec, self._client
        with logged_as_worker(index):
            try:
                reader = _patiently(self._stop, lambda: open_reader(spec, index, client))
                if reader is None:
                    return False
                closing.callback(reader.close)
                schema = _patiently(self._stop, lambda: reader.schema)
                if schema is None:
                    return False
                reducers = spec.reducer.count
                worker = WorkerSpec(
                    spec.processor, index, new_guid(), self._mapper_count, reducers, spec.max_parallelism
                )
                user = create(load_class(spec, "mapper"), "mapper", spec.mapper.config, worker, client, schema)
            except ShuffleError as error:
                raise self._named(index, error) from error
        metrics = MapperMetrics(spec.processor, index, self._metrics_port is not None, self._metrics)
        self._metrics = self._metrics or metrics
        self._instances.append(
            MapperInstance(
                spec,
                client,
                worker,
                reader,
                MapStage(user, worker, spec.mapper.on_error, decode=reader.decode),
                dead_letter_queue,
                self._memory_bytes_max,
                metrics,
                lambda error: self._fail(self._named(index, error)),
                len(self._indexes) == 1,
            )
        )
        return True

    def _fail(self, error: ShuffleError) -> None:
        """The process cannot go on, and ``run`` is to end with ``error``. Any thread may call it."""
        self._failure = self._failure or error
        self._stop.set()

    def _named(self, index: MapperIndex, error: ShuffleError) -> ShuffleError:
        """``error``, with the instance that it is about if there are several and its message does not name it."""
        if len(self._indexes) == 1 or f"mapper {index}" in error.message:
            return error
        return type(error)(f"mapper {index}: {error.message}", **error.fields)


def memory_share(spec: ProcessorSpec, instances: int) -> int:
    """The bytes of the process's memory limit that each of its ``instances`` gets."""
    share_bytes = spec.mapper.memory_bytes // instances
    if instances > 1 and share_bytes < spec.mapper.batch_bytes_max:
        raise SpecError(
            f"{spec.at('mapper.memory')}: {spec.mapper.memory_bytes} bytes for {instances} mappers in one process are "
            f"{share_bytes} for each, which cannot hold a batch of {spec.mapper.batch_bytes_max}: raise it, lower "
            "batch_bytes_max, or have fewer mappers in a process"
        )
    return share_bytes


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that are to stop; they have ``CLOSE_S`` for it together."""
    deadline_s = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
