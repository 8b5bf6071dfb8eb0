"""How many bytes are written for a byte that is shuffled, and where does each of them come from?

Write amplification is what all processes of the system write to storage, over the bytes of the rows shuffled as Arrow
data; the input queue's own copy is not in it. Five runs, each with two mappers and two reducers:

- *no state*: full rows to reducers that keep nothing (bar ``shuffle_alone``);
- *small state*: the activity job with 100 keys;
- *activity table*: the activity job as it is, 25,000 keys (bar ``activity_table``);
- *large state*: ``--keys`` keys, in the table before the run, each row with a key drawn at random: the worst case, in
  which every row is a row of the table to be written;
- *one reducer down*: as without state, but one reducer is stopped for a while and comes back.

Beside them Spark's streaming repartition of the same full rows (``spark_repartition``).

What the kernel counts (``write_bytes`` of ``/proc/<pid>/io``, by role) is explained by what the store counts itself
(RocksDB's log, flushes and compactions, the segments of queues, those of spill apart) and by the growth of RocksDB's
other files. All that workers and the controller write is their logs. Leases are in the store's memory: not written.
Storage is written by pages of 4 KiB: each sync of RocksDB's log writes the page in which it ends once more. This is
*log pages*, a page for each sync that the store has counted; and so is each sync of the store's *marker*, which is one
small record. What is left is *not attributable*; it can be negative,
where the end of a log needed no page of its own, or a worker's last lines came after it was last looked at.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from perf.common import compare_pictures, report
from perf.common.keyed_rows import KeyedRows, load_table
from perf.common.progress import Buckets, fill_with, forget, watched
from perf.common.workload_files import in_turn, write_forms
from perf.yardsticks.compare_others import FILES_PER_BATCH, Spark, SparkProcess
from perf.yardsticks.compare_peer import PeerFailed
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.local import LocalSystem, workers
from shuffle.examples.workload import Workload
from shuffle.statestore import StateClient

MAPPERS = 2
REDUCERS = 2
BATCH_ROWS = 100_000
ROWS_DEFAULT = 8_000_000
KEYS_DEFAULT = 10_000_000
OUTAGE_S = 10.0
ROLES_PERIOD_S = 0.1
PAGE_BYTES = 4096
KINDS = (
    "log",
    "log_pages",
    "flush",
    "compaction",
    "segments",
    "spill",
    "rocksdb_files",
    "marker",
    "workers_logs",
    "leases",
    "not_attributable",
)
LIMITS = {"shuffle_alone": "<= 0.001", "activity_table": "<= 0.02"}


@dataclass(frozen=True)
class Scenario:
    name: str
    mapper: str
    reducer: str
    rows: int
    source: Workload | KeyedRows
    table: str = ""
    key: tuple[str, ...] = ("user", "cluster")
    loaded_keys: int = 0
    """The number of rows of the table before the run."""
    outage_s: float = 0.0
    """The time in seconds for which one reducer is stopped."""


@dataclass
class Account:
    """The bytes written in one run, by the role that wrote them and by their purpose."""

    shuffled_bytes: int
    total_bytes: int = 0
    roles: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    tables: dict[str, int] = field(default_factory=dict)
    unflushed_log_bytes: int = 0
    """The bytes that are only in RocksDB's log and memory. A later flush writes at most this, one version of each
    key."""
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        return self.total_bytes / self.shuffled_bytes

    def as_details(self) -> dict[str, Any]:
        return {
            "bytes_per_byte": self.ratio,
            "shuffled_mb": self.shuffled_bytes / 1e6,
            "written_mb": self.total_bytes / 1e6,
            "seconds": self.seconds,
            "kinds_mb": {kind: self.kinds[kind] / 1e6 for kind in KINDS},
            "roles_mb": {role: size / 1e6 for role, size in self.roles.items()},
            "log_by_table_mb": {name: size / 1e6 for name, size in self.tables.items() if size},
            "unflushed_log_mb": self.unflushed_log_bytes / 1e6,
        }


# --- counting --------------------------------------------------------------------------------------------------------


class Counted:
    """All counters of the store and the sizes of its files, at one moment."""

    def __init__(self, system: LocalSystem, state: StateClient, input_queue: str) -> None:
        stats = state.stats()
        total = stats["total"]
        queues = {name: queue["segment_bytes_written"] for name, queue in stats["queues"].items()}
        self.kinds = {
            "log": total["log_bytes"],
            "flush": total["flush_bytes"],
            "compaction": total["compaction_bytes"],
            "segments": total["segment_bytes"],
            "spill": sum(size for name, size in queues.items() if name != input_queue),
            "rocksdb_files": _sizes(system.folder / "store" / "rocks", ("LOG", "MANIFEST", "OPTIONS", "CURRENT")),
            "log_pages": total["groups"] * PAGE_BYTES,
            "marker": total["marker_syncs"] * PAGE_BYTES,
            "leases": 0,
        }
        self.kinds["segments"] -= self.kinds["spill"]
        self.tables = {name: table["log_bytes"] for name, table in stats["tables"].items()}
        self.unflushed_log_bytes = _sizes(system.folder / "store" / "rocks", (), ".log")


def _sizes(folder: Path, beginnings: tuple[str, ...], ending: str = "") -> int:
    """The size in bytes of the files of a folder whose names have one of the beginnings and the ending."""
    total = 0
    for path in folder.iterdir():
        if (not beginnings or path.name.startswith(beginnings)) and path.name.endswith(ending) and path.is_file():
            total += path.stat().st_size
    return total


class Roles:
    """The bytes written by role, sampled while the processes live: the kernel's count of a process ends with it."""

    def __init__(self, system: LocalSystem) -> None:
        self._store_pid = system.store_pid
        self._store_before = processes.written_bytes(self._store_pid)
        self.controller_pid = 0
        self._last: dict[tuple[str, int], int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roles", daemon=True)

    def start(self, controller_pid: int) -> None:
        self.controller_pid = controller_pid
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(ROLES_PERIOD_S):
            found = {("controller", 0): self.controller_pid}
            for role in ("mapper", "reducer"):
                found |= {(role, pid): pid for pid in workers(self.controller_pid, role).values()}
            for key, pid in found.items():
                # Killed or ended, it reads as 0: what was seen last stays.
                self._last[key] = max(self._last.get(key, 0), processes.written_bytes(pid))

    def close(self) -> dict[str, int]:
        self._stopping.set()
        self._thread.join()
        sums = {"store": processes.written_bytes(self._store_pid) - self._store_before}
        for (role, _), size in self._last.items():
            sums[role] = sums.get(role, 0) + size
        # The controller's count includes those of the children that it has waited for.
        if "controller" in sums:
            sums["controller"] = max(0, sums["controller"] - sums.get("mapper", 0) - sums.get("reducer", 0))
        return sums


# --- the runs --------------------------------------------------------------------------------------------------------


def account(system: LocalSystem, state: StateClient, scenario: Scenario) -> Account:
    """Fill a queue, run a processor over it, and account for all bytes written."""
    name = scenario.name.replace(" ", "-")
    if scenario.loaded_keys:
        load_table(state, scenario.table, scenario.loaded_keys)
    batches = list(_batches(scenario))
    buckets = Buckets(MAPPERS, REDUCERS, scenario.key)
    for partition, batch in batches:
        buckets.add(partition, batch)
    shuffled_bytes = fill_with(state, name, batches[0][1].schema, batches)
    spec = {
        "processor": name,
        "input": {"queue": name},
        "mapper": {"class": scenario.mapper, "memory": "64MiB", "batch_rows_max": BATCH_ROWS},
        "reducer": {"class": scenario.reducer, "count": REDUCERS},
        "metrics": False,
    }
    found = Account(shuffled_bytes)
    before = Counted(system, state, name)
    roles = Roles(system)
    total_before = processes.tree_written_bytes(os.getpid())
    with Outage(scenario.outage_s) as outage:
        seen = watched(
            system, state, spec, buckets.close(), lambda started: roles.start(started.pid), lambda: outage.start(roles)
        )
    found.roles = roles.close()
    found.total_bytes = processes.tree_written_bytes(os.getpid()) - total_before
    after = Counted(system, state, name)
    found.seconds = seen.seconds
    found.unflushed_log_bytes = after.unflushed_log_bytes
    found.tables = {table: size - before.tables.get(table, 0) for table, size in after.tables.items()}
    found.kinds = {kind: size - before.kinds[kind] for kind, size in after.kinds.items()}
    # Controller, mappers and reducers have nothing else to write than their logs.
    found.kinds["workers_logs"] = sum(size for role, size in found.roles.items() if role != "store")
    found.kinds["not_attributable"] = found.total_bytes - sum(found.kinds.values())
    forget(state, name, name)
    if scenario.table:
        state.drop_table(scenario.table)
    return found


def _batches(scenario: Scenario) -> Any:
    if isinstance(scenario.source, Workload):
        return in_turn(scenario.source, scenario.rows, MAPPERS, BATCH_ROWS)
    return scenario.source.in_turn(scenario.rows, MAPPERS, BATCH_ROWS)


class Outage:
    """Stops reducer 1 once rows are committed, and lets it go on later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Outage:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def start(self, roles: Roles) -> None:
        if self._seconds:
            pid = workers(roles.controller_pid, "reducer")[1]
            os.kill(pid, signal.SIGSTOP)
            self._thread = threading.Thread(target=self._end, args=(pid,), name="outage", daemon=True)
            self._thread.start()

    def _end(self, pid: int) -> None:
        self._stopping.wait(self._seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def scenarios(args: argparse.Namespace) -> list[Scenario]:
    logs = Workload(seed=args.seed, with_user_share=1.0)
    few = Workload(seed=args.seed, users=20, with_user_share=1.0)
    whole, nothing = "perf.common.jobs:WholeRows", "perf.common.jobs:KeepNothing"
    parse, count = "examples.activity:ParseLogs", "examples.activity:DeclaredCountByUser"
    half, quarter = max(args.rows // 2, BATCH_ROWS), max(args.rows // 4, BATCH_ROWS)
    keyed = KeyedRows(args.seed, args.keys)
    return [
        Scenario("no state", whole, nothing, args.rows, logs),
        Scenario("small state", parse, count, half, few, "activity"),
        Scenario("activity table", parse, count, args.rows, logs, "activity"),
        Scenario(
            "large state",
            "perf.common.keyed_rows:ByKey",
            "perf.common.keyed_rows:CountByKey",
            quarter,
            keyed,
            "keyed",
            ("key",),
            loaded_keys=args.keys,
        ),
        Scenario("one reducer down", whole, nothing, half, logs, outage_s=args.outage_s),
    ]


def spark_repartition(args: argparse.Namespace, folder: Path) -> float:
    """The bytes that Spark writes for each byte that it repartitions."""
    workload = Workload(seed=args.seed, with_user_share=1.0)
    rows = max(args.rows // 4, 4 * BATCH_ROWS)
    with ExitStack() as stack:
        given = write_forms(folder, workload, rows, MAPPERS, BATCH_ROWS, rows // (4 * FILES_PER_BATCH), ["parquet"])
        process = SparkProcess("spark_alone", folder, stack)
        return Spark(given, folder, process, None).repartition().written_per_byte


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser("write_amplification", "How many bytes are written for a byte shuffled, and what for?")
    parser.add_argument("--rows", type=int, default=ROWS_DEFAULT, help=f"of the largest run ({ROWS_DEFAULT:,})")
    parser.add_argument("--keys", type=int, default=KEYS_DEFAULT, help=f"of the large state ({KEYS_DEFAULT:,})")
    parser.add_argument("--outage-s", type=float, default=OUTAGE_S, help=f"of one reducer (default: {OUTAGE_S:.0f})")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run only this scenario")
    parser.add_argument("--without-spark", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    compare_pictures.add_argument(parser)
    args = parser.parse_args(argv)
    chosen = [one for one in scenarios(args) if not args.only or one.name in args.only]
    if not chosen:
        raise ShuffleError(f"no such scenario; there are: {', '.join(one.name for one in scenarios(args))}")
    found: dict[str, Account] = {}
    for scenario in chosen:
        folder = Path(tempfile.mkdtemp(prefix="shuffle-written-"))
        try:
            with LocalSystem(folder) as system, system.connect() as state:
                found[scenario.name] = account(system, state, scenario)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{scenario.name}: {found[scenario.name].ratio:.5f}", file=sys.stderr, flush=True)
    publish(args, found)
    return 0


def publish(args: argparse.Namespace, found: Mapping[str, Account]) -> None:
    names = {"no state": "shuffle_alone", "activity table": "activity_table"}
    bars = {bar: found[name].ratio for name, bar in names.items() if name in found}
    if not args.without_spark and not args.only:
        folder = Path(tempfile.mkdtemp(prefix="shuffle-written-"))
        try:
            bars["spark_repartition"] = spark_repartition(args, folder)
        except PeerFailed as error:
            raise ShuffleError(str(error)) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    report.show(table(found))
    scenarios = {name: one.as_details() for name, one in found.items()}
    details = {"scenarios": [{"name": name, **one} for name, one in scenarios.items()]}
    series = {"kind": "write_amplification", "scenarios": scenarios}
    report.publish("write amplification", bars, details, args.json, LIMITS, series)
    compare_pictures.draw_and_report(series, args.pictures)


def table(found: Mapping[str, Account]) -> Table:
    """A table of the bytes written for a million bytes shuffled, by run and purpose."""
    made = Table(title="bytes written for a million bytes shuffled, by what for", title_justify="left")
    made.add_column("what for")
    for name in found:
        made.add_column(name, justify="right")
    for kind in KINDS:
        per_million = [1e6 * one.kinds[kind] / one.shuffled_bytes for one in found.values()]
        made.add_row(kind.replace("_", " "), *(f"{value:,.0f}" for value in per_million))
    made.add_section()
    made.add_row("all", *(f"{1e6 * one.ratio:,.0f}" for one in found.values()), style="bold")
    return made


if __name__ == "__main__":
    sys.exit(report.run_and_report_errors(main))
