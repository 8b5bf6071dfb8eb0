"""The outbox: the queue in which rows wait on their way to a place outside of the state store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from shuffle.errors import SpecError, TableExists
from shuffle.reducer.outputs.output import Output

if TYPE_CHECKING:
    from shuffle.spec.config import ProcessorSpec
    from shuffle.statestore import StateClient, Transaction


class OutboxOutput(Output):
    """Reducer i appends to partition i; the exporter carries the rows on, and trims them.

    The queue belongs to the processor. It is created with the columns of the first rows that any reducer emits.
    """

    def __init__(self, spec: ProcessorSpec, client: StateClient) -> None:
        assert spec.output is not None
        super().__init__(spec.output.config, spec.path.parent)
        self._outbox = spec.outbox
        self._client = client
        self._partitions = spec.reducer.count
        self._is_there = False

    def prepare(self, client: StateClient, reducer_count: int) -> None:
        self._check(client)

    def emit(self, tx: Transaction, reducer_index: int, rows: pa.Table | pa.RecordBatch) -> None:
        if not self._is_there and not self._check(self._client):
            self._create(rows.schema)
        self._is_there = True
        tx.append(self._outbox, reducer_index, rows)

    def _check(self, client: StateClient) -> bool:
        """Whether the queue is there; ``SpecError`` if it was made for another number of reducers."""
        found = [int(queue.partitions) for queue in client.queues() if queue.name == self._outbox]
        if found and found[0] != self._partitions:
            raise SpecError(
                f"the outbox {self._outbox!r} has {found[0]} partitions and the processor {self._partitions} reducers. "
                "It needs one for each: let the exporter empty it, and drop it then, as docs/outputs.md says (`shuffle "
                f"state drop STORE {self._outbox} … --yes`)",
                queue=self._outbox,
            )
        return bool(found)

    def _create(self, schema: pa.Schema) -> None:
        # Whether a column may be null is not known from the first rows alone.
        columns = pa.schema([pa.field(field.name, field.type) for field in schema])
        try:
            self._client.create_queue(self._outbox, columns, self._partitions, if_not_exists=True)
        except TableExists:
            # Another reducer was first, with other columns: the append says which.
            self._check(self._client)
