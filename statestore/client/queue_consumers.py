"""The consumers of queues: at most one processor for each queue, registered in the store.

A processor trims the rows that it has committed, so a second one on the same queue would silently miss rows. Therefore
each registers as the queue's consumer in the transaction in which it first writes its own state, and a queue
that has another consumer is refused.

The registration names the queue by its id as well. Ids are never used twice, so a queue that was dropped and created
anew under its name has no consumer, whoever dropped it. Several consumers of one queue, each with a position of its
own, would need another table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa

from shuffle.errors import BadInput, CommitConflict, UnknownTable

if TYPE_CHECKING:
    from shuffle.statestore.client.client import StateClient
    from shuffle.statestore.client.transaction import Transaction

CONSUMERS_TABLE = "store/queue_consumers"
"""The table of registrations. No processor has one of this name: theirs end in mappers, reducers, spills and meta."""

CONSUMERS_KEY = pa.schema([pa.field("queue", pa.string(), nullable=False)])
CONSUMERS_VALUE = pa.schema(
    [pa.field("queue_id", pa.int64(), nullable=False), pa.field("consumer", pa.string(), nullable=False)]
)
_ROW = pa.schema([*CONSUMERS_KEY, *CONSUMERS_VALUE])


def create_consumers_table(client: StateClient) -> None:
    client.create_table(CONSUMERS_TABLE, key=CONSUMERS_KEY, value=CONSUMERS_VALUE, if_not_exists=True)


def queue_consumers(client: StateClient, tx: Transaction | None = None) -> dict[str, str]:
    """The consumer of each queue that has one, as of now, or as ``tx`` sees it."""
    ids = _queue_ids(client)
    try:
        rows = (tx or client).scan(CONSUMERS_TABLE).read_all().to_pylist()
    except UnknownTable:  # No processor has registered in this store yet.
        return {}
    return {row["queue"]: row["consumer"] for row in rows if ids.get(row["queue"]) == row["queue_id"]}


def register_consumer(client: StateClient, tx: Transaction, consumer: str, queue: str | None) -> bool:
    """Register in ``tx`` that ``consumer`` consumes only ``queue`` (None: no queue); returns whether anything changes.

    The caller checks that the queue has no other consumer, with ``queue_consumers`` in the same ``tx``.
    """
    requested = {} if queue is None else {queue: _queue_ids(client)[queue]}
    rows = tx.scan(CONSUMERS_TABLE).read_all().to_pylist()
    held = {row["queue"]: row["queue_id"] for row in rows if row["consumer"] == consumer}
    if held == requested:
        return False
    if held:
        tx.delete(CONSUMERS_TABLE, _keys(held))
    if queue is not None:
        tx.write(CONSUMERS_TABLE, pa.table([[queue], [requested[queue]], [consumer]], schema=_ROW))
    return True


def reserve_queue(client: StateClient, consumer: str, queue: str) -> None:
    """Register ``consumer`` for ``queue`` in a transaction of its own, unless it is; ``BadInput`` if the queue has
    another one. ``UnknownTable`` if there is no such queue."""
    while queue_consumers(client).get(queue) != consumer:
        with client.transaction() as tx:
            found = queue_consumers(client, tx).get(queue)
            if found is not None and found != consumer:
                raise BadInput(
                    f"the queue {queue!r} is consumed by {found!r}: if that is over for good, run `shuffle state "
                    f"release STORE {queue}`",
                    queue=queue,
                )
            try:
                register_consumer(client, tx, consumer, queue)
                tx.commit()
            except KeyError:
                raise UnknownTable(f"there is no queue {queue!r}", table=queue) from None
            except CommitConflict:
                continue  # Another one registers for another queue at the same time.


def release_consumer(client: StateClient, queue: str) -> None:
    """Remove the registration of a queue; the next processor that starts on it registers."""
    with client.transaction() as tx:
        tx.delete(CONSUMERS_TABLE, _keys([queue]))
        tx.commit()


def _queue_ids(client: StateClient) -> dict[str, int]:
    """The ids of all queues, read from the store each time: a handle may be of a queue that was dropped since."""
    return {queue.name: queue.queue_id for queue in client.queues()}


def _keys(queues: Iterable[str]) -> pa.Table:
    return pa.table([list(queues)], schema=CONSUMERS_KEY)
