"""``shuffle exporter SPEC --index I --position N``: a person says what is outside, after a position was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shuffle.durable.export_state import ExportState
from shuffle.durable.tables import exporters_group
from shuffle.errors import BadInput, OutOfRange
from shuffle.ids import new_guid
from shuffle.spec.config import ProcessorSpec


def set_position(spec: ProcessorSpec, partitions: Sequence[int] | None, position: int) -> str:
    """Write the row of one partition: everything before ``position`` is outside, and nothing is under way.

    Returns a line for people. Raises ``BadInput`` while an exporter runs, and ``OutOfRange`` for rows that the outbox
    does not have.
    """
    if partitions is None or len(partitions) != 1:
        raise BadInput("--position needs --index with one partition of the outbox")
    [partition] = partitions
    with spec.open_state() as client:
        running = client.leases.members(exporters_group(spec.processor))
        if any(member.attributes.get("index") == str(partition) for member in running):
            raise BadInput(
                f"exporter {partition} of {spec.processor} runs: stop it first, or wait for its lease to end"
            )
        begin, end = client.queue(spec.outbox).bounds()[partition]
        if not begin <= position <= end:
            raise OutOfRange(
                f"partition {partition} of the outbox has the rows from {begin} up to {end}: --position must be one of "
                "them, or the end",
                position=position,
            )
        found = ExportState.from_rows(client.lookup(spec.exports_table, ExportState.key(partition)))
        if found is None:
            raise BadInput(f"no exporter has ever worked on partition {partition}: there is nothing to repair")
        state = replace(found, owner=new_guid(), position=position, in_flight_end=None)
        with client.transaction() as tx:
            tx.expect(spec.exports_table, found.to_row(partition))
            tx.write(spec.exports_table, state.to_row(partition))
            tx.trim(spec.outbox, partition, position)
            tx.commit()
    return f"{spec.processor}: exporter {partition} goes on at {position}, it was at {found.position}"
