"""The mapper's persisted state: one row per mapper in the table ``<processor>/mappers``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from shuffle.durable.reducer_state import REDUCERS_KEY, ReducerState
from shuffle.durable.tables import mappers_table, reducers_table
from shuffle.ids import InputIndex, MapperIndex, ReducerIndex, ShuffleIndex, Token

if TYPE_CHECKING:
    from shuffle.statestore import Snapshot, StateClient, Transaction

MAPPERS_KEY = pa.schema([("mapper_index", pa.int32())])
MAPPERS_VALUE = pa.schema(
    [
        ("input_unread_row_index", pa.int64()),
        ("shuffle_unread_row_index", pa.int64()),
        ("continuation_token", pa.binary()),
        pa.field("generation", pa.int32(), nullable=False),
        ("front", pa.int64()),
    ]
)
MAPPERS_ROW = pa.schema([*MAPPERS_KEY, *MAPPERS_VALUE])


@dataclass(frozen=True, slots=True)
class MapperState:
    """The persisted positions of one mapper: every row before them has been committed by its reducer, or is in the
    spill."""

    input_unread_row_index: InputIndex = InputIndex(0)
    """The index, in the input numbering, of the first row that is not yet done."""
    shuffle_unread_row_index: ShuffleIndex = ShuffleIndex(0)
    """The index, in the shuffle numbering, of the first row that is not yet done."""
    continuation_token: Token = Token(b"")
    """The token with which the reader goes on at these positions."""
    generation: int = 0
    """The generation of the processor. States that differ only in their generation are different states, so a mapper
    notices that another instance has written one."""
    front: int | None = None
    """The value of the mapper's clock at this position: no row from here on is below it. It depends only on the
    position, so two instances agree on it. None if the mapper has no clock."""

    def is_before(self, other: MapperState) -> bool:
        return self.input_unread_row_index < other.input_unread_row_index


def key_rows(mapper_index: MapperIndex) -> pa.Table:
    return pa.table([pa.array([mapper_index], pa.int32())], schema=MAPPERS_KEY)


def state_rows(mapper_index: MapperIndex, state: MapperState) -> pa.Table:
    """The row of this mapper in the table, with ``state`` in it."""
    return pa.table(
        [
            pa.array([mapper_index], pa.int32()),
            pa.array([state.input_unread_row_index], pa.int64()),
            pa.array([state.shuffle_unread_row_index], pa.int64()),
            pa.array([state.continuation_token], pa.binary()),
            pa.array([state.generation], pa.int32()),
            pa.array([state.front], pa.int64()),
        ],
        schema=MAPPERS_ROW,
    )


def state_from_rows(rows: pa.Table) -> MapperState | None:
    """The state in the result of a lookup; None before the first commit."""
    if rows.num_rows == 0:
        return None
    assert rows.num_rows == 1
    row = rows.to_pylist()[0]
    return MapperState(
        InputIndex(row["input_unread_row_index"]),
        ShuffleIndex(row["shuffle_unread_row_index"]),
        Token(row["continuation_token"]),
        row["generation"],
        row["front"],
    )


def lookup_state(
    source: StateClient | Transaction | Snapshot, processor: str, mapper_index: MapperIndex
) -> MapperState | None:
    """The persisted state of a mapper, as ``source`` sees it; None before the first commit."""
    return state_from_rows(source.lookup(mappers_table(processor), key_rows(mapper_index)))


def lookup_committed(
    source: StateClient | Transaction | Snapshot, processor: str, mapper_index: MapperIndex, reducer_count: int
) -> dict[ReducerIndex, ShuffleIndex]:
    """The last row of this mapper that each reducer has committed, by the reducer's own row. Reducers without a row are
    absent."""
    keys = pa.table([pa.array(range(reducer_count), pa.int32())], schema=REDUCERS_KEY)
    rows = source.lookup(reducers_table(processor), keys)
    states = {row["reducer_index"]: ReducerState.decode_any(row["committed_row_indices"]) for row in rows.to_pylist()}
    return {ReducerIndex(reducer): state.committed(mapper_index) for reducer, state in states.items()}


class PersistedState:
    """Fetches the state of one mapper repeatedly. It is fetched with every batch and seldom changes, so the decoded
    state is kept."""

    def __init__(self, client: StateClient, processor: str, mapper_index: MapperIndex) -> None:
        self._client = client
        self._table = mappers_table(processor)
        self._mapper_index = mapper_index
        self._rows: pa.Table | None = None
        """The rows that the store returned last."""
        self._state: MapperState | None = None
        """The state that is decoded from ``_rows``."""

    def fetch(self) -> MapperState | None:
        rows = self._client.cached_lookup(self._table, (self._mapper_index,))
        if rows is not self._rows:
            self._rows, self._state = rows, state_from_rows(rows)
        return self._state
