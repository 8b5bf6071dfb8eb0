"""Which column types the store knows, and which casts between types cannot lose anything."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

_UNIT_ORDER = {"s": 0, "ms": 1, "us": 2, "ns": 3}


def plain_type(data_type: pa.DataType) -> pa.DataType | None:
    """The type under which a sorted table keeps values of ``data_type``, or ``None`` if it cannot keep them."""
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type) or pa.types.is_string_view(data_type):
        return pa.string()
    if pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type) or pa.types.is_binary_view(data_type):
        return pa.binary()
    simple = (
        pa.types.is_integer(data_type)
        or pa.types.is_float32(data_type)
        or pa.types.is_float64(data_type)
        or pa.types.is_boolean(data_type)
        or pa.types.is_date32(data_type)
        or pa.types.is_timestamp(data_type)
        or pa.types.is_decimal128(data_type)
    )
    return data_type if simple else None


def is_text_or_bytes(data_type: pa.DataType) -> bool:
    """True for the plain types whose values differ in length."""
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


def widens(given: pa.DataType, target: pa.DataType) -> bool:
    """True if every value of ``given`` has its equal in ``target`` (timestamps of a finer unit may run out of range,
    which the cast then reports)."""
    if given == target:
        return True
    if pa.types.is_integer(given):
        return _integer_widens(given, target)
    if pa.types.is_floating(given):
        return bool(pa.types.is_floating(target)) and given.bit_width <= target.bit_width
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(target):
        # Two time zones show the same instant differently. An instant and a wall clock time cannot be compared at all.
        both_or_neither_zoned = (given.tz is None) == (target.tz is None)
        return both_or_neither_zoned and _UNIT_ORDER[given.unit] <= _UNIT_ORDER[target.unit]
    if pa.types.is_decimal(given) and pa.types.is_decimal(target):
        return bool(target.scale >= given.scale and target.precision - target.scale >= given.precision - given.scale)
    plain_given, plain_target = plain_type(given), plain_type(target)
    if plain_given is not None and plain_given == plain_target:
        return True
    if pa.types.is_fixed_size_binary(given):
        return bool(plain_target == pa.binary())
    return _nested_widens(given, target)


def decodes_exactly(dictionary: pa.DataType, target: pa.DataType) -> bool:
    return widens(dictionary.value_type, target)


def nested_types(data_type: pa.DataType) -> Iterator[pa.DataType]:
    """``data_type`` and every type inside it."""
    yield data_type
    for index in range(data_type.num_fields):
        yield from nested_types(data_type.field(index).type)


def _integer_widens(given: pa.DataType, target: pa.DataType) -> bool:
    signed = bool(pa.types.is_signed_integer(given))
    if pa.types.is_integer(target):
        if signed == bool(pa.types.is_signed_integer(target)):
            return bool(given.bit_width <= target.bit_width)
        return not signed and bool(given.bit_width < target.bit_width)
    mantissa_bits = {pa.float32(): 24, pa.float64(): 53}.get(target, 0)
    return bool(given.bit_width - signed <= mantissa_bits)


def _nested_widens(given: pa.DataType, target: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list)
    if any(is_list(given) for is_list in lists) and any(is_list(target) for is_list in lists):
        return widens(given.value_type, target.value_type)
    if pa.types.is_fixed_size_list(given) and pa.types.is_fixed_size_list(target):
        return given.list_size == target.list_size and widens(given.value_type, target.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(target):
        pairs = list(zip(given, target, strict=False))
        return given.num_fields == target.num_fields and all(
            a.name == b.name and widens(a.type, b.type) for a, b in pairs
        )
    return False
