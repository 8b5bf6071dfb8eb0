"""The parts of a chaos run: processes that are started again, the disk, the input, and the watch over the commits."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from shuffle.errors import CommitConflict, CommitUnknown, ShuffleError, StoreError
from shuffle.examples.workload import Workload, oracle_part, oracle_sum
from shuffle.statestore import StateClient

MAPPERS = 2
REDUCERS = 2
PROCESSOR = "chaos"
QUEUE = "logs"
APPEND_S = 0.1
POLL_S = 0.05
RESTART_S = 0.2
DISK_BYTES = 512 * 1024 * 1024
FILL_STEP_BYTES = 1024 * 1024
FILL_ATTEMPTS_MAX = 8
"""The number of attempts to fill the disk, until less than the store's reserve of 16 MiB is left."""


class Slot:
    """Keeps one process running: starts it again when it dies, and sometimes runs a second instance of it."""

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.name = name
        self.start = start
        self.processes: list[subprocess.Popen[bytes]] = []
        self.paused: dict[int, float] = {}
        self.starts_from_s = 0.0
        """The time of the monotonic clock, in seconds, before which it is not started again."""
        self.starts = 0

    def tick(self) -> None:
        now_s = time.monotonic()
        for process in list(self.processes):
            if process.poll() is not None:
                self.processes.remove(process)
                self.paused.pop(process.pid, None)
                self.starts_from_s = now_s + RESTART_S
            elif self.paused.get(process.pid, now_s + 1) < now_s:
                self.resume(process)
        if not self.processes and now_s >= self.starts_from_s:
            self.add()

    def add(self) -> None:
        self.starts += 1
        self.processes.append(self.start())

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    def pause(self, process: subprocess.Popen[bytes], for_s: float) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        self.paused[process.pid] = time.monotonic() + for_s

    def resume(self, process: subprocess.Popen[bytes]) -> None:
        self.paused.pop(process.pid, None)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)

    def calm(self) -> None:
        """Go back to one instance, and let it run."""
        for process in list(self.processes):
            self.resume(process)
        for process in self.processes[1:]:
            self.kill(process)

    def end(self) -> None:
        for process in self.processes:
            self.kill(process)


class Disk:
    """A small file system of its own for the store, where the machine allows that."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "disk"
        self.path.mkdir()
        self.reason = ""
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.path)]
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            self.mounted = made.returncode == 0
            self.reason = made.stderr.strip().replace("\n", " ")
        except OSError as error:
            self.mounted, self.reason = False, str(error)
        self._ballast = self.path / "ballast"

    def fill(self) -> None:
        """Fill nearly all of the disk: the store keeps a reserve, and refuses to write into it."""
        left = os.statvfs(self.path)
        size_bytes = left.f_bavail * left.f_frsize
        with self._ballast.open("wb") as ballast:
            for _ in range(FILL_ATTEMPTS_MAX):
                # The store writes meanwhile: what was free a moment ago may be taken.
                size_bytes -= FILL_STEP_BYTES
                with suppress(OSError):
                    os.posix_fallocate(ballast.fileno(), 0, max(size_bytes, 1))
                    return

    @property
    def is_full(self) -> bool:
        return self._ballast.exists()

    def make_room(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def make_writable(self) -> None:
        self.remount("rw")

    def remount(self, how: str) -> bool:
        command = ["mount", "-o", f"remount,{how}", str(self.path)]
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.path)], capture_output=True, timeout=20, check=False)


class Producer(threading.Thread):
    """Appends at a set rate, each batch once whatever happens, and counts what it appended."""

    def __init__(self, connect: Callable[[], StateClient], seed: int, rows_per_s: int) -> None:
        super().__init__(name="producer", daemon=True)
        self._connect = connect
        self._workload = Workload(seed=seed)
        self._rows = max(1, round(rows_per_s * APPEND_S / MAPPERS))
        self.stopping = threading.Event()
        self.parts: list[pa.Table] = []
        self.rows = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self._connect() as client:
                sequence = 0
                while not self.stopping.is_set():
                    begin_s = time.monotonic()
                    for partition in range(MAPPERS):
                        begin = sequence * self._rows
                        rows = self._workload.rows(begin, begin + self._rows, partition)
                        self._append(client, partition, rows, sequence)
                    sequence += 1
                    self.stopping.wait(max(0.0, APPEND_S - (time.monotonic() - begin_s)))
        except BaseException as error:
            self.failure = error

    def _append(self, client: StateClient, partition: int, rows: pa.Table, sequence: int) -> None:
        # The append is repeated even while stopping: only rows that are known to be appended can be counted.
        while True:
            try:
                client.queue(QUEUE).append(partition, rows, producer=f"chaos-{partition}", sequence=sequence)
                break
            except (StoreError, CommitUnknown, CommitConflict):
                time.sleep(0.05)
        self.parts.append(oracle_part(rows))
        if len(self.parts) > 200:
            self.parts[:] = [oracle_sum(self.parts)]
        self.rows += rows.num_rows


class Watch(threading.Thread):
    """Polls the reducers' positions: records when they last moved, and the longest time in which they did not."""

    def __init__(self, connect: Callable[[], StateClient]) -> None:
        super().__init__(name="watch", daemon=True)
        self._connect = connect
        self._keys = pa.table({"reducer_index": pa.array(range(REDUCERS), pa.int32())})
        self.stopping = threading.Event()
        self.moved_s: float | None = None
        self.stalls: list[tuple[float, float]] = []
        """The (length, end) in seconds of every time without a commit that was longer than a second."""
        self.commits_seen = 0

    def run(self) -> None:
        before: Any = None
        with self._connect() as client:
            while not self.stopping.wait(POLL_S):
                try:
                    rows = client.lookup(f"{PROCESSOR}/reducers", self._keys).to_pylist()
                except ShuffleError:
                    continue
                if rows and rows != before:
                    before = rows
                    self._moved()

    def _moved(self) -> None:
        now_s = time.monotonic()
        self.commits_seen += 1
        if self.moved_s is not None and now_s - self.moved_s > 1.0:
            self.stalls.append((now_s - self.moved_s, now_s))
        self.moved_s = now_s

    @property
    def longest_stall_s(self) -> float:
        open_s = time.monotonic() - self.moved_s if self.moved_s is not None else 0.0
        return max([open_s, *(length_s for length_s, _ in self.stalls)])
