"""The ways out of the state store that a spec asks for: from which queue, to which place, with which positions.

There is one for the outbox, if the output is outside, and one for each dead-letter queue, if ``dead_letters`` is given.
The exporter does not tell them apart: a route says all that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa

from shuffle.durable import tables
from shuffle.errors import UnknownTable
from shuffle.reducer.outputs.letters import readable
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.outputs import OutputSpec

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

MARK = "~"
"""No name of a processor has it, so that what is outside of two of them is never taken for that of one."""


@dataclass(frozen=True, slots=True)
class Route:
    """The way of the rows of one queue to a place outside of the state store."""

    section: str
    """The section of the spec that names the place: ``output`` or ``dead_letters``."""
    output: OutputSpec
    """The place."""
    queue: str
    """The queue of the state store that the rows come from."""
    table: str
    """The table with the positions of the exporters, a row for each partition."""
    group: str
    """The group of leases of the exporters, and the name under which they consume the queue."""
    role: tables.Role | None = None
    """The role that has set the rows aside (the first, if two share the queue); None for the outbox."""
    label: str = ""
    """The name of the queue beside the numbers of its exporters: empty for the outbox."""

    @property
    def is_dead_letters(self) -> bool:
        return self.role is not None

    @property
    def mark(self) -> str:
        """What the place gets to tell positions of this queue from those of others."""
        return MARK + quote(self.label.replace("/", MARK), safe="") if self.label else ""

    def worker(self, partition: int) -> int | str:
        """The name of one exporter, in metrics, logs and the status."""
        return f"{self.label}/{partition}" if self.label else partition

    @property
    def outside(self) -> Callable[[pa.Table], pa.Table]:
        """Makes of rows of the queue the rows that are published."""
        return readable if self.is_dead_letters else _as_they_are

    def waiting_rows(self, client: StateClient) -> list[int]:
        """For each partition, the rows that are not known to be outside; ``UnknownTable`` if there is no queue yet."""
        return [end - begin for begin, end in client.queue(self.queue).bounds()]


def _as_they_are(rows: pa.Table) -> pa.Table:
    return rows


def output_route(spec: ProcessorSpec) -> Route | None:
    """The way of what reducers emit; None if the output is not outside."""
    if spec.output is None or not spec.output.is_outside:
        return None
    group = tables.exporters_group(spec.processor)
    return Route("output", spec.output, spec.outbox, spec.exports_table, group)


def dead_letter_routes(spec: ProcessorSpec) -> list[Route]:
    """The ways of rows that were set aside, one for each queue."""
    if spec.dead_letters is None:
        return []
    return [
        Route(
            "dead_letters",
            spec.dead_letters,
            queue,
            tables.dead_letter_exports_table(queue),
            tables.dead_letter_exporters_group(spec.processor, queue),
            role,
            queue.removeprefix(f"{spec.processor}/"),
        )
        for queue, role in spec.exported_dead_letter_queues.items()
    ]


def routes(spec: ProcessorSpec) -> list[Route]:
    """All ways out of the store, that of the output first."""
    output = output_route(spec)
    return [*([] if output is None else [output]), *dead_letter_routes(spec)]


def exporters_missing(spec: ProcessorSpec, client: StateClient) -> str:
    """A sentence for people if rows are to go outside and no exporter is registered to carry them; else empty."""
    idle = [route for route in routes(spec) if not client.leases.members(route.group)]
    if not idle:
        return ""
    queues = " and ".join(route.queue for route in idle)
    return (
        f"no exporter is registered for {queues}: rows stay there until one runs. `shuffle run SPEC` starts it, with "
        "--mappers-only too; `shuffle exporter SPEC` runs it alone"
    )


def unexported_rows(spec: ProcessorSpec, client: StateClient) -> int:
    """The rows that exporters have yet to carry outside."""
    total = 0
    for route in routes(spec):
        try:
            total += sum(route.waiting_rows(client))
        except UnknownTable:  # Nothing was emitted yet.
            continue
    return total
