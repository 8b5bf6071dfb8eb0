"""What a sorted table and a queue look like, and how rows are brought into that shape.

A schema is written down as readable JSON (``to_json``), so that what the store holds can be understood without this
code. Every row of a caller passes through ``conform`` before it reaches the codecs: after it the columns are complete,
in order, one contiguous array each, and of exactly the declared types.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput, CorruptData, NullKey, SchemaMismatch, TooLarge
from shuffle.limits import NAME_BYTES_MAX
from shuffle.statestore.codec.column_types import decodes_exactly, nested_types, plain_type, widens

COLUMNS_MAX = 1_000
"""The most columns that one table or queue may have. Every row pays for each column; wider data is better kept as one
binary value."""

PARTITIONS_MAX = 10_000
"""The most partitions that one queue may have: each has its own open segment, and file descriptors are limited."""

CONSTRAINTS_MAX = 100
"""The most constraints that one table may have: each is evaluated on every written batch."""

_TYPE_BY_NAME: dict[str, pa.DataType] = {
    str(data_type): data_type
    for data_type in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.date32(), pa.date64(), pa.null()),
        *(pa.string(), pa.binary(), pa.large_string(), pa.large_binary()),
    )
}
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=(.+))?\]")
_DECIMAL = re.compile(r"decimal128\((\d+), (-?\d+)\)")


@dataclass(frozen=True)
class TableSchema:
    """A sorted table: rows by ``key``, each with ``value`` columns and the constraints they have to meet."""

    name: str
    """The name of the table."""
    key: pa.Schema
    """The columns that rows are sorted by; none of them may be null."""
    value: pa.Schema
    """The other columns."""
    constraints: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The CHECK constraints, by name."""
    table_id: int = 0
    """The id that the store has given to the table; a table that is dropped and created anew has another one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _normalise(self.key))
        object.__setattr__(self, "value", _normalise(self.value))
        object.__setattr__(self, "constraints", dict(self.constraints))

    @cached_property
    def row(self) -> pa.Schema:
        """Key columns, then value columns: the shape of ``lookup`` and ``scan``."""
        return pa.schema([*self.key, *self.value])

    def validate(self) -> None:
        """Raises what is wrong with this schema, naming the table and the column."""
        _check_name(self.name, "table", self.name)
        if not len(self.key):
            raise BadInput(f"table {self.name!r} has no key column: at least one is needed", table=self.name)
        _check_columns("table", self.name, [*self.key.names, *self.value.names])
        for column in self.row:
            if plain_type(column.type) is None:
                raise SchemaMismatch(
                    f"table {self.name!r}, column {column.name!r}: the type {column.type} is not supported in a sorted"
                    " table (integers, floats, bool, string, binary, date32, timestamp and decimal128 are)",
                    table=self.name,
                    column=column.name,
                )
        if len(self.constraints) > CONSTRAINTS_MAX:
            raise TooLarge(
                f"table {self.name!r} has {len(self.constraints)} constraints, more than {CONSTRAINTS_MAX}",
                table=self.name,
                limit=CONSTRAINTS_MAX,
            )
        for name, expression in self.constraints.items():
            _check_name(name, "constraint", self.name)
            if not isinstance(expression, str):
                raise BadInput(
                    f"table {self.name!r}, constraint {name!r}: the expression must be text, not {expression!r}",
                    table=self.name,
                    constraint=name,
                )

    def row_columns(self, rows: pa.Table | pa.RecordBatch) -> list[pa.Array]:
        """The columns of a write, keys first; refuses nulls in the key."""
        return conform_columns(rows, self.row, self.name, not_null=self.key.names)

    def conform_keys(self, keys: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a lookup or a delete: the key columns and nothing else; refuses nulls."""
        return conform(keys, self.key, self.name, not_null=self.key.names)

    def to_json(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "table_id": self.table_id,
                "key": _fields_to_json(self.key),
                "value": _fields_to_json(self.value),
                "constraints": dict(self.constraints),
            }
        )

    @staticmethod
    def from_json(text: str | bytes) -> TableSchema:
        try:
            parsed = json.loads(text)
            return TableSchema(
                parsed["name"],
                _fields_from_json(parsed["key"]),
                _fields_from_json(parsed["value"]),
                parsed["constraints"],
                int(parsed["table_id"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptData(f"not the description of a table: {error}") from None


@dataclass(frozen=True)
class QueueSchema:
    """A queue: ``partitions`` sequences of rows of one schema."""

    name: str
    """The name of the queue."""
    schema: pa.Schema
    """The columns of the queue's rows."""
    partitions: int
    """The number of partitions of the queue."""
    queue_id: int = 0
    """The id that the store has given to the queue; a queue that is dropped and created anew has another one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", self.schema.remove_metadata())

    def validate(self) -> None:
        """Raises what is wrong with this schema, naming the queue and the column."""
        _check_name(self.name, "queue", self.name)
        if not len(self.schema):
            raise BadInput(f"queue {self.name!r} has no column: at least one is needed", table=self.name)
        _check_columns("queue", self.name, self.schema.names)
        for column in self.schema:
            for inner in nested_types(column.type):
                if not _fits_queue(inner):
                    raise SchemaMismatch(
                        f"queue {self.name!r}, column {column.name!r}: the type {column.type} is not supported"
                        " (dictionary, union, run-end encoded and extension types are not; cast it first)",
                        table=self.name,
                        column=column.name,
                    )
        if not isinstance(self.partitions, int) or isinstance(self.partitions, bool) or self.partitions < 1:
            raise BadInput(
                f"queue {self.name!r} needs at least one partition, not {self.partitions!r}", table=self.name
            )
        if self.partitions > PARTITIONS_MAX:
            raise TooLarge(
                f"queue {self.name!r} asks for {self.partitions} partitions, more than {PARTITIONS_MAX}",
                table=self.name,
                limit=PARTITIONS_MAX,
            )

    def conform_rows(self, rows: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
        """The rows of an append, in the queue's own schema."""
        if isinstance(rows, pa.RecordBatch) and self._takes_nulls and rows.schema.equals(self.schema):
            return rows  # Nothing to find wrong with them, which would take 40 µs for one row.
        return conform(rows, self.schema, self.name)

    @cached_property
    def _takes_nulls(self) -> bool:
        return all(field.nullable for field in self.schema)

    def to_json(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "queue_id": self.queue_id,
                "schema": _fields_to_json(self.schema),
                "partitions": self.partitions,
            }
        )

    @staticmethod
    def from_json(text: str | bytes) -> QueueSchema:
        try:
            parsed = json.loads(text)
            columns = _fields_from_json(parsed["schema"])
            return QueueSchema(parsed["name"], columns, int(parsed["partitions"]), int(parsed["queue_id"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptData(f"not the description of a queue: {error}") from None


def conform(
    rows: pa.Table | pa.RecordBatch, expected: pa.Schema, table: str, not_null: Iterable[str] = ()
) -> pa.RecordBatch:
    """``rows`` as one batch of exactly the schema ``expected``, or an error naming the table, column and row."""
    return pa.RecordBatch.from_arrays(conform_columns(rows, expected, table, not_null), schema=expected)


def conform_columns(
    rows: pa.Table | pa.RecordBatch, expected: pa.Schema, table: str, not_null: Iterable[str] = ()
) -> list[pa.Array]:
    """The columns of ``conform``.

    Columns are matched by name. Only casts that cannot lose anything are made. Nulls in the columns ``not_null`` are
    ``NullKey``; nulls in a column that its schema declares not nullable are ``SchemaMismatch``.
    """
    if not isinstance(rows, pa.Table | pa.RecordBatch):
        raise BadInput(f"table {table!r}: rows must be an Arrow table or record batch, not {type(rows).__name__}")
    arrays = _as_they_are(rows, expected)
    if arrays is not None and not any(array.null_count for array in arrays):
        return arrays
    names = rows.schema.names
    if names != expected.names:
        _check_names(names, expected.names, table)
    required = set(not_null)
    arrays = []
    for column in expected:
        array = conform_column(rows.column(column.name), column, table)
        if array.null_count:
            if column.name in required:
                raise null_key(array, column.name, table)
            if not column.nullable:
                row = first_null(array)
                raise SchemaMismatch(
                    f"table {table!r}, column {column.name!r}, row {row}: null in a column declared not nullable",
                    table=table,
                    column=column.name,
                    row=row,
                )
        arrays.append(array)
    return arrays


def _as_they_are(rows: pa.Table | pa.RecordBatch, expected: pa.Schema) -> list[pa.Array] | None:
    """The columns of rows that have exactly the schema ``expected``, and each column in one piece; else None."""
    if not rows.schema.equals(expected):
        return None
    if isinstance(rows, pa.RecordBatch):
        return list(rows.columns)
    columns = rows.columns
    return [column.chunk(0) for column in columns] if all(column.num_chunks == 1 for column in columns) else None


def conform_column(column: pa.Array | pa.ChunkedArray, expected: pa.Field, table: str) -> pa.Array:
    """One column as one array of the expected type."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            raise TooLarge(
                f"table {table!r}, column {expected.name!r}: more than 2 GiB in one batch; write it in smaller ones",
                table=table,
                column=expected.name,
            )
    if column.type == expected.type:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), expected.type)
    if pa.types.is_dictionary(column.type) and decodes_exactly(column.type, expected.type):
        column = column.dictionary_decode()
    if not widens(column.type, expected.type):
        raise SchemaMismatch(
            f"table {table!r}, column {expected.name!r}: {column.type} was given where {expected.type} is declared",
            table=table,
            column=expected.name,
            given=str(column.type),
            declared=str(expected.type),
        )
    try:
        return column.cast(expected.type)
    except pa.ArrowInvalid as error:
        row = _first_uncastable(column, expected.type)
        raise SchemaMismatch(
            f"table {table!r}, column {expected.name!r}, row {row}: does not fit {expected.type} ({error})",
            table=table,
            column=expected.name,
            row=row,
        ) from None


def first_null(array: pa.Array) -> int:
    return int(pc.index(array.is_null(), True).as_py())


def null_key(array: pa.Array, column: str, table: str) -> NullKey:
    row = first_null(array)
    return NullKey(
        f"table {table!r}, row {row}: the key column {column!r} is null; key columns must have a value",
        table=table,
        column=column,
        row=row,
    )


def _first_uncastable(column: pa.Array, target: pa.DataType) -> int:
    """The first row that a cast refuses, by halving: a cast of a slice fails exactly if the row is in it."""
    low, high = 0, len(column) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low + 1).cast(target)
            low = middle + 1
        except pa.ArrowInvalid:
            high = middle
    return low


def _check_names(given: list[str], expected: list[str], table: str) -> None:
    seen: set[str] = set()
    for name in given:
        if name in seen:
            raise SchemaMismatch(f"table {table!r}: the column {name!r} was given twice", table=table, column=name)
        seen.add(name)
    for name in expected:
        if name not in seen:
            raise SchemaMismatch(f"table {table!r}: the column {name!r} is missing", table=table, column=name)
    for name in given:
        if name not in expected:
            raise SchemaMismatch(
                f"table {table!r}: there is no column {name!r} here; expected are {', '.join(expected)}",
                table=table,
                column=name,
            )


def _check_name(name: Any, what: str, table: Any) -> None:
    if not isinstance(name, str) or not name:
        raise BadInput(f"{table!r}: the name of a {what} must be text and not empty, not {name!r}", table=str(table))
    if len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise TooLarge(
            f"{table!r}: the name of the {what} {name[:40]!r}… is longer than {NAME_BYTES_MAX} bytes",
            table=table,
            limit=NAME_BYTES_MAX,
        )
    if not name.isprintable():
        raise BadInput(f"{table!r}: the name of the {what} {name!r} has unprintable characters", table=table)


def _check_columns(kind: str, name: str, columns: list[str]) -> None:
    if len(columns) > COLUMNS_MAX:
        raise TooLarge(
            f"{kind} {name!r} has {len(columns)} columns, more than {COLUMNS_MAX}", table=name, limit=COLUMNS_MAX
        )
    seen = set()
    for column in columns:
        _check_name(column, "column", name)
        if column in seen:
            raise BadInput(f"{kind} {name!r} has two columns named {column!r}", table=name, column=column)
        seen.add(column)


def _fits_queue(data_type: pa.DataType) -> bool:
    return not (
        pa.types.is_dictionary(data_type)
        or pa.types.is_union(data_type)
        or pa.types.is_run_end_encoded(data_type)
        or isinstance(data_type, pa.BaseExtensionType)
    )


def _normalise(schema: pa.Schema) -> pa.Schema:
    """The schema without metadata, with ``string`` for all string types and ``binary`` for all binary types."""
    return pa.schema([pa.field(c.name, plain_type(c.type) or c.type, c.nullable) for c in schema])


def _fields_to_json(schema: pa.Schema) -> list[dict[str, Any]]:
    columns = []
    for column in schema:
        described: dict[str, Any] = {"name": column.name, "type": str(column.type)}
        if not column.nullable:
            described["nullable"] = False
        if _parse_type(str(column.type)) != column.type:
            # The name of a nested type is for people who read the JSON; Arrow's own serialisation keeps it exactly.
            described["arrow"] = base64.b64encode(pa.schema([column]).serialize().to_pybytes()).decode()
        columns.append(described)
    return columns


def _fields_from_json(columns: list[dict[str, Any]]) -> pa.Schema:
    fields = []
    for column in columns:
        if "arrow" in column:
            fields.append(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(column["arrow"]))).field(0))
            continue
        data_type = _parse_type(column["type"])
        if data_type is None:
            raise ValueError(f"column {column['name']!r} has the unknown type {column['type']!r}")
        fields.append(pa.field(column["name"], data_type, column.get("nullable", True)))
    return pa.schema(fields)


def _parse_type(text: str) -> pa.DataType | None:
    if text in _TYPE_BY_NAME:
        return _TYPE_BY_NAME[text]
    if match := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(match[1], match[2])
    if match := _DECIMAL.fullmatch(text):
        return pa.decimal128(int(match[1]), int(match[2]))
    return None
