"""What does the state store cost over the libraries it stands on?

Everything goes through a daemon in a process of its own, and each figure is a ratio of two things measured in turns in
the same run, the median of the rounds of each:

- ``group_commit_ratio``: transactions of one row by 16 clients at once, over one raw loop of synced writes of one key;
- ``bulk_write_ratio``: keys upserted in transactions of 10,000 rows, over raw synced batches of the same keys;
- ``bulk_lookup_ratio``: keys looked up 10,000 at a time, over raw multi-gets of the same keys;
- ``queue_bytes_ratio``: bytes the daemon sent to storage, over the bytes of the Arrow data appended;
- ``queue_read_ratio``: rows read from a queue over the wire, over a raw Flight DoGet of the same batches. (A client on
  the daemon's machine maps its files instead, and is faster.)

And ``shuffle state scan`` of a table, as a process: when its first row comes, and the most memory it held.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from perf.common import report
from perf.parts import statestore_scan
from perf.parts.statestore_clients import SMALL_KEY, SMALL_TABLE, SMALL_VALUE, clients, small_row
from perf.yardsticks import raw_flight
from perf.yardsticks.raw_rocks import RawRocks
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.local import LocalSystem
from shuffle.examples.workload import SCHEMA, Workload
from shuffle.statestore import StateClient
from shuffle.statestore.codec.arrow_bytes import to_list
from shuffle.statestore.codec.sorted_table import Table
from shuffle.support import flight

MB = 1_000_000

CLIENT_PROCESSES = 2
CLIENT_THREADS = 8
COMMIT_SECONDS = 1.0

BULK_TABLE = "bulk"
BULK_KEY = pa.schema([("user", pa.string()), ("cluster", pa.string())])
BULK_VALUE = pa.schema([("last_access", pa.timestamp("us")), ("count", pa.int64())])
BULK_ROWS = 10_000
BULK_TRANSACTIONS = 10
"""The number of transactions in a round; each round upserts other keys, and looks up those of all rounds."""

QUEUE = "log"
QUEUE_BATCH_ROWS = 8_192

LIMITS = {
    "group_commit_ratio": ">= 1.0",
    "bulk_write_ratio": ">= 0.35",
    "bulk_lookup_ratio": ">= 0.25",
    "queue_bytes_ratio": "<= 1.05",
    "queue_read_ratio": ">= 0.6",
    "scan_first_row_s": "<= 2",
    "scan_rss_peak_mb": "< 200",
}


@dataclass
class Results:
    """The measurements so far."""

    bars: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def ratio(self, bar: str, unit: str, ours: Sequence[float], raw: Sequence[float]) -> None:
        """Add a bar: the median of ``ours`` over the median of ``raw``. Both are added to the details."""
        self.bars[bar] = report.median(ours) / report.median(raw)
        name = bar.removesuffix("_ratio")
        self.details[name] = {f"{unit}": report.spread(ours), f"raw_{unit}": report.spread(raw)}


def in_turns(rounds: int, raw: Callable[[int], float], ours: Callable[[int], float]) -> tuple[list[float], list[float]]:
    """Measure each of the two once in every round; the first round only warms up."""
    found: tuple[list[float], list[float]] = [], []
    for number in range(rounds + 1):
        for values, measure in zip(found, (raw, ours), strict=True):
            value = measure(number)
            if number:
                values.append(value)
    return found


def group_commit(system: LocalSystem, state: StateClient, raw: RawRocks, rounds: int, found: Results) -> None:
    schema = state.create_table(SMALL_TABLE, key=SMALL_KEY, value=SMALL_VALUE)
    keys, values = (to_list(column) for column in Table(schema).encode_rows(small_row("raw", 0)))
    took_ms: list[float] = []
    raw_took_ms: list[float] = []

    def raw_round(number: int) -> float:
        took, begin = [], time.monotonic()
        deadline = begin + COMMIT_SECONDS
        while begin < deadline:
            raw.put_synced(keys[0], values[0])
            end = time.monotonic()
            took.append((end - begin) * 1000)
            begin = end
        raw_took_ms.extend(took if number else [])
        return len(took) / COMMIT_SECONDS

    with clients(system.address, CLIENT_PROCESSES, CLIENT_THREADS) as running:

        def our_round(number: int) -> float:
            took = running.run(COMMIT_SECONDS)
            took_ms.extend(seconds * 1000 for seconds in (took if number else []))
            return len(took) / COMMIT_SECONDS

        raw_found, ours = in_turns(rounds, raw_round, our_round)
    found.ratio("group_commit_ratio", "transactions_per_s", ours, raw_found)
    found.details["group_commit"] |= {
        "clients": CLIENT_PROCESSES * CLIENT_THREADS,
        "latency_ms": report.percentiles(took_ms),
        "raw_latency_ms": report.percentiles(raw_took_ms),
    }


def bulk_rows(first: int, rows: int) -> pa.Table:
    """``rows`` rows of the bulk table from row ``first`` on, not in the order of their keys."""
    numbers = np.random.default_rng(first).permutation(np.arange(first, first + rows)).tolist()
    return pa.table(
        {
            "user": [f"user-{number * 7919 % 10_000_019:08d}" for number in numbers],
            "cluster": [f"cluster-{number % 16:02d}" for number in numbers],
            "last_access": pa.array(numbers, pa.timestamp("us")),
            "count": pa.array(numbers, pa.int64()),
        }
    )


def bulk(state: StateClient, raw: RawRocks, rounds: int, found: Results) -> None:
    handle = Table(state.create_table(BULK_TABLE, key=BULK_KEY, value=BULK_VALUE))
    tables = [bulk_rows(at * BULK_ROWS, BULK_ROWS) for at in range((rounds + 1) * BULK_TRANSACTIONS)]
    encoded = [tuple(to_list(column) for column in handle.encode_rows(rows)) for rows in tables]

    def of_round(number: int) -> range:
        return range(number * BULK_TRANSACTIONS, (number + 1) * BULK_TRANSACTIONS)

    def raw_write(number: int) -> float:
        return _per_s(lambda at: raw.write_synced(*encoded[at]), of_round(number), BULK_ROWS)

    def write(number: int) -> float:
        def one(at: int) -> None:
            with state.transaction() as tx:
                tx.write(BULK_TABLE, tables[at])
                tx.commit()

        return _per_s(one, of_round(number), BULK_ROWS)

    raw_found, ours = in_turns(rounds, raw_write, write)
    found.ratio("bulk_write_ratio", "keys_per_s", ours, raw_found)

    # Lookups take every key once, in another order than they were written in.
    order = np.random.default_rng(1).permutation(len(tables) * BULK_ROWS)
    whole = pa.concat_tables(tables).select(BULK_KEY.names).take(pa.array(order)).combine_chunks()
    keys = [whole.slice(at * BULK_ROWS, BULK_ROWS) for at in range(len(tables))]
    encoded_keys = [to_list(handle.encode_keys(part)[1]) for part in keys]

    def raw_lookup(number: int) -> float:
        def one(at: int) -> None:
            if None in raw.multi_get(encoded_keys[at]):
                raise ShuffleError("a raw multi-get missed a key that was written")

        return _per_s(one, of_round(number), BULK_ROWS)

    def lookup(number: int) -> float:
        def one(at: int) -> None:
            if state.lookup(BULK_TABLE, keys[at]).num_rows != BULK_ROWS:
                raise ShuffleError("a lookup missed a key that was written")

        return _per_s(one, of_round(number), BULK_ROWS)

    raw_found, ours = in_turns(rounds, raw_lookup, lookup)
    found.ratio("bulk_lookup_ratio", "keys_per_s", ours, raw_found)


def _per_s(work: Callable[[int], None], items: Sequence[int], each: int) -> float:
    begin = time.monotonic()
    for item in items:
        work(item)
    return len(items) * each / (time.monotonic() - begin)


def queue_append(system: LocalSystem, state: StateClient, workload: Workload, rows: int, found: Results) -> None:
    queue = state.create_queue(QUEUE, schema=SCHEMA, partitions=1)
    batches = list(workload.batches(rows, QUEUE_BATCH_ROWS))
    os.sync()  # what was written before must not be sent to storage, and counted, now
    before_bytes = processes.written_bytes(system.store_pid)
    begin = time.monotonic()
    for batch in batches:
        queue.append(0, batch)
    took_s = time.monotonic() - begin
    os.sync()
    written_bytes = processes.written_bytes(system.store_pid) - before_bytes
    data_bytes = sum(batch.nbytes for batch in batches)
    found.bars["queue_bytes_ratio"] = written_bytes / data_bytes
    found.details["queue_append"] = {
        "appended_bytes": data_bytes,
        "written_bytes": written_bytes,
        "bytes_per_append": data_bytes // len(batches),
        "mb_per_s": data_bytes / took_s / MB,
    }


def read_all(state: StateClient, rows: int) -> float:
    """Read a whole partition as a mapper does; returns MB/s."""
    queue = state.queue(QUEUE)
    position = data_bytes = 0
    begin = time.monotonic()
    while position < rows:
        table, position = queue.read(0, position)
        data_bytes += table.nbytes
    return data_bytes / (time.monotonic() - begin) / MB


def queue_read(system: LocalSystem, workload: Workload, rows: int, rounds: int, found: Results) -> None:
    stream = raw_flight.Stream(workload, 0, rows, QUEUE_BATCH_ROWS, 1)
    with (
        raw_flight.servers([stream]) as (address,),
        StateClient.connect(system.address, local_files=False) as far,
        StateClient.connect(system.address) as near,
    ):
        raw_client = flight.connect(address)
        mapped: list[float] = []

        def raw_round(number: int) -> float:
            begin = time.monotonic()
            return raw_flight.get(raw_client, 0) / (time.monotonic() - begin) / MB

        def our_round(number: int) -> float:
            mapped.append(read_all(near, rows))
            return read_all(far, rows)

        raw_found, ours = in_turns(rounds, raw_round, our_round)
    found.ratio("queue_read_ratio", "mb_per_s", ours, raw_found)
    found.details["queue_read"]["mapped_mb_per_s"] = report.spread(mapped[1:])


def scan(system: LocalSystem, state: StateClient, rows: int, found: Results) -> None:
    statestore_scan.fill(state, rows)
    served = statestore_scan.scan(system.address)
    if served.lines != rows:
        raise ShuffleError(f"the scan printed {served.lines} rows of {rows}")
    found.bars["scan_first_row_s"] = served.first_row_s
    found.bars["scan_rss_peak_mb"] = served.rss_peak_bytes / MB
    found.details["scan"] = {"rows": rows, "rows_per_s": rows / served.whole_s}


def measure(folder: Path, rounds: int, queue_rows: int, scan_rows: int, seed: int) -> Results:
    found = Results()
    workload = Workload(seed=seed)
    with LocalSystem(folder) as system, system.connect() as state:
        queue_append(system, state, workload, queue_rows, found)
        queue_read(system, workload, queue_rows, rounds, found)
        with RawRocks(folder / "raw") as raw:
            group_commit(system, state, raw, rounds, found)
            bulk(state, raw, rounds, found)
        scan(system, state, scan_rows, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("statestore", "The state store over the libraries it stands on.")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement, in turns (default: %(default)s)")
    parser.add_argument("--queue-rows", type=int, default=1_000_000, help="rows in the queue (default: %(default)s)")
    parser.add_argument("--scan-rows", type=int, default=500_000, help="rows in the scan (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to put the store (default: the temporary folder)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="shuffle-perf-", dir=args.folder))
    try:
        found = measure(folder, args.rounds, args.queue_rows, args.scan_rows, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.publish("state store, over raw rocksdict and raw Flight", found.bars, found.details, args.json, LIMITS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
