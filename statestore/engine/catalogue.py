"""The tables and queues of a store. Ids are never reused, so a stale id is unknown and never means another table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shuffle.errors import BadInput, CorruptData, TableExists, TooLarge, UnknownTable
from shuffle.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import Binary, all_start_with, longest_of, nulls_in, to_array
from shuffle.statestore.codec.constraints import TableConstraints
from shuffle.statestore.codec.keys import KeyCodec, bytes_after, table_prefix
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.codec.segment import encode_file_header
from shuffle.statestore.codec.small_batch import SMALL_BATCH_ROWS_MAX, SmallKeyCodec, SmallValueCodec
from shuffle.statestore.codec.values import RowCodec
from shuffle.statestore.request import CatalogueChange, CreateQueue, CreateTable, TableWrite

CATALOGUE_PREFIX = b"\0c"


@dataclass(slots=True)
class TableEntry:
    """A table, and what is needed to check rows against its constraints."""

    schema: TableSchema
    prefix: bytes
    """The bytes with which all keys of the table begin."""
    end: bytes
    """The first key after all keys of the table."""
    constraints: TableConstraints
    keys: KeyCodec
    codec: RowCodec
    small_keys: SmallKeyCodec
    small_values: SmallValueCodec

    @staticmethod
    def of(schema: TableSchema) -> TableEntry:
        codec = RowCodec(schema.name, schema.value)
        prefix = table_prefix(schema.table_id)
        return TableEntry(
            schema,
            prefix,
            bytes_after(prefix) or prefix,
            TableConstraints(schema, codec),
            KeyCodec(schema.name, schema.key),
            codec,
            SmallKeyCodec(schema.key),
            SmallValueCodec(schema.value),
        )

    def check_write(self, write: TableWrite) -> None:
        """Checks that keys and values are rows of this table, once for each write.

        A single invalid row would make every later scan over it fail.
        """
        if not write.is_checked:
            self._check_rows(write.keys, write.values)
            write.is_checked = True

    def _are_valid(self, keys: Binary, values: Binary) -> bool:
        """Says whether this is a small batch of valid rows; if it is not, the later steps say what is wrong."""
        if not (
            isinstance(keys, list) and isinstance(values, list) and len(keys) == len(values) <= SMALL_BATCH_ROWS_MAX
        ):
            return False
        prefix, key_bytes_max = self.prefix, KEY_BYTES_MAX + len(self.prefix)
        for key in keys:
            if key is None or len(key) > key_bytes_max or not key.startswith(prefix):
                return False
        for value in values:
            if value is not None and len(value) > VALUE_BYTES_MAX:
                return False
        return self.small_keys.are_valid(keys, len(prefix)) and self.small_values.are_valid(values)

    def _check_rows(self, keys: Binary, values: Binary) -> None:
        if self._are_valid(keys, values):
            self.constraints.check(values)
            return
        name = self.schema.name
        if len(keys) != len(values):
            raise BadInput(f"table {name!r}: {len(keys)} keys but {len(values)} values", table=name)
        self.check_prefix(keys)
        longest, largest = longest_of(keys), longest_of(values)
        if longest > KEY_BYTES_MAX + len(self.prefix) or largest > VALUE_BYTES_MAX:
            raise TooLarge(
                f"table {name!r}: a key of {longest} or a value of {largest} bytes is over the limit of "
                f"{KEY_BYTES_MAX} and {VALUE_BYTES_MAX} bytes",
                table=name,
            )
        self._check_form(keys, values)
        self.constraints.check(values)

    def _check_form(self, keys: Binary, values: Binary) -> None:
        try:
            self.keys.check(to_array(keys), len(self.prefix))
            self.codec.check(to_array(values).drop_null() if nulls_in(values) else to_array(values))
        except CorruptData as error:
            raise BadInput(f"{error.message}: not a row of this table", **error.fields) from None

    def check_prefix(self, keys: Binary) -> None:
        if not all_start_with(keys, self.prefix):
            name = self.schema.name
            raise BadInput(f"table {name!r}: keys that are not of this table", table=name)

    def check_range(self, begin: bytes, end: bytes | None) -> None:
        """Raises ``BadInput`` unless all keys between these two belong to this table."""
        if not begin.startswith(self.prefix) or end is None or not self.prefix <= end <= self.end:
            name = self.schema.name
            raise BadInput(f"table {name!r}: a range of keys that are not of this table", table=name)


@dataclass(slots=True)
class QueueEntry:
    schema: QueueSchema
    header: bytes
    """The file header of the queue's segments."""
    not_null: list[int]
    """The indexes of the columns that must have no nulls."""

    @staticmethod
    def of(schema: QueueSchema) -> QueueEntry:
        not_null = [index for index, column in enumerate(schema.schema) if not column.nullable]
        return QueueEntry(schema, encode_file_header(schema.schema), not_null)


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
        entry = self.tables.get(table_id)
        if entry is None:
            raise UnknownTable(f"no table with the id {table_id}: it was dropped, or is of another store", id=table_id)
        return entry

    def queue(self, queue_id: int) -> QueueEntry:
        entry = self.queues.get(queue_id)
        if entry is None:
            raise UnknownTable(f"no queue with the id {queue_id}: it was dropped, or is of another store", id=queue_id)
        return entry

    def table_named(self, name: str) -> TableEntry | None:
        return next((entry for entry in self.tables.values() if entry.schema.name == name), None)

    def queue_named(self, name: str) -> QueueEntry | None:
        return next((entry for entry in self.queues.values() if entry.schema.name == name), None)

    def check_change(self, change: CatalogueChange) -> CatalogueStep:
        """Checks a change; the step is empty if the same table or queue exists already and ``if_not_exists`` is set."""
        if isinstance(change, CreateTable):
            return self._create_table(change)
        if isinstance(change, CreateQueue):
            return self._create_queue(change)
        if change.kind == "table":
            table = self.table_named(change.name)
            if table is None:
                raise UnknownTable(f"no table {change.name!r}", table=change.name)
            return CatalogueStep(dropped_table=table)
        if change.kind == "queue":
            queue = self.queue_named(change.name)
            if queue is None:
                raise UnknownTable(f"no queue {change.name!r}", queue=change.name)
            return CatalogueStep(dropped_queue=queue)
        raise BadInput(f"cannot drop a {change.kind!r}, only a table or a queue")

    def _create_table(self, change: CreateTable) -> CatalogueStep:
        change.schema.validate()
        self._check_free(change.schema.name, "table")
        existing = self.table_named(change.schema.name)
        if existing is None:
            return CatalogueStep(table=TableEntry.of(replace(change.schema, table_id=self.next_id)))
        same = replace(change.schema, table_id=existing.schema.table_id) == existing.schema
        if change.if_not_exists and same:
            return CatalogueStep()
        raise TableExists(
            f"table {change.schema.name!r} exists already" + ("" if same else ", with another schema"),
            table=change.schema.name,
        )

    def _create_queue(self, change: CreateQueue) -> CatalogueStep:
        change.schema.validate()
        self._check_free(change.schema.name, "queue")
        existing = self.queue_named(change.schema.name)
        if existing is None:
            return CatalogueStep(queue=QueueEntry.of(replace(change.schema, queue_id=self.next_id)))
        same = replace(change.schema, queue_id=existing.schema.queue_id) == existing.schema
        if change.if_not_exists and same:
            return CatalogueStep()
        raise TableExists(
            f"queue {change.schema.name!r} exists already"
            + ("" if same else ", with another schema or partition count"),
            queue=change.schema.name,
        )

    def _check_free(self, name: str, kind: str) -> None:
        other = self.queue_named(name) if kind == "table" else self.table_named(name)
        if other is not None:
            raise TableExists(f"{name!r} exists already, and is not a {kind}", table=name)


@dataclass(slots=True)
class CatalogueStep:
    """A change of the catalogue that has been checked and is not yet durable."""

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
