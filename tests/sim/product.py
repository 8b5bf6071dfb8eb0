"""The product, loaded a second time with the simulated world in place of threads, clocks, random numbers and Flight.

First everything is imported as it is, so that the libraries it uses get the real modules. Then the product's own
modules are dropped and imported again while the names they ask for lead to ``shims`` and to ``flight``. This is done
once, in a process that does nothing else: the command line and the tests start one.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from types import ModuleType
from typing import Any

from shuffle.support.process_memory import keep_small

MODULES = (
    "shuffle.spec.config",
    "shuffle.discovery",
    "shuffle.jobs.aggregate_reducer",
    "shuffle.jobs.hash_mapper",
    "shuffle.metrics",
    "shuffle.partition",
    "shuffle.user_code.poison",
    "shuffle.preflight.check",
    "shuffle.spec.spec_file",
    "shuffle.mapper.daemon",
    "shuffle.mapper.readers.folder",
    "shuffle.mapper.readers.grouped",
    "shuffle.mapper.readers.queue",
    "shuffle.reducer.daemon",
    "shuffle.reducer.exporter.daemon",
    "shuffle.statestore.client.client",
    "shuffle.statestore.local.local",
    "shuffle.statestore.server.session_registry",
)

_installed = False


class _NoMetric:
    def __call__(self, *labels: Any) -> _NoMetric:
        return self

    def inc(self, amount: float = 1) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


class NoMetrics:
    """Counting costs more than the simulation itself."""

    _metric = _NoMetric()

    def __init__(self, *args: Any) -> None: ...

    def __getattr__(self, name: str) -> _NoMetric:
        setattr(self, name, self._metric)  # Found at once from now on.
        return self._metric


def is_product(name: str) -> bool:
    # The generated messages register themselves in a pool of the process, once.
    return name.partition(".")[0] == "shuffle" and not name.startswith("shuffle.statestore.wire.proto")


def install() -> None:
    """Load the product into the simulated world; afterwards plain imports find it there."""
    global _installed
    if _installed:
        return
    _installed = True
    keep_small()  # As the daemons do; pandas would come later otherwise, and get the simulated modules.
    logging.getLogger("shuffle-service").setLevel(logging.CRITICAL + 1)
    for name in MODULES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if is_product(name)]:
        del sys.modules[name]
    from tests.sim import shims

    fakes: dict[str, ModuleType] = shims.modules()
    kept = {name: importlib.import_module(name) for name in fakes}
    sys.modules.update(fakes)
    try:
        # Flight's place is taken before anything can import it, both as a module and as the package's attribute.
        package = importlib.import_module("shuffle.support")
        transport = importlib.import_module("tests.sim.flight")
        sys.modules["shuffle.support.flight"] = transport
        package.flight = transport  # type: ignore[attr-defined]
        for name in MODULES:
            importlib.import_module(name)
    finally:
        sys.modules.update(kept)
    _settle()
    importlib.import_module("tests.sim.memoise").install()
    importlib.import_module("tests.sim.clock").install()
    importlib.import_module("tests.sim.probes").install()
    gc.collect()
    gc.freeze()  # What is loaded stays; looking through it after every few seeds would take longer than they do.


def _settle() -> None:
    """Constants that are right for a real machine and would only make virtual time long."""
    names = ("shuffle.mapper.daemon", "shuffle.reducer.daemon", "shuffle.reducer.fetch", "shuffle.reducer.exchange")
    mapper, reducer, fetch, stream = (sys.modules[name] for name in names)
    vars(mapper).update(MapperMetrics=NoMetrics)
    vars(sys.modules["shuffle.mapper.instance"]).update(DRAIN_S=2.0)
    # A run is the same on every machine, however many cores it has.
    vars(reducer).update(ReducerMetrics=NoMetrics, _STOP_CHECK_S=1.0, reducers_per_core=lambda spec: 1.0)
    # Less than ``DRAIN_S``, as on a real machine: a poll must end while a mapper that a row has stopped still serves.
    vars(sys.modules["shuffle.reducer.core"]).update(IDLE_WAIT_MS_MAX=1_000)
    vars(sys.modules["shuffle.reducer.exporter.daemon"]).update(
        ExporterMetrics=NoMetrics, BACKOFF_MS_MAX=400, POLL_MS=100
    )
    vars(fetch).update(RESPONSE_S_MAX=1.0, LOCATE_S_MAX=0.5)
    vars(sys.modules["shuffle.reducer.link"]).update(RESPONSE_S_MAX=1.0)
    vars(stream).update(STREAM_S_MAX=0.5)
    importlib.import_module("tests.sim.stragglers").settle(dict(sys.modules))
