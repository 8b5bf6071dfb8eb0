"""What every daemon counts, and the HTTP endpoint that Prometheus reads it from.

Each object has a registry of its own, or that of another one: then both are served by one endpoint, each with its own
labels. Names begin with ``shuffle_``; the labels are processor, role and index.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from shuffle.support.vital_threads import OnDeath, start_vital

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Half a millisecond is one synced write of a good disk; half a minute is as good as stuck."""

REQUEST_S_MAX = 10.0
"""A request must be here within so long: each has a thread, and one that never ends its request would keep it."""

_LABELS = ("processor", "role", "index")


class _Nothing:
    """A counter, gauge or histogram that counts nothing."""

    def inc(self, amount: float = 1) -> None:
        pass

    def set(self, value: float) -> None:
        pass

    def observe(self, amount: float) -> None:
        pass


class _Metrics:
    """A registry, and shorthands that bind the labels once: the hot path then pays for an addition only.

    Where nobody can read them, as ``enabled`` says, nothing is counted: the library for it brings Python's HTTP server
    and client and TLS along, which is 8 MB in every worker.
    """

    def __init__(
        self, processor: str, role: str, index: int | str, enabled: bool = True, beside: _Metrics | None = None
    ) -> None:
        """``beside``: of another worker in this process, whose registry is used. What is the process's own is counted
        once, by the first of them."""
        self.registry: CollectorRegistry | None = None
        self._values = (processor, role, str(index))
        self._families: dict[str, Any] = {}
        """The metrics of the registry, which have one series for each worker."""
        if not enabled:
            return
        if beside is not None:
            self.registry, self._families = beside.registry, beside._families
            return
        from prometheus_client import CollectorRegistry, disable_created_metrics

        disable_created_metrics()  # type: ignore[no-untyped-call]  # One more series per counter, and nobody asks for it.
        self.registry = CollectorRegistry()
        written = self._gauge("process_written_bytes", "Bytes this process has caused to be written to storage")
        written.set_function(storage_bytes_written)
        reads = self._gauge("process_read_bytes", "Bytes this process has caused to be read from storage")
        reads.set_function(storage_bytes_read)
        memory = self._gauge("process_resident_bytes", "Resident memory of this process")
        memory.set_function(resident_bytes)

    def _family(self, kind: str, name: str, what: str, labels: tuple[str, ...] = _LABELS, **options: Any) -> Any:
        if name not in self._families:
            import prometheus_client

            made = getattr(prometheus_client, kind)(f"shuffle_{name}", what, labels, registry=self.registry, **options)
            self._families[name] = made
        return self._families[name]

    def _counter(self, name: str, what: str) -> Counter:
        if self.registry is None:
            return cast("Counter", _Nothing())
        return cast("Counter", self._family("Counter", name, what).labels(*self._values))

    def _gauge(self, name: str, what: str) -> Gauge:
        if self.registry is None:
            return cast("Gauge", _Nothing())
        return cast("Gauge", self._family("Gauge", name, what).labels(*self._values))

    def _gauges_by_reducer(self, name: str, what: str) -> Callable[[int], Gauge]:
        if self.registry is None:
            return lambda reducer: cast("Gauge", _Nothing())
        gauge = self._family("Gauge", name, what, (*_LABELS, "reducer"))
        return lambda reducer: cast("Gauge", gauge.labels(*self._values, str(reducer)))

    def _seconds(self, name: str, what: str) -> Histogram:
        if self.registry is None:
            return cast("Histogram", _Nothing())
        histogram = self._family("Histogram", name, what, buckets=SECONDS_BUCKETS)
        return cast("Histogram", histogram.labels(*self._values))


class MapperMetrics(_Metrics):
    def __init__(self, processor: str, index: int, enabled: bool = True, beside: MapperMetrics | None = None) -> None:
        super().__init__(processor, "mapper", index, enabled, beside)
        self.input_rows = self._counter("input_rows", "Rows read from the input")
        self.input_bytes = self._counter("input_bytes", "Bytes of the rows read from the input")
        self.shuffle_rows = self._counter("shuffle_rows", "Rows that map produced")
        self.shuffle_bytes = self._counter("shuffle_bytes", "Bytes of the rows that map produced")
        self.served_rows = self._counter("served_rows", "Rows handed to reducers, repeated ones included")
        self.served_bytes = self._counter("served_bytes", "Bytes handed to reducers, repeated ones included")
        self.window_bytes = self._gauge("window_bytes", "Bytes held in the window")
        self.window_rows = self._gauge("window_rows", "Rows held in the window")
        self.read_lag_rows = self._gauge("read_lag_rows", "Rows in the input that are not read yet")
        self.trims = self._counter("trims", "Times the state was persisted and the input trimmed")
        self.conflicts = self._counter("conflicts", "Commits refused because something read had changed")
        self.dead_letters = self._counter("dead_letters", "Rows set aside in the dead-letter queue")
        self.split_brains = self._counter("split_brains", "Times another instance of this worker was noticed")
        self.false_claims = self._counter("false_claims", "Times rows were called committed in a request and were not")
        self.stragglers = self._gauge("stragglers", "Reducers that lag so far behind that their rows may be spilled")
        self.spill_rows = self._gauges_by_reducer("spill_rows", "Rows in the spill that the reducer has not committed")
        self.spill_bytes = self._gauges_by_reducer("spill_bytes", "Bytes of the rows in the spill, uncompressed")
        self.spilled_rows = self._counter("spilled_rows", "Rows moved to the spill")
        self.spilled_bytes = self._counter("spilled_bytes", "Bytes of the rows moved to the spill, uncompressed")
        self.spilled_stored_bytes = self._counter("spilled_stored_bytes", "Bytes written for the rows spilled")
        self.map_seconds = self._seconds("map_seconds", "Time in the user's map, per batch")


