"""The prefix that clients of a schema registry put before a value: a zero, and the id of its schema in four bytes.

Messages of protobuf have one thing more behind it: where the message's type is in its file, as a list of indexes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.formats.base import NO_VALUE, BadValue, byte_offsets, without_prefix

PREFIX_BYTES = 5
INDEXES_MAX = 32
"""The most messages inside of each other."""


class Framed(NamedTuple):
    """Values, divided into the ids of their schemas and what is behind them."""

    good: np.ndarray[Any, np.dtype[np.int64]]
    """The indexes of the values that have a prefix."""
    ids: np.ndarray[Any, np.dtype[np.int64]]
    """For each of them, the id of its schema."""
    bodies: pa.Array
    """For each of them, the bytes behind the prefix."""
    bad: list[BadValue]


def split(values: pa.Array) -> Framed:
    """Takes the prefix off."""
    offsets = byte_offsets(values).astype(np.int64)
    begins, lengths = offsets[:-1], np.diff(offsets)
    data = np.frombuffer(values.buffers()[2] or b"", dtype=np.uint8)
    present = values.is_valid().to_numpy(zero_copy_only=False)
    framed = present & (lengths >= PREFIX_BYTES)
    at = begins[framed]
    zero = np.zeros(len(values), dtype=bool)
    zero[framed] = data[at] == 0
    framed &= zero
    at = begins[framed]
    ids = np.zeros(len(at), dtype=np.int64)
    for byte in range(1, PREFIX_BYTES):
        ids = (ids << 8) | data[at + byte]
    bad = [BadValue(int(index), _why(values[int(index)].as_py())) for index in np.flatnonzero(~framed)]
    kept = values if framed.all() else values.filter(pa.array(framed))
    return Framed(np.flatnonzero(framed), ids, without_prefix(kept, PREFIX_BYTES), bad)


def _why(value: bytes | None) -> str:
    if value is None:
        return NO_VALUE
    if len(value) < PREFIX_BYTES:
        return f"it has {len(value)} bytes; the prefix of a schema registry alone has {PREFIX_BYTES}"
    return f"it begins with {value[0]}, and with a schema registry values begin with 0"


def prefix(schema_id: int, indexes: Sequence[int] | None = None) -> bytes:
    """What goes before a value; ``indexes`` is for protobuf."""
    found = b"\0" + schema_id.to_bytes(4, "big")
    return found if indexes is None else found + encode_indexes(indexes)


def framed(bodies: pa.Array, before: bytes) -> pa.Array:
    """``bodies`` with ``before`` before each."""
    return pc.binary_join_element_wise(pa.scalar(before, pa.binary()), bodies, pa.scalar(b"", pa.binary()))


def encode_indexes(indexes: Sequence[int]) -> bytes:
    """The place of a message's type in its file. The first type, which most are, is a single zero."""
    if list(indexes) == [0]:
        return b"\0"
    return b"".join(varint(number) for number in (len(indexes), *indexes))


def varint(number: int) -> bytes:
    """A number that is not negative, as a zigzag varint."""
    number <<= 1  # Zigzag of a number that is not negative.
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def read_varints(value: bytes) -> Iterator[tuple[int, int]]:
    """The zigzag varints of ``value``, each with the offset after it; ``ValueError`` where they end."""
    at = 0
    while True:
        number = shift = 0
        while True:
            if at >= len(value) or shift > 63:
                raise ValueError("it ends inside of a number")
            byte = value[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        yield (number >> 1) ^ -(number & 1), at


def decode_indexes(body: bytes) -> tuple[list[int], int]:
    """The place of the message's type in its file, and the offset of the message in ``body``."""
    numbers = read_varints(body)
    count, at = next(numbers)
    if count == 0:
        return [0], at
    if not 0 < count <= INDEXES_MAX:
        raise ValueError(f"{count} messages inside of each other")
    found = []
    for _ in range(count):
        number, at = next(numbers)
        found.append(number)
    return found, at
