"""Which tables and queues there are. Ids are never used twice, so a stale id is unknown, not another table."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pyarrow as pa

from shuffle.errors import BadInput, TableExists, UnknownTable
from statestore.constraints import Constraint
from statestore.request import CatalogueChange, CreateQueue, CreateTable
from statestore.schema import QueueSchema, TableSchema
from statestore.segment import encode_file_header
from statestore.values import RowCodec

CATALOGUE_PREFIX = b"\0c"


def table_prefix(table_id: int) -> bytes:
    return b"t" + struct.pack(">I", table_id)


@dataclass(slots=True)
class TableEntry:
    """A table, and what is needed to check rows against its constraints."""

    schema: TableSchema
    prefix: bytes
    constraints: list[Constraint]
    codec: RowCodec

    @staticmethod
    def of(schema: TableSchema) -> TableEntry:
        constraints = [
            Constraint(schema.name, name, expression, schema.value) for name, expression in schema.constraints.items()
        ]
        return TableEntry(schema, table_prefix(schema.table_id), constraints, RowCodec(schema.name, schema.value))

    def check(self, values: pa.BinaryArray) -> None:
        """Raises ``ConstraintViolated`` for the first written row that breaks a constraint."""
        if not self.constraints:
            return
        written = values.drop_null()
        if len(written):
            rows = pa.RecordBatch.from_arrays(self.codec.decode(written), schema=self.schema.value)
            for constraint in self.constraints:
                constraint.check(rows)


@dataclass(slots=True)
class QueueEntry:
    schema: QueueSchema
    header: bytes

    @staticmethod
    def of(schema: QueueSchema) -> QueueEntry:
        return QueueEntry(schema, encode_file_header(schema.schema))


@dataclass(slots=True)
class Catalogue:
    """All tables and queues, by name and by id."""

    tables: dict[int, TableEntry] = field(default_factory=dict)
    queues: dict[int, QueueEntry] = field(default_factory=dict)
    next_id: int = 1

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in rows:
            kind = key[len(CATALOGUE_PREFIX) : len(CATALOGUE_PREFIX) + 1]
            if kind == b"i":
                self.next_id = int(value)
            elif kind == b"t":
                table = TableSchema.from_json(value.decode())
                self.tables[table.table_id] = TableEntry.of(table)
            else:
                queue = QueueSchema.from_json(value.decode())
                self.queues[queue.queue_id] = QueueEntry.of(queue)

    def table(self, table_id: int) -> TableEntry:
        found = self.tables.get(table_id)
        if found is None:
            raise UnknownTable(f"no table with the id {table_id}: it was dropped, or is of another store", id=table_id)
        return found

    def queue(self, queue_id: int) -> QueueEntry:
        found = self.queues.get(queue_id)
        if found is None:
            raise UnknownTable(f"no queue with the id {queue_id}: it was dropped, or is of another store", id=queue_id)
        return found

    def table_named(self, name: str) -> TableEntry | None:
        return next((entry for entry in self.tables.values() if entry.schema.name == name), None)

    def queue_named(self, name: str) -> QueueEntry | None:
        return next((entry for entry in self.queues.values() if entry.schema.name == name), None)

    def change(self, wanted: CatalogueChange) -> CatalogueStep:
        """What ``wanted`` comes to: nothing, when a table of the same shape is there and that is allowed."""
        if isinstance(wanted, CreateTable):
            return self._create_table(wanted)
        if isinstance(wanted, CreateQueue):
            return self._create_queue(wanted)
        if wanted.kind == "table":
            table = self.table_named(wanted.name)
            if table is None:
                raise UnknownTable(f"no table {wanted.name!r}", table=wanted.name)
            return CatalogueStep(dropped_table=table)
        if wanted.kind == "queue":
            queue = self.queue_named(wanted.name)
            if queue is None:
                raise UnknownTable(f"no queue {wanted.name!r}", queue=wanted.name)
            return CatalogueStep(dropped_queue=queue)
        raise BadInput(f"cannot drop a {wanted.kind!r}, only a table or a queue")

    def _create_table(self, wanted: CreateTable) -> CatalogueStep:
        wanted.schema.validate()
        self._check_free(wanted.schema.name, "table")
        found = self.table_named(wanted.schema.name)
        if found is None:
            return CatalogueStep(table=TableEntry.of(replace(wanted.schema, table_id=self.next_id)))
        same = replace(wanted.schema, table_id=found.schema.table_id) == found.schema
        if wanted.if_not_exists and same:
            return CatalogueStep()
        raise TableExists(
            f"table {wanted.schema.name!r} exists already" + ("" if same else ", with another schema"),
            table=wanted.schema.name,
        )

    def _create_queue(self, wanted: CreateQueue) -> CatalogueStep:
        wanted.schema.validate()
        self._check_free(wanted.schema.name, "queue")
        found = self.queue_named(wanted.schema.name)
        if found is None:
            return CatalogueStep(queue=QueueEntry.of(replace(wanted.schema, queue_id=self.next_id)))
        same = replace(wanted.schema, queue_id=found.schema.queue_id) == found.schema
        if wanted.if_not_exists and same:
            return CatalogueStep()
        raise TableExists(
            f"queue {wanted.schema.name!r} exists already"
            + ("" if same else ", with another schema or partition count"),
            queue=wanted.schema.name,
        )

    def _check_free(self, name: str, kind: str) -> None:
        other = self.queue_named(name) if kind == "table" else self.table_named(name)
        if other is not None:
            raise TableExists(f"{name!r} exists already, and is not a {kind}", table=name)


@dataclass(slots=True)
class CatalogueStep:
    """A change of the catalogue that has been checked and waits to be durable."""

    table: TableEntry | None = None
    queue: QueueEntry | None = None
    dropped_table: TableEntry | None = None
    dropped_queue: QueueEntry | None = None

    def rows(self, next_id: int) -> list[tuple[bytes, bytes | None]]:
        pairs: list[tuple[bytes, bytes | None]] = []
        if self.table is not None:
            schema = self.table.schema
            pairs.append((CATALOGUE_PREFIX + b"t" + schema.name.encode(), schema.to_json().encode()))
        if self.queue is not None:
            queue = self.queue.schema
            pairs.append((CATALOGUE_PREFIX + b"q" + queue.name.encode(), queue.to_json().encode()))
        if pairs:
            pairs.append((CATALOGUE_PREFIX + b"i", b"%d" % (next_id + 1)))
        if self.dropped_table is not None:
            pairs.append((CATALOGUE_PREFIX + b"t" + self.dropped_table.schema.name.encode(), None))
        if self.dropped_queue is not None:
            pairs.append((CATALOGUE_PREFIX + b"q" + self.dropped_queue.schema.name.encode(), None))
        return pairs

    def apply(self, catalogue: Catalogue) -> None:
        if self.table is not None:
            catalogue.tables[self.table.schema.table_id] = self.table
            catalogue.next_id += 1
        if self.queue is not None:
            catalogue.queues[self.queue.schema.queue_id] = self.queue
            catalogue.next_id += 1
        if self.dropped_table is not None:
            del catalogue.tables[self.dropped_table.schema.table_id]
        if self.dropped_queue is not None:
            del catalogue.queues[self.dropped_queue.schema.queue_id]
