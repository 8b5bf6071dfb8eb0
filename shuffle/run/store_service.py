"""The state store of a run: the daemon that serves its folder, and the folder of the logs of its processes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shuffle.errors import SpecError, StoreUnavailable
from shuffle.run.run_lock import logs_of
from shuffle.run.supervisor import Child, Supervisor
from shuffle.spec.config import ProcessorSpec
from shuffle.statestore.local.store_folder import is_open
from shuffle.support.endpoint import Endpoint
from shuffle.support.slow_wait import announce_slow

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

STORE_START_S_MAX = 60.0
"""The most seconds that a store may take to start. One that was not closed reads its log first, which is at most a few
hundred megabytes."""
STORE_GONE_S = 2.0
"""Seconds after which a store that another process has started and that has ended is replaced: that process may be
starting it again."""
STORE_MODULE = "shuffle.statestore"


def require_store(spec: ProcessorSpec) -> None:
    """Raises ``SpecError`` if there is no store yet: commands that only inspect one must not create it."""
    folder = spec.state_folder
    if folder is not None and not folder.is_dir():
        how = "`shuffle run` makes it"
        if spec.input.consumes is not None:
            how = f"it comes with whatever fills the queue {spec.input.consumes}, for example StateClient.open(folder)"
        raise SpecError(f"{spec.at('state')}: there is no store in {folder} yet; {how}")


def open_client(spec: ProcessorSpec) -> StateClient:
    """A client of the processor's store. If opening it takes long, that is announced on stderr."""
    where = f"in {spec.state} to open" if spec.state_folder is not None else f"at {spec.state} to answer"
    with announce_slow(f"the state store {where}"):
        return spec.open_state()


@contextmanager
def served_store(spec: ProcessorSpec, supervisor: Supervisor, logs: Path) -> Iterator[ProcessorSpec]:
    """``spec`` with the address of a running daemon as its ``state``; one is started for a folder that has none.

    Workers get the address and not the folder: if one of them found the folder without a daemon for a short time, it
    would open it itself and lock out all others.
    """
    folder = spec.state_folder
    if folder is None:
        yield spec
        return
    try:
        address = serving_address(folder)
        if address is None:
            listen = ["127.0.0.1:0"]
            child = supervisor.add(_store_child(folder, listen, logs, spec.store_metrics_port()))
            with announce_slow(f"the state store in {folder} to start ({STORE_START_S_MAX:.0f} s)"):
                address = _wait_for_store(child, folder)
            listen[0] = Endpoint.parse(address).target  # A restarted store must have the same address.
        yield replace(spec, state=address)
    finally:
        supervisor.stop([child for child in supervisor.children if child.module == STORE_MODULE])


def _store_child(folder: Path, listen: list[str], logs: Path, metrics_port: int | None) -> Child:
    """The child process of the store. ``listen`` holds one address, which is read at each start."""
    metrics = [] if metrics_port is None else ["--metrics", f"127.0.0.1:{metrics_port}"]
    return Child(
        STORE_MODULE,
        STORE_MODULE,
        lambda: ["--path", os.fspath(folder), "--listen", listen[0], *metrics],
        logs / "statestore.log",
    )


@dataclass(slots=True)
class StoreKeeper:
    """Starts a daemon in the place of one that another process has started and that has ended.

    It has the same address, which all workers have got. Other runs on the same folder do the same: one of them gets the
    lock of the folder, and the others go on with its daemon.
    """

    folder: Path
    """The folder of the store."""
    address: str
    """The address on which the daemon listens."""
    supervisor: Supervisor
    """The supervisor that runs the daemon."""
    logs: Path
    """The folder for the daemon's log."""
    metrics_port: int | None = None
    """The port on which the daemon serves metrics: 0 for any free one, None if it serves none."""
    child: Child | None = None
    """The daemon that was started here, if there is one."""
    gone_since_s: float | None = None
    """The time at which no daemon was seen first; None while there is one."""

    def look(self, now_s: float) -> bool:
        """Starts a daemon if that is due, and returns whether it did."""
        if self.child is not None:
            if self.child.process is None and is_open(self.folder):  # Another run was faster.
                self.supervisor.children.remove(self.child)
                self.child = None
            return False
        if is_open(self.folder):
            self.gone_since_s = None
            return False
        if self.gone_since_s is None:
            self.gone_since_s = now_s
        if now_s - self.gone_since_s < STORE_GONE_S:
            return False
        listen = [Endpoint.parse(self.address).target]
        self.child = self.supervisor.add(_store_child(self.folder, listen, self.logs, self.metrics_port), now_s)
        return True


def serving_address(folder: Path) -> str | None:
    """The address of the daemon that serves the store in ``folder``; None if there is none."""
    from shuffle.statestore import StateClient

    client = StateClient.serving(folder)
    if client is None:
        return None
    with client:
        return client.address


def _wait_for_store(child: Child, folder: Path) -> str:
    deadline_s = time.monotonic() + STORE_START_S_MAX
    while time.monotonic() < deadline_s:
        if child.reap(time.monotonic()):
            raise StoreUnavailable(f"the state store in {folder} did not start: {child.last_error}")
        address = serving_address(folder)
        if address is not None:
            return address
        time.sleep(0.02)
    raise StoreUnavailable(f"the state store in {folder} did not answer within {STORE_START_S_MAX:.0f} s")


@contextmanager
def log_folder(spec: ProcessorSpec) -> Iterator[Path]:
    """The folder of the children's logs, in the state folder; with a store elsewhere, beside the spec. It is kept."""
    if spec.state_folder is not None:
        yield logs_of(spec.state_folder, spec.processor)
        return
    folder = spec.path.parent / f"{spec.processor}.logs"
    try:
        folder.mkdir(exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    yield folder if writable else Path(tempfile.mkdtemp(prefix=f"shuffle-{spec.processor}-"))
