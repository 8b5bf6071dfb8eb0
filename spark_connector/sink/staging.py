"""Writing to a queue from many tasks at once: rows are staged by the tasks and published by one transaction.

Staged rows are durable and invisible. Whatever happens to a task (killed, repeated, run twice), only the ids in the one
message of it that Spark accepts are published; the rest is garbage, which the store removes when its time to live ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from shuffle.errors import Expired, ShuffleError
from shuffle.limits import MIB
from shuffle.partition import hash_partition, split_by_partition
from shuffle.spark_connector.schemas import as_schema
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.statestore import Queue, QueueSchema, StateClient, Transaction

SINKS_TABLE = "spark/sinks"
"""The table with the last batch id that each query has published to each queue: a repeated commit finds its batch id
there, and changes nothing."""
SINKS_KEY = pa.schema([pa.field("query", pa.string(), False), pa.field("queue", pa.string(), False)])
SINKS_VALUE = pa.schema([pa.field("batch_id", pa.int64(), False)])

SLICE_BYTES = 8 * MIB
"""The size in bytes of the slices in which rows are partitioned: Spark's batches of some thousand rows are too small
to be fast."""

STAGE_BYTES = 8 * MIB
"""The number of bytes for one partition of the queue that a task gathers before it stages them, in one file. While they
are written, Spark hands over the next rows."""

PENDING_BYTES_MAX = 32 * MIB
"""The most bytes for all partitions together that a task gathers before it stages what it has for each of them."""

STAGES_UNDER_WAY_MAX = 2
"""The most requests to stage rows that a task has under way. While they are, it gathers the next rows."""


@dataclass(frozen=True)
class StagedRows:
    """Rows that wait in the store for one partition of a queue."""

    partition: int
    staged_id: str


@dataclass
class StagedMessage(WriterCommitMessage):
    """The message of a task to the driver, with the ids of the rows that it has staged."""

    query: str
    staged: list[StagedRows]
    rows: int


@dataclass(frozen=True)
class QueueTarget:
    """A queue that is written to, and how its rows are partitioned."""

    store: StoreHandle
    queue: str
    partition_by: tuple[str, ...]
    staged_ttl_ms: int
    schema: pa.Schema
    """The schema of the rows as Spark gives them, with time zones in UTC."""
    partitions: int | None = None
    """The number of partitions with which the queue is created if it does not exist; None if it must exist. The first
    task that has rows for it creates it, so that a query which fails earlier leaves nothing behind."""

    def opened(self, client: StateClient) -> Queue:
        """The queue, which is created if it does not exist."""
        if self.partitions is not None and self.queue not in {queue.name for queue in client.queues()}:
            new = new_queue(self.queue, self.schema, self.partitions)
            return client.create_queue(new.name, new.schema, new.partitions, if_not_exists=True)
        return client.queue(self.queue)

    def prepare(self) -> None:
        """Create the queue and the table that a commit needs, also for a commit without a single row."""

        def call(client: StateClient) -> None:
            client.refresh()
            self.opened(client)
            if SINKS_TABLE not in {table.name for table in client.tables()}:
                create_sinks_table(client)

        self.store.with_retries(call)

    def stage(self, batches: Iterator[pa.RecordBatch], first_partition: int) -> tuple[list[StagedRows], int]:
        """Stage the rows of one task. Without ``partition_by``, slices go to the partitions in turn."""
        self.store.with_retries(StateClient.refresh)
        staging = _Staging(self, first_partition)
        try:
            for table in _slices(batches, self.schema):
                staging.add(table)
            return staging.finish(), staging.rows
        except BaseException:
            staging.give_up()
            raise

    def discard(self, staged: Iterable[StagedRows]) -> None:
        """Discard staged rows. Best effort: the store removes the others when their time to live ends."""
        with suppress(ShuffleError):
            queue = self.store.client().queue(self.queue)
            for rows in staged:
                queue.discard(rows.staged_id)


class _Staging:
    """Partitions and stages the rows of one task."""

    def __init__(self, target: QueueTarget, first_partition: int) -> None:
        self._target = target
        # If the option gives a number, an existing queue was checked to have it, and a new one is created with it.
        self._partitions = target.partitions or target.store.with_retries(lambda c: c.queue(target.queue).partitions)
        self._next = first_partition
        self._pending: dict[int, list[pa.Table]] = {}
        self._pending_bytes: dict[int, int] = {}
        self._pool = ThreadPoolExecutor(STAGES_UNDER_WAY_MAX, thread_name_prefix="stage")
        self._under_way: list[Future[StagedRows]] = []
        self._done: list[StagedRows] = []
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        self.rows += table.num_rows
        for partition, rows in self._partitioned(table):
            self._pending.setdefault(partition, []).append(rows)
            self._pending_bytes[partition] = self._pending_bytes.get(partition, 0) + rows.nbytes
        all_of_them = sum(self._pending_bytes.values()) >= PENDING_BYTES_MAX
        for partition, size_bytes in sorted(self._pending_bytes.items()):
            if all_of_them or size_bytes >= STAGE_BYTES:
                self._flush(partition)

    def _partitioned(self, table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        if not self._target.partition_by:
            yield self._next % self._partitions, table
            self._next += 1
            return
        indexes = hash_partition(table, self._target.partition_by, self._partitions).partition_indexes
        for partition, (batch, _) in enumerate(split_by_partition(table, indexes, self._partitions)):
            if batch is not None:
                yield partition, pa.Table.from_batches([batch])

    def _flush(self, partition: int) -> None:
        rows = pa.concat_tables(self._pending.pop(partition))
        del self._pending_bytes[partition]
        while len(self._under_way) >= STAGES_UNDER_WAY_MAX:
            self._done.append(self._under_way.pop(0).result())
        self._under_way.append(self._pool.submit(self._stage, partition, rows))

    def _stage(self, partition: int, rows: pa.Table) -> StagedRows:
        target = self._target
        staged_id = target.store.with_retries(
            lambda client: target.opened(client).stage(rows, ttl_ms=target.staged_ttl_ms)
        )
        return StagedRows(partition, staged_id)

    def finish(self) -> list[StagedRows]:
        for partition in sorted(self._pending):
            self._flush(partition)
        while self._under_way:
            self._done.append(self._under_way.pop(0).result())
        self._pool.shutdown()
        return self._done

    def give_up(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for future in self._under_way:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._done.append(future.result())
        self._target.discard(self._done)


def _slices(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    gathered: list[pa.RecordBatch] = []
    gathered_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        gathered.append(as_schema(batch, schema))
        gathered_bytes += batch.nbytes
        if gathered_bytes >= SLICE_BYTES:
            yield pa.Table.from_batches(gathered, schema)
            gathered, gathered_bytes = [], 0
    if gathered:
        yield pa.Table.from_batches(gathered, schema)


def new_queue(name: str, rows: pa.Schema, partitions: int) -> QueueSchema:
    """The schema of a queue for such rows. All columns are nullable: those of a later query may have nulls."""
    return QueueSchema(name, pa.schema([field.with_nullable(True) for field in rows]), partitions)


def create_sinks_table(client: StateClient) -> None:
    client.create_table(SINKS_TABLE, key=SINKS_KEY, value=SINKS_VALUE, if_not_exists=True)


def publish(target: QueueTarget, query: str, batch_id: int, staged: Sequence[StagedRows]) -> bool:
    """Make staged rows visible, once for each (query, batch id). Returns whether this call has published them.

    1. Look up the last batch id that this query has published.
    2. If it is this one or a later one, an earlier commit has happened: what was staged again is garbage.
    3. Else publish all rows and write the batch id, in the same transaction.
    4. On *conflict* and *unknown* begin again at 1: the row says whether the commit has happened.
    """

    def attempt(client: StateClient) -> bool:
        with client.transaction() as tx:
            if (last_id := _last_published(tx, query, target.queue)) is not None and last_id >= batch_id:  # 1, 2
                return False
            for rows in staged:  # 3
                tx.publish(target.queue, rows.partition, rows.staged_id)
            tx.write(SINKS_TABLE, _key(query, target.queue).append_column("batch_id", pa.array([batch_id], pa.int64())))
            tx.commit()
            return True

    try:
        published = target.store.in_transaction(attempt)  # 4
    except Expired as error:
        raise Expired(
            f"batch {batch_id} of query {query} cannot be published: {error.message}. Restart the query, so that Spark "
            "writes the batch again; if commits take this long, raise the option 'stagedTtl'",
            **error.fields,
        ) from error
    if not published:
        target.discard(staged)
    return published


def forget(target: QueueTarget, query: str) -> None:
    """Remove the row of a query that will never commit again."""
    with suppress(ShuffleError):
        with target.store.client().transaction() as tx:
            tx.delete(SINKS_TABLE, _key(query, target.queue))
            tx.commit()


def _last_published(tx: Transaction, query: str, queue: str) -> int | None:
    rows = tx.lookup(SINKS_TABLE, _key(query, queue))
    return rows["batch_id"][0].as_py() if rows.num_rows else None


def _key(query: str, queue: str) -> pa.Table:
    return pa.table({"query": [query], "queue": [queue]}, schema=SINKS_KEY)
