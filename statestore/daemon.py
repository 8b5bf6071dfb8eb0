"""The store as a daemon: ``shuffle statestore``, ``python -m statestore``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import uuid
from typing import Any

from shuffle import flight
from shuffle.errors import ShuffleError
from shuffle.logs import get_logger, setup_logging
from statestore.control import ControlPlane, check_listen, control_server
from statestore.held import Held
from statestore.lane import Lane
from statestore.local import LocalStore
from statestore.proto import control_pb2 as pb
from statestore.questions import Questions
from statestore.service import DataPlane

SWITCH_INTERVAL_S = 0.001
"""How long a thread may keep the GIL while another wants it. The writer must not wait 5 ms for a long scan."""

_log = get_logger("statestore")


class StoreDaemon:
    """A store with its two planes. ``close`` finishes what was accepted."""

    def __init__(self, path: str, listen: str) -> None:
        check_listen(listen)
        host = listen.rpartition(":")[0] or "127.0.0.1"
        self.store = LocalStore(path)
        try:
            self._held = Held(self.store)
            questions = Questions(self.store, self._held)
            self._data = DataPlane(flight.location(f"{host}:0"), questions)
            self._lane = Lane(host, self.store, questions)
            advertised = "" if host in ("0.0.0.0", "[::]") else host
            info = pb.InfoReply(
                flight_address=f"grpc://{advertised}:{self._data.port}",
                lane_address=f"tcp://{advertised}:{self._lane.port}",
                lane_local_name=self._lane.local_name,
                folder=str(self.store.folder),
                store_id=uuid.uuid4().hex,
            )
            self._control, port = control_server(ControlPlane(self.store, self._held, info), listen)
        except BaseException:
            self.store.close()
            raise
        self.address = f"grpc://{advertised or '127.0.0.1'}:{port}"
        self.store.announce(self.address)

    def close(self) -> None:
        self.store.withdraw()
        self._control.stop(grace=1.0)
        self._held.close()
        self.store.close()
        self._lane.close()
        flight.shutdown(self._data, timeout_s=1.0)


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    setup_logging("statestore")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        daemon = StoreDaemon(arguments.path, arguments.listen)
    except ShuffleError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    stop = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    print(f"state store {arguments.path} serves at {daemon.address}", flush=True)
    while not stop.wait(1.0):
        if daemon.store.failure is not None:
            print(f"error: {daemon.store.failure.message}", file=sys.stderr, flush=True)
            os._exit(1)
    daemon.close()
    sys.stdout.flush()
    # Clients keep their streams open, and Flight's server would wait for them; everything of ours is closed by now.
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shuffle statestore",
        description="Serve a state store to many processes.",
        epilog="example: shuffle statestore --path ./activity.state --listen 127.0.0.1:7070",
    )
    parser.add_argument("--path", required=True, metavar="DIR", help="the folder of the store; made when missing")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where the control plane listens; port 0 takes a free one (default: %(default)s). Rows travel over a "
        "second port, which clients learn from the first",
    )
    return parser
