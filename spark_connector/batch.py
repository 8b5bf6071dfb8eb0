"""Reading from Spark in batch: a snapshot of a table, and a range of a queue."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from shuffle.errors import BadInput, Expired, OutOfRange, UnknownTable
from shuffle.limits import MIB
from shuffle.spark_connector.filters import key_ranges
from shuffle.spark_connector.options import SNAPSHOT_TTL_S_DEFAULT, Options
from shuffle.spark_connector.schemas import arrow_schema, as_schema, check_requested_schema, spark_schema
from shuffle.spark_connector.sink.writer import store_handle
from shuffle.statestore import Queue, Snapshot, StateClient
from shuffle.statestore.key_range import KeyRange

SPLITS_DEFAULT = 8
"""The number of tasks that read a table, if it has that many rows: a few more than a small machine has cores."""

SPLIT_ROWS_DEFAULT = 1_000_000
"""The number of rows of a queue partition that one task reads."""

READ_BYTES = 8 * MIB
"""The most bytes of a queue that one request reads."""


def batch_schema(options: Options) -> StructType:
    """The schema of the table or queue that is to be read, as the store has it."""
    kind = options.one_of(["table", "queue"])
    name = options.required(kind, f"the {kind} to read")

    def stored(client: StateClient) -> pa.Schema:
        client.refresh()
        return client.table(name).row if kind == "table" else client.queue(name).schema

    return spark_schema(store_handle(options).with_retries(stored), f"the {kind} {name!r}")


def batch_reader(options: Options, schema: StructType) -> DataSourceReader:
    if options.one_of(["table", "queue"]) == "queue":
        for name in ("snapshotTtl",):
            options.only_with(name, "table")
        return QueueReader(options, schema)
    for name in ("begin", "end"):
        options.only_with(name, "queue")
    # Spark refuses readers with `pushFilters` unless filter pushdown is enabled, and only then it imports this module.
    pushed = "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules
    return (FilteredTableReader if pushed else TableReader)(options, schema)


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass
class TablePart(InputPartition):
    """A range of keys of a table, in the snapshot that was taken when the query was planned."""

    token: str
    """The token of the shared snapshot."""
    begin: bytes
    end: bytes | None

    def __init__(self, token: str, keys: KeyRange) -> None:
        super().__init__(None)
        self.token, self.begin, self.end = token, keys.begin, keys.end


class TableReader(DataSourceReader):
    """Reads a table. All tasks read the same snapshot, which the store keeps for them."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._store = store_handle(options)
        self._table = options.required("table", "the table to read")
        self._schema = arrow_schema(schema)
        self._splits = options.number("splits") or SPLITS_DEFAULT
        self._snapshot_ttl_s = options.seconds("snapshotTtl", SNAPSHOT_TTL_S_DEFAULT)
        self._filters: list[Filter] = []

    def partitions(self) -> list[InputPartition]:
        return self._store.with_retries(self._plan)

    def _plan(self, client: StateClient) -> list[InputPartition]:
        client.refresh()
        check_requested_schema(self._schema, client.table(self._table).row, f"the table {self._table!r}")
        token = client.share_snapshot(int(self._snapshot_ttl_s * 1000))
        with client.snapshot_at(token) as snapshot:
            ranges = key_ranges(client.table_handle(self._table), self._filters)
            pieces = snapshot.split(self._table, self._splits, ranges)
        # Given an empty list of partitions, Spark would call `read` once, with None for the partition.
        return [TablePart(token, piece) for piece in pieces] or [TablePart(token, KeyRange(b"", b""))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TablePart)
        keys = KeyRange(partition.begin, partition.end)
        if keys.begin == keys.end:
            return
        renew_s = min(self._snapshot_ttl_s / 4, 5.0)
        try:
            with self._store.with_retries(partial(self._snapshot, partition.token)) as snapshot:
                renewed_s = time.monotonic()
                for batch in snapshot.scan_range(self._table, keys):
                    yield as_schema(batch.select(self._schema.names), self._schema)
                    if time.monotonic() - renewed_s > renew_s:
                        snapshot.renew()
                        renewed_s = time.monotonic()
        except Expired as error:
            raise Expired(
                f"the moment at which the table {self._table!r} was to be read is over ({error.message}): the store "
                "was restarted, or the plan is older than the option 'snapshotTtl'. Run the query again"
            ) from error

    def _snapshot(self, token: str, client: StateClient) -> Snapshot:
        client.refresh()
        return client.snapshot_at(token)


