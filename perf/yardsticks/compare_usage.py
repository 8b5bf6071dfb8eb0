"""What a system's processes use while it runs: processor time, memory, bytes written.

A ``Meter`` samples whole process trees a few times a second, so that the use in any period can be computed afterwards:
the clock of a run starts with its first progress, which is known only when it has been seen.

Memory is anonymous and shared memory (``RssAnon`` and ``RssShmem``), summed over the processes. Pages of mapped files
are left out: they are the kernel's page cache, which any reader of files uses and which can be reclaimed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import numpy as np

from shuffle.examples import processes

PERIOD_S = 0.25
REST_S = 2.0
"""Nothing is written any more when nothing was for this long, in seconds."""
REST_TIMEOUT_S = 60.0
REST_BYTES = 100_000
"""What may be written within that time without being noticed: logs, leases."""


def private_bytes(pid: int) -> int:
    """The anonymous and shared memory of a process in bytes; 0 when it is gone."""
    return processes.status_bytes(pid, "RssAnon") + processes.status_bytes(pid, "RssShmem")


def trees(roots: Iterable[int]) -> list[int]:
    """The processes of several trees, each once."""
    return list(dict.fromkeys(pid for root in roots for pid in processes.process_tree(root)))


class Meter:
    """Samples the trees of ``roots`` until the block is left. ``roots`` is called each time: some processes start
    later."""

    def __init__(self, roots: Callable[[], Sequence[int]]) -> None:
        self._roots = roots
        self._times_s: list[float] = []
        self._cpu_of: dict[int, float] = {}
        """The processor time in seconds by pid, also of processes that have ended since, such as workers of Spark."""
        self._cpu_s: list[float] = []
        self._memory_bytes: list[int] = []
        self._written_before = 0
        self._written_after: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def __enter__(self) -> Meter:
        os.sync()  # What others have written before must not be counted for the system that is measured now.
        self._written_before = processes.tree_written_bytes(os.getpid())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()
        self.stop_counting_bytes()

    def _run(self) -> None:
        while True:
            pids = trees(self._roots())
            self._times_s.append(time.time())
            for pid in pids:
                self._cpu_of[pid] = max(self._cpu_of.get(pid, 0.0), processes.own_cpu_seconds(pid))
            self._cpu_s.append(sum(self._cpu_of.values()))
            self._memory_bytes.append(sum(private_bytes(pid) for pid in pids))
            if self._stopping.wait(PERIOD_S):
                return

    def wait_until_nothing_is_written(self) -> None:
        """Wait for what was put off, such as compaction: it is part of what a run writes."""
        deadline_s = time.monotonic() + REST_TIMEOUT_S
        before, after = -REST_BYTES, processes.tree_written_bytes(os.getpid())
        while after - before >= REST_BYTES and time.monotonic() < deadline_s:
            time.sleep(REST_S)
            before, after = after, processes.tree_written_bytes(os.getpid())

    def stop_counting_bytes(self) -> None:
        """Do not count bytes that are written from now on, for instance to check the result."""
        if self._written_after is None:
            self._written_after = processes.tree_written_bytes(os.getpid())

    def cpu_between_s(self, begin_s: float, end_s: float) -> float:
        """The processor time in seconds that was used between two times of the wall clock."""
        first, last = np.interp([begin_s, end_s], self._times_s, self._cpu_s)
        return float(last - first)

    @property
    def memory_peak_bytes(self) -> int:
        return max(self._memory_bytes)

    @property
    def written_bytes(self) -> int:
        """The bytes written by this process and all that it has started, from entry to exit."""
        assert self._written_after is not None
        return self._written_after - self._written_before
