"""``shuffle state …``: shows what is in a store, to people and, with ``--json``, to programs.

Only ``release`` and ``drop`` change anything. No command holds more than one batch of a table or a queue in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shuffle.durable.tables import mappers_group
from shuffle.errors import BadInput, ShuffleError, StoreUnavailable, UnknownTable
from shuffle.statestore.admin.text import QueueRows, TextRows, json_rows, parse_bound, printable
from shuffle.statestore.client.queue_consumers import queue_consumers, release_consumer
from shuffle.statestore.codec.column_types import is_text_or_bytes
from shuffle.support.exit_codes import EXIT_BROKEN_PIPE
from shuffle.support.slow_wait import announce_slow
from shuffle.support.units import rough_size

if TYPE_CHECKING:
    import pyarrow as pa

    from shuffle.statestore.client.client import StateClient
    from shuffle.statestore.codec.schema import QueueSchema, TableSchema

PIPE_WIDTH = 160
"""The width in characters of output that does not go to a terminal: wide enough that lines are seldom folded."""


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of ``shuffle state`` to ``parser``."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="state_command", required=True)

    def add(name: str, what: str, example: str | None = None) -> argparse.ArgumentParser:
        epilog = f"example: shuffle state {example}" if example else None
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", epilog=epilog)
        command.add_argument("store", metavar="STORE", help="the store's folder, or the daemon's grpc://host:port")
        command.add_argument("--json", action="store_true", help="as JSON")
        return command

    add("ls", "list tables and queues")
    add("describe", "show the columns and constraints of a table, or the partitions of a queue").add_argument(
        "name", metavar="NAME", help="a table or a queue"
    )
    scan = add("scan", "print the rows of a table in the order of their keys")
    scan.add_argument("table", metavar="TABLE", help="the table")
    bound = "leading key values: a,5 or a JSON array"
    scan.add_argument(
        "--prefix", metavar="KEY", help=f"only keys that begin so; {bound}. Of a string, its beginning is enough"
    )
    scan.add_argument("--begin", metavar="KEY", help=f"from here on (included); {bound}")
    scan.add_argument("--end", metavar="KEY", help=f"up to here (excluded); {bound}")
    scan.add_argument("--limit", metavar="N", type=_count_argument, help="at most N rows")
    scan.add_argument("--reverse", action="store_true", help="the last key first")
    scan.add_argument("--columns", metavar="A,B", help="only these columns")
    add("queues", "show where each partition of each queue begins and ends").add_argument(
        "name", metavar="QUEUE", nargs="?", help="only this one"
    )
    read = add("read", "print rows of a queue", "read ./job.state logs --partition 1 --begin 5000 --rows 10 --json")
    read.add_argument("queue", metavar="QUEUE")
    read.add_argument("--partition", metavar="N", type=_count_argument, help="only this one (default: all, in order)")
    read.add_argument(
        "--begin", metavar="I", type=_count_argument, help="from this position on (default: the first one there is)"
    )
    read.add_argument("--rows", metavar="N", type=_count_argument, default=20, help="at most N rows (default: 20)")
    add("consumers", "show which processor consumes which queue", "consumers ./job.state")
    add(
        "release",
        "forget which processor consumes a queue, so that another one may",
        "release ./job.state logs",
    ).add_argument("queue", metavar="QUEUE")
    drop = add("drop", "delete tables and queues with all their rows, for good", "drop ./job.state job/outbox --yes")
    drop.add_argument("names", metavar="NAME", nargs="+", help="a table or a queue")
    drop.add_argument("--yes", action="store_true", help="do it, and do not only say what would go")
    add("leases", "show who is registered, with attributes").add_argument(
        "group", metavar="GROUP", nargs="?", help="only this one"
    )
    add("stats", "count the bytes written since the store was opened")


def run(args: argparse.Namespace) -> int:
    """Runs the chosen subcommand and returns the exit code. Errors are raised for the caller to report."""
    commands = {
        "ls": _ls,
        "describe": _describe,
        "scan": _scan,
        "queues": _queues,
        "read": _read,
        "consumers": _consumers,
        "release": _release,
        "drop": _drop,
        "leases": _leases,
        "stats": _stats,
    }
    try:
        with open_existing(args.store) as client:
            commands[args.state_command](client, args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output (`head`, a pager) has closed it. Without this Python would report that again at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return 0


def open_existing(store: str) -> StateClient:
    """A client for the address or folder; a folder without a store is refused, where ``open`` would make one."""
    from shuffle.statestore.client.client import StateClient
    from shuffle.statestore.client.open_store import address_forms, folder_of

    folder = folder_of(store)
    if folder is None:
        with announce_slow(f"the state store at {store} to answer"):
            return StateClient.connect(store)
    try:
        exists = (folder / "FORMAT").is_file()
    except PermissionError:
        exists = True  # The store of another user: opening it reports that.
    if not exists:
        raise StoreUnavailable(
            f"there is no state store in {store!r}; give its folder, or {' or '.join(address_forms())} of the daemon",
            store=store,
        )
    with announce_slow(f"the state store in {store} to open"):
        return StateClient.open(store)


# The subcommands -----------------------------------------------------------------------------------------------------


def _ls(client: StateClient, args: argparse.Namespace) -> None:
    tables = sorted(client.tables(), key=lambda table: table.name)
    queues = sorted(client.queues(), key=lambda queue: queue.name)
    if args.json:
        _print_json(
            {"tables": [_table_json(table) for table in tables], "queues": [_queue_json(queue) for queue in queues]}
        )
        return
    shown = _grid("table", "key", "value", "constraints>")
    for table in tables:
        _row(shown, table.name, _columns(table.key), _columns(table.value), len(table.constraints))
    _show(shown, "no tables")
    shown = _grid("queue", "columns", "partitions>")
    for queue in queues:
        _row(shown, queue.name, _columns(queue.schema), queue.partitions)
    _show(shown, "no queues")


def _describe(client: StateClient, args: argparse.Namespace) -> None:
    table = next((table for table in client.tables() if table.name == args.name), None)
    queue = next((queue for queue in client.queues() if queue.name == args.name), None)
    if table is None and queue is None:
        raise UnknownTable(f"no table or queue {args.name!r}; `shuffle state ls` lists them", table=args.name)
    if args.json:
        described = _table_json(table) if table is not None else _queue_json(_known(queue))
        _print_json(described if table is not None else described | {"bounds": client.queue(args.name).bounds()})
        return
    shown = _grid("column", "type", "", title=f"{'table' if table is not None else 'queue'} {args.name}")
    if table is not None:
        for column in table.key:
            _row(shown, column.name, column.type, "key")
        for column in table.value:
            _row(shown, column.name, column.type, "" if column.nullable else "not null")
        _show(shown)
        constraints = _grid("constraint", "expression")
        for name, expression in table.constraints.items():
            _row(constraints, name, expression)
        _show(constraints, "no constraints")
        return
    for column in _known(queue).schema:
        _row(shown, column.name, column.type, "" if column.nullable else "not null")
    _show(shown)
    _show(_bounds_grid([(args.name, client.queue(args.name).bounds())]))


def _scan(client: StateClient, args: argparse.Namespace) -> None:
    """Prints each batch as it arrives: the first rows at once, and never more than one batch in memory."""
    if args.table in {queue.name for queue in client.queues()}:
        raise BadInput(f"{args.table!r} is a queue; `shuffle state read` prints its rows")
    schema = client.table(args.table)
    if args.prefix is not None and (args.begin is not None or args.end is not None):
        raise BadInput("give either --prefix, or --begin and --end")
    bounds = {
        name: parse_bound(text, schema.key, schema.name) if text is not None else None
        for name, text in (("begin", args.begin), ("end", args.end), ("prefix", args.prefix))
    }
    prefix = bounds["prefix"]
    partial = bool(prefix) and is_text_or_bytes(schema.key.field(len(prefix or ()) - 1).type)
    columns = args.columns.split(",") if args.columns else None
    reader = client.scan(
        schema.name,
        begin=bounds["begin"],
        end=bounds["end"],
        prefix=prefix,
        limit=args.limit,
        reverse=args.reverse,
        columns=columns,
        partial=partial,
    )
    rows = TextRows(reader.schema, key_names=schema.key.names)
    count = 0
    for batch in reader:
        count += batch.num_rows
        sys.stdout.write(json_rows(batch) if args.json else rows.text(batch))
        sys.stdout.flush()
    if not args.json and sys.stdout.isatty():
        _console().print(Text(f"{count:,} rows", style="dim"))


def _queues(client: StateClient, args: argparse.Namespace) -> None:
    names = sorted(queue.name for queue in client.queues())
    if args.name is not None:
        if args.name not in names:
            raise UnknownTable(f"no queue {args.name!r}; `shuffle state ls` lists them", table=args.name)
        names = [args.name]
    bounds_by_queue = [(name, client.queue(name).bounds()) for name in names]
    if args.json:
        _print_json(
            {
                name: [{"begin": begin, "end": end, "rows": end - begin} for begin, end in bounds]
                for name, bounds in bounds_by_queue
            }
        )
        return
    _show(_bounds_grid(bounds_by_queue), "no queues")


def _read(client: StateClient, args: argparse.Namespace) -> None:
    """Prints rows with their positions, partition by partition, with never more than one response in memory."""
    queue = client.queue(args.queue)
    bounds = queue.bounds()
    if args.begin is not None and args.partition is None and len(bounds) > 1:
        raise BadInput(f"positions count in one partition: give --partition, from 0 to {len(bounds) - 1}")
    if args.partition is not None and args.partition >= len(bounds):
        raise BadInput(f"queue {args.queue!r} has the partitions 0 to {len(bounds) - 1}, not {args.partition}")
    left = args.rows
    shown = QueueRows(queue.schema)
    for partition in range(len(bounds)) if args.partition is None else [args.partition]:
        position = bounds[partition][0] if args.begin is None else args.begin
        while left:
            rows, after = queue.read(partition, position, max_rows=left, one_answer=True)
            if not rows.num_rows:
                break
            for batch in rows.to_batches():
                sys.stdout.write((shown.json if args.json else shown.text)(partition, position, batch))
                position += batch.num_rows
            sys.stdout.flush()
            left -= rows.num_rows
            position = after


def _consumers(client: StateClient, args: argparse.Namespace) -> None:
    consumers = queue_consumers(client)
    if args.json:
        _print_json(consumers)
        return
    shown = _grid("queue", "consumer")
    for queue, consumer in sorted(consumers.items()):
        _row(shown, queue, consumer)
    _show(shown, "no queue has a consumer")


def _release(client: StateClient, args: argparse.Namespace) -> None:
    consumer = queue_consumers(client).get(args.queue)
    if consumer is None:
        raise BadInput(f"the queue {args.queue!r} has no consumer; `shuffle state consumers` lists those that have")
    if client.leases.members(mappers_group(consumer)):
        raise BadInput(f"the processor {consumer!r} is running and would go on consuming {args.queue!r}: stop it first")
    release_consumer(client, args.queue)
    if args.json:
        _print_json({"queue": args.queue, "released": consumer})
        return
    print(f"{args.queue}: released from the processor {consumer}; the next one that starts on it becomes its consumer")


def _drop(client: StateClient, args: argparse.Namespace) -> None:
    tables = {table.name for table in client.tables()}
    queues = {queue.name: queue for queue in client.queues()}
    names = list(dict.fromkeys(args.names))
    for name in names:
        if name not in tables and name not in queues:
            raise UnknownTable(f"no table or queue {name!r}; `shuffle state ls` lists them", table=name)
        if (processor := _running_user(client, name)) is not None:
            raise BadInput(f"the processor {processor!r} is running and uses {name!r}: stop it first", table=name)
    lines = [
        f"the queue {name}, with {sum(end - begin for begin, end in client.queue(name).bounds()):,} rows"
        if name in queues
        else f"the table {name}"
        for name in names
    ]
    if not args.yes:
        raise BadInput(f"this would delete {'; '.join(lines)}. Nothing was done; to do it, say --yes")
    for name in names:
        (client.drop_queue if name in queues else client.drop_table)(name)
    if args.json:
        _print_json({"dropped": names})
        return
    for line in lines:
        print(f"dropped {line}")


def _running_user(client: StateClient, name: str) -> str | None:
    """The processor whose table or queue it is, or that consumes the queue, if a worker of it is registered."""
    consumer = queue_consumers(client).get(name)
    for group in client.leases.groups():
        processor = group.rpartition("/")[0]
        is_user = name.startswith(f"{processor}/") or consumer in (processor, group)
        if processor and is_user and client.leases.members(group):
            return processor
    return None


def _leases(client: StateClient, args: argparse.Namespace) -> None:
    groups = [args.group] if args.group is not None else client.leases.groups()
    members_by_group = {group: client.leases.members(group) for group in groups}
    if args.json:
        _print_json(
            {
                group: [{"name": member.name, "attributes": dict(member.attributes)} for member in members]
                for group, members in members_by_group.items()
            }
        )
        return
    shown = _grid("group", "member", "attributes")
    for group, members in members_by_group.items():
        for member in members:
            _row(shown, group, member.name, "  ".join(f"{name}={value}" for name, value in member.attributes.items()))
    _show(shown, "no members")


def _stats(client: StateClient, args: argparse.Namespace) -> None:
    stats = client.stats()
    if args.json:
        _print_json(stats)
        return
    for kind in ("table", "queue"):
        entries: Mapping[str, Mapping[str, Any]] = stats.get(f"{kind}s", {})
        names = list(dict.fromkeys(name for entry in entries.values() for name in entry))
        shown = _grid(kind, *(f"{_heading(name)}>" for name in names))
        for entry_name, entry in sorted(entries.items()):
            _row(shown, entry_name, *(_amount(name, entry.get(name)) for name in names))
        _show(shown, f"no {kind}s")
    shown = _grid("in all", "since the store was opened>")
    for name, value in stats.get("total", {}).items():
        _row(shown, _heading(name), _amount(name, value))
    _show(shown)


# How things are shown ------------------------------------------------------------------------------------------------


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raises instead of ending the process, as Rich would: ``run`` ends it with its own exit code."""
        raise BrokenPipeError


