"""Exporters as a process: a thread for each partition of the outbox, and what it does when the store or the sink fails.

Every error that passes by itself has the same answer: wait, and begin again from what is durable (``core``). All other
errors end the process, and whoever started it starts it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shuffle.discovery import Membership
from shuffle.errors import ShuffleError, SplitBrain, UnknownTable
from shuffle.ids import new_guid
from shuffle.metrics import ExporterMetrics, serve_metrics
from shuffle.preflight.check import check_against_store
from shuffle.reducer.exporter.chosen import Chosen
from shuffle.reducer.exporter.core import BatchLimits, ExporterCore
from shuffle.reducer.exporter.cycle import ExportCycle
from shuffle.reducer.outputs.opening import open_sink
from shuffle.reducer.outputs.routes import Route
from shuffle.reducer.outputs.sink import Sink
from shuffle.spec.config import ProcessorSpec
from shuffle.statestore import StateClient
from shuffle.statestore.client.queue_consumers import reserve_queue
from shuffle.support.exit_codes import report
from shuffle.support.logs import get_logger, logged_as_worker
from shuffle.support.retry import Backoff, passes_by_itself, patiently
from shuffle.support.vital_threads import start_vital

BACKOFF_MS, BACKOFF_MS_MAX = 50, 5_000
"""Milliseconds before the first retry after a failure, and the longest wait between two."""
POLL_MS = 500
"""Milliseconds that a read of the outbox waits for rows, for which a stop may have to wait."""
OUTBOX_CHECK_S = 0.5
"""Seconds between two looks whether a reducer has emitted anything, which creates the outbox."""
CALM_S = 30.0
"""A second instance that was noticed so many seconds ago counts as gone: the waits begin anew."""
KEEP_ALIVE_S = 3_600.0
"""Seconds between two calls of ``Sink.keep_alive``."""
TRIM_PERIOD_MS = 1_000
"""Milliseconds between two trims of the outbox, if the sink keeps the position."""
LAG_S = 1.0
"""Seconds between two updates of the metric of the lag."""
DRAINING_AGE_MS = 500
"""The longest that the first row of a batch waits for others while the processor is drained, in milliseconds."""

T = TypeVar("T")

_log = get_logger(__name__)


def run(
    spec: ProcessorSpec,
    chosen: Chosen | None = None,
    *,
    draining: bool = False,
    stop: threading.Event | None = None,
) -> int:
    """Run the ``chosen`` exporters (default: all) in this process, until ``stop`` is set or one cannot go on. Returns
    the exit code; errors are printed to stderr. With ``draining``, batches wait for few rows."""
    stop = stop or threading.Event()
    chosen = chosen or Chosen()
    try:
        chosen.check(spec)
        client = _patiently(spec.open_state, "the state store", stop)
        if client is None:
            return 0
        with client:
            if _patiently(lambda: check_against_store(spec, client), "the state store", stop) is not None:
                hosted = _patiently(lambda: chosen.exporters(spec, client), "the state store", stop)
                _run_hosted(spec, hosted or [], client, stop, draining)
            return 0
    except ShuffleError as error:
        return report(error)


def _patiently(call: Callable[[], T], peer: str, stop: threading.Event) -> T | None:
    """Call until there is a result, or None when stopped: a store that is being restarted is no reason to end."""

    def log_wait(error: ShuffleError, wait_s: float) -> None:
        _log.warning(f"waiting for {peer}", error=error, wait_s=round(wait_s, 3))

    return patiently(call, Backoff(BACKOFF_MS, BACKOFF_MS_MAX), stop, log_wait)


def _run_hosted(
    spec: ProcessorSpec,
    exporters: Sequence[tuple[Route, int]],
    client: StateClient,
    stop: threading.Event,
    draining: bool = False,
) -> None:
    """Run exporters, each of a partition of a route, side by side until ``stop`` is set. An error after which one of
    them cannot go on ends all of them, and is raised."""
    failures: list[ShuffleError] = []

    def fail(error: ShuffleError) -> None:
        failures.append(error)
        stop.set()

    daemons: list[ExporterDaemon] = []
    for route, partition in exporters:
        beside = daemons[0].metrics if daemons else None
        daemons.append(ExporterDaemon(spec, route, partition, client, draining, beside))
    if not daemons:
        return  # Stopped before they were known.
    port = daemons[0].metrics_port
    with ExitStack() as stack:
        attributes = {}
        if port is not None:
            server = serve_metrics(daemons[0].metrics.registry, fail, port=port)
            attributes["metrics"] = stack.enter_context(server).address
        threads = []
        for daemon in daemons:
            with logged_as_worker(daemon.name):
                run_one = partial(daemon.run_reporting, stop, attributes, fail)
                threads.append(start_vital(run_one, f"exporter-{daemon.name}", fail))
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


class ExporterDaemon:
    """One instance of the exporter of one partition of the outbox, or of a dead-letter queue."""

    def __init__(
        self,
        spec: ProcessorSpec,
        route: Route,
        partition: int,
        client: StateClient,
        draining: bool = False,
        beside: ExporterMetrics | None = None,
    ) -> None:
        """``beside`` are the metrics of another exporter of this process, if there is one."""
        self.name = route.worker(partition)
        self.partition = partition
        self.guid = new_guid()
        self._spec = spec
        self._route = route
        self._client = client
        self._limits = limits_of(route, draining)
        # Dead letters that have a process of their own take the port after those of the outbox.
        self.metrics_port = spec.metrics_port("exporter", spec.reducer.count if route.is_dead_letters else partition)
        self.metrics = ExporterMetrics(spec.processor, self.name, self.metrics_port is not None, beside)
        self._backoff = Backoff(BACKOFF_MS, BACKOFF_MS_MAX)
        self._split_brains = Backoff(BACKOFF_MS, BACKOFF_MS_MAX)
        self._split_brain_s: float | None = None
        self._lag_s = 0.0

    def run_reporting(
        self, stop: threading.Event, attributes: dict[str, str], fail: Callable[[ShuffleError], None]
    ) -> None:
        """``run`` beside other exporters: an error goes to ``fail``, and names the exporter."""
        try:
            self.run(stop, attributes, fail)
        except ShuffleError as error:
            _log.error("stopped", error=error, **error.fields)
            fail(type(error)(f"exporter {self.name}: {error.message}", **error.fields))

    def run(self, stop: threading.Event, attributes: dict[str, str], fail: Callable[[ShuffleError], None]) -> None:
        """Run until ``stop`` is set; raises the error after which the exporter cannot go on."""
        spec, route = self._spec, self._route
        listed = {"index": str(self.partition), **attributes}
        with Membership(self._client, route.group, self.guid, listed, spec.lease_ttl_ms, fail):
            sink = self._await_sink(stop)
            if sink is None:
                return
            core = ExporterCore(
                self.partition,
                sink.identity,
                sink.keeps_position,
                self._limits,
                None if route.role is None else (route.role, route.queue),
            )
            cycle = ExportCycle(
                self._client,
                sink,
                core,
                outbox=route.queue,
                table=route.table,
                clock=time.monotonic,
                metrics=self.metrics,
                outside=route.outside,
            )
            try:
                self._run_cycle(cycle, core, stop)
            finally:
                sink.close()
            _log.info("exporter stopped", position=core.position)

    def _await_sink(self, stop: threading.Event) -> Sink | None:
        """The sink, once there is an outbox, which the first row that is emitted creates; None when stopped."""
        while not stop.is_set():
            try:
                sink = _patiently(self._open_sink, "the state store", stop)
                if sink is None:
                    return None
                _patiently(self._reserve_queue, "the state store", stop)
                return sink
            except UnknownTable:
                stop.wait(OUTBOX_CHECK_S)
        return None

    def _open_sink(self) -> Sink:
        return open_sink(self._spec, self._route, self._client, self.partition)

    def _reserve_queue(self) -> bool:
        """Nobody else may consume, and trim, the queue."""
        reserve_queue(self._client, self._route.group, self._route.queue)
        return True

    def _run_cycle(self, cycle: ExportCycle, core: ExporterCore, stop: threading.Event) -> None:
        is_settled = False
        while not stop.is_set():
            try:
                cycle.start()
                is_settled = True
                self._started(core)
                while not stop.is_set():
                    if cycle.step(POLL_MS):
                        self._backoff.reset()
                    cycle.keep_alive(KEEP_ALIVE_S)
                    self._show_lag(cycle)
            except ShuffleError as error:
                is_settled = False
                if not passes_by_itself(error):
                    raise
                self._wait(error, stop)
        if is_settled:
            self._stop(cycle)

    def _show_lag(self, cycle: ExportCycle) -> None:
        now_s = time.monotonic()
        if now_s - self._lag_s >= LAG_S:
            self._lag_s = now_s
            self.metrics.export_lag_rows.set(cycle.lag_rows())

    def _started(self, core: ExporterCore) -> None:
        if core.found_other:
            self._note_split_brain("its row had another owner")
        _log.info("exporter started", position=core.position, guid=self.guid)

    def _stop(self, cycle: ExportCycle) -> None:
        try:
            cycle.stop()
        except ShuffleError as error:
            # What is durable is enough to go on; a clean stop only makes that easier.
            _log.warning("not stopped cleanly", error=error)

    def _wait(self, error: ShuffleError, stop: threading.Event) -> None:
        self.metrics.restarts.inc()
        if isinstance(error, SplitBrain):
            stop.wait(self._note_split_brain(error.message))
            return
        wait_s = self._backoff.next_s()
        _log.warning("starting again from the persisted state", error=error, wait_s=round(wait_s, 3))
        stop.wait(wait_s)

    def _note_split_brain(self, evidence: str) -> float:
        """Log that another instance is alive; returns the seconds to wait, so that it can go on: with both at work the
        result would be right, but they would take the partition from each other all the time."""
        now_s = time.monotonic()
        if self._split_brain_s is not None and now_s - self._split_brain_s > CALM_S:
            self._split_brains.reset()
        self._split_brain_s = now_s
        wait_s = self._split_brains.next_s()
        self.metrics.split_brains.inc()
        _log.error(
            f"split brain: another instance of exporter {self.name} of processor {self._spec.processor} is alive and "
            "has taken the partition over. What this instance had under way is settled by the sink; it goes on from "
            "there. If nobody meant to start two, stop this one",
            guid=self.guid,
            evidence=evidence,
            wait_s=round(wait_s, 3),
        )
        return wait_s


def limits_of(route: Route, draining: bool) -> BatchLimits:
    rows_max, bytes_max, age_ms = route.output.limits
    limits = BatchLimits(rows_max, bytes_max, age_ms, TRIM_PERIOD_MS)
    return replace(limits, age_ms=min(age_ms, DRAINING_AGE_MS)) if draining else limits
