"""What a format is: values of messages (an Arrow array of bytes) into columns of a schema that never changes, and back.

A value that cannot be decoded is found with its index and its reason, and does not keep the others from being decoded.
Libraries decode a batch as a whole, and stop at the first bad value, some without saying which it is. So a batch that
fails is halved until the bad values are alone: k of them among n take O(k log n) attempts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.errors import BadInput

REASON_CHARS_MAX = 500
"""The most characters of a library's error text that are kept. Some of them quote the value, which may be long."""

Indexes = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, order=True, slots=True)
class BadValue:
    """A value that cannot be decoded."""

    index: int
    """The index of the value in the array that was given."""
    reason: str


class CannotDecode(Exception):
    """Some value of those given cannot be decoded; raised inside of formats, never to their callers."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The rows of a batch of values."""

    rows: pa.Table
    """The rows of all values that could be decoded, in their order."""
    bad: Sequence[BadValue] = ()
    """The values that could not, in their order."""
    values: Indexes | None = None
    """For each row the index of its value; None if row i is value i."""


class Format(ABC):
    """A format of messages. It has no threads and no connections of its own, except for a client of a registry."""

    schema: pa.Schema
    """The schema of decoded rows."""
    is_batched: bool = False
    """Whether one value holds many rows. Otherwise ``encode`` returns one value for each row."""

    @abstractmethod
    def decode(self, values: pa.Array) -> Decoded:
        """The rows of ``values``, an array of ``pa.binary()``. A null is a message without a value, which is bad."""

    @abstractmethod
    def encode(self, rows: pa.Table) -> pa.Array:
        """The values of ``rows``, an array of ``pa.binary()``; of all rows in one value if ``is_batched``.

        Raises ``BadInput`` if a row cannot be encoded.
        """

    def close(self) -> None:  # noqa: B027 (most formats have nothing open)
        """Release what is open."""


NO_VALUE = "the message has no value (a tombstone)"


def decode_in_halves(
    values: pa.Array, attempt: Callable[[pa.Array], pa.Table], schema: pa.Schema, why_alone: Callable[[pa.Array], str]
) -> Decoded:
    """Decodes ``values`` with ``attempt``, in as few calls as the bad ones among them allow.

    ``attempt`` returns one row for each value, or raises ``CannotDecode``. ``why_alone`` gets an array of the one value
    that fails by itself, and says why.
    """
    tables: list[pa.Table] = []
    bad: list[BadValue] = []
    good: list[tuple[int, int]] = []
    ranges = [(0, len(values))] if len(values) else []
    if values.null_count:
        ranges = _without_nulls(values, bad)
    while ranges:
        begin, end = ranges.pop()
        part = values.slice(begin, end - begin)
        try:
            tables.append(attempt(part))
            good.append((begin, end))
        except CannotDecode:
            if end - begin == 1:
                bad.append(BadValue(begin, why_alone(part)))
            else:
                middle = (begin + end) // 2
                ranges += [(middle, end), (begin, middle)]  # The left one on top: results stay in order.
    rows = pa.concat_tables(tables) if tables else schema.empty_table()
    if not bad:
        return Decoded(rows)
    bad.sort()
    kept = [np.arange(begin, end, dtype=np.int64) for begin, end in good]
    return Decoded(rows, bad, np.concatenate(kept) if kept else np.empty(0, dtype=np.int64))


def _without_nulls(values: pa.Array, bad: list[BadValue]) -> list[tuple[int, int]]:
    """The ranges between the nulls, the leftmost last; the nulls are noted as bad."""
    nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
    bad += [BadValue(int(index), NO_VALUE) for index in nulls]
    edges = [-1, *nulls.tolist(), len(values)]
    ranges = [(left + 1, right) for left, right in pairwise(edges) if right > left + 1]
    return ranges[::-1]


def short(error: BaseException | str) -> str:
    """The text of an error of a library, on one line, and not too long."""
    text = " ".join(str(error).split())
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"


def joined(values: pa.Array) -> pa.Buffer:
    """The bytes of all values one after the other, without a copy."""
    offsets = byte_offsets(values)
    data = values.buffers()[2]
    if data is None:
        return pa.py_buffer(b"")
    return data.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def byte_offsets(values: pa.Array) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Where each value begins and ends in the data of the array: one more than there are values."""
    offsets = np.frombuffer(values.buffers()[1], dtype=np.int32, count=values.offset + len(values) + 1)
    return offsets[values.offset :]


def without_prefix(values: pa.Array, count: int) -> pa.Array:
    """``values``, all of which have ``count`` bytes or more, without their first ``count``."""
    offsets = byte_offsets(values).astype(np.int64)
    keep = np.ones(int(offsets[-1] - offsets[0]), dtype=bool)
    for byte in range(count):
        keep[offsets[:-1] - offsets[0] + byte] = False
    return values_of(np.frombuffer(joined(values), dtype=np.uint8)[keep].tobytes(), np.diff(offsets) - count)


def values_of(data: bytes | pa.Buffer, lengths: np.ndarray[Any, Any]) -> pa.Array:
    """An array of bytes from the bytes of all values, and the length of each."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise BadInput(f"{offsets[-1]} bytes of values at a time are too many")
    return pa.Array.from_buffers(
        pa.binary(), len(lengths), [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    )


def check_columns(rows: pa.Table, schema: pa.Schema, what: str) -> pa.Table:
    """``rows`` with the columns of ``schema``, cast where nothing is lost; ``BadInput`` names what does not fit."""
    missing = [name for name in schema.names if name not in rows.schema.names]
    extra = [name for name in rows.schema.names if name not in schema.names]
    if missing or extra:
        raise BadInput(f"{what} has the columns {', '.join(schema.names)}, the rows {', '.join(rows.schema.names)}")
    try:
        return rows.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise BadInput(f"the rows do not fit {what}: {short(error)}") from None
