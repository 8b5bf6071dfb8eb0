"""Avro's types: as types of Arrow, and how many bytes each value of a column has when it is encoded.

The lengths are what makes it safe to decode many bodies in one go: polars reads bodies that stand one after the other,
and does not notice when a body is not of the schema. If each decoded row has as many bytes as its body, then every row
was read from its own body, and as any other reader would have read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput

NESTING_MAX = 32
"""The most types inside of each other."""

Lengths = np.ndarray[Any, np.dtype[np.int64]]

_PRIMITIVES: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL: Mapping[tuple[str, str], pa.DataType] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
_THRESHOLDS = np.array([1 << bits for bits in range(7, 64, 7)], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class AvroType:
    """One type of a schema: what it is on the wire, and in Arrow."""

    wire: str
    """boolean, int, long, float, double, bytes, string, enum, fixed, array or record."""
    arrow: pa.DataType
    nullable: bool = False
    null_last: bool = False
    """Whether null is the second branch of the union that makes the type nullable."""
    size: int = 0
    """The bytes of a fixed."""
    fields: tuple[tuple[str, AvroType], ...] = ()
    """The fields of a record; of an array the type of its items, under the name ``item``."""
    symbols: tuple[str, ...] = ()
    """The values of an enum, in the order of their numbers."""
    default: Any = None
    has_default: bool = False


def parse_record(text: str) -> AvroType:
    """The type of a schema in JSON, which must be a record; ``BadInput`` names the field that cannot be read."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise BadInput(f"the Avro schema is no JSON: {error}") from None
    found = _parse(schema, "", {}, 0)
    if found.wire != "record" or found.nullable:
        raise BadInput("the Avro schema is not a record")
    return found


def arrow_schema(record: AvroType) -> pa.Schema:
    return pa.schema([pa.field(name, inner.arrow, nullable=True) for name, inner in record.fields])


def _parse(schema: Any, at: str, named: dict[str, AvroType], depth: int) -> AvroType:
    if depth > NESTING_MAX:
        raise BadInput(f"{at}: more than {NESTING_MAX} types inside of each other")
    if isinstance(schema, list):
        return _parse_union(schema, at, named, depth)
    if isinstance(schema, str):
        return _parse({"type": schema}, at, named, depth + 1)
    if not isinstance(schema, dict):
        raise BadInput(f"{at or 'the Avro schema'}: {schema!r} is no type")
    kind = schema.get("type")
    if isinstance(kind, dict | list):
        return _parse(kind, at, named, depth + 1)
    if isinstance(kind, str) and kind in _PRIMITIVES:
        return _parse_primitive(schema, kind, at)
    if kind == "array":
        item = _parse(schema.get("items"), f"{at}[]", named, depth + 1)
        return AvroType("array", pa.list_(item.arrow), fields=(("item", item),))
    if kind in ("enum", "fixed"):
        made = _parse_enum(schema, at) if kind == "enum" else _parse_fixed(schema, at)
        return _remember(schema, made, named, at)
    if kind in ("record", "error"):
        fields = tuple(_parse_field(field, at, named, depth) for field in schema.get("fields", ()))
        arrow = pa.struct([pa.field(name, inner.arrow) for name, inner in fields])
        return _remember(schema, AvroType("record", arrow, fields=fields), named, at)
    if isinstance(kind, str) and kind.rpartition(".")[2] in named:
        return named[kind.rpartition(".")[2]]
    raise BadInput(f"{at or 'the Avro schema'}: the type {kind!r} has no columns here")


def _parse_field(field: Any, at: str, named: dict[str, AvroType], depth: int) -> tuple[str, AvroType]:
    if not isinstance(field, dict) or not isinstance(field.get("name"), str):
        raise BadInput(f"{at or 'the Avro schema'}: {field!r} is no field")
    inner = _parse(field.get("type"), f"{at}.{field['name']}".lstrip("."), named, depth + 1)
    if "default" in field:
        inner = replace(inner, default=field["default"], has_default=True)
    return field["name"], inner


def _parse_union(branches: list[Any], at: str, named: dict[str, AvroType], depth: int) -> AvroType:
    others = [branch for branch in branches if branch not in ("null", {"type": "null"})]
    if len(branches) != 2 or len(others) != 1:
        raise BadInput(f"{at or 'the Avro schema'}: a union other than of null and one type has no column here")
    inner = _parse(others[0], at, named, depth + 1)
    return replace(inner, nullable=True, null_last=branches[1] != others[0])


def _parse_primitive(schema: Mapping[str, Any], kind: str, at: str) -> AvroType:
    logical = schema.get("logicalType")
    if logical == "decimal" and kind == "bytes":
        return AvroType("bytes", _decimal(schema, at))
    return AvroType(kind, _LOGICAL.get((kind, str(logical)), _PRIMITIVES[kind]))


def _parse_enum(schema: Mapping[str, Any], at: str) -> AvroType:
    symbols = schema.get("symbols")
    if not isinstance(symbols, list) or not all(isinstance(symbol, str) for symbol in symbols):
        raise BadInput(f"{at}: an enum has symbols")
    return AvroType("enum", pa.string(), symbols=tuple(symbols))


def _parse_fixed(schema: Mapping[str, Any], at: str) -> AvroType:
    size = schema.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise BadInput(f"{at}: a fixed has a size")
    arrow = _decimal(schema, at) if schema.get("logicalType") == "decimal" else pa.binary()
    return AvroType("fixed", arrow, size=size)


