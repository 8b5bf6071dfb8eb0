"""What ``perf.straggler`` and ``perf.hot_bucket`` have in common: four mappers and eight reducers with small windows,
started one by one, of which one reducer is down or slow.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shuffle.durable.tables import spill_queue
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.local import LocalSystem
from shuffle.run import launch
from shuffle.statestore import StateClient

MAPPERS, REDUCERS = 4, 8
MEMORY_BYTES = 16 << 20
BATCH_ROWS = 20_000
PROCESSOR = "straggler"
POLL_S = 0.1
TIMEOUT_S = 400.0
EMPTY_TIMEOUT_S = 15.0
MB = 1e6


def write_spec(
    system: LocalSystem, reducer: dict[str, Any], spill: Any, processor: str = PROCESSOR, queue: str = "logs"
) -> Path:
    return system.write_spec(
        {
            "processor": processor,
            "input": {"queue": queue},
            "mapper": {
                "class": "examples.activity:ParseLogs",
                "memory": MEMORY_BYTES,
                "batch_rows_max": BATCH_ROWS,
                "batch_bytes_max": "4MiB",
            },
            "reducer": {"count": REDUCERS, **reducer},
            "spill": spill,
            "metrics": False,
        }
    )


class Workers:
    """The mappers and reducers, as processes of this one."""

    def __init__(self, folder: Path, spec_path: Path) -> None:
        self._folder = folder
        self._spec_path = spec_path
        self._running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._peaks_bytes: dict[int, int] = {}
        self.kills = 0

    def start(self, role: str, index: int) -> int:
        with (self._folder / f"{role}-{index}.log").open("ab") as log:
            self._running[role, index] = child = subprocess.Popen(
                launch.command(f"shuffle.{role}", str(self._spec_path), "--index", str(index)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=launch.environment(),
                start_new_session=True,
            )
        return child.pid

    def start_all(self) -> None:
        for index in range(MAPPERS):
            self.start("mapper", index)
        for index in range(REDUCERS):
            self.start("reducer", index)

    def kill(self, role: str, index: int) -> None:
        child = self._running.pop((role, index))
        if role == "mapper":
            self._note(child.pid)
        child.kill()
        child.wait()
        self.kills += 1

    def note_memory(self) -> None:
        for (role, _), child in self._running.items():
            if role == "mapper":
                self._note(child.pid)

    def _note(self, pid: int) -> None:
        self._peaks_bytes[pid] = max(self._peaks_bytes.get(pid, 0), processes.rss_peak_bytes(pid))

    @property
    def peak_bytes(self) -> int:
        self.note_memory()
        return max(self._peaks_bytes.values())

    def check(self) -> None:
        for (role, index), child in self._running.items():
            if child.poll() is not None:
                log = (self._folder / f"{role}-{index}.log").read_text()[-1500:]
                raise ShuffleError(f"{role} {index} ended with {child.returncode}:\n{log}")

    def close(self) -> None:
        for child in self._running.values():
            child.kill()
        for child in self._running.values():
            child.wait()
        self._running.clear()


def spill_bytes(state: StateClient, folder: Path) -> int:
    """The bytes of all files of the spill queues, with those that are staged and not published."""
    names = {queue.name for queue in state.queues()}
    ids = [state.queue(name).queue_id for index in range(MAPPERS) if (name := spill_queue(PROCESSOR, index)) in names]
    size_bytes = 0
    for queue_id in ids:
        for pattern in (f"q{queue_id}-*.seg", f"staged-{queue_id}-*.seg"):
            for path in (folder / "store").rglob(pattern):
                with suppress(FileNotFoundError):
                    size_bytes += path.stat().st_size
    return size_bytes


def wait_for_empty_spill(state: StateClient, folder: Path) -> int:
    """Wait for the spill to be empty; returns the bytes that are left of it after the time-out."""
    deadline_s = time.monotonic() + EMPTY_TIMEOUT_S
    while (left := spill_bytes(state, folder)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return left
