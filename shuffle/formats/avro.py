"""The format ``avro``: one record in each value, alone or behind the prefix of a schema registry.

The columns are those of one schema, the *reader's*, which is fixed by the spec: a file, or a version of a subject of
the registry. With a registry each value names the schema that it was written with, and what that one has is fitted to
the columns: by name, with types widened, and with the default of a column that it lacks.

Bodies are decoded many at a time: put one after the other behind the header of an Avro file, they are such a file,
which polars reads into columns. What it returns is believed only if the length of each row is that of its body (see
``avro_types``); else the batch is halved, and a few values are decoded one by one by ``fastavro``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, cast
from uuid import UUID

import fastavro
import numpy as np
import polars as pl
import pyarrow as pa

from shuffle.errors import BadInput
from shuffle.formats import framing
from shuffle.formats.avro_types import AvroType, arrow_schema, encoded_lengths, parse_record, plain_schema
from shuffle.formats.base import (
    BadValue,
    CannotDecode,
    Decoded,
    Format,
    byte_offsets,
    check_columns,
    decode_in_halves,
    joined,
    short,
)
from shuffle.formats.framing import varint
from shuffle.formats.registry import SchemaRegistry

ONE_BY_ONE_MAX = 32
"""The most values that are decoded one by one before the rest of a batch that failed is halved again."""
SYNC = b"shuffle.formats\0"
"""What separates the blocks of an Avro file: any 16 bytes."""


class AvroSchema:
    """One schema of Avro: decodes bodies that were written with it, and encodes rows."""

    def __init__(self, text: str) -> None:
        self.record: AvroType = parse_record(text)
        self.schema = arrow_schema(self.record)
        try:
            self._parsed: Any = fastavro.parse_schema(json.loads(text))
        except Exception as error:  # The library raises many types.
            raise BadInput(f"the Avro schema cannot be used: {short(error)}") from None
        metadata = {b"avro.schema": plain_schema(self.record).encode(), b"avro.codec": b"null"}
        self._header = b"Obj\x01" + varint(len(metadata))
        for name, value in metadata.items():
            self._header += varint(len(name)) + name + varint(len(value)) + value
        self._header += b"\0" + SYNC

    def decode(self, bodies: pa.Array) -> Decoded:
        return decode_in_halves(bodies, self._attempt, self.schema, self._why)

    def _attempt(self, bodies: pa.Array) -> pa.Table:
        if len(bodies) <= ONE_BY_ONE_MAX:
            try:
                return self._one_by_one(bodies)
            except Exception as error:
                raise CannotDecode(short(error)) from error
        try:
            data = joined(bodies)
            block = varint(len(bodies)) + varint(data.size)
            file = b"".join((self._header, block, data, SYNC))
            frame = pl.read_avro(io.BytesIO(file))
            rows = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(self.schema)
            lengths = encoded_lengths(rows, self.record)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # polars panics at bytes that it cannot read; a panic is no Exception.
            raise CannotDecode(short(error)) from error
        if rows.num_rows != len(bodies) or not np.array_equal(lengths, np.diff(byte_offsets(bodies))):
            raise CannotDecode("the lengths differ")
        return rows

    def _one_by_one(self, bodies: pa.Array) -> pa.Table:
        found = [self._record(body) for body in bodies.to_pylist()]
        return pa.table(
            [pa.array([_plain(one[field.name]) for one in found], field.type) for field in self.schema],
            schema=self.schema,
        )

    def _record(self, body: bytes) -> Mapping[str, Any]:
        stream = io.BytesIO(body)
        found = fastavro.schemaless_reader(stream, self._parsed, None)
        if stream.tell() != len(body):
            raise ValueError(f"{len(body) - stream.tell()} bytes are left behind the record")
        return cast(Mapping[str, Any], found)

    def _why(self, bodies: pa.Array) -> str:
        try:
            self._one_by_one(bodies)
        except EOFError:
            return "it is not Avro of its schema: it ends inside of the record"
        except Exception as error:
            return f"it is not Avro of its schema: {short(error) or type(error).__name__}"
        return "it is not Avro of its schema"

    def encode(self, rows: pa.Table) -> pa.Array:
        rows = check_columns(rows, self.schema, "the Avro schema")
        bodies = []
        for row in rows.to_pylist():
            stream = io.BytesIO()
            try:
                fastavro.schemaless_writer(stream, self._parsed, row)
            except Exception as error:
                raise BadInput(f"a row cannot be written as Avro: {short(error)}") from None
            bodies.append(stream.getvalue())
        return pa.array(bodies, pa.binary())


class AvroFormat(Format):
    """Records of Avro. ``registry`` says that values have its prefix; ``schema_id`` is the id of the schema that rows
    are encoded with there."""

    def __init__(self, schema: str, registry: SchemaRegistry | None = None, schema_id: int | None = None) -> None:
        self._reader = AvroSchema(schema)
        self.schema = self._reader.schema
        self._registry = registry
        self._schema_id = schema_id
        self._writers: dict[int, AvroSchema | str] = {}
        """The schemas that values were written with, by id; of those that cannot be used, the reason."""

    def decode(self, values: pa.Array) -> Decoded:
        if self._registry is None:
            return self._reader.decode(values)
        framed = framing.split(values)
        ids = np.unique(framed.ids)
        if len(ids) == 1:
            found = self._decode_of(int(ids[0]), framed.bodies)
            return _merged([(framed.good, found)], framed.bad, self.schema)
        parts = []
        for schema_id in ids.tolist():
            chosen = framed.ids == schema_id
            parts.append((framed.good[chosen], self._decode_of(schema_id, framed.bodies.filter(pa.array(chosen)))))
        return _merged(parts, framed.bad, self.schema)

    def _decode_of(self, schema_id: int, bodies: pa.Array) -> Decoded:
        writer = self._writer(schema_id)
        if isinstance(writer, str):
            nothing = np.empty(0, dtype=np.int64)
            return Decoded(
                self.schema.empty_table(), [BadValue(index, writer) for index in range(len(bodies))], nothing
            )
        found = writer.decode(bodies)
        return Decoded(resolved(found.rows, self._reader.record, self.schema), found.bad, found.values)

    def _writer(self, schema_id: int) -> AvroSchema | str:
        assert self._registry is not None
        known = self._writers.get(schema_id)
        if known is not None:
            return known
        registered = self._registry.by_id(schema_id)
        if registered is None:
            return f"the schema registry has no schema {schema_id}"
        try:
            writer = AvroSchema(registered.text)
            resolved(writer.schema.empty_table(), self._reader.record, self.schema)
        except BadInput as error:
            self._writers[schema_id] = f"it was written with schema {schema_id}: {error.message}"
            return self._writers[schema_id]
        self._writers[schema_id] = writer
        return writer

    def encode(self, rows: pa.Table) -> pa.Array:
        bodies = self._reader.encode(rows)
        if self._registry is None:
            return bodies
        if self._schema_id is None:
            raise BadInput(
                "to write with a schema registry, name a subject and a version: its id goes before each value"
            )
        return framing.framed(bodies, framing.prefix(self._schema_id))


def resolved(rows: pa.Table, reader: AvroType, schema: pa.Schema) -> pa.Table:
    """``rows``, decoded with the writer's schema, with the columns of the reader's."""
    columns = []
    for name, wanted in reader.fields:
        field = schema.field(name)
        if name in rows.schema.names:
            given = rows.schema.field(name).type
            if given != field.type and not _widens(given, field.type):
                raise BadInput(f"column {name!r} is {given} there, and {field.type} in the schema of the spec")
            columns.append(rows[name].cast(field.type))
        elif wanted.has_default:
            columns.append(pa.repeat(pa.scalar(_default(wanted, name), field.type), rows.num_rows))
        else:
            raise BadInput(f"it lacks the column {name!r}, which has no default in the schema of the spec")
    return pa.table(columns, schema=schema)


def _default(wanted: AvroType, name: str) -> Any:
    value = wanted.default
    if isinstance(value, str) and wanted.wire in ("bytes", "fixed"):
        return value.encode("latin-1")
    if isinstance(value, dict | list) and value:
        raise BadInput(f"the default of column {name!r} is neither a single value nor empty")
    return value


_WIDER = {
    pa.int32(): (pa.int64(), pa.float32(), pa.float64()),
    pa.int64(): (pa.float32(), pa.float64()),
    pa.float32(): (pa.float64(),),
    pa.string(): (pa.binary(),),
    pa.binary(): (pa.string(),),
}
"""What Avro lets a reader take for what a writer wrote."""


def _widens(given: pa.DataType, wanted: pa.DataType) -> bool:
    return wanted in _WIDER.get(given, ())


def _merged(parts: list[tuple[Any, Decoded]], bad: list[BadValue], schema: pa.Schema) -> Decoded:
    """One result of several, each of which decoded the values at some indexes."""
    indexes, tables = [], []
    for places, found in parts:
        indexes.append(places if found.values is None else places[found.values])
        tables.append(found.rows)
        bad = bad + [BadValue(int(places[one.index]), one.reason) for one in found.bad]
    if not tables:
        return Decoded(schema.empty_table(), sorted(bad), np.empty(0, dtype=np.int64))
    rows, values = pa.concat_tables(tables), np.concatenate(indexes)
    if len(parts) > 1:
        order = np.argsort(values, kind="stable")
        rows, values = rows.take(pa.array(order)), values[order]
    return Decoded(rows, sorted(bad), values) if bad else Decoded(rows)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, UUID) else value
