"""What does one reducer that is down cost the others, and what is written for it?

The activity job with four mappers and eight reducers, every row with a user, all reducers with about equal shares. All
of the input is in its queue before the clock starts: per mapper at least twenty times its memory limit. After a while
one reducer is killed with ``kill -9``; when the others have finished it is started again, and catches up.

- ``others_ratio``: rows per second that the other reducers commit while it is away, over before.
- ``memory_over_limit_mb``: the most memory of any mapper, less its limit and the memory of an idle mapper.
- ``spill_bytes_ratio``: bytes of all spill files, just before the reducer comes back, over the bytes of its rows that
  were spilled, uncompressed.
- ``lost``, ``duplicated``: rows, by an independent count of the input.
- ``spill_left_bytes``: the bytes of spill files that are left at the end.
- ``catch_up_s``: from the start of the returning process until it has committed everything.

With ``--kill-mappers`` mappers are killed at random from the moment the reducer is gone to the end.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from perf.common import report
from perf.common.progress import Buckets, committed_by_reducer
from perf.parts.straggler_parts import (
    BATCH_ROWS,
    MAPPERS,
    MB,
    MEMORY_BYTES,
    POLL_S,
    PROCESSOR,
    REDUCERS,
    TIMEOUT_S,
    Workers,
    spill_bytes,
    wait_for_empty_spill,
    write_spec,
)
from shuffle.durable.spill_ends import SpillEnd
from shuffle.durable.tables import mappers_group
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.activity import COLUMNS, KEY_COLUMNS, TABLE
from shuffle.examples.generate import fill
from shuffle.examples.local import LocalSystem
from shuffle.examples.workload import Workload, difference, oracle_part, oracle_sum
from shuffle.ids import NOTHING_COMMITTED
from shuffle.mapper.spill.format import SpillPart, decode_batch, decode_heads, encode
from shuffle.statestore import StateClient

AWAY = 3
ROWS_DEFAULT = 30_000_000
"""The number of rows of the input. At a million rows a second the reducer is then down for twice as long as it was
up."""
STOP_AFTER_S = 10.0
SETTLE_S = 1.0
"""The time in seconds after a change that is not counted: what was under way belongs to neither side."""
KILL_EVERY_S = 3.0


class Run:
    """One outage, from the start to the end."""

    def __init__(self, system: LocalSystem, state: StateClient, folder: Path, options: Any) -> None:
        self._system = system
        self._state = state
        self._folder = folder
        self._options = options
        self._random = random.Random(options.seed)
        self._buckets = Buckets(MAPPERS, REDUCERS, KEY_COLUMNS)
        self._kill_at_s: float | None = None

    def measure(self) -> tuple[dict[str, float], dict[str, Any]]:
        options = self._options
        oracle: list[pa.Table] = []

        def on_batch(partition: int, batch: pa.Table) -> None:
            self._buckets.add(partition, batch)
            oracle.append(oracle_part(batch))

        workload = Workload(seed=options.seed, with_user_share=1.0, skew="uniform")
        bytes_total = fill(self._state, "logs", workload, options.rows, MAPPERS, BATCH_ROWS, on_batch)
        self._buckets.close()
        idle_bytes = self._idle_bytes()
        self._workers = Workers(self._folder, self._spec())
        try:
            self._start()
            before = self._go_on_for(options.stop_after)
            self._workers.kill("reducer", AWAY)
            stopped_s = time.monotonic()
            self._kill_at_s = stopped_s if options.kill_mappers else None
            during = self._until_others_are_done()
            away_s = time.monotonic() - stopped_s
            held = self._spilled()
            files_bytes = spill_bytes(self._state, self._folder)
            self._workers.start("reducer", AWAY)
            catch_up_s = self._until_all_is_done()
            self._kill_at_s = None
            left_bytes = wait_for_empty_spill(self._state, self._folder)
            peak_bytes = self._workers.peak_bytes
        finally:
            self._workers.close()
        found = self._state.scan(TABLE).read_all().select(COLUMNS)
        verdict = difference(oracle_sum(oracle), found)
        row_bytes = bytes_total / options.rows
        bars = {
            "others_ratio": during / before,
            "memory_over_limit_mb": (peak_bytes - idle_bytes - MEMORY_BYTES) / MB,
            "spill_bytes_ratio": files_bytes / max(1, held["bytes"]),
            "lost": verdict.lost,
            "duplicated": verdict.duplicated,
            "spill_left_bytes": left_bytes,
            "catch_up_s": catch_up_s,
        }
        details = {
            "verdict": str(verdict),
            "input_over_limit": bytes_total / MAPPERS / MEMORY_BYTES,
            "others_mb_per_s_before": before * row_bytes / MB,
            "others_mb_per_s_away": during * row_bytes / MB,
            "away_s": away_s,
            "spilled_mb": held["bytes"] / MB,
            "spilled_rows": held["rows"],
            "spilled_mb_for_others": held["others_bytes"] / MB,
            "spill_share_of_its_rows": held["rows"] / self._buckets.rows_of(AWAY),
            "spill_files_mb": files_bytes / MB,
            "catch_up_mb_per_s": held["bytes"] / MB / catch_up_s,
            "idle_mb": idle_bytes / MB,
            "peak_mb": peak_bytes / MB,
            "mappers_killed": self._workers.kills - 1,
            "compression": options.compression,
        }
        return bars, details

    def _spec(self, processor: str = PROCESSOR, queue: str = "logs") -> Path:
        reducer = {"class": "examples.activity:CountByUser"}
        return write_spec(self._system, reducer, {"compression": self._options.compression}, processor, queue)

    def _idle_bytes(self) -> int:
        """The memory in bytes of a mapper that has nothing to do."""
        self._state.create_queue("nothing", schema=self._state.queue("logs").schema, partitions=1)
        workers = Workers(self._folder, self._spec("idle", "nothing"))
        try:
            pid = workers.start("mapper", 0)
            self._wait_for(lambda: bool(self._state.leases.members(mappers_group("idle"))), workers)
            time.sleep(1.0)
            return processes.rss_peak_bytes(pid)
        finally:
            workers.close()

    def _start(self) -> None:
        self._workers.start_all()
        self._wait_for(lambda: all(self._committed()), self._workers)

    def _committed(self) -> list[int]:
        return committed_by_reducer(self._state, PROCESSOR, self._buckets)

    def _wait_for(self, done: Any, workers: Workers) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not done():
            if time.monotonic() > deadline_s:
                raise ShuffleError(f"not at its end after {TIMEOUT_S:.0f} s: {self._committed()}")
            workers.check()
            workers.note_memory()
            self._kill_now_and_then()
            time.sleep(POLL_S)

    def _kill_now_and_then(self) -> None:
        now_s = time.monotonic()
        if self._kill_at_s is None or now_s < self._kill_at_s:
            return
        index = self._random.randrange(MAPPERS)
        self._workers.kill("mapper", index)
        self._workers.start("mapper", index)
        self._kill_at_s = now_s + KILL_EVERY_S * (0.5 + self._random.random())

    def _others(self) -> int:
        return sum(rows for reducer, rows in enumerate(self._committed()) if reducer != AWAY)

    def _go_on_for(self, seconds: float) -> float:
        """The rows per second of the other reducers, from ``SETTLE_S`` after now on."""
        time.sleep(SETTLE_S)
        begin_s, begin = time.monotonic(), self._others()
        end_s = begin_s + seconds - SETTLE_S
        self._wait_for(lambda: time.monotonic() >= end_s, self._workers)
        rows = self._others() - begin
        if self._others() >= 0.8 * self._others_total():
            raise ShuffleError("nearly all was done before the reducer was stopped: take more --rows")
        return rows / (time.monotonic() - begin_s)

    def _others_total(self) -> int:
        return sum(self._buckets.rows_of(reducer) for reducer in range(REDUCERS) if reducer != AWAY)

    def _until_others_are_done(self) -> float:
        """The rows per second of the other reducers while the one is down. The last rows are not counted, because some
        reducers finish sooner."""
        total = self._others_total()
        time.sleep(SETTLE_S)
        begin_s, begin = time.monotonic(), self._others()
        self._wait_for(lambda: self._others() >= 0.95 * total, self._workers)
        rate = (self._others() - begin) / (time.monotonic() - begin_s)
        self._wait_for(lambda: self._others() == total, self._workers)
        return rate

    def _until_all_is_done(self) -> float:
        begin_s = time.monotonic()
        total = self._buckets.rows_of(AWAY)
        self._wait_for(lambda: self._committed()[AWAY] == total, self._workers)
        return time.monotonic() - begin_s

    def _spilled(self) -> dict[str, int]:
        """The rows and bytes spilled for the reducer that is down; and for the others, which may be late for a moment
        at the start."""
        rows = self._state.scan(f"{PROCESSOR}/spills").read_all().to_pylist()
        own = [row for row in rows if row["reducer_index"] == AWAY]
        others = [row for row in rows if row["reducer_index"] != AWAY]
        found = {name: sum(row[name] for row in own) for name in ("rows", "bytes")}
        return {**found, "others_bytes": sum(row["bytes"] for row in others)}


def compression_figures(seed: int) -> dict[str, Any]:
    """The cost of each compression, writing and reading, on one reducer's rows of the workload."""
    table = Workload(seed=seed, with_user_share=1.0, skew="uniform").rows(0, 400_000).combine_chunks()
    (batch,) = table.to_batches()
    indexes = np.arange(0, 8 * batch.num_rows, 8, dtype=np.int64)
    found: dict[str, Any] = {}
    encode(
        [SpillPart(batch, indexes, indexes * 0)], SpillEnd(), NOTHING_COMMITTED, "none", 0
    )  # Warms up the memory pool.
    for compression in ("none", "lz4", "zstd"):
        begin_s = time.process_time()
        stored, end = encode([SpillPart(batch, indexes, indexes * 0)], SpillEnd(), NOTHING_COMMITTED, compression, 0)
        written_s = time.process_time()
        rows = 0
        for at, head in enumerate(decode_heads(stored, 0)):
            decoded = decode_batch(stored, at, head)
            decoded.rows.validate(full=True)
            rows += decoded.rows.num_rows
        read_s = time.process_time()
        assert rows == batch.num_rows
        found[compression] = {
            "bytes_ratio": end.stored_bytes / end.nbytes,
            "write_mb_per_cpu_s": end.nbytes / MB / max(1e-9, written_s - begin_s),
            "read_mb_per_cpu_s": end.nbytes / MB / max(1e-9, read_s - written_s),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("straggler", "What one reducer that stays away costs the others.")
    parser.add_argument("--rows", type=int, default=ROWS_DEFAULT, help=f"of the input (default: {ROWS_DEFAULT:,})")
    parser.add_argument("--stop-after", type=float, default=STOP_AFTER_S, help="seconds (default: 10)")
    parser.add_argument("--compression", choices=["none", "lz4", "zstd"], default="none", help="of the spill")
    parser.add_argument("--kill-mappers", action="store_true", help="kill mappers at random meanwhile")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="shuffle-perf-"))
    try:
        with LocalSystem(folder) as system, system.connect() as state:
            bars, details = Run(system, state, folder, options).measure()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    limits = {
        "others_ratio": ">= 0.95",
        "memory_over_limit_mb": "<= 100",
        "spill_bytes_ratio": "<= 1.1",
        "lost": "0",
        "duplicated": "0",
        "spill_left_bytes": "0",
    }
    details["compressed"] = compression_figures(options.seed)
    report.publish("straggler: one reducer of eight stays away", bars, details, options.json, limits)
    return 0


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
