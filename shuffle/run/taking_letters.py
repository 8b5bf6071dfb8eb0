"""Taking dead letters from a queue that an exporter empties, too: ``replay`` and ``drop``.

A row must go one way only: outside, or to where the command takes it. The exporter's row in the store says which rows
are outside, and whether any may be that the store does not know of. So a command takes rows only while nothing is under
way, and moves the exporter's position past them in the transaction that trims them. Whichever of the two commits first,
the other finds the row changed, and its transaction is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from shuffle.durable.export_state import ExportState
from shuffle.durable.tables import dead_letter_exporters_group, dead_letter_exports_table
from shuffle.errors import BadInput, UnknownTable
from shuffle.ids import new_guid
from shuffle.statestore.client.queue_consumers import CONSUMERS_KEY, CONSUMERS_TABLE, create_consumers_table

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction


def refuse_beside_exporter(client: StateClient, processor: str, queue: str) -> None:
    """``BadInput`` if an exporter of the processor works on the queue."""
    if client.leases.members(dead_letter_exporters_group(processor, queue)):
        raise BadInput(
            f"an exporter moves the rows of {queue} to the place that the spec names (dead_letters): stop it first "
            "(`shuffle run` and `shuffle exporter` end cleanly with Ctrl-C or SIGTERM)",
            queue=queue,
        )


def note_taken(client: StateClient, tx: Transaction, queue: str, partition: int, after: int) -> None:
    """Add to ``tx``, which trims a dead-letter queue up to ``after``, what an exporter must know of it.

    ``BadInput`` if some of these rows may be outside already.
    """
    table, key = dead_letter_exports_table(queue), ExportState.key(partition)
    try:
        found = ExportState.from_rows(client.lookup(table, key))
    except UnknownTable:
        _expect_no_first_exporter(client, tx, queue)
        return
    if found is None:
        tx.expect_absent(table, key)
        return
    if found.in_flight_end is not None:
        raise BadInput(
            f"rows of {queue}, partition {partition}, from {found.position} on may be in {found.sink} already: the "
            "exporter was killed, or runs. Start it again, let it end cleanly (Ctrl-C, SIGTERM), and repeat this",
            queue=queue,
            position=found.position,
        )
    tx.expect(table, found.to_row(partition))
    taken = replace(found, owner=new_guid(), position=max(after, found.position))
    tx.write(table, taken.to_row(partition))


def _expect_no_first_exporter(client: StateClient, tx: Transaction, queue: str) -> None:
    """No exporter has worked on the queue yet. One that starts meanwhile registers as its consumer before it reads."""
    key = pa.table([[queue]], schema=CONSUMERS_KEY)
    create_consumers_table(client)
    registered = client.lookup(CONSUMERS_TABLE, key)
    if registered.num_rows:
        tx.expect(CONSUMERS_TABLE, registered)
    else:
        tx.expect_absent(CONSUMERS_TABLE, key)