def _decimal(schema: Mapping[str, Any], at: str) -> pa.DataType:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision <= 38:
        raise BadInput(f"{at}: a decimal has 1 to 38 digits, and no more than those after the point")
    return pa.decimal128(precision, scale)


def _remember(schema: Mapping[str, Any], made: AvroType, named: dict[str, AvroType], at: str) -> AvroType:
    """Keep a type under its name, without its namespace, for where the schema names it again."""
    name = str(schema.get("name")).rpartition(".")[2]
    if named.setdefault(name, made) != made:
        raise BadInput(f"{at or 'the Avro schema'}: two types are named {name!r}, in different namespaces")
    return made


# For polars ----------------------------------------------------------------------------------------------------------


def plain_schema(record: AvroType) -> str:
    """The schema in JSON, with the same encoding, written so that polars can read it: types that are named are written
    out wherever they are, and times are the numbers that they are encoded as."""
    return json.dumps(_plain(record, iter(range(1 << 30))))


def _plain(kind: AvroType, numbers: Iterator[int]) -> Any:
    made: Any = kind.wire
    if pa.types.is_decimal(kind.arrow):
        made = {"type": kind.wire, "logicalType": "decimal"}
        made |= {"precision": kind.arrow.precision, "scale": kind.arrow.scale}
    elif kind.wire in ("enum", "fixed", "record"):
        made = {"type": kind.wire}
    elif kind.wire == "array":
        made = {"type": "array", "items": _plain(kind.fields[0][1], numbers)}
    if kind.wire in ("enum", "fixed", "record"):
        made["name"] = f"t{next(numbers)}"
    if kind.wire == "enum":
        made["symbols"] = list(kind.symbols)
    if kind.wire == "fixed":
        made["size"] = kind.size
    if kind.wire == "record":
        made["fields"] = [{"name": name, "type": _plain(inner, numbers)} for name, inner in kind.fields]
    if not kind.nullable:
        return made
    return [made, "null"] if kind.null_last else ["null", made]


# Lengths -------------------------------------------------------------------------------------------------------------


def encoded_lengths(rows: pa.Table, record: AvroType) -> Lengths:
    """For each row, the number of bytes of its encoding; a value that has several encodings counts as its shortest."""
    total = np.zeros(rows.num_rows, dtype=np.int64)
    for name, inner in record.fields:
        column = rows[name]
        array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        total += _lengths(array, inner)
    return total


def _lengths(array: pa.Array, kind: AvroType) -> Lengths:
    found = _LENGTHS[kind.wire](array, kind)
    if not kind.nullable:
        return found
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return 1 + np.where(valid, found, 0)  # The branch of the union is one byte.


def varint_lengths(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Lengths:
    zigzag = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    found: Lengths = np.searchsorted(_THRESHOLDS, zigzag, side="right") + 1
    return found


def _of_integers(array: pa.Array, kind: AvroType) -> Lengths:
    plain = array.cast(pa.int32()) if pa.types.is_date32(array.type) or pa.types.is_time32(array.type) else array
    numbers = plain.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return varint_lengths(numbers)


def _of_enums(array: pa.Array, kind: AvroType) -> Lengths:
    numbers = pc.index_in(array, value_set=pa.array(kind.symbols, pa.string())).fill_null(0)
    return varint_lengths(numbers.cast(pa.int64()).to_numpy(zero_copy_only=False))


def _of_bytes(array: pa.Array, kind: AvroType) -> Lengths:
    if pa.types.is_decimal(array.type):
        values = (int(value.scaleb(array.type.scale)) if value is not None else 0 for value in array.to_pylist())
        return np.array([2 + (value if value >= 0 else ~value).bit_length() // 8 for value in values], dtype=np.int64)
    sizes = pc.binary_length(array).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    found: Lengths = varint_lengths(sizes) + sizes
    return found


def _of_arrays(array: pa.Array, kind: AvroType) -> Lengths:
    offsets = array.offsets.to_numpy().astype(np.int64)
    counts = np.diff(offsets)
    items = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    ends = np.concatenate([[0], np.cumsum(_lengths(items, kind.fields[0][1]))]).astype(np.int64)
    inside = ends[offsets[1:] - offsets[0]] - ends[offsets[:-1] - offsets[0]]
    # One block with its count, and the zero that ends the array; an empty array is that zero alone.
    return np.where(counts > 0, varint_lengths(counts) + inside + 1, 1)


def _of_records(array: pa.Array, kind: AvroType) -> Lengths:
    total = np.zeros(len(array), dtype=np.int64)
    for index, (_, inner) in enumerate(kind.fields):
        total += _lengths(array.field(index), inner)
    return total


_LENGTHS: Mapping[str, Callable[[pa.Array, AvroType], Lengths]] = {
    "boolean": lambda array, kind: np.ones(len(array), dtype=np.int64),
    "int": _of_integers,
    "long": _of_integers,
    "float": lambda array, kind: np.full(len(array), 4, dtype=np.int64),
    "double": lambda array, kind: np.full(len(array), 8, dtype=np.int64),
    "bytes": _of_bytes,
    "string": _of_bytes,
    "enum": _of_enums,
    "fixed": lambda array, kind: np.full(len(array), kind.size, dtype=np.int64),
    "array": _of_arrays,
    "record": _of_records,
}
