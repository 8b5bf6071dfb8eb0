"""Spark's types and Arrow's: schemas in both directions, and batches cast to exactly the schema that is expected.

Timestamps with a time zone are instants (Spark's ``TimestampType``, kept in UTC); those without are wall clock times
(``TimestampNTZType``).
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from pyspark.sql.types import StructField, StructType

from shuffle.errors import SchemaMismatch
from shuffle.statestore.codec.column_types import widens
from shuffle.support.suggest import nearest


def arrow_schema(schema: StructType, what: str = "the DataFrame") -> pa.Schema:
    """The Arrow schema in which Spark takes and gives rows of ``schema``."""
    fields = []
    for field in schema.fields:
        try:
            arrow_type = to_arrow_type(field.dataType, timezone="UTC")
        except PySparkException as error:
            raise SchemaMismatch(
                f"{what}: column {field.name!r} of type {field.dataType.simpleString()} cannot be written as Arrow: "
                "cast it first",
                column=field.name,
            ) from error
        fields.append(pa.field(field.name, arrow_type, field.nullable))
    return pa.schema(fields)


def spark_schema(schema: pa.Schema, what: str) -> StructType:
    """The Spark schema for rows of ``schema``."""
    fields = []
    for field in schema:
        try:
            fields.append(StructField(field.name, from_arrow_type(field.type, True), field.nullable))
        except PySparkException as error:
            raise SchemaMismatch(
                f"{what}: column {field.name!r} has the type {field.type}, for which Spark has none; leave it out in "
                "the mapper, or cast it there",
                column=field.name,
            ) from error
    return StructType(fields)


def check_fits(given: pa.Schema, declared: pa.Schema, what: str) -> None:
    """Raises ``SchemaMismatch``, naming the column, unless rows of ``given`` can become rows of ``declared``."""
    for field in declared:
        if field.name not in given.names:
            near = nearest(field.name, [n for n in given.names if n not in declared.names])
            hint = f"; is {near!r} meant to be it?" if near else ""
            raise SchemaMismatch(
                f"{what} has a column {field.name!r} ({field.type}), which is missing here{hint}", column=field.name
            )
    for field in given:
        if field.name not in declared.names:
            raise SchemaMismatch(
                f"{what} has no column {field.name!r}; it has {', '.join(declared.names)}", column=field.name
            )
        declared_type = declared.field(field.name).type
        if not widens(field.type, declared_type):
            raise SchemaMismatch(
                f"{what}, column {field.name!r}: it is {declared_type} there and {field.type} here; cast it first",
                column=field.name,
                given=str(field.type),
                declared=str(declared_type),
            )


def check_requested_schema(requested: pa.Schema, stored: pa.Schema, what: str) -> None:
    """Raise ``SchemaMismatch`` unless rows of ``stored`` can be read with the schema that the user ``requested``.

    A requested schema may leave columns out, but not have columns that are not stored.
    """
    for field in requested:
        if field.name not in stored.names:
            raise SchemaMismatch(
                f"{what} has no column {field.name!r}; it has {', '.join(stored.names)}: correct the schema given with "
                ".schema(…), or leave it out",
                column=field.name,
            )
    check_fits(pa.schema([stored.field(field.name) for field in requested]), requested, f"the schema given for {what}")


def as_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """``batch`` with exactly the columns and types of ``schema``. Columns that fit already are not copied."""
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        column = batch.column(field.name)
        columns.append(column if column.type.equals(field.type) else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
