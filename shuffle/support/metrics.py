"""The base class for counters, gauges and histograms of any process, and the HTTP endpoint that Prometheus reads.

Each object has a registry of its own, so that several workers in one process (as in tests) do not count into each
other. Names begin with ``shuffle_``; the labels are processor, role and index.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from shuffle.support.vital_threads import OnDeath, start_vital

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The bucket bounds of histograms of seconds: half a millisecond is one synced write of a good disk, and after half a
minute a process is as good as stuck."""

REQUEST_S_MAX = 10.0
"""The most seconds that a request may take to arrive: each has a thread, which a client that never completes its
request would keep."""

LABELS = ("processor", "role", "index")
"""The labels of every metric."""


class NullMetric:
    """A counter, gauge or histogram that counts nothing."""

    def inc(self, amount: float = 1) -> None:
        pass

    def set(self, value: float) -> None:
        pass

    def set_function(self, function: Callable[[], float]) -> None:
        pass

    def observe(self, amount: float) -> None:
        pass


class Metrics:
    """A registry, and shorthands that bind the labels once: the hot path then pays for an addition only.

    With ``enabled`` false, where nobody could read them, nothing is counted: the library for it imports Python's HTTP
    server and client and TLS, which is 8 MB in every worker.
    """

    def __init__(
        self, processor: str, role: str, index: int | str, enabled: bool = True, beside: Metrics | None = None
    ) -> None:
        """``beside`` are the metrics of another worker in this process, whose registry is used: one endpoint serves
        both, each with its own labels. The metrics of the process itself are registered once, by the first of them."""
        self.registry: CollectorRegistry | None = None
        self.label_values = (processor, role, str(index))
        self._families: dict[str, Any] = {}
        """The metrics of the registry by name; each has one time series for each worker."""
        if not enabled:
            return
        if beside is not None:
            self.registry, self._families = beside.registry, beside._families
            return
        from prometheus_client import CollectorRegistry, disable_created_metrics

        disable_created_metrics()  # type: ignore[no-untyped-call]  # They are one more series per counter, unused here.
        self.registry = CollectorRegistry()
        written = self._gauge("process_written_bytes", "Bytes this process has caused to be written to storage")
        written.set_function(storage_bytes_written)
        reads = self._gauge("process_read_bytes", "Bytes this process has caused to be read from storage")
        reads.set_function(storage_bytes_read)
        memory = self._gauge("process_resident_bytes", "Resident memory of this process")
        memory.set_function(resident_bytes)

    def _family(self, metric_type: str, name: str, what: str, labels: tuple[str, ...] = LABELS, **options: Any) -> Any:
        if name not in self._families:
            import prometheus_client

            make = getattr(prometheus_client, metric_type)
            self._families[name] = make(f"shuffle_{name}", what, labels, registry=self.registry, **options)
        return self._families[name]

    def _counter(self, name: str, what: str) -> Counter:
        if self.registry is None:
            return cast("Counter", NullMetric())
        return cast("Counter", self._family("Counter", name, what).labels(*self.label_values))

    def _gauge(self, name: str, what: str) -> Gauge:
        if self.registry is None:
            return cast("Gauge", NullMetric())
        return cast("Gauge", self._family("Gauge", name, what).labels(*self.label_values))

    def _gauges_by_reducer(self, name: str, what: str) -> Callable[[int], Gauge]:
        if self.registry is None:
            return lambda reducer: cast("Gauge", NullMetric())
        gauge = self._family("Gauge", name, what, (*LABELS, "reducer"))
        return lambda reducer: cast("Gauge", gauge.labels(*self.label_values, str(reducer)))

    def _seconds(self, name: str, what: str) -> Histogram:
        return self._histogram(name, what, SECONDS_BUCKETS)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        if self.registry is None:
            return cast("Histogram", NullMetric())
        histogram = self._family("Histogram", name, what, buckets=buckets)
        return cast("Histogram", histogram.labels(*self.label_values))


def storage_bytes_written() -> float:
    """The bytes that this process has sent to the block layer, by the kernel's count; 0 where there is none."""
    return _proc_io("write_bytes:")


def storage_bytes_read() -> float:
    """The bytes that this process has read from the block layer, by the kernel's count; 0 where there is none."""
    return _proc_io("read_bytes:")


def _proc_io(name: str) -> float:
    try:
        with open("/proc/self/io") as lines:
            return float(next((line.split()[1] for line in lines if line.startswith(name)), 0))
    except OSError:
        return 0.0


def resident_bytes() -> float:
    """The resident memory of this process in bytes; 0 where the kernel does not tell."""
    try:
        with open("/proc/self/statm") as text:
            return float(text.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


class MetricsServer:
    """Serves one registry at ``http://host:port/metrics`` until it is closed.

    ``on_death`` is called if the thread that serves dies (``vital_threads``).
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, on_death: OnDeath) -> None:
        from wsgiref.simple_server import WSGIRequestHandler, make_server

        from prometheus_client import make_wsgi_app
        from prometheus_client.exposition import ThreadingWSGIServer

        class Silent(WSGIRequestHandler):
            timeout = REQUEST_S_MAX

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.host = host
        # The same as the library's own ``start_http_server``, except for the thread.
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
            if self._thread.is_alive():  # ``shutdown`` waits for that thread to acknowledge it.
                self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)


def serve_metrics(
    registry: CollectorRegistry | None, on_death: OnDeath, host: str = "127.0.0.1", port: int = 0
) -> MetricsServer:
    """Starts the endpoint. Port 0 takes any free port, which is then in the attribute ``port`` of the server."""
    assert registry is not None, "metrics that are not enabled cannot be served"
    return MetricsServer(registry, host, port, on_death)
