"""``shuffle exporter SPEC --index I --position N``: a person says what is outside, after a position was lost."""

from __future__ import annotations

from dataclasses import replace

from shuffle.durable.export_state import ExportState
from shuffle.errors import BadInput, OutOfRange
from shuffle.ids import new_guid
from shuffle.reducer.exporter.chosen import Chosen
from shuffle.spec.config import ProcessorSpec


def set_position(spec: ProcessorSpec, chosen: Chosen, position: int) -> str:
    """Write the row of one partition: everything before ``position`` is outside, and nothing is under way.

    Returns a line for people. Raises ``BadInput`` while an exporter runs, and ``OutOfRange`` for rows that the queue
    does not have.
    """
    chosen.check(spec)
    if chosen.indexes is None or len(chosen.indexes) != 1:
        raise BadInput("--position needs --index with one partition of the outbox, or of a queue of dead letters")
    [route] = chosen.routes(spec)
    [partition] = chosen.indexes
    with spec.open_state() as client:
        running = client.leases.members(route.group)
        if any(member.attributes.get("index") == str(partition) for member in running):
            raise BadInput(
                f"exporter {route.worker(partition)} of {spec.processor} runs: stop it first, or wait for its "
                "lease to end"
            )
        bounds = client.queue(route.queue).bounds()
        if not 0 <= partition < len(bounds):
            raise OutOfRange(f"{route.queue} has no partition {partition}, only {len(bounds)}, counted from 0")
        begin, end = bounds[partition]
        if not begin <= position <= end:
            raise OutOfRange(
                f"partition {partition} of {route.queue} has the rows from {begin} up to {end}: --position must be one "
                "of them, or the end",
                position=position,
            )
        found = ExportState.from_rows(client.lookup(route.table, ExportState.key(partition)))
        if found is None:
            raise BadInput(f"no exporter has ever worked on partition {partition}: there is nothing to repair")
        state = replace(found, owner=new_guid(), position=position, in_flight_end=None)
        with client.transaction() as tx:
            tx.expect(route.table, found.to_row(partition))
            tx.write(route.table, state.to_row(partition))
            tx.trim(route.queue, partition, position)
            tx.commit()
    return f"{spec.processor}: exporter {route.worker(partition)} goes on at {position}, it was at {found.position}"
