"""Fill a queue with activity logs.

    python -m shuffle.examples.generate --state DIR --queue logs --partitions 4 --rows N --seed S

Creates the queue if it is not there. The rows depend on the seed alone, so that a run can be repeated and checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shuffle.errors import ShuffleError
from shuffle.examples.workload import BATCH_ROWS_DEFAULT, SCHEMA, Workload, partition_rows
from statestore import StateClient


def open_state(where: str) -> StateClient:
    """A client for ``grpc://host:port`` or for a folder."""
    return StateClient.open(where)


def fill(
    state: StateClient,
    queue_name: str,
    workload: Workload,
    rows: int,
    partitions: int,
    batch_rows: int = BATCH_ROWS_DEFAULT,
    on_batch: Callable[[int, pa.Table], None] = lambda _partition, _batch: None,
) -> int:
    """Append ``rows`` rows, spread evenly over the partitions, a batch to each in turn. Returns their Arrow bytes."""
    state.create_queue(queue_name, schema=SCHEMA, partitions=partitions, if_not_exists=True)
    queue = state.queue(queue_name)
    bytes_total = 0
    pending = [
        (partition, workload.batches(share, batch_rows, partition))
        for partition, share in enumerate(partition_rows(rows, partitions))
    ]
    while pending:
        still = []
        for partition, batches in pending:
            batch = next(batches, None)
            if batch is None:
                continue
            queue.append(partition, batch)
            bytes_total += batch.nbytes
            on_batch(partition, batch)
            still.append((partition, batches))
        pending = still
    return bytes_total


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeElapsedColumn(),
        console=console,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shuffle.examples.generate", description="Fill a queue with activity logs."
    )
    parser.add_argument("--state", required=True, help="a folder, or grpc://host:port of a state store")
    parser.add_argument("--queue", default="logs", help="the queue to append to (default: logs)")
    parser.add_argument("--partitions", type=int, default=4, help="partitions of a new queue (default: 4)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows in all (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal rows (default: 1)")
    parser.add_argument("--users", type=int, default=5000)
    parser.add_argument("--clusters", type=int, default=5)
    parser.add_argument("--skew", choices=["thesis", "uniform"], default="thesis")
    parser.add_argument("--with-user-share", type=float, default=0.15, help="part of the lines with a user")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        workload = Workload(args.seed, args.users, args.clusters, args.skew, args.with_user_share)
        with open_state(args.state) as state, progress_bar(console) as progress:
            task = progress.add_task(f"filling {args.queue}", total=args.rows)
            fill(
                state,
                args.queue,
                workload,
                args.rows,
                args.partitions,
                on_batch=lambda _, batch: progress.advance(task, batch.num_rows),
            )
            bounds = state.queue(args.queue).bounds()
    except (ShuffleError, ValueError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    for partition, (begin, end) in enumerate(bounds):
        print(f"{args.queue}[{partition}]: rows {begin} to {end}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
