"""Writing from Spark: the streaming sink and the batch writers.

write (in the tasks): stage          commit (in the driver): publish, in one transaction
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from shuffle.errors import BadInput, SchemaMismatch, TooLarge
from shuffle.limits import KEY_GROUPS_DEFAULT, TRANSACTION_BYTES_MAX, TRANSACTION_ROWS_MAX
from shuffle.partition.xxhash64 import hashable
from shuffle.spark_connector.options import TIMEOUT_S_DEFAULT, Options, state_of
from shuffle.spark_connector.schemas import arrow_schema, as_schema, check_fits
from shuffle.spark_connector.sink.staging import (
    QueueTarget,
    StagedMessage,
    StagedRows,
    forget,
    new_queue,
    publish,
)
from shuffle.spark_connector.source.query_lease import QUERY_ID
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.statestore import StateClient, TableSchema
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.store import STAGED_TTL_MS_DEFAULT
from shuffle.support.suggest import did_you_mean

BATCH_ID = "streaming.sql.batchId"
"""The property of a task that says which micro-batch it belongs to."""


def store_handle(options: Options) -> StoreHandle:
    return StoreHandle(state_of(options), options.seconds("timeout", TIMEOUT_S_DEFAULT))


# --- queues ----------------------------------------------------------------------------------------------------------


def queue_target(options: Options, schema: StructType) -> QueueTarget:
    """The queue to write to, checked against the rows. A queue that is missing is created once there are rows."""
    store = store_handle(options)
    name = options.required("queue", "the queue to append to")
    rows = arrow_schema(schema)
    by = tuple(options.names("partitionBy"))
    for column in by:
        if column not in rows.names:
            hint = did_you_mean(column, rows.names, f"; they have {', '.join(rows.names)}")
            raise SchemaMismatch(f"the option 'partitionBy': the rows have no column {column!r}{hint}", column=column)
        if not hashable(rows.field(column).type):
            column_type = rows.field(column).type
            raise BadInput(
                f"the option 'partitionBy': Spark's xxhash64 does not hash column {column!r} of type {column_type}"
                ": name others",
                column=column,
            )
    partitions = options.number("partitions")
    store.with_retries(lambda client: _check_queue(client, name, rows, partitions, bool(by)))
    ttl_ms = int(options.seconds("stagedTtl", STAGED_TTL_MS_DEFAULT / 1000) * 1000)
    return QueueTarget(store, name, by, ttl_ms, rows, partitions)


def _check_queue(client: StateClient, name: str, rows: pa.Schema, partitions: int | None, keyed: bool) -> None:
    queues = {queue.name: queue for queue in client.queues()}
    if name not in queues and partitions is not None:
        queues[name] = new_queue(name, rows, partitions)
        queues[name].validate()
    if name not in queues:
        known = f"there are {', '.join(sorted(queues))}" if queues else "the store has none yet"
        raise BadInput(
            f"there is no queue {name!r} ({known}). Give the option 'partitions' to have it created with the "
            "DataFrame's schema",
            queue=name,
        )
    queue = queues[name]
    if partitions is not None and queue.partitions != partitions:
        raise BadInput(
            f"the queue {name!r} has {queue.partitions} partitions, not {partitions}, and that cannot be changed: "
            "leave the option 'partitions' out, or write to another queue",
            queue=name,
        )
    if keyed and queue.partitions > KEY_GROUPS_DEFAULT:
        raise BadInput(
            f"the option 'partitionBy' spreads rows over at most {KEY_GROUPS_DEFAULT} partitions; the queue {name!r} "
            f"has {queue.partitions}: leave it out, or write to another queue",
            queue=name,
        )
    check_fits(rows, queue.schema, f"the queue {name!r}")


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    """The rows that all tasks have staged, in the order of the tasks."""
    return [rows for message in messages if isinstance(message, StagedMessage) for rows in message.staged]


class QueueStreamWriter(DataSourceStreamArrowWriter):
    """The streaming sink. Exactly once: a batch that was published before is not published again."""

    def __init__(self, target: QueueTarget) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        context: Any = TaskContext.get()
        query, batch_id = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query:
            raise BadInput("the sink does not know its query: it can only be used through writeStream")
        # Each task and batch begins at another partition, so that small batches do not all go to the first one.
        first_partition = context.partitionId() + int(batch_id or 0)
        staged, rows = self._target.stage(iterator, first_partition)
        return StagedMessage(query, staged, rows)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        queries = {message.query for message in messages if isinstance(message, StagedMessage)}
        self._target.prepare()
        if not queries:
            return
        staged = _staged(messages)
        if staged:
            publish(self._target, queries.pop(), batchId, staged)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._target.discard(_staged(messages))


class QueueBatchWriter(DataSourceArrowWriter):
    """Appends a DataFrame to a queue: all of it, or nothing."""

    def __init__(self, target: QueueTarget) -> None:
        self._target = target
        self._job = f"batch-{uuid.uuid4().hex}"
        """The name of this write in the table of sinks, in place of a query's: it shows whether a commit whose response
        was lost has happened."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        context: Any = TaskContext.get()
        staged, rows = self._target.stage(iterator, context.partitionId())
        return StagedMessage(self._job, staged, rows)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        staged = _staged(messages)
        self._target.prepare()
        if staged:
            publish(self._target, self._job, 0, staged)
            forget(self._target, self._job)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._target.discard(_staged(messages))


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass
class RowsMessage(WriterCommitMessage):
    """The rows of one task, as an Arrow stream. They go to the driver, since a transaction belongs to one client."""

    rows: int
    stream: bytes


