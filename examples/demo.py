"""``shuffle demo``: the activity job from beginning to end, with two workers killed on the way, and a check at the end.

The steps, in a temporary folder:

1. start a state store, and fill a queue of four partitions with log lines, counting them independently meanwhile;
2. run the job with four mappers and two reducers until all of the input is committed; kill one mapper and one reducer
   with ``kill -9`` on the way, and show the progress;
3. show the top users, the speed, and the bytes written per byte shuffled;
4. compare the table with the independent count, key by key; then stop everything and remove the folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from shuffle.errors import ShuffleError
from shuffle.examples.activity import COLUMNS, TABLE
from shuffle.examples.generate import fill, progress_bar
from shuffle.examples.local import LocalSystem, kill_worker
from shuffle.examples.processes import tree_written_bytes
from shuffle.examples.workload import RESULT_SCHEMA, Difference, Workload, difference, oracle_part, oracle_sum
from statestore import StateClient

QUEUE = "logs"
PARTITIONS = 4
REDUCERS = 2
ROWS_DEFAULT = 12_000_000
RUN_TIMEOUT_S = 110.0
POLL_S = 0.1
MIB = 1024 * 1024

SPEC = {
    "processor": "activity",
    "input": {"queue": QUEUE},
    "mapper": {"class": "shuffle.examples.activity:ParseLogs", "memory": "64MiB", "batch_rows_max": 50_000},
    "reducer": {"class": "shuffle.examples.activity:CountByUser", "count": REDUCERS},
    # A dead worker is replaced at once, but stays registered until its lease ends; a short lease keeps the demo short.
    "lease_ttl": "2s",
}

KILLS = ((0.1, "mapper", 1), (0.4, "reducer", 0))
"""The workers that are killed: the share of the rows after which, the role and the index."""


@dataclass
class Input:
    """What was appended to the queue, counted independently of the project."""

    rows: int = 0
    bytes: int = 0
    shuffled_bytes: int = 0
    """The bytes of the rows that have a user: these go through the shuffle."""
    parts: list[pa.Table] = field(default_factory=list)

    def add(self, batch: pa.Table) -> None:
        self.rows += batch.num_rows
        self.bytes += batch.nbytes
        self.shuffled_bytes += batch.filter(pc.is_valid(batch["user"])).nbytes
        self.parts.append(oracle_part(batch))


@dataclass(frozen=True)
class Run:
    """The measurements of the job's run."""

    seconds: float
    """The time in seconds from the start of the controller to its end."""
    working_s: float
    """The time in seconds without the start-up: from the first commit that was seen to the end of the controller."""
    written_bytes: int


def generate(state: StateClient, rows: int, seed: int, console: Console) -> Input:
    found = Input()
    with progress_bar(console) as progress:
        task = progress.add_task(f"filling queue {QUEUE}", total=rows)

        def on_batch(_partition: int, batch: pa.Table) -> None:
            found.add(batch)
            progress.advance(task, batch.num_rows)

        fill(state, QUEUE, Workload(seed=seed), rows, PARTITIONS, on_batch=on_batch)
    return found


def activity_table(state: StateClient) -> pa.Table:
    """The job's table now; empty before the first reducer has created it."""
    if TABLE not in {table.name for table in state.tables()}:
        return RESULT_SCHEMA.empty_table()
    return state.scan(TABLE).read_all().select(COLUMNS)


def committed_rows(state: StateClient) -> int:
    return int(pc.sum(activity_table(state)["count"]).as_py() or 0)