def _console() -> Console:
    return _Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _grid(*columns: str, title: str | None = None) -> Table:
    """An empty table; a column whose name ends in ``>`` is aligned to the right, for numbers."""
    shown = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left"
    )
    for name in columns:
        shown.add_column(Text(name.rstrip(">")), justify="right" if name.endswith(">") else "left", overflow="fold")
    return shown


def _row(shown: Table, *cells: Any) -> None:
    """Adds cells as plain text: stored text must neither be taken for markup nor reach the terminal as commands."""
    shown.add_row(*(Text(printable(f"{cell:,}" if isinstance(cell, int) else str(cell))) for cell in cells))


def _show(shown: Table, if_empty: str | None = None) -> None:
    console = _console()
    console.print(shown if shown.row_count or if_empty is None else Text(if_empty, style="dim"))
    console.print()


def _bounds_grid(bounds_by_queue: Sequence[tuple[str, Sequence[tuple[int, int]]]]) -> Table:
    shown = _grid("queue", "partition>", "begin>", "end>", "rows>")
    for name, bounds in bounds_by_queue:
        for partition, (begin, end) in enumerate(bounds):
            _row(shown, name, partition, begin, end, end - begin)
    return shown


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in schema)


def _heading(name: str) -> str:
    return name.replace("_", " ")


def _amount(name: str, value: Any) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        return "-" if value is None else str(value)
    return rough_size(value) if "bytes" in name else f"{value:,}"


def _table_json(table: TableSchema) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(table.to_json())
    return {"kind": "table", **described}


def _queue_json(queue: QueueSchema) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(queue.to_json())
    return {"kind": "queue", **described}


def _known(queue: QueueSchema | None) -> QueueSchema:
    if queue is None:
        raise ShuffleError("a queue vanished while it was looked at; try again")
    return queue


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def _count_argument(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value