class FilteredTableReader(TableReader):
    """A ``TableReader`` for a Spark session that pushes filters down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        self._filters = list(filters)
        # All filters are returned, so that Spark applies them again: the ranges may hold rows that do not pass.
        return filters


# --- queues ----------------------------------------------------------------------------------------------------------


@dataclass
class QueuePart(InputPartition):
    """The rows of one queue partition at the positions from ``begin`` up to and without ``end``."""

    partition: int
    begin: int
    end: int

    def __init__(self, partition: int, begin: int, end: int) -> None:
        super().__init__(None)
        self.partition, self.begin, self.end = partition, begin, end


class QueueReader(DataSourceReader):
    """Reads the rows of a queue from the option ``begin`` up to and without the option ``end``."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._store = store_handle(options)
        self._queue = options.required("queue", "the queue to read")
        self._schema = arrow_schema(schema)
        self._begin = options.text("begin") or "earliest"
        self._end = options.text("end") or "latest"
        self._splits = options.number("splits")

    def partitions(self) -> list[InputPartition]:
        bounds = self._store.with_retries(self._bounds)
        begins = _positions("begin", self._begin, [begin for begin, _ in bounds], [end for _, end in bounds])
        ends = _positions("end", self._end, [begin for begin, _ in bounds], [end for _, end in bounds])
        parts: list[InputPartition] = []
        for partition, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            low, high = bounds[partition]
            if begin < low or max(begin, end) > high:
                raise OutOfRange(
                    f"partition {partition} of the queue {self._queue!r} has the rows {low} to {high - 1}; asked for "
                    f"are {begin} to {end - 1}",
                    queue=self._queue,
                    partition=partition,
                )
            pieces = self._splits or -(-max(end - begin, 0) // SPLIT_ROWS_DEFAULT) or 1
            step = -(-max(end - begin, 0) // pieces) or 1
            parts.extend(QueuePart(partition, at, min(at + step, end)) for at in range(begin, end, step))
        return parts or [QueuePart(0, 0, 0)]

    def _bounds(self, client: StateClient) -> list[tuple[int, int]]:
        client.refresh()
        queue = client.queue(self._queue)
        check_requested_schema(self._schema, queue.schema, f"the queue {self._queue!r}")
        return queue.bounds()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueuePart)
        self._store.with_retries(StateClient.refresh)
        position = partition.begin
        while position < partition.end:
            rows, after = self._store.with_retries(partial(self._read, partition, position))
            if after <= position:
                raise UnknownTable(f"the queue {self._queue!r} has lost rows that it had: was it created anew?")
            for batch in rows.to_batches():
                yield as_schema(batch.select(self._schema.names), self._schema)
            position = after

    def _read(self, part: QueuePart, position: int, client: StateClient) -> tuple[pa.Table, int]:
        queue: Queue = client.queue(self._queue)
        return queue.read(part.partition, position, max_rows=part.end - position, max_bytes=READ_BYTES)


def _positions(name: str, text: str, earliest: list[int], latest: list[int]) -> list[int]:
    """One position for each partition, from the text of an option.

    The text is ``earliest``, ``latest``, a position for all partitions, or JSON with a position for each partition:
    ``{"0": 17, "1": 4}``.
    """
    if text.lower() in ("earliest", "latest"):
        return earliest if text.lower() == "earliest" else latest
    if text.isdigit():
        return [int(text)] * len(earliest)
    try:
        parsed: Any = json.loads(text)
        positions = {int(partition): int(position) for partition, position in parsed.items()}
    except (ValueError, AttributeError, TypeError):
        raise BadInput(
            f'the option {name!r} is earliest, latest, a position, or JSON like {{"0": 17}}, not {text!r}', option=name
        ) from None
    if unknown := [partition for partition in positions if not 0 <= partition < len(earliest)]:
        raise BadInput(f"the option {name!r} names partition {unknown[0]}; there are {len(earliest)}", option=name)
    default = earliest if name == "begin" else latest
    return [positions.get(partition, default[partition]) for partition in range(len(earliest))]
