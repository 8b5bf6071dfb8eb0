"""How soon does a processor with a large state commit again after one of its processes was killed?

A count over ``--keys`` keys is brought to its end. Then one reducer is killed with ``kill -9`` and, at the same moment,
a few rows for each reducer are appended; the clock runs until they are committed, so it holds the noticing, the start
of the new process, and its first batch, whose keys it must look up. Then the same with the state store, which has to
read its log, and the changelog of the table, before it serves anybody.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import yaml

from perf.common import report
from perf.common.keyed_rows import SCHEMA, KeyedRows
from perf.common.progress import Buckets, committed
from shuffle.errors import ShuffleError, StoreUnavailable
from shuffle.examples.local import LocalSystem, kill_worker
from shuffle.examples.processes import command_line, process_tree
from shuffle.statestore import StateClient
from shuffle.statestore.wire.announcement import served_at

NAME = "restart"
KEYS_DEFAULT = 10_000_000
ROW_BYTES = 40
MAPPERS = REDUCERS = 2
BATCH_ROWS = 200_000
MORE_ROWS = 2_000
POLL_S = 0.02
TIMEOUT_S = 600.0

LIMITS = {"reducer_restart_s": "<= 10", "store_restart_s": "<= 10"}


class Job:
    """The processor, its input, and what of it is committed."""

    def __init__(self, folder: Path, keys: int, seed: int) -> None:
        self._state = folder / "state"
        self._rows = KeyedRows(seed, keys, ROW_BYTES)
        self._batches: list[tuple[int, pa.Table]] = []
        with StateClient.open(str(self._state)) as state:
            state.create_queue(NAME, schema=SCHEMA, partitions=MAPPERS)
            self._append(state, keys, BATCH_ROWS)
        self.spec = folder / f"{NAME}.yaml"
        spec = {
            "processor": NAME,
            "state": str(self._state),
            "input": {"queue": NAME},
            "mapper": {"class": "perf.common.keyed_rows:ByKey"},
            "reducer": {"class": "perf.common.keyed_rows:CountByKey", "count": REDUCERS},
            "metrics": False,
        }
        self.spec.write_text(yaml.safe_dump(spec, sort_keys=False))

    def _append(self, state: StateClient, rows: int, batch_rows: int) -> None:
        # Each call makes other rows, since they follow from where they begin.
        first = sum(batch.num_rows for partition, batch in self._batches if partition == 0)
        share = -(-rows // MAPPERS)
        for begin in range(first, first + share, batch_rows):
            for partition in range(MAPPERS):
                batch = self._rows.rows(begin, min(begin + batch_rows, first + share), partition)
                state.queue(NAME).append(partition, batch)
                self._batches.append((partition, batch))

    def _connect(self) -> StateClient:
        """A client of the run's store. It must not open the folder itself: the run could not serve it then."""
        address = served_at(self._state)
        if address is None:
            raise StoreUnavailable("the store is not served")
        return StateClient.connect(address)

    def append_more(self) -> None:
        """Append a few rows, as soon as the store takes them."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                with self._connect() as state:
                    self._append(state, MORE_ROWS, MORE_ROWS)
                return
            except ShuffleError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(POLL_S)

    def wait_until_committed(self, controller: subprocess.Popen[bytes]) -> None:
        buckets = Buckets(MAPPERS, REDUCERS, ["key"])
        for partition, batch in self._batches:
            buckets.add(partition, batch)
        buckets.close()
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            if controller.poll() is not None or time.monotonic() > deadline_s:
                raise ShuffleError("the rows were not committed: see the log of the run")
            with suppress(ShuffleError), self._connect() as state:
                while committed(state, NAME, buckets) < buckets.rows and time.monotonic() < deadline_s:
                    time.sleep(POLL_S)
                return
            time.sleep(POLL_S)


def kill_store(controller_pid: int) -> None:
    for pid in process_tree(controller_pid)[1:]:
        if "shuffle.statestore" in command_line(pid):
            os.kill(pid, signal.SIGKILL)
            return
    raise ShuffleError("the run has no state store of its own")


def measure(folder: Path, keys: int, seed: int) -> dict[str, float]:
    job = Job(folder, keys, seed)
    with LocalSystem(folder) as system:
        controller = system.run(job.spec, "--no-check")
        job.wait_until_committed(controller)
        bars = {}
        for name, kill in (
            ("reducer_restart_s", lambda: kill_worker(controller.pid, "reducer", 0)),
            ("store_restart_s", lambda: kill_store(controller.pid)),
        ):
            begin_s = time.monotonic()
            kill()
            job.append_more()
            job.wait_until_committed(controller)
            bars[name] = time.monotonic() - begin_s
    return bars


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("restart", "How soon is the next commit, after a kill, with a large state?")
    parser.add_argument("--keys", type=int, default=KEYS_DEFAULT, help=f"keys of the table (default: {KEYS_DEFAULT:,})")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="shuffle-restart-"))
    try:
        bars = measure(folder, args.keys, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.publish("restart: the next commit after a kill", bars, {"keys": args.keys}, args.json, LIMITS)
    return 0


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
