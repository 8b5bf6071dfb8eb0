"""The reducer's persisted state: one row with the last committed shuffle index of every mapper, and its front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.errors import CorruptData, SpecError
from shuffle.ids import NOTHING_COMMITTED, MapperIndex, ReducerIndex, ShuffleIndex

REDUCERS_KEY = pa.schema([pa.field("reducer_index", pa.int32(), nullable=False)])
REDUCERS_VALUE = pa.schema(
    [
        pa.field("committed_row_indices", pa.binary(), nullable=False),
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("fronts", pa.binary()),
    ]
)
"""``committed_row_indices`` has a little-endian int64 for each mapper; 8 bytes a mapper is what a commit of the shuffle
itself costs. ``fronts`` is encoded in the same way, with ``NO_FRONT`` for a mapper of which no front is known; it is
null if none is known of any mapper."""

_ROW = pa.schema([*REDUCERS_KEY, *REDUCERS_VALUE])

NO_FRONT = -(2**63)
"""The encoded value for a mapper of which no front is known."""

_INDEXES = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class ReducerState:
    """The row of one reducer. Two states are equal if all fields are: a commit compares the whole row."""

    committed_row_indices: tuple[ShuffleIndex, ...]
    """The last shuffle index that was committed, for each mapper."""
    generation: int = 0
    """The generation of the processor. A commit that expects another one is refused, like any that expects another
    row."""
    fronts: tuple[int | None, ...] | None = None
    """The front of each mapper: no row after the committed ones is below it. None where it is not known."""

    @staticmethod
    def initial(mapper_count: int) -> ReducerState:
        return ReducerState((NOTHING_COMMITTED,) * mapper_count)

    def __getitem__(self, mapper_index: MapperIndex) -> ShuffleIndex:
        return self.committed_row_indices[mapper_index]

    def committed(self, mapper_index: MapperIndex) -> ShuffleIndex:
        """The last index that was committed of a mapper; nothing of one that came after this row was written."""
        known = mapper_index < len(self.committed_row_indices)
        return self.committed_row_indices[mapper_index] if known else NOTHING_COMMITTED

    def widened(self, mapper_count: int) -> ReducerState:
        """This state with mappers that came later, of which nothing is committed."""
        more = mapper_count - len(self.committed_row_indices)
        indices = self.committed_row_indices + (NOTHING_COMMITTED,) * more
        fronts = None if self.fronts is None else self.fronts + (None,) * more
        return ReducerState(indices, self.generation, fronts)

    def front(self, mapper_index: MapperIndex) -> int | None:
        return None if self.fronts is None else self.fronts[mapper_index]

    def advanced(
        self, last_row_indices: Mapping[MapperIndex, ShuffleIndex], fronts: Mapping[MapperIndex, int] | None = None
    ) -> ReducerState:
        """This state with some mappers further on. Neither an index nor a front ever goes back."""
        indices = list(self.committed_row_indices)
        for mapper_index, last in last_row_indices.items():
            if last < indices[mapper_index]:
                raise ValueError(f"mapper {mapper_index}: committed would fall from {indices[mapper_index]} to {last}")
            indices[mapper_index] = last
        return ReducerState(tuple(indices), self.generation, self._advanced_fronts(fronts))

    def _advanced_fronts(self, fronts: Mapping[MapperIndex, int] | None) -> tuple[int | None, ...] | None:
        if not fronts:
            return self.fronts
        advanced = list(self.fronts or (None,) * len(self.committed_row_indices))
        for mapper_index, front in fronts.items():
            before = advanced[mapper_index]
            # Both bounds hold: another instance of the mapper may cut its batches differently, and give a lower one.
            advanced[mapper_index] = front if before is None else max(before, front)
        return tuple(advanced)

    def encode(self) -> bytes:
        """The encoded value of the column ``committed_row_indices``."""
        return np.array(self.committed_row_indices, dtype=_INDEXES).tobytes()

    def encode_fronts(self) -> bytes | None:
        """The encoded value of the column ``fronts``."""
        if self.fronts is None:
            return None
        return np.array([NO_FRONT if front is None else front for front in self.fronts], dtype=_INDEXES).tobytes()

    @staticmethod
    def decode_any(encoded: bytes) -> ReducerState:
        """The state with these committed indexes, whatever the number of mappers."""
        return ReducerState.decode(encoded, len(encoded) // _INDEXES.itemsize)

    @staticmethod
    def decode(
        encoded: bytes, mapper_count: int, generation: int = 0, encoded_fronts: bytes | None = None
    ) -> ReducerState:
        if len(encoded) % _INDEXES.itemsize:
            raise CorruptData(f"committed_row_indices has {len(encoded)} bytes, which are no whole number of indexes")
        indices = np.frombuffer(encoded, dtype=_INDEXES).tolist()
        if len(indices) != mapper_count:
            raise SpecError(
                f"the state is of {len(indices)} mappers and the input has {mapper_count}: the number of partitions of "
                "the input cannot change under existing state. Restore the input, or start a processor of another name",
                expected=mapper_count,
                found=len(indices),
            )
        if indices and min(indices) < NOTHING_COMMITTED:
            raise CorruptData(f"committed_row_indices has an index of {min(indices)}")
        fronts = None if encoded_fronts is None else _decode_fronts(encoded_fronts, mapper_count)
        return ReducerState(tuple(ShuffleIndex(index) for index in indices), generation, fronts)

    def to_row(self, reducer_index: ReducerIndex) -> pa.RecordBatch:
        """The row as it is written to the table of reducers."""
        values = (reducer_index, self.encode(), self.generation, self.encode_fronts())
        columns = [pa.array([value], data_type) for value, data_type in zip(values, _ROW.types, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=_ROW)

    @staticmethod
    def key(reducer_index: ReducerIndex) -> pa.Table:
        return pa.table({"reducer_index": pa.array([reducer_index], pa.int32())})

    @staticmethod
    def from_rows(rows: pa.Table, mapper_count: int) -> ReducerState:
        """The state in the result of a lookup of ``key``. Without a row, nothing is committed of any mapper."""
        if rows.num_rows == 0:
            return ReducerState.initial(mapper_count)
        row = rows.to_pylist()[0]
        return ReducerState.from_row(row, mapper_count)

    @staticmethod
    def from_any_row(row: Mapping[str, Any]) -> ReducerState:
        """The state in one row of the table, of however many mappers."""
        width = len(row["committed_row_indices"]) // _INDEXES.itemsize
        return ReducerState.from_row(row, width)

    @staticmethod
    def from_row(row: Mapping[str, Any], mapper_count: int) -> ReducerState:
        """The state in one row of the table."""
        return ReducerState.decode(row["committed_row_indices"], mapper_count, row["generation"], row["fronts"])


def _decode_fronts(encoded: bytes, mapper_count: int) -> tuple[int | None, ...]:
    if len(encoded) != mapper_count * _INDEXES.itemsize:
        raise CorruptData(f"fronts has {len(encoded)} bytes, and there are {mapper_count} mappers")
    fronts = np.frombuffer(encoded, dtype=_INDEXES).tolist()
    return tuple(None if front == NO_FRONT else front for front in fronts)
