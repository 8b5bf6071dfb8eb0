"""The base classes of map and reduce, which a user's module imports, and the objects that they are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from shuffle.errors import BadInput, SpecError
from shuffle.ids import Guid
from shuffle.limits import KEY_GROUPS_DEFAULT

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction

Emit = Callable[["Transaction", pa.Table | pa.RecordBatch], None]
"""Appends rows to the output of a processor, in a transaction."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The identity of a worker: the streaming processor it belongs to, and its index there."""

    processor: str
    """The name of the processor."""
    index: int
    """The index of this mapper or reducer, counted from 0."""
    guid: Guid
    """The name of this instance; a worker that is restarted has another one."""
    mapper_count: int
    """The number of mappers of the processor."""
    reducer_count: int
    """The number of reducers of the processor; ``hash_partition`` needs it."""
    max_parallelism: int = KEY_GROUPS_DEFAULT
    """The number of key groups of the processor; ``hash_partition`` needs it if the spec sets another than the
    default."""


class PartitionedRowset:
    """What ``map`` returns: rows, and for each row the index of the reducer it goes to."""

    __slots__ = ("partition_indexes", "rows")

    def __init__(self, rows: pa.Table, partition_indexes: pa.Array | np.ndarray[Any, Any]) -> None:
        if isinstance(partition_indexes, pa.ChunkedArray):
            partition_indexes = partition_indexes.combine_chunks()
        if isinstance(partition_indexes, pa.Array):
            if partition_indexes.null_count:
                raise BadInput("partition_indexes has nulls: every row must go to some reducer")
            partition_indexes = partition_indexes.to_numpy(zero_copy_only=False)
        indexes = np.asarray(partition_indexes)
        if indexes.ndim != 1 or not np.issubdtype(indexes.dtype, np.integer):
            raise BadInput(f"partition_indexes must be one dimension of integers, not {indexes.dtype}")
        if len(indexes) != rows.num_rows:
            raise BadInput(f"{rows.num_rows} rows but {len(indexes)} partition indexes: one for each row is needed")
        self.rows = rows
        self.partition_indexes = indexes


class Mapper(ABC):
    """Your map: deterministic, row by row, and free to filter, change and multiply rows.

    The same input rows must give the same output rows in the same order, whatever the batch boundaries, the process and
    the time: after a crash rows are mapped again, and only their numbering says which were counted already.

    ``self.config`` is the ``config`` of the spec, ``self.spec`` says which worker this is, ``self.state`` is a client
    of the state store, and ``self.schema`` is that of the input rows.
    """

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient, schema: pa.Schema) -> None:
        self.config = config
        self.spec = spec
        self.state = state
        self.schema = schema

    @abstractmethod
    def map(self, rows: pa.Table) -> PartitionedRowset:
        """The result for a batch of input rows: what becomes of each, in order, and which reducer it goes to."""


class Reducer(ABC):
    """Your reduce: it folds a batch of rows into state, inside a transaction that the reducer commits.

    Return the transaction without committing it, or ``None`` when there is nothing to write.

    ``self.config`` is the ``config`` of the spec, ``self.spec`` says which worker this is, and ``self.state`` is a
    client of the state store.
    """

    _shuffle_emit: Emit | None = None
    # Set by ``shuffle.user_code.create``, not by the constructor, which is the user's.

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient) -> None:
        self.config = config
        self.spec = spec
        self.state = state

    @abstractmethod
    def reduce(self, rows: pa.Table) -> Transaction | None:
        """Fold rows into the state; ``self.state.transaction()`` gives the transaction for what is to be written."""

    def emit(self, tx: Transaction, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows to the output that the spec names, in ``tx``, the transaction that ``reduce`` returns.

        They are there once it is committed, and exactly once. ``SpecError`` if the spec has no ``output``.
        """
        if self._shuffle_emit is None:
            raise SpecError(
                "this reducer has no output: it is what the key `output` of the spec names, and set once the reducer "
                "was created",
                field="output",
            )
        self._shuffle_emit(tx, rows)

    def forget(self) -> None:  # noqa: B027 (most reducers remember nothing)
        """Override to drop what the reducer remembers of the tables between batches.

        It is called before ``reduce`` when that may be out of date: a transaction that an earlier call returned was not
        committed, or another instance of this reducer has committed in the meantime.
        """
