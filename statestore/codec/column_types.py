"""Which column types the store knows, and which casts between types cannot lose anything."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

_UNIT_ORDER = {"s": 0, "ms": 1, "us": 2, "ns": 3}


def plain_type(kind: pa.DataType) -> pa.DataType | None:
    """The type under which a sorted table keeps ``kind``, or ``None`` if it cannot."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    simple = (
        pa.types.is_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_decimal128(kind)
    )
    return kind if simple else None


def is_text_or_bytes(kind: pa.DataType) -> bool:
    """A plain type whose values differ in length."""
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def widens(given: pa.DataType, wanted: pa.DataType) -> bool:
    """True if every value of ``given`` has its equal in ``wanted`` (timestamps of a finer unit may run out of range,
    which the cast then reports)."""
    if given == wanted:
        return True
    if pa.types.is_integer(given):
        return _integer_widens(given, wanted)
    if pa.types.is_floating(given):
        return bool(pa.types.is_floating(wanted)) and given.bit_width <= wanted.bit_width
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(wanted):
        # Two zones show the same instant differently; an instant and a wall clock time are not the same thing at all.
        same_kind = (given.tz is None) == (wanted.tz is None)
        return same_kind and _UNIT_ORDER[given.unit] <= _UNIT_ORDER[wanted.unit]
    if pa.types.is_decimal(given) and pa.types.is_decimal(wanted):
        return bool(wanted.scale >= given.scale and wanted.precision - wanted.scale >= given.precision - given.scale)
    plain_given, plain_wanted = plain_type(given), plain_type(wanted)
    if plain_given is not None and plain_given == plain_wanted:
        return True
    if pa.types.is_fixed_size_binary(given):
        return bool(plain_wanted == pa.binary())
    return _nested_widens(given, wanted)


def decodes_exactly(dictionary: pa.DataType, wanted: pa.DataType) -> bool:
    return widens(dictionary.value_type, wanted)


def nested_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    """``kind`` and every type inside it."""
    yield kind
    for index in range(kind.num_fields):
        yield from nested_types(kind.field(index).type)


def _integer_widens(given: pa.DataType, wanted: pa.DataType) -> bool:
    signed = bool(pa.types.is_signed_integer(given))
    if pa.types.is_integer(wanted):
        if signed == bool(pa.types.is_signed_integer(wanted)):
            return bool(given.bit_width <= wanted.bit_width)
        return not signed and bool(given.bit_width < wanted.bit_width)
    mantissa_bits = {pa.float32(): 24, pa.float64(): 53}.get(wanted, 0)
    return bool(given.bit_width - signed <= mantissa_bits)


def _nested_widens(given: pa.DataType, wanted: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list)
    if any(is_list(given) for is_list in lists) and any(is_list(wanted) for is_list in lists):
        return widens(given.value_type, wanted.value_type)
    if pa.types.is_fixed_size_list(given) and pa.types.is_fixed_size_list(wanted):
        return given.list_size == wanted.list_size and widens(given.value_type, wanted.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        pairs = list(zip(given, wanted, strict=False))
        return given.num_fields == wanted.num_fields and all(
            a.name == b.name and widens(a.type, b.type) for a, b in pairs
        )
    return False
