"""A queue of the state store as an output: reducer i appends to partition i."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.errors import SpecError
from shuffle.reducer.outputs.output import Output
from shuffle.support.suggest import did_you_mean

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction

QUEUES_SHOWN_MAX = 10


class QueueOutput(Output):
    """Each partition has one writer, so rows of one reducer are in the order in which it has committed them."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        super().__init__(config, folder)
        self.queue = str(config["queue"])

    def prepare(self, client: StateClient, reducer_count: int) -> None:
        queues = {queue.name: queue for queue in client.queues()}
        if self.queue not in queues:
            raise SpecError(
                f"there is no queue {self.queue!r}{_similar(self.queue, sorted(queues))} Create it before the start, "
                f"with the schema of the rows that are emitted: StateClient.create_queue({self.queue!r}, schema, "
                f"partitions={reducer_count})",
                queue=self.queue,
            )
        found = int(queues[self.queue].partitions)
        if found != reducer_count:
            raise SpecError(
                f"the queue {self.queue!r} has {found} partitions and the processor {reducer_count} reducers. It needs "
                "one for each, as reducer i appends to partition i: create another queue with "
                f"partitions={reducer_count}",
                queue=self.queue,
            )

    def emit(self, tx: Transaction, reducer_index: int, rows: pa.Table | pa.RecordBatch) -> None:
        tx.append(self.queue, reducer_index, rows)


def _similar(name: str, known: list[str]) -> str:
    there = f"; there are {', '.join(known[:QUEUES_SHOWN_MAX])}." if known else "; the store has no queue yet."
    return did_you_mean(name, known, there)
