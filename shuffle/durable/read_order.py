"""The order in which a mapper read the partitions of its group: rows of the table ``<processor>/reads``.

A mapper of several partitions writes an entry before it exposes the rows of a read: from which partitions they came,
and how many from each. An instance that starts again reads the same rows in the same order. Entries are numbered
without gaps; those before the persisted state of the mapper are deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from shuffle.durable.tables import reads_table
from shuffle.errors import CommitConflict, CommitUnknown, CorruptData
from shuffle.ids import MapperIndex

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

READS_KEY = pa.schema([("mapper_index", pa.int32()), ("entry", pa.int64())])
READS_VALUE = pa.schema([pa.field("batches", pa.binary(), nullable=False)])
"""``batches`` has two little-endian uint32 for each batch of the read: its partition, and its number of rows."""

DELETED_AT_ONCE_MAX = 10_000
"""The most entries that are deleted in one transaction."""

_ROW = pa.schema([*READS_KEY, *READS_VALUE])
_BATCHES = np.dtype("<u4")


class ReadBatch(NamedTuple):
    """A part of an entry: rows that were read from one partition."""

    partition: int
    rows: int


Entry = tuple[ReadBatch, ...]


def encode_entry(entry: Entry) -> bytes:
    return np.array(entry, dtype=_BATCHES).tobytes()


def decode_entry(encoded: bytes) -> Entry:
    if not encoded or len(encoded) % (2 * _BATCHES.itemsize):
        raise CorruptData(f"an entry of a mapper's reads has {len(encoded)} bytes, which are no whole batches")
    return tuple(ReadBatch(*batch) for batch in np.frombuffer(encoded, dtype=_BATCHES).reshape(-1, 2).tolist())


class ReadOrder:
    """The entries of one mapper in the store. It has no state of its own, so all instances may use it."""

    def __init__(self, client: StateClient, processor: str, mapper_index: MapperIndex) -> None:
        self._client = client
        self._table = reads_table(processor)
        self._mapper_index = mapper_index

    def load(self, first: int, entries_max: int) -> dict[int, Entry]:
        """The entries from ``first`` on, by their numbers."""
        begin, end = (self._mapper_index, first), (self._mapper_index + 1,)
        rows = self._client.scan(self._table, begin=begin, end=end, limit=entries_max).read_all()
        encoded = zip(rows["entry"].to_pylist(), rows["batches"].to_pylist(), strict=True)
        return {number: decode_entry(batches) for number, batches in encoded}

    def append(self, number: int, entry: Entry) -> bool:
        """Write an entry durably. False if there is another of this number, or if it is not known whether there is:
        load it then, and read what it says."""
        row = pa.RecordBatch.from_arrays(
            [
                pa.array([self._mapper_index], pa.int32()),
                pa.array([number], pa.int64()),
                pa.array([encode_entry(entry)], pa.binary()),
            ],
            schema=_ROW,
        )
        with self._client.transaction() as tx:
            tx.expect_absent(self._table, row.select(READS_KEY.names))
            tx.write(self._table, row)
            try:
                tx.commit()
            except (CommitConflict, CommitUnknown):
                return False
        return True

    def trim(self, number: int) -> None:
        """Delete the entries below ``number``."""
        begin, end = (self._mapper_index,), (self._mapper_index, number)
        keys = self._client.scan(
            self._table, begin=begin, end=end, limit=DELETED_AT_ONCE_MAX, columns=READS_KEY.names
        ).read_all()
        if keys.num_rows:
            with self._client.transaction() as tx:
                tx.delete(self._table, keys)
                tx.commit()
