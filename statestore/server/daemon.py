"""The store as a daemon: ``shuffle statestore``, ``python -m statestore``."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shuffle.errors import BadInput, ShuffleError
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.local.store_folder import folder_path
from shuffle.statestore.server.control_server import ControlServer, ControlService, Health, check_listen
from shuffle.statestore.server.flight_server import FlightServer
from shuffle.statestore.server.handlers import Handlers
from shuffle.statestore.server.headroom import check_headroom
from shuffle.statestore.server.lane_server import LaneServer
from shuffle.statestore.server.metrics import StoreMetrics
from shuffle.statestore.server.session_registry import SessionRegistry
from shuffle.statestore.wire.proto import control_pb2 as pb
from shuffle.support import flight
from shuffle.support.endpoint import Endpoint, advertised_endpoint, bracketed, check_advertise
from shuffle.support.logs import get_logger, setup_logging
from shuffle.support.metrics import MetricsServer, serve_metrics
from shuffle.support.vital_threads import end_process

OPEN_FILES = 16_384
"""The number of file descriptors that this process asks the system for: enough for all connections, streams and files
that there may be. The usual 1,024 would be used up by the connections of the lane alone."""

SWITCH_INTERVAL_S = 0.001
"""The seconds for which a thread may keep the GIL while another waits for it. The writer must not wait Python's default
of 5 ms for a long scan."""

_log = get_logger("statestore")


class StoreDaemon:
    """A store with its control plane and its data plane. ``close`` finishes the requests that were accepted.

    When the store fails, or a thread that it depends on dies, health is turned off and ``on_failure`` is called.
    """

    def __init__(
        self,
        path: str,
        listen: str,
        on_failure: Callable[[ShuffleError], None],
        advertise: str | None = None,
        lane: bool = True,
        metrics: str | None = None,
    ) -> None:
        """``advertise`` is the host, or the host and the port of the control plane, at which clients reach this daemon.

        Without ``lane`` every request is sent over Flight. ``metrics`` is the ``host:port`` at which they are served.
        """
        listening = Endpoint.parse_listen(listen)
        check_listen(listening)
        if advertise is not None:
            check_advertise(advertise)
        metrics_listen = None if metrics is None else Endpoint.parse_listen(metrics)
        if metrics_listen is not None:
            check_listen(metrics_listen)
        self.store = LocalStore(path)
        try:
            self._on_failure = on_failure
            self._health = Health()
            self.store.on_failure = self._failed
            self._sessions = SessionRegistry(self.store)
            self._metrics = StoreMetrics(metrics is not None)
            handlers = Handlers(self.store, self._sessions, self._metrics)
            self._flight = FlightServer(flight.location(replace(listening, port=0).target), handlers)
            self._lane = LaneServer(listening.host, self.store, handlers, self.store.fail) if lane else None
            self._metrics_server = None if metrics_listen is None else self._serve_metrics(metrics_listen)
            # With an empty host, each client uses the one at which it has reached this daemon.
            has_host = advertise is not None or not listening.is_everywhere
            host = bracketed(advertised_endpoint(listening, advertise).host) if has_host else ""
            info = pb.InfoReply(
                flight_address=f"grpc://{host}:{self._flight.port}",
                lane_address="" if self._lane is None else f"tcp://{host}:{self._lane.port}",
                lane_local_name="" if self._lane is None else self._lane.local_name,
                folder=str(self.store.folder),
                store_id=self.store.store_id,
            )
            service = ControlService(self.store, self._sessions, info, self._stats)
            self._control = ControlServer(service, self._health, listening.target)
        except BaseException:
            self.store.close()
            raise
        listening = replace(listening, port=self._control.port)
        if not has_host:
            # Clients that read the address from the folder are on this machine.
            listening = replace(listening, host="127.0.0.1")
        self.address = str(advertised_endpoint(listening, advertise))
        self.store.announce(self.address)

    @property
    def metrics_address(self) -> str | None:
        """The address at which the metrics are served; None if they are not."""
        return None if self._metrics_server is None else self._metrics_server.address

    def _serve_metrics(self, listen: Endpoint) -> MetricsServer:
        metrics, lane = self._metrics, self._lane
        metrics.totals = lambda: self.store.stats()["total"]
        metrics.sessions.set_function(lambda: len(self._sessions))
        metrics.flight_streams.set_function(lambda: len(self._flight.streams))
        metrics.lane_connections.set_function(lambda: 0 if lane is None else len(lane.connections))
        self.store.on_group = metrics.count_group
        return serve_metrics(metrics.registry, self.store.fail, listen.host, listen.port)

    def _stats(self) -> dict[str, Any]:
        return {**self.store.stats(), "metrics": self.metrics_address}

    def _failed(self, error: ShuffleError) -> None:
        self._health.turn_off()
        self._on_failure(error)

    def close(self) -> None:
        self._health.turn_off()
        self.store.withdraw()
        self._control.stop(grace_s=1.0)
        if self._metrics_server is not None:
            self._metrics_server.close()
        self._sessions.close()
        self.store.close()
        if self._lane is not None:
            self._lane.close()
        flight.shutdown(self._flight, timeout_s=1.0)


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    setup_logging("statestore")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _raise_file_limit()
    try:
        check_headroom()
        daemon = StoreDaemon(
            arguments.path,
            arguments.listen,
            end_process,
            advertise=arguments.advertise,
            lane=arguments.lane,
            metrics=arguments.metrics,
        )
    except ShuffleError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    stop = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    print(f"state store {arguments.path} serves at {daemon.address}", flush=True)
    if daemon.metrics_address is not None:
        print(f"metrics are at {daemon.metrics_address}", flush=True)
    while not stop.wait(1.0):
        if daemon.store.failure is not None:
            end_process(daemon.store.failure)
    daemon.close()
    sys.stdout.flush()
    # Clients keep their streams open, and Flight's server would wait for them; everything else is closed by now.
    os._exit(0)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    requested = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < requested:
        resource.setrlimit(resource.RLIMIT_NOFILE, (requested, hard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shuffle statestore",
        description="Serve a state store to many processes.",
        epilog="example: shuffle statestore --path ./activity.state --listen 127.0.0.1:7070",
    )
    parser.add_argument(
        "--path", required=True, type=_folder, metavar="DIR", help="the folder of the store; made when missing"
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where the control plane listens; port 0 takes a free one (default: %(default)s). Rows travel over a "
        "second port, which clients learn from the first",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST[:PORT]",
        help="where clients reach the store, if that is not where it listens: the host for all of its ports, and the "
        "port of the control plane (default: as it listens)",
    )
    parser.add_argument(
        "--no-lane",
        dest="lane",
        action="store_false",
        help="do not open the lane, the sockets for small requests; everything then goes over Arrow Flight, which is "
        "slower for small transactions",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve Prometheus metrics there over HTTP; port 0 takes a free one (default: not at all)",
    )
    return parser


def _folder(text: str) -> str:
    try:
        folder_path(text)
    except BadInput as error:
        raise argparse.ArgumentTypeError(error.message) from None
    return text
