"""The whole system on one machine, as processes: a store daemon, and the controller with its workers.

The demo and the benchmarks use it. Whatever happens in the ``with`` block, no process outlives it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from shuffle.errors import ShuffleError, StoreUnavailable
from shuffle.examples.processes import command_line, process_tree
from shuffle.run import launch
from shuffle.spec.index_sets import parse_indexes
from shuffle.statestore.wire.announcement import served_at
from statestore import StateClient

PROJECT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


class LocalSystem:
    """Starts the store in ``folder`` on entry; ``run`` starts a controller; everything is stopped on exit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self._store: subprocess.Popen[bytes] | None = None
        self._controllers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LocalSystem:
        try:
            self._start_store()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start_store(self) -> None:
        path = self.folder / "store"
        path.mkdir(parents=True, exist_ok=True)
        self._store = self._start("store", ["shuffle.statestore", "--path", str(path), "--listen", "127.0.0.1:0"])
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._store.poll() is not None:
                break
            address = served_at(path)
            if address is not None:
                self.address = address
                return
            time.sleep(0.02)
        raise StoreUnavailable(f"the state store did not start:\n{self.log_tail('store')}")

    def connect(self) -> StateClient:
        return StateClient.connect(self.address)

    @property
    def store_pid(self) -> int:
        assert self._store is not None
        return self._store.pid

    def write_spec(self, spec: Mapping[str, Any]) -> Path:
        """Write a spec with ``state`` set to this store."""
        path = self.folder / f"{spec['processor']}.yaml"
        path.write_text(yaml.safe_dump({**spec, "state": self.address}, sort_keys=False))
        return path

    def run(self, spec_path: Path, *options: str) -> subprocess.Popen[bytes]:
        """``shuffle run`` as a process of its own; its output goes to a log file."""
        controller = self._start(spec_path.stem, ["shuffle.cli", "run", str(spec_path), *options])
        self._controllers.append(controller)
        return controller

    def worker(self, spec_path: Path, role: str, index: int) -> subprocess.Popen[bytes]:
        """One mapper or reducer by itself, which nobody starts again when it dies."""
        worker = self._start(f"{role}-{index}", ["shuffle.cli", role, str(spec_path), "--index", str(index)])
        self._controllers.append(worker)
        return worker

    def _start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        with self._log_path(name).open("ab") as log:
            return subprocess.Popen(
                # Launched so that it dies with this process, even if that is killed.
                launch.command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                # Temporary files of the children go when the folder goes, however they end.
                env={**launch.environment(), "TMPDIR": str(self.folder)},
                # Ctrl-C in a terminal goes to the whole group; the children are to be stopped in order, by us.
                start_new_session=True,
            )

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log_tail(self, name: str, lines: int = 15) -> str:
        with suppress(FileNotFoundError):
            return "\n".join(self._log_path(name).read_text(errors="replace").splitlines()[-lines:])
        return ""

    def close(self) -> None:
        """Controllers first, so that no worker complains about a store that is gone."""
        for controller in self._controllers:
            if controller.poll() is None:
                controller.terminate()  # all of them, before the first is waited for
        for process in (*self._controllers, self._store):
            if process is not None:
                _stop(process)
        self._controllers, self._store = [], None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, wait, and kill it if it has not ended. A controller's workers cannot outlive it."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def workers(controller_pid: int, role: str) -> dict[int, int]:
    """The pids of a controller's living workers of one role (``mapper`` or ``reducer``), by their index. Workers that
    share a process have the same one."""
    found = {}
    for pid in process_tree(controller_pid)[1:]:
        arguments = command_line(pid)
        if {role, f"shuffle.{role}"}.intersection(arguments) and "--index" in arguments[:-1]:
            for index in parse_indexes(arguments[arguments.index("--index") + 1]):
                found[index] = pid
    return found


def kill_worker(controller_pid: int, role: str, index: int) -> int:
    """``kill -9`` one worker; returns its pid."""
    pid = workers(controller_pid, role).get(index)
    if pid is None:
        raise ShuffleError(f"there is no {role} {index} to kill")
    os.kill(pid, signal.SIGKILL)
    return pid
