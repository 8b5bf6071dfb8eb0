"""What a reducer makes durable: one row with the last committed shuffle index of every mapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shuffle.errors import CorruptData, SpecError
from shuffle.ids import NOTHING_COMMITTED, MapperIndex, ReducerIndex, ShuffleIndex

REDUCERS_KEY = pa.schema([pa.field("reducer_index", pa.int32(), nullable=False)])
REDUCERS_VALUE = pa.schema([pa.field("committed_row_indices", pa.binary(), nullable=False)])
"""Little-endian int64 for each mapper: 8 bytes a mapper is what a commit of the shuffle itself costs."""

_INDEXES = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class ReducerState:
    """The row of one reducer. Two states are equal if every index is: a commit compares the whole row."""

    committed_row_indices: tuple[ShuffleIndex, ...]

    @staticmethod
    def initial(mapper_count: int) -> ReducerState:
        return ReducerState((NOTHING_COMMITTED,) * mapper_count)

    def __getitem__(self, mapper_index: MapperIndex) -> ShuffleIndex:
        return self.committed_row_indices[mapper_index]

    def advanced(self, last_row_indices: Mapping[MapperIndex, ShuffleIndex]) -> ReducerState:
        """This state with some mappers further on; it never goes back."""
        indices = list(self.committed_row_indices)
        for mapper_index, last in last_row_indices.items():
            if last < indices[mapper_index]:
                raise ValueError(f"mapper {mapper_index}: committed would fall from {indices[mapper_index]} to {last}")
            indices[mapper_index] = last
        return ReducerState(tuple(indices))

    def encode(self) -> bytes:
        return np.array(self.committed_row_indices, dtype=_INDEXES).tobytes()

    @staticmethod
    def decode_any(encoded: bytes) -> ReducerState:
        """Of however many mappers it is."""
        return ReducerState.decode(encoded, len(encoded) // _INDEXES.itemsize)

    @staticmethod
    def decode(encoded: bytes, mapper_count: int) -> ReducerState:
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
        return ReducerState(tuple(ShuffleIndex(index) for index in indices))

    def to_row(self, reducer_index: ReducerIndex) -> pa.Table:
        """The row as it is written to the table of reducers."""
        return pa.table(
            {
                "reducer_index": pa.array([reducer_index], pa.int32()),
                "committed_row_indices": pa.array([self.encode()], pa.binary()),
            }
        )

    @staticmethod
    def key(reducer_index: ReducerIndex) -> pa.Table:
        return pa.table({"reducer_index": pa.array([reducer_index], pa.int32())})

    @staticmethod
    def from_rows(rows: pa.Table, mapper_count: int) -> ReducerState:
        """What a lookup of ``key`` found. No row yet is the same as nothing committed of any mapper."""
        if rows.num_rows == 0:
            return ReducerState.initial(mapper_count)
        return ReducerState.decode(rows["committed_row_indices"][0].as_py(), mapper_count)
