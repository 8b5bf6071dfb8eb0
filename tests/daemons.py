"""A state store as a real process of its own, for the tests that need one: started, stopped, killed, started again."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from tests import waiting

ROOT = Path(__file__).resolve().parent.parent
START_S_MAX = 30.0
STOP_S_MAX = 20.0

_CHANGED = """
import importlib, json, sys
from shuffle.statestore.server import daemon
for place, value in json.loads(sys.argv[1]).items():
    module, _, name = place.rpartition(".")
    assert hasattr(importlib.import_module(module), name), place
    setattr(importlib.import_module(module), name, value)
raise SystemExit(daemon.main(sys.argv[2:]))
"""


def environment() -> dict[str, str]:
    """For children: this checkout is what they import, wherever they run."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


wait_until = partial(waiting.wait_until, wait_s=20.0)


def run_store(path: Path, listen: str = "127.0.0.1:0", wait_s: float = START_S_MAX) -> subprocess.CompletedProcess[str]:
    """``python -m statestore`` where it is expected to refuse: its exit code and what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "statestore", "--path", str(path), "--listen", listen],
        capture_output=True,
        text=True,
        timeout=wait_s,
        env=environment(),
        check=False,
    )


class StoreProcess:
    """``python -m statestore`` on a folder. As a context manager it is killed at the end, if it still runs."""

    def __init__(
        self,
        path: Path,
        listen: str = "127.0.0.1:0",
        disk_reserve_bytes: int | None = None,
        changed: Mapping[str, float] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """``disk_reserve_bytes`` makes a large disk a small one, for where none can be mounted; ``changed`` are other
        constants of the store, by their full names, that are too large for a test; ``options`` go to the command."""
        self.path = path
        constants = dict(changed or {})
        if disk_reserve_bytes is not None:
            constants["shuffle.statestore.engine.engine.DISK_RESERVE_BYTES"] = disk_reserve_bytes
        program = ["-c", _CHANGED, json.dumps(constants)] if constants else ["-m", "statestore"]
        self._errors = (path.parent / f"{path.name}.stderr").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, *program, "--path", str(path), "--listen", listen, *options],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(),
        )
        try:
            self.address = self._announced()
        except BaseException:
            self.kill()
            raise

    def _announced(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S_MAX)
        line = self._process.stdout.readline() if ready else ""
        found = re.search(r"serves at (grpc://\S+)", line)
        assert found, f"the store did not start: {line!r}; {self.errors()}"
        return found.group(1)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def listen(self) -> str:
        """For a successor at the same address."""
        return self.address.removeprefix("grpc://")

    def errors(self) -> str:
        self._errors.flush()
        return (self.path.parent / f"{self.path.name}.stderr").read_text()

    def kill(self) -> None:
        """``kill -9``: no handler runs, nothing is flushed."""
        self._process.kill()
        self._close()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._close()

    def wait(self) -> int:
        return self._close()

    def _close(self) -> int:
        code = self._process.wait(STOP_S_MAX)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        return code

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.running:
            self.kill()
