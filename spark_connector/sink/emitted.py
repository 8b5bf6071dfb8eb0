"""Rows that reducers emit to Spark: those that they append to one queue, in the transactions of their positions.

Reducer i appends to partition i of the queue. What a task emits is the part of its partition that the micro-batch has
appended, read back after the micro-batch is committed. The position at which that part begins is stored by the first
commit of the micro-batch that appends anything, in the same transaction. So a task that is run again emits the same
rows, however far the earlier attempt came. Rows of earlier micro-batches are in Spark's log by then, and are trimmed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from shuffle.durable.tables import emitted_table
from shuffle.errors import BadInput, UserCodeError
from shuffle.limits import MIB
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.statestore import Queue, StateClient, Transaction

READ_BYTES = 8 * MIB
"""The most bytes of the queue that one request reads."""

KEY = pa.schema([pa.field("queue", pa.string(), False), pa.field("reducer_index", pa.int32(), False)])
VALUE = pa.schema([pa.field("batch", pa.string(), False), pa.field("begin", pa.int64(), False)])


def prepare(client: StateClient, processor: str, queue: str, reducer_count: int) -> None:
    """Check the option ``emit`` when the query starts, and create the table that is needed for it."""
    target = _queue(client, queue)
    if target.partitions != reducer_count:
        raise BadInput(
            f"the option 'emit': the queue {queue!r} has {target.partitions} partitions and the processor "
            f"{reducer_count} reducers. It needs one for each, as reducer i appends to partition i: create another "
            f"queue with partitions={reducer_count}",
            option="emit",
        )
    if emitted_table(processor) not in {table.name for table in client.tables()}:
        client.create_table(emitted_table(processor), key=KEY, value=VALUE, if_not_exists=True)


def emitted_schema(client: StateClient, queue: str) -> pa.Schema:
    return _queue(client, queue).schema


def _queue(client: StateClient, name: str) -> Queue:
    known = sorted(queue.name for queue in client.queues())
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "the store has none yet"
        raise BadInput(
            f"the option 'emit' names the queue {name!r}, which is not there ({there}): create it, with one partition "
            "for each reducer, before the query starts",
            option="emit",
        )
    return client.queue(name)


@dataclass
class Emission:
    """The rows that one task emits for one micro-batch."""

    store: StoreHandle
    processor: str
    queue: str
    reducer: int
    ends: Mapping[int, int]
    """The end of the micro-batch, a shuffle index for each mapper: it identifies the micro-batch."""
    _begin: int = field(default=0, init=False)

    @property
    def _batch(self) -> str:
        return json.dumps([self.ends[mapper] for mapper in sorted(self.ends)])

    def begin(self) -> None:
        """Remember where the partition ends.

        Call this after the reducer's row was read: commits depend on that row, so as long as they succeed, nobody else
        has appended since.
        """
        self._begin = self.store.with_retries(lambda client: client.queue(self.queue).bounds()[self.reducer][1])

    def add_to(self, tx: Transaction | None) -> None:
        """Add the beginning of the micro-batch's rows to a transaction that is about to be committed.

        1. If the transaction appends nothing, nothing is added.
        2. If an earlier commit of this micro-batch has appended, the beginning is stored already.
        3. Else store the beginning, and trim the rows before it.
        """
        partitions = set() if tx is None else tx.appends_to(self.queue)
        if tx is None or not partitions:  # 1
            return
        if partitions != {self.reducer}:
            raise UserCodeError(
                f"processor {self.processor}, reducer {self.reducer}: reduce has appended to partition "
                f"{min(partitions - {self.reducer})} of the queue {self.queue!r}, which the query hands to Spark: each "
                "reducer appends to its own, tx.append(queue, self.spec.index, rows)",
                processor=self.processor,
                reducer=self.reducer,
            )
        stored = tx.lookup(emitted_table(self.processor), self._key)
        if stored.num_rows and stored["batch"][0].as_py() == self._batch:  # 2
            return
        row = {"batch": pa.array([self._batch]), "begin": pa.array([self._begin], pa.int64())}
        tx.write(emitted_table(self.processor), pa.table({**_columns(self._key), **row}))  # 3
        tx.trim(self.queue, self.reducer, self._begin)

    def rows(self) -> Iterator[pa.RecordBatch]:
        """All rows that the micro-batch has emitted. Call this once all of it is committed."""
        stored = self.store.with_retries(lambda client: client.lookup(emitted_table(self.processor), self._key))
        if not stored.num_rows or stored["batch"][0].as_py() != self._batch:
            return
        position: int = stored["begin"][0].as_py()
        end = self.store.with_retries(lambda client: client.queue(self.queue).bounds()[self.reducer][1])
        while position < end:
            rows, position = self._read(position, end)
            yield from rows.to_batches()

    def _read(self, position: int, end: int) -> tuple[pa.Table, int]:
        return self.store.with_retries(
            lambda client: client.queue(self.queue).read(
                self.reducer, position, max_rows=end - position, max_bytes=READ_BYTES
            )
        )

    @property
    def _key(self) -> pa.Table:
        return pa.table({"queue": [self.queue], "reducer_index": [self.reducer]}, schema=KEY)


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))