class ReducerMetrics(_Metrics):
    def __init__(self, processor: str, index: int, enabled: bool = True) -> None:
        super().__init__(processor, "reducer", index, enabled)
        self.fetched_rows = self._counter("fetched_rows", "Rows fetched from mappers, repeated ones included")
        self.fetched_bytes = self._counter("fetched_bytes", "Bytes fetched from mappers, repeated ones included")
        self.reduced_rows = self._counter("reduced_rows", "Rows whose effect is committed")
        self.reduced_bytes = self._counter("reduced_bytes", "Bytes of the rows whose effect is committed")
        self.commits = self._counter("commits", "Transactions committed")
        self.conflicts = self._counter("conflicts", "Commits refused because something read had changed")
        self.dead_letters = self._counter("dead_letters", "Rows set aside in the dead-letter queue")
        self.split_brains = self._counter("split_brains", "Times another instance of this worker was noticed")
        self.restarts = self._counter("restarts", "Times the pipeline started again from the persisted state")
        self.fetch_seconds = self._seconds("fetch_seconds", "Time of one GetRows, the long poll included")
        self.reduce_seconds = self._seconds("reduce_seconds", "Time in the user's reduce, per batch")
        self.commit_seconds = self._seconds("commit_seconds", "Time of one commit")


class StoreMetrics(_Metrics):
    def __init__(self) -> None:
        super().__init__("", "statestore", "")
        self.commits = self._counter("store_commits", "Transactions committed")
        self.conflicts = self._counter("store_conflicts", "Transactions refused because something read had changed")
        self.group_commits = self._counter("store_group_commits", "Runs of transactions written with one sync")
        self.written_rows = self._counter("store_written_rows", "Rows written to or deleted from sorted tables")
        self.appended_rows = self._counter("store_appended_rows", "Rows appended to queues")
        self.appended_bytes = self._counter("store_appended_bytes", "Bytes appended to queues")
        self.read_rows = self._counter("store_read_rows", "Rows answered by lookups, scans and queue reads")
        self.commit_seconds = self._seconds(
            "store_commit_seconds", "Time of one commit, waiting for its group included"
        )
        self.sync_seconds = self._seconds("store_sync_seconds", "Time of one sync to storage")


def storage_bytes_written() -> float:
    """What the kernel says this process sent to the block layer; 0 where it does not say."""
    return _proc_io("write_bytes:")


def storage_bytes_read() -> float:
    return _proc_io("read_bytes:")


def _proc_io(name: str) -> float:
    try:
        with open("/proc/self/io") as lines:
            return float(next((line.split()[1] for line in lines if line.startswith(name)), 0))
    except OSError:
        return 0.0


def resident_bytes() -> float:
    try:
        with open("/proc/self/statm") as text:
            return float(text.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


class MetricsServer:
    """Serves one registry at ``http://host:port/metrics`` until closed. ``on_death``: see ``vital_threads``."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, on_death: OnDeath) -> None:
        from wsgiref.simple_server import WSGIRequestHandler, make_server

        from prometheus_client import make_wsgi_app
        from prometheus_client.exposition import ThreadingWSGIServer

        class Silent(WSGIRequestHandler):
            timeout = REQUEST_S_MAX

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.host = host
        # As the library's own ``start_http_server`` does it, but for the thread.
        app = make_wsgi_app(registry)
        self._server = make_server(host, port, app, ThreadingWSGIServer, handler_class=Silent)
        self._thread = start_vital(self._server.serve_forever, "metrics", on_death)
        self.port: int = self._server.server_port
        self._closed = threading.Event()

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}/metrics"

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            if self._thread.is_alive():  # It waits for the thread to say that it has heard it.
                self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)


def serve_metrics(
    registry: CollectorRegistry | None, on_death: OnDeath, host: str = "127.0.0.1", port: int = 0
) -> MetricsServer:
    """Starts the endpoint; port 0 takes any free one, which ``port`` of the answer tells."""
    assert registry is not None, "metrics that are not enabled cannot be served"
    return MetricsServer(registry, host, port, on_death)
