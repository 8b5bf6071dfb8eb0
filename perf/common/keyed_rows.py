"""Rows of a key and a payload, with any number of keys and any size of row, and the jobs on them.

Workers import this module for the jobs, so it imports little itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from shuffle import AggregateReducer, Count, HashMapper
from shuffle.jobs.aggregates import Aggregate
from shuffle.statestore import StateClient

SCHEMA = pa.schema([("key", pa.int32()), ("payload", pa.binary())])
TABLE = "keyed"
KEY = pa.schema([pa.field("key", pa.int32(), nullable=False)])
VALUE = pa.schema([("count", pa.int64())])
ROW_BYTES = 115
ROW_BYTES_MIN = 8
"""The least size of a row in bytes: the key, and the offset of the payload's end."""
LOAD_ROWS = 50_000


class ByKey(HashMapper):
    key = ("key",)


class CountByKey(AggregateReducer):
    table = TABLE
    key = ("key",)
    aggregates: ClassVar[Mapping[str, Aggregate]] = {"count": Count()}


@dataclass(frozen=True)
class KeyedRows:
    """Rows whose keys are drawn evenly and at random from 0 to ``keys``; equal objects give equal rows."""

    seed: int
    keys: int
    row_bytes: int = ROW_BYTES

    def rows(self, begin: int, end: int, partition: int) -> pa.Table:
        random = np.random.default_rng([self.seed, partition, begin])
        count, payload_bytes = end - begin, self.row_bytes - ROW_BYTES_MIN
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(payload_bytes)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(random.bytes(count * payload_bytes))]
        keys = random.integers(0, self.keys, count, dtype=np.int32)
        payloads = pa.Array.from_buffers(pa.binary(), count, buffers)
        return pa.Table.from_arrays([pa.array(keys), payloads], schema=SCHEMA)

    def in_turn(self, rows: int, partitions: int, batch_rows: int) -> Iterator[tuple[int, pa.Table]]:
        """``rows`` rows, a batch of each partition in turn."""
        share = -(-rows // partitions)
        for begin in range(0, share, batch_rows):
            for partition in range(partitions):
                yield partition, self.rows(begin, min(begin + batch_rows, share), partition)


def load_table(state: StateClient, table: str, keys: int) -> None:
    """Create a table with a row for each key."""
    state.create_table(table, key=KEY, value=VALUE)
    for begin in range(0, keys, LOAD_ROWS):
        numbers = pa.array(np.arange(begin, min(begin + LOAD_ROWS, keys), dtype=np.int32))
        with state.transaction() as tx:
            tx.write(table, pa.table({"key": numbers, "count": np.zeros(len(numbers), dtype=np.int64)}))
            tx.commit()
