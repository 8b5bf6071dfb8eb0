"""The ends of the spills: one row for each mapper and reducer with spilled rows in the table ``<processor>/spills``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from shuffle.durable.mapper_state import MapperState, lookup_state
from shuffle.durable.tables import spills_table
from shuffle.errors import UnknownTable
from shuffle.ids import NOTHING_COMMITTED, MapperIndex, ReducerIndex, ShuffleIndex

if TYPE_CHECKING:
    from shuffle.statestore import Snapshot, StateClient, Transaction

SPILLS_KEY = pa.schema([("mapper_index", pa.int32()), ("reducer_index", pa.int32())])
SPILLS_VALUE = pa.schema(
    [
        ("position", pa.int64()),
        ("last_row_index", pa.int64()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("stored_bytes", pa.int64()),
        ("since_ms", pa.int64()),
    ]
)
SPILLS_ROW = pa.schema([*SPILLS_KEY, *SPILLS_VALUE])


@dataclass(frozen=True, slots=True)
class SpillEnd:
    """The end of the spill of one (mapper, reducer): its row in the table ``<processor>/spills``."""

    position: int = 0
    """The position of the next batch in the partition of the spill queue."""
    last_row_index: ShuffleIndex = NOTHING_COMMITTED
    """The shuffle index of the last row that was spilled."""
    rows: int = 0
    """The number of rows spilled over the life of the processor."""
    nbytes: int = 0
    """The bytes of those rows in memory."""
    stored_bytes: int = 0
    """The bytes that were written to the store for those rows."""
    since_ms: int = 0
    """The wall-clock time, in milliseconds, at which rows were last spilled into the empty spill."""


def lookup_spills(
    source: StateClient | Transaction | Snapshot,
    processor: str,
    mapper_index: MapperIndex,
    reducers: Sequence[ReducerIndex],
) -> dict[ReducerIndex, SpillEnd]:
    """The ends of the spills of these reducers, as ``source`` sees them. Reducers without spilled rows so far are
    absent."""
    mappers = pa.array([mapper_index] * len(reducers), pa.int32())
    keys = pa.table([mappers, pa.array(reducers, pa.int32())], schema=SPILLS_KEY)
    return {
        ReducerIndex(row["reducer_index"]): SpillEnd(
            row["position"],
            ShuffleIndex(row["last_row_index"]),
            row["rows"],
            row["bytes"],
            row["stored_bytes"],
            row["since_ms"],
        )
        for row in source.lookup(spills_table(processor), keys).to_pylist()
    }


def done_row_indexes(
    source: StateClient | Transaction | Snapshot,
    processor: str,
    mapper_index: MapperIndex,
    committed: Mapping[ReducerIndex, ShuffleIndex],
) -> dict[ReducerIndex, ShuffleIndex]:
    """For each reducer the shuffle index up to which it has no rows of this mapper left, given what it has
    ``committed``.

    That follows from the mapper's persisted state, even where the reducer's own last row is far below, unless rows
    between the two are in the spill. ``source`` should be one read view.
    """
    state = lookup_state(source, processor, mapper_index) or MapperState()
    try:
        spills = lookup_spills(source, processor, mapper_index, list(committed))
    except UnknownTable:
        spills = {}  # No mapper that can spill has ever run here.
    return {
        reducer: last
        if reducer in spills and spills[reducer].last_row_index > last
        else max(last, ShuffleIndex(state.shuffle_unread_row_index - 1))
        for reducer, last in committed.items()
    }


def spill_rows(mapper_index: MapperIndex, ends: Mapping[ReducerIndex, SpillEnd]) -> pa.Table:
    rows = [
        (mapper_index, reducer, e.position, e.last_row_index, e.rows, e.nbytes, e.stored_bytes, e.since_ms)
        for reducer, e in ends.items()
    ]
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SPILLS_ROW, strict=True)], schema=SPILLS_ROW)
