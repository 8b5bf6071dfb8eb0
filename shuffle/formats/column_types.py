"""Types of columns as people write them in a spec: ``int64``, ``timestamp[ms, UTC]``, ``list<string>``."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa

from shuffle.errors import BadInput
from shuffle.support.suggest import did_you_mean

NESTING_MAX = 16
"""The most types inside of each other."""

PLAIN: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
}
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, *([\w/+:-]+))?\]")
_DECIMAL = re.compile(r"decimal\((\d{1,2}), *(\d{1,2})\)")
_LIST = re.compile(r"list<(.+)>", re.DOTALL)
_STRUCT = re.compile(r"struct<(.+)>", re.DOTALL)
FORMS = (*PLAIN, "timestamp[ms]", "timestamp[ms, UTC]", "decimal(10, 2)", "list<…>", "struct<a: …, b: …>")


def column_type(text: str, depth: int = 0) -> pa.DataType:
    """The type that ``text`` names; ``BadInput`` if there is none."""
    text = text.strip()
    if depth > NESTING_MAX:
        raise BadInput(f"more than {NESTING_MAX} types inside of each other")
    if text in PLAIN:
        return PLAIN[text]
    if found := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(found[1], tz=found[2])
    if found := _DECIMAL.fullmatch(text):
        precision, scale = int(found[1]), int(found[2])
        if not 0 <= scale <= precision <= 38 or precision == 0:
            raise BadInput(f"{text!r} is not a decimal: it has 1 to 38 digits, and no more than those after the point")
        return pa.decimal128(precision, scale)
    if found := _LIST.fullmatch(text):
        return pa.list_(column_type(found[1], depth + 1))
    if found := _STRUCT.fullmatch(text):
        return pa.struct([_field(part, depth + 1) for part in _parts(found[1])])
    forms = f"; there are {', '.join(FORMS)}"
    raise BadInput(f"{text[:80]!r} is not a type{did_you_mean(text, list(PLAIN), forms)}")


def _field(text: str, depth: int) -> pa.Field:
    name, colon, inner = text.partition(":")
    if not colon or not name.strip():
        raise BadInput(f"{text.strip()!r} is not a field of a struct: write it as name: type")
    return pa.field(name.strip(), column_type(inner, depth))


def _parts(text: str) -> list[str]:
    """``text`` cut at the commas that are inside of no bracket."""
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "<([") - (character in ">)]")
        if character == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def schema_of(columns: Mapping[str, str]) -> pa.Schema:
    """The schema of columns and the names of their types."""
    fields = []
    for name, text in columns.items():
        try:
            fields.append(pa.field(name, column_type(text)))
        except BadInput as error:
            raise BadInput(f"column {name!r}: {error.message}") from None
    return pa.schema(fields)
