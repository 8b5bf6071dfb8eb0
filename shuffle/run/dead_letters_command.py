"""``shuffle dead-letters SPEC …``: list, show, replay and drop the rows that a processor has set aside."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from shuffle.errors import BadInput, ShuffleError
from shuffle.run.dead_letters import (
    ROLES,
    DeadLetter,
    DeadLetterQueue,
    Replay,
    dead_letter_queues,
    dead_letter_summary,
    drop,
    newest_dead_letter,
    read_dead_letters,
)
from shuffle.run.run_lock import hold_run_lock
from shuffle.run.store_service import open_client, require_store
from shuffle.spec.config import load_spec
from shuffle.statestore.admin.text import json_line, json_values, printable
from shuffle.support.slow_wait import say_on_stderr

if TYPE_CHECKING:
    from shuffle.spec.config import ProcessorSpec
    from shuffle.statestore import StateClient

SHOWN_ROWS_DEFAULT = 20
"""The number of rows that ``show`` prints unless ``--rows`` is given."""


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Adds the actions of ``shuffle dead-letters SPEC``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)

    def add(name: str, what: str, example: str) -> argparse.ArgumentParser:
        action = actions.add_parser(
            name, help=what, description=what[0].upper() + what[1:] + ".", epilog=f"example: shuffle {example}"
        )
        action.add_argument("--role", choices=ROLES, help="only rows that map (mapper) or reduce (reducer) refused")
        return action

    listed = add("list", "count them, with the newest error of each queue", "dead-letters job.yaml list")
    shown = add("show", "print them: where from, the error, the row", "dead-letters job.yaml show --rows 5 --json")
    shown.add_argument(
        "--rows", type=_count, default=SHOWN_ROWS_DEFAULT, metavar="N", help="at most N rows (default: %(default)s)"
    )
    for action in (listed, shown):
        action.add_argument("--json", action="store_true", help="as JSON")
    add(
        "replay",
        "append rows that map refused to the input again, and reduce again those that reduce refused",
        "dead-letters job.yaml replay --role mapper",
    )
    add("drop", "give them up for good", "dead-letters job.yaml drop --yes").add_argument(
        "--yes", action="store_true", help="do it, and do not only say what would be dropped"
    )


def run(options: argparse.Namespace) -> int:
    spec = load_spec(options.spec)
    require_store(spec)
    actions = {"list": _list, "show": _show, "replay": _replay, "drop": _drop}
    with ExitStack() as stack:
        if options.action == "replay" and options.role != "mapper":
            # Checked first: if no reducer has set rows aside, the processor may go on running.
            with open_client(spec) as client:
                waiting = [queue for queue in dead_letter_queues(spec, client, "reducer") if queue.rows]
            if waiting:
                stack.enter_context(hold_run_lock(spec, say_on_stderr))
        client = stack.enter_context(open_client(spec))
        actions[options.action](spec, client, options)
    sys.stdout.flush()
    return 0


def _list(spec: ProcessorSpec, client: StateClient, options: argparse.Namespace) -> None:
    queues = [
        (queue, newest_dead_letter(client, queue.queue)) for queue in dead_letter_queues(spec, client, options.role)
    ]
    if options.json:
        print(json.dumps([{**asdict(queue), "newest": _plain(last)} for queue, last in queues], indent=2))
        return
    if not any(queue.rows for queue, _ in queues):
        print(f"{spec.processor}: no dead letters")
    for queue, last in queues:
        if last is not None:
            print(f"{queue.queue}: {queue.rows:,} rows ({queue.rows_ever:,} ever)")
            print(f"  newest: {last.origin}: {printable(last.fields['reason'])}")


def _plain(dead_letter: DeadLetter | None) -> dict[str, Any] | None:
    """The columns of a dead letter and its position in the queue, without the row itself."""
    if dead_letter is None:
        return None
    known = {name: value for name, value in dead_letter.fields.items() if name not in ("row", "position")}
    position = {"queue": dead_letter.queue, "partition": dead_letter.partition, "position": dead_letter.position}
    return {**position, **known, "origin_position": dead_letter.fields["position"]}


def _show(spec: ProcessorSpec, client: StateClient, options: argparse.Namespace) -> None:
    dead_letters = (row for queue in dead_letter_queues(spec, client) for row in read_dead_letters(client, queue.queue))
    selected = (row for row in dead_letters if options.role in (None, row.fields["role"]))
    for dead_letter in islice(selected, options.rows):
        try:
            row: dict[str, Any] | str = json_values(dead_letter.original().combine_chunks().to_batches()[0])[0]
        except ShuffleError as error:
            row = f"cannot be read: {error}"
        if options.json:
            sys.stdout.write(json_line({**(_plain(dead_letter) or {}), "row": row}))
            continue
        print(
            f"{dead_letter.queue}, partition {dead_letter.partition}, row {dead_letter.position}: {dead_letter.origin}"
        )
        print(f"  {printable(dead_letter.fields['reason'])}")
        sys.stdout.write(f"  {json_line(row) if isinstance(row, dict) else row}")


def _replay(spec: ProcessorSpec, client: StateClient, options: argparse.Namespace) -> None:
    replay = Replay(spec, client)
    queues = _of_one_role(dead_letter_queues(spec, client, options.role), options)
    try:
        for queue in queues:
            replay.run(queue)
    finally:
        done = replay.done
        print(
            f"{spec.processor}: {done.to_input:,} rows are in the input again, {done.reduced:,} were reduced,"
            f" {done.refused:,} were refused again"
        )


def _drop(spec: ProcessorSpec, client: StateClient, options: argparse.Namespace) -> None:
    queues = _of_one_role(dead_letter_queues(spec, client, options.role), options)
    words = dead_letter_summary(queues)
    if words and not options.yes:
        raise BadInput(f"this gives up {words} for good: look with `show`, and add --yes")
    print(f"{spec.processor}: {sum(drop(spec, client, queue.queue) for queue in queues):,} rows dropped")


def _of_one_role(queues: list[DeadLetterQueue], options: argparse.Namespace) -> list[DeadLetterQueue]:
    for queue in queues:
        if options.role is not None and len(queue.roles) > 1:
            raise BadInput(f"mappers and reducers share the queue {queue.queue}: leave --role out to take all of it")
    return queues


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value
