"""Records of Kafka as columns: what a reader returns, and what rows for ``map`` may have beside the value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.formats.base import BadValue, Decoded, Format
from shuffle.mapper.readers.kafka.positions import Partition

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
FIELDS = {
    "key": pa.field("key", pa.binary()),
    "value": pa.field("value", pa.binary()),
    "headers": pa.field("headers", HEADERS),
    "timestamp": pa.field("timestamp", pa.timestamp("ms", "UTC")),
    "topic": pa.field("topic", pa.string()),
    "partition": pa.field("partition", pa.int32()),
    "offset": pa.field("offset", pa.int64()),
}
"""The columns of the format ``raw``."""
METADATA = tuple(name for name in FIELDS if name != "value")
"""What rows of other formats can have beside the columns of the value, each with ``_`` before its name."""


class Records:
    """The columns that a reader of one partition returns, and the rows for ``map`` that are made of them."""

    def __init__(self, partition: Partition, value: Format | None, metadata: Collection[str]) -> None:
        """``value`` is the format of values; None for ``raw``, which has all columns as they are."""
        self._partition = partition
        self._value = value
        self._metadata = list(FIELDS) if value is None else [name for name in METADATA if name in metadata]
        wanted = set(self._metadata) | {"value", "offset"}
        self.read_schema = pa.schema([field for name, field in FIELDS.items() if name in wanted])
        self.schema = self.read_schema
        if value is not None:
            extra = [FIELDS[name].with_name(f"_{name}") for name in self._metadata]
            self.schema = pa.schema([*value.schema, *extra])

    @property
    def needs(self) -> frozenset[str]:
        """The parts of a record that are to be read."""
        return frozenset(self.read_schema.names)

    def table(self, columns: dict[str, Any], count: int) -> pa.Table:
        """A table of what was read. ``columns`` has all that differs from record to record."""
        made = []
        for field in self.read_schema:
            if field.name == "topic":
                made.append(pa.repeat(pa.scalar(self._partition.topic, field.type), count))
            elif field.name == "partition":
                made.append(pa.repeat(pa.scalar(self._partition.number, field.type), count))
            else:
                given = columns[field.name]
                made.append(given if isinstance(given, pa.Array) else pa.array(given, field.type))
        return pa.table(made, schema=self.read_schema)

    def decode(self, rows: pa.Table) -> Decoded:
        if self._value is None:
            return Decoded(rows)
        column = rows["value"]
        values = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.binary())
        decoded = self._value.decode(values)
        bad = [BadValue(one.index, self._reason(rows, one)) for one in decoded.bad]
        columns = list(decoded.rows.columns)
        if self._metadata:
            beside = rows.select(self._metadata)
            if decoded.values is not None:
                beside = beside.take(pa.array(decoded.values))
            columns += beside.columns
        return Decoded(pa.table(columns, schema=self.schema), bad, decoded.values)

    def _reason(self, rows: pa.Table, bad: BadValue) -> str:
        return f"{self._partition} at offset {rows['offset'][bad.index]} cannot be decoded: {bad.reason}"


def headers_of(given: Any) -> list[dict[str, Any]] | None:
    return None if given is None else [{"key": key, "value": value} for key, value in given]


def timestamps_of(milliseconds: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Times of records; a record without one has -1."""
    numbers = np.asarray(milliseconds, dtype=np.int64)
    return pa.array(numbers, mask=numbers < 0).cast(FIELDS["timestamp"].type)
