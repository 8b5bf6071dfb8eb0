"""The format ``json``: one object in each value, by polars, which reads lines of JSON into columns.

Why polars: it is the fastest, and it is strict. A number that does not fit its column, a text where a number should be,
a value that is no object are all errors, and none becomes a null in silence. This follows from how it reads:

- A column that an object lacks is null, and so is one whose value is ``null``. Keys that are no columns are ignored.
- A value in a column of type ``string`` that is no text (a number, a list, an object) becomes its JSON as text.
- Times are texts as in ISO 8601, with a zone (``Z``, ``+02:00``) exactly if the column's type has one.
- Values are joined with line breaks, so those that contain some are written anew without before they are read.

``pyarrow.json`` would do for less, but ends the process where a line is ``null`` (version 26).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput
from shuffle.formats.base import (
    CannotDecode,
    Decoded,
    Format,
    check_columns,
    decode_in_halves,
    short,
    values_of,
)

NEWLINE = 10


class JsonFormat(Format):
    """Objects as JSON. Columns are nullable: an object may lack any of them."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._read_as = {
            # Arrow reads times from text ten times as fast as polars does.
            field.name: pl.String if pa.types.is_temporal(field.type) else _polars_type(field.name, field.type)
            for field in schema
        }

    def decode(self, values: pa.Array) -> Decoded:
        return decode_in_halves(values, self._attempt, self.schema, self._why)

    def _attempt(self, values: pa.Array) -> pa.Table:
        try:
            return self._read(values)
        except Exception as error:  # The library raises many types.
            raise CannotDecode(short(error)) from error

    def _read(self, values: pa.Array) -> pa.Table:
        lines = _lines(values)
        if lines.count(b"\n") != len(values) - 1:
            lines = _lines(_in_lines(values))
        frame = pl.read_ndjson(lines, schema=self._read_as)
        # A blank value is no line: without a line break in any value, as many rows as values means one of each.
        if frame.height != len(values):
            raise ValueError("there is no JSON object in it")
        return frame.to_arrow().cast(self.schema)

    def _why(self, values: pa.Array) -> str:
        try:
            self._read(values)
        except Exception as error:
            return f"it is not JSON of the declared columns: {short(error)}"
        return "it is not JSON of the declared columns"

    def encode(self, rows: pa.Table) -> pa.Array:
        rows = check_columns(rows, self.schema, "the format json")
        if not rows.num_rows:
            return pa.array([], pa.binary())
        try:
            written = pl.from_arrow(rows).write_ndjson().encode()  # type: ignore[union-attr]
        except Exception as error:
            raise BadInput(f"the rows cannot be written as JSON: {short(error)}") from None
        # A line break inside of a text is written as \n, so each of these ends one object.
        data = np.frombuffer(written, dtype=np.uint8)
        ends = np.flatnonzero(data == NEWLINE)
        if len(ends) != rows.num_rows:
            raise BadInput(f"{rows.num_rows} rows became {len(ends)} lines of JSON")
        lengths = np.diff(ends, prepend=-1) - 1
        return values_of(data[data != NEWLINE].tobytes(), lengths)


def _lines(values: pa.Array) -> bytes:
    """``values``, one or more, none of them null, with line breaks between them."""
    joined: bytes = (
        pc.binary_join(pa.ListArray.from_arrays([0, len(values)], values), b"\n")[0].as_buffer().to_pybytes()
    )
    return joined


def _in_lines(values: pa.Array) -> pa.Array:
    """``values`` without line breaks inside of any."""
    return pa.array([_in_one_line(value) for value in values.to_pylist()], pa.binary())


def _in_one_line(value: bytes | None) -> bytes | None:
    if value is None or b"\n" not in value:
        return value
    trimmed = value.strip(b" \t\r\n")
    if b"\n" not in trimmed:
        return trimmed
    try:
        return json.dumps(json.loads(trimmed), ensure_ascii=False).encode()
    except (ValueError, RecursionError, UnicodeError):
        return b"\x00"  # It is no JSON, and neither is this: it will be found bad.


def _polars_type(name: str, kind: pa.DataType) -> Any:
    """The type as which polars reads a column; it is cast afterwards, with a check."""
    if pa.types.is_int32(kind):
        return pl.Int32
    if pa.types.is_integer(kind):
        return pl.Int64
    if pa.types.is_floating(kind):
        return pl.Float64
    if pa.types.is_string(kind):
        return pl.String
    if pa.types.is_boolean(kind):
        return pl.Boolean
    if pa.types.is_date(kind):
        return pl.Date
    if pa.types.is_timestamp(kind):
        return pl.Datetime("ms" if kind.unit == "s" else kind.unit, kind.tz)
    if pa.types.is_list(kind):
        return pl.List(_polars_type(name, kind.value_type))
    if pa.types.is_struct(kind):
        return pl.Struct({field.name: _polars_type(name, field.type) for field in kind})
    raise BadInput(f"column {name!r}: the format json has no {kind}")