class TableBatchWriter(DataSourceArrowWriter):
    """Upserts a DataFrame into a sorted table, in one transaction."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._store = store_handle(options)
        self._table = options.required("table", "the table to write to")
        self._schema = arrow_schema(schema)
        key = options.names("key")
        self._new = self._store.with_retries(lambda client: _check_table(client, self._table, self._schema, key))
        """The schema of the table that is created once there are rows that fit it; None if the table exists."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsMessage:
        sink = pa.BufferOutputStream()
        rows = 0
        with pa.ipc.new_stream(sink, self._schema) as stream:
            for batch in iterator:
                rows += batch.num_rows
                stream.write_batch(as_schema(batch, self._schema))
                if sink.tell() > TRANSACTION_BYTES_MAX or rows > TRANSACTION_ROWS_MAX:
                    raise _too_large(self._table)
        return RowsMessage(rows, sink.getvalue().to_pybytes())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        with_rows = [message for message in messages if isinstance(message, RowsMessage) and message.rows]
        if sum(message.rows for message in with_rows) > TRANSACTION_ROWS_MAX:
            raise _too_large(self._table)
        tables = [pa.ipc.open_stream(message.stream).read_all() for message in with_rows]
        rows = pa.concat_tables(tables) if tables else self._schema.empty_table()
        if (new := self._new) is not None:
            Table(new).encode_rows(rows)  # A null in the key is found here, before there is a table.
            self._store.with_retries(
                lambda client: client.create_table(new.name, new.key, new.value, if_not_exists=True)
            )
        if not tables:
            return

        def attempt(client: StateClient) -> None:
            # Upserting the same rows again gives the same table, so after a lost response it is simply done again.
            client.refresh()
            with client.transaction() as tx:
                tx.write(self._table, rows)
                tx.commit()

        self._store.in_transaction(attempt)


def _check_table(client: StateClient, name: str, rows: pa.Schema, key: list[str]) -> TableSchema | None:
    """The schema of the table that is to be created; None if the table exists."""
    tables = {table.name: table for table in client.tables()}
    if name not in tables:
        if not key:
            known = f"there are {', '.join(sorted(tables))}" if tables else "the store has none yet"
            raise BadInput(
                f"there is no table {name!r} ({known}). Give the option 'key', the key columns separated by commas, to "
                "have it created with the DataFrame's schema",
                table=name,
            )
        for column in key:
            if column not in rows.names:
                raise SchemaMismatch(
                    f"the option 'key': the rows have no column {column!r}; they have {', '.join(rows.names)}"
                )
        value = pa.schema([field.with_nullable(True) for field in rows if field.name not in key])
        key_schema = pa.schema([rows.field(column).with_nullable(False) for column in key])
        new = TableSchema(name, key_schema, value)
        new.validate()
        return new
    table = tables[name]
    if key and key != table.key.names:
        raise BadInput(
            f"the table {name!r} has the key {', '.join(table.key.names)}, not {', '.join(key)}: leave the option 'key'"
            " out, or write to another table",
            table=name,
        )
    check_fits(rows, table.row, f"the table {name!r}")
    return None


def _too_large(table: str) -> TooLarge:
    return TooLarge(
        f"the table {table!r} is written in one transaction, which takes at most {TRANSACTION_ROWS_MAX} rows and "
        f"{TRANSACTION_BYTES_MAX} bytes: write the DataFrame in parts, or append it to a queue",
        table=table,
    )
