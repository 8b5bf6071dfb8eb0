"""What do many partitions with little in each cost: in as many processes, in one, and with one mapper for all of them?

Three ways to read the partitions of a queue: each has a mapper and a process of its own (``each``); each has a mapper,
and one process hosts them all (``hosted``, by ``mapper.per_process``); one mapper reads them all (``grouped``, by
``mapper.partitions_per_mapper``). Every second each partition gets an append of a few rows, for ``--seconds``; memory
and processor time are those of the mappers' processes alone, from the moment when all are up to the last commit. The
ratios are of ``grouped`` to ``each``.

At the end the process of the one mapper is killed with ``kill -9`` while rows come in, again and again: it must read
what it had served once more, in the same order. All counts are compared with what was appended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from perf.common import report
from perf.common.keyed_rows import SCHEMA, TABLE, KeyedRows
from perf.yardsticks.compare_usage import private_bytes
from shuffle.durable.tables import mappers_group, reducers_group
from shuffle.errors import ShuffleError, UnknownTable
from shuffle.examples import processes
from shuffle.examples.local import LocalSystem, workers
from shuffle.statestore import StateClient

NAME = "partitions"
PARTITIONS_DEFAULT = 200
REDUCERS = 2
ROWS_PER_APPEND = 20
KEYS = 1_000
BATCH_BYTES_MAX = 1 << 20
UP_TIMEOUT_S = 900.0
DONE_TIMEOUT_S = 120.0
POLL_S = 0.1
SETTLE_S = 5.0
"""Requests that find nothing are held longer and longer; after this time, in seconds, as long as ever."""

LIMITS = {"memory_ratio": "<= 0.1", "cpu_ratio": "<= 0.3"}


@dataclass(frozen=True)
class Way:
    """One way to read many partitions."""

    partitions: int
    per_process: int = 1
    per_mapper: int = 1

    @property
    def mappers(self) -> int:
        return -(-self.partitions // self.per_mapper)

    def spec(self) -> dict[str, object]:
        return {
            "processor": NAME,
            "input": {"queue": NAME},
            "mapper": {
                "class": "perf.common.keyed_rows:ByKey",
                "per_process": self.per_process,
                "partitions_per_mapper": self.per_mapper,
                "memory": self.per_process * 2 * BATCH_BYTES_MAX,
                "batch_bytes_max": BATCH_BYTES_MAX,
            },
            "reducer": {"class": "perf.common.keyed_rows:CountByKey", "count": REDUCERS},
            "metrics": False,
        }


@dataclass(frozen=True)
class Measured:
    """What the processes of the mappers took."""

    processes: int
    memory_bytes: int
    """The private memory of all of them at the end."""
    cpu_s: float
    idle_cores: float
    """The cores that they keep busy while nothing is appended."""
    rows: int
    up_s: float

    @property
    def us_per_row(self) -> float:
        return 1e6 * self.cpu_s / self.rows

    def as_details(self, name: str) -> dict[str, float]:
        return {
            f"{name}_processes": self.processes,
            f"{name}_memory_mb": self.memory_bytes / 1e6,
            f"{name}_us_per_row": self.us_per_row,
            f"{name}_idle_cores": self.idle_cores,
            f"{name}_up_s": self.up_s,
        }


class Job:
    """A running processor, and the rows that were appended to its input."""

    def __init__(
        self, system: LocalSystem, state: StateClient, controller: subprocess.Popen[bytes], way: Way, seed: int
    ) -> None:
        self._system = system
        self._state = state
        self._controller = controller
        self._way = way
        self._made = KeyedRows(seed, KEYS)
        self._appends = 0

    @property
    def rows(self) -> int:
        return self._appends * self._way.partitions * ROWS_PER_APPEND

    def mapper_pids(self) -> list[int]:
        return sorted(set(workers(self._controller.pid, "mapper").values()))

    def append(self) -> None:
        """A few rows to each partition."""
        begin = self._appends * ROWS_PER_APPEND
        with self._state.transaction() as tx:
            for partition in range(self._way.partitions):
                tx.append(NAME, partition, self._made.rows(begin, begin + ROWS_PER_APPEND, partition))
            tx.commit()
        self._appends += 1

    def wait_until_up(self) -> None:
        wanted = {mappers_group(NAME): self._way.mappers, reducers_group(NAME): REDUCERS}
        self._wait(
            lambda: all(len(self._state.leases.members(group)) >= count for group, count in wanted.items()),
            UP_TIMEOUT_S,
            "the workers did not all start",
        )
        time.sleep(SETTLE_S)

    def wait_until_counted(self) -> None:
        self._wait(lambda: self._counted() >= self.rows, DONE_TIMEOUT_S, "not all rows were counted")
        if self._counted() != self.rows:
            raise ShuffleError(f"{self.rows} rows were appended and {self._counted()} counted")

    def _counted(self) -> int:
        with suppress(UnknownTable), self._state.snapshot() as snapshot:
            return sum(sum(batch["count"].to_pylist()) for batch in snapshot.scan(TABLE))
        return 0

    def _wait(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            if self._controller.poll() is not None or time.monotonic() > deadline_s:
                raise ShuffleError(f"{what}:\n{self._system.log_tail(NAME, 30)}")
            time.sleep(POLL_S)


@contextmanager
def running(way: Way, seed: int) -> Iterator[Job]:
    folder = Path(tempfile.mkdtemp(prefix="shuffle-partitions-"))
    try:
        with LocalSystem(folder) as system, system.connect() as state:
            state.create_queue(NAME, schema=SCHEMA, partitions=way.partitions)
            controller = system.run(system.write_spec(way.spec()), "--no-check")
            yield Job(system, state, controller, way, seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(way: Way, seconds: int, seed: int) -> Measured:
    began_s = time.monotonic()
    with running(way, seed) as job:
        job.wait_until_up()
        up_s = time.monotonic() - began_s - SETTLE_S
        pids = job.mapper_pids()
        before_s = cpu_seconds(pids)
        time.sleep(seconds)
        idle_s = cpu_seconds(pids)
        begin_s = time.monotonic()
        for second in range(seconds):
            time.sleep(max(0.0, begin_s + second - time.monotonic()))
            job.append()
        job.wait_until_counted()
        return Measured(
            processes=len(pids),
            memory_bytes=sum(private_bytes(pid) for pid in pids),
            cpu_s=cpu_seconds(pids) - idle_s,
            idle_cores=(idle_s - before_s) / seconds,
            rows=job.rows,
            up_s=up_s,
        )


def cpu_seconds(pids: Sequence[int]) -> float:
    return sum(processes.cpu_seconds(pid) for pid in pids)


def count_through_kills(way: Way, kills: int, seed: int) -> int:
    """Kill the mapper's process while rows come in; returns the number of rows, which were all counted once."""
    with running(way, seed) as job:
        job.wait_until_up()
        for _ in range(kills):
            for _ in range(10):
                job.append()
                time.sleep(0.05)
            for pid in job.mapper_pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.append()
            time.sleep(2.0)
        job.wait_until_counted()
        return job.rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser(NAME, "Many partitions with little in each: one mapper for all against one for each.")
    parser.add_argument("--partitions", type=int, default=PARTITIONS_DEFAULT)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=5, help="how often the one mapper is killed (default: 5)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    count = args.partitions
    ways = {"grouped": Way(count, per_mapper=count), "hosted": Way(count, per_process=count), "each": Way(count)}
    found: dict[str, Measured] = {}
    for name, way in ways.items():
        found[name] = measure(way, args.seconds, args.seed)
        print(f"{name}: {found[name].us_per_row:.1f} µs a row", file=sys.stderr, flush=True)
    through_kills = count_through_kills(ways["grouped"], args.kills, args.seed)
    grouped, hosted, each = (found[name] for name in ways)
    bars = {
        "memory_ratio": grouped.memory_bytes / each.memory_bytes,
        "cpu_ratio": grouped.us_per_row / each.us_per_row,
    }
    details: dict[str, object] = {
        "partitions": count,
        "rows": grouped.rows,
        "rows_per_append": ROWS_PER_APPEND,
        "hosted_memory_ratio": hosted.memory_bytes / each.memory_bytes,
        "hosted_cpu_ratio": hosted.us_per_row / each.us_per_row,
        "rows_counted_once_through_kills": through_kills,
        "kills": args.kills,
    }
    for name, measured in found.items():
        details |= measured.as_details(name)
    report.publish("partitions: one mapper for all over one for each", bars, details, args.json, LIMITS)
    return 0


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
