"""Rows as text, batch by batch, and key values from text."""

from __future__ import annotations

import csv
import json
import math
import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput

TEXT_WIDTH_MAX = 40
"""The most characters of a value in a table of rows; longer text is cut (``--json`` has all of it)."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROL_RE2 = r"[\x{00}-\x{1f}\x{7f}-\x{9f}]"
_HIGH_CONTROL = re.compile(r"[\x7f-\x9f]")
_CONTROL_SUBSTITUTE = "·"
_ENCODE = json.JSONEncoder(ensure_ascii=False, default=str).encode


def printable(text: str) -> str:
    """The text without control characters: stored text must not be able to control the reader's terminal."""
    return _CONTROL.sub(_CONTROL_SUBSTITUTE, text)


class TextRows:
    """The lines of a table. The first batch fixes the widths of the columns, so that rows are printed at once."""

    def __init__(self, schema: pa.Schema, key_names: list[str]) -> None:
        self._names = [f"{name}*" if name in key_names else name for name in schema.names]
        self._right = [
            bool(pa.types.is_integer(data_type) or pa.types.is_floating(data_type)) for data_type in schema.types
        ]
        self._right = [
            right or bool(pa.types.is_decimal(data_type))
            for right, data_type in zip(self._right, schema.types, strict=True)
        ]
        self._widths: list[int] | None = None

    def text(self, batch: pa.RecordBatch) -> str:
        """The lines of a batch; before the first one, the header, in which key columns have a star."""
        if not batch.num_rows:
            return ""
        columns = [_as_text(column) for column in batch.columns]
        header = ""
        if self._widths is None:
            longest = [pc.max(pc.utf8_length(column)).as_py() or 0 for column in columns]
            self._widths = [max(len(printable(name)), width) for name, width in zip(self._names, longest, strict=True)]
            names = [
                printable(name).rjust(width) if right else printable(name).ljust(width)
                for name, width, right in zip(self._names, self._widths, self._right, strict=True)
            ]
            header = "  ".join(names).rstrip() + "\n" + "  ".join("-" * width for width in self._widths) + "\n"
        padded = [
            (pc.utf8_lpad if right else pc.utf8_rpad)(column, width)
            for column, width, right in zip(columns, self._widths, self._right, strict=True)
        ]
        lines = pc.utf8_rtrim_whitespace(padded[0] if len(padded) == 1 else pc.binary_join_element_wise(*padded, "  "))
        return header + "\n".join(lines.to_pylist()) + "\n"


class QueueRows:
    """Rows of a queue as lines, each with its partition and position."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = pa.schema([("partition", pa.int32()), ("position", pa.int64()), *schema])
        self._text = TextRows(self._schema, key_names=[])

    def text(self, partition: int, position: int, batch: pa.RecordBatch) -> str:
        count = batch.num_rows
        row_positions = [
            pa.array([partition] * count, pa.int32()),
            pa.array(range(position, position + count), pa.int64()),
        ]
        return self._text.text(pa.RecordBatch.from_arrays([*row_positions, *batch.columns], schema=self._schema))

    def json(self, partition: int, position: int, batch: pa.RecordBatch) -> str:
        """Rows as JSON lines. The row is a nested object, since its columns may have any names."""
        rows = enumerate(json_values(batch), start=position)
        return "".join(json_line({"partition": partition, "position": at, "row": row}) for at, row in rows)


def json_rows(batch: pa.RecordBatch) -> str:
    """One JSON object in one line for each row. Timestamps, dates and decimals are text, bytes are hexadecimal."""
    return "".join(json_line(row) for row in json_values(batch))


def json_values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Each row as a dict of values that JSON can represent."""
    names = batch.schema.names
    columns = [_as_json(column) for column in batch.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def json_line(value: dict[str, Any]) -> str:
    text = _ENCODE(value) + "\n"
    # JSON itself escapes the control characters below the space only.
    return _HIGH_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parse_bound(text: str, key: pa.Schema, table: str) -> tuple[Any, ...]:
    """Leading key values from ``a,5`` (quoted as in CSV where needed) or from a JSON array."""
    if text.lstrip().startswith("["):
        try:
            given: list[Any] = json.loads(text)
        except ValueError as error:
            raise BadInput(f"{text!r} is not a JSON array: {error}", table=table) from None
    else:
        given = next(csv.reader([text]), [])
    if not 1 <= len(given) <= len(key):
        raise BadInput(
            f"table {table!r}: {len(given)} key values in {text!r}, but the key is {', '.join(key.names)}", table=table
        )
    return tuple(_parse_value(value, key.field(index), table) for index, value in enumerate(given))


def _parse_value(value: Any, column: pa.Field, table: str) -> Any:
    try:
        if pa.types.is_binary(column.type):
            return bytes.fromhex(value[2:]) if value.startswith("0x") else value.encode()
        if isinstance(value, str) or pa.types.is_temporal(column.type) or pa.types.is_decimal(column.type):
            return pa.scalar(str(value)).cast(column.type)
        return pa.scalar(value, column.type)
    except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
        raise BadInput(
            f"table {table!r}, column {column.name!r}: {value!r} is not a value of {column.type} ({error})",
            table=table,
            column=column.name,
        ) from None


def _as_text(column: pa.Array) -> pa.Array:
    """A column as text for display: printable, short, and with a dash for null."""
    if pa.types.is_binary(column.type):
        beginnings = pc.binary_slice(column, 0, TEXT_WIDTH_MAX)
        column = pa.array([None if v is None else f"0x{v.hex()}" for v in beginnings.to_pylist()], pa.string())
    elif not pa.types.is_string(column.type):
        return _cast_to_text(column).fill_null("-")
    column = pc.replace_substring_regex(column, _CONTROL_RE2, _CONTROL_SUBSTITUTE)
    length = pc.utf8_length(column)
    if (pc.max(length).as_py() or 0) > TEXT_WIDTH_MAX:
        cut = pc.binary_join_element_wise(pc.utf8_slice_codeunits(column, 0, TEXT_WIDTH_MAX - 1), "…", "")
        column = pc.if_else(pc.greater(length, TEXT_WIDTH_MAX), cut, column)
    return column.fill_null("-")


def _cast_to_text(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        # A time zone that this machine does not know: the bare number is still right.
        return column.cast(pa.int64()).cast(pa.string())


def _as_json(column: pa.Array) -> list[Any]:
    if pa.types.is_binary(column.type):
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if pa.types.is_floating(column.type):
        # JSON has no NaN and no infinity.
        return [value if value is None or math.isfinite(value) else str(value) for value in column.to_pylist()]
    if pa.types.is_temporal(column.type) or pa.types.is_decimal(column.type):
        column = _cast_to_text(column)
    values: list[Any] = column.to_pylist()
    return values