def run_job(system: LocalSystem, state: StateClient, wanted: int, kill: bool, console: Console) -> Run:
    """Step 2: run until the input is drained, killing on the way."""
    spec_path = system.write_spec(SPEC)
    written_before = tree_written_bytes(os.getpid())
    begin = time.monotonic()
    controller = system.run(spec_path, "--until-drained")
    pending = list(KILLS) if kill else []
    first_s = 0.0
    with run_progress(console) as progress:
        task = progress.add_task("rows committed", total=wanted, speed=0.0)
        while controller.poll() is None:
            seconds = time.monotonic() - begin
            if seconds > RUN_TIMEOUT_S:
                raise ShuffleError(f"not drained after {RUN_TIMEOUT_S:.0f} s:\n{system.log_tail('activity')}")
            done = committed_rows(state)
            first_s = first_s or (seconds if done else 0.0)
            show(progress, task, done, seconds - first_s)
            while pending and done >= pending[0][0] * wanted:
                kill_one(controller, *pending.pop(0), console=progress.console)
            time.sleep(POLL_S)
        seconds = time.monotonic() - begin
        show(progress, task, committed_rows(state), seconds - first_s)
    if controller.returncode != 0:
        raise ShuffleError(f"the run ended with {controller.returncode}:\n{system.log_tail('activity', 30)}")
    if pending:
        raise ShuffleError("the input was drained before anybody could be killed: take more --rows, or --no-kill")
    return Run(seconds, seconds - first_s, tree_written_bytes(os.getpid()) - written_before)


def show(progress: Progress, task: TaskID, done: int, seconds: float) -> None:
    progress.update(task, completed=done, speed=done / seconds if seconds else 0.0)


def kill_one(controller: subprocess.Popen[bytes], share: float, role: str, index: int, console: Console) -> None:
    pid = kill_worker(controller.pid, role, index)
    console.print(f"[red]kill -9 {role} {index} (pid {pid}) after {share:.0%} of the rows[/red]", highlight=False)


def run_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:,.0f} rows/s"),
        TimeElapsedColumn(),
        console=console,
    )


def report(found: Input, run: Run, result: pa.Table, console: Console) -> None:
    """Step 3: show the top users, the speed, and the bytes written."""
    users = result.group_by("user").aggregate([("count", "sum"), ("last_access", "max")])
    table = Table(title="top users", title_justify="left")
    for name in ("user", "lines", "last access"):
        table.add_column(name, justify="right" if name == "lines" else "left")
    for row in users.sort_by([("count_sum", "descending")]).slice(0, 8).to_pylist():
        table.add_row(row["user"], f"{row['count_sum']:,}", f"{row['last_access_max']:%Y-%m-%d %H:%M:%S}")
    console.print(table)
    start_up_s = run.seconds - run.working_s
    print(
        f"rows read: {found.rows:,} ({found.bytes / MIB:,.0f} MiB) in {run.seconds:.1f} s ({start_up_s:.1f} s start-up)"
    )
    print(
        f"rows per second: {found.rows / run.working_s:,.0f} ({found.bytes / MIB / run.working_s:,.0f} MiB/s), "
        "start-up not counted"
    )
    print(
        f"bytes written per byte shuffled: {run.written_bytes / max(found.shuffled_bytes, 1):.4f} "
        f"({run.written_bytes / MIB:.1f} MiB written, {found.shuffled_bytes / MIB:.1f} MiB shuffled)"
    )


def demo(folder: Path, rows: int, seed: int, kill: bool, console: Console) -> Difference:
    with LocalSystem(folder) as system, system.connect() as state:
        found = generate(state, rows, seed, console)  # 1
        expected = oracle_sum(found.parts)
        wanted = int(pc.sum(expected["count"]).as_py() or 0)
        run = run_job(system, state, wanted, kill, console)  # 2
        result = activity_table(state)
        report(found, run, result, console)  # 3
        return difference(expected, result)  # 4


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does, so that the cleaning up happens in both cases."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="shuffle-demo-"))
    try:
        with terminated_as_interrupted():
            verdict = demo(folder, args.rows, args.seed, not args.no_kill, console)
    except KeyboardInterrupt:
        print("interrupted: everything was stopped", file=sys.stderr)
        return 130
    except ShuffleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if args.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(verdict)
    return 0 if verdict.exact else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shuffle demo", description="The activity job with kills, checked row by row."
    )
    parser.add_argument("--rows", type=int, default=ROWS_DEFAULT, help=f"log lines in all (default: {ROWS_DEFAULT:,})")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal log lines (default: 1)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the state and the logs")
    parser.add_argument("--no-kill", action="store_true", help="let all workers live")
    return parser


if __name__ == "__main__":
    sys.exit(main())
