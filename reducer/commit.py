"""The commit stage: the user's writes and the reducer's positions, in one transaction."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa

from shuffle.durable.reducer_state import ReducerState
from shuffle.errors import CommitConflict, CommitUnknown, Outgrown, SplitBrain
from shuffle.ids import ReducerIndex
from shuffle.reducer.core import ReduceBatch
from shuffle.reducer.reduce import Reduced
from shuffle.statestore import PreparedRows, StateClient
from shuffle.support import crash_points

WIDEN_ATTEMPTS_MAX = 10
"""The most attempts to widen a row; only other instances that do the same can make one fail."""


class Committer:
    """Reads the row of one reducer in the store, and commits batches together with its new row."""

    def __init__(self, client: StateClient, table: str, index: ReducerIndex, mapper_count: int) -> None:
        self._client = client
        self._table = table
        self._index = index
        self._mapper_count = mapper_count
        self._row_is_there = False
        """Whether the reducer has a row in the store, as far as is known. One that has committed nothing has none, and
        for the store's comparison an absent row is not the same as an initial one."""
        self._committed: tuple[ReducerState, PreparedRows] | None = None
        """The state of the last commit, and its row, which the next commit is likely to expect."""

    def read_state(self) -> ReducerState:
        """The persisted row. If it was written when there were fewer mappers, it is widened first: a commit compares
        whole rows, so from then on no instance that knows of fewer can commit."""
        for _ in range(WIDEN_ATTEMPTS_MAX):
            rows = self._client.lookup(self._table, ReducerState.key(self._index))
            self._row_is_there = rows.num_rows > 0
            if not self._row_is_there:
                return ReducerState.initial(self._mapper_count)
            state = ReducerState.from_any_row(rows.to_pylist()[0])
            width = len(state.committed_row_indices)
            if width == self._mapper_count:
                return state
            if width > self._mapper_count:
                raise Outgrown(
                    f"reducer {self._index} knows of {self._mapper_count} mappers, and its persisted row has {width}",
                    reducer=self._index,
                    mappers=width,
                )
            self._widen(state)
        raise CommitConflict(f"the row of reducer {self._index} changes all the time: several of it are alive")

    def _widen(self, state: ReducerState) -> None:
        """Write the row with the mappers that came later, if it is still the same. Whoever calls reads it again."""
        with self._client.transaction() as transaction:
            transaction.expect(self._table, state.to_row(self._index))
            transaction.write(self._table, state.widened(self._mapper_count).to_row(self._index))
            with suppress(CommitConflict, CommitUnknown):
                transaction.commit()

    def commit(self, reduced: Reduced) -> None:
        """Commit a batch, or raise; after any error the persisted row decides what became of it (``core.settle``).

        1. Take the user's transaction, or begin one.
        2. Name the row that the batch expects: the store compares it with its own, in the same step as it commits.
        3. Write the new row.
        4. Commit. CommitUnknown: perhaps it happened; it is never sent again, because only the persisted row can tell.
        5. CommitConflict: nothing happened. Read the row. If it is not the one the batch expects, another instance is
           alive (or an earlier commit of this one arrived late): SplitBrain.
        """
        batch = reduced.batch
        transaction = reduced.transaction or self._client.transaction()  # 1
        with transaction:
            if self._row_is_there or batch.expected != ReducerState.initial(self._mapper_count):  # 2
                transaction.expect(self._table, self._row_of(batch.expected))
            else:
                transaction.expect_absent(self._table, ReducerState.key(self._index))
            row = self._client.prepare(self._table, batch.new.to_row(self._index))
            transaction.write(self._table, row)  # 3
            crash_points.reach("reducer.before_commit")
            try:
                transaction.commit()  # 4
            except CommitConflict as error:
                persisted = self.read_state()  # 5
                if persisted != batch.expected:
                    raise SplitBrain(_describe(self._index, batch, persisted), reducer=self._index) from error
                raise
            crash_points.reach("reducer.after_commit")
        self._row_is_there = True
        self._committed = batch.new, row

    def _row_of(self, state: ReducerState) -> pa.RecordBatch | PreparedRows:
        if self._committed is not None and self._committed[0] == state:
            return self._committed[1]
        return state.to_row(self._index)


def _describe(index: ReducerIndex, batch: ReduceBatch, persisted: ReducerState) -> str:
    """How the persisted row differs from the one that ``batch`` expects."""
    expected = batch.expected.committed_row_indices
    if persisted.generation != batch.expected.generation:
        return (
            f"reducer {index} expected to be of generation {batch.expected.generation}, and the store says "
            f"{persisted.generation}"
        )
    differing = [i for i, (a, b) in enumerate(zip(expected, persisted.committed_row_indices, strict=True)) if a != b]
    if not differing:
        return f"reducer {index} found the indexes that it expected with other fronts in the store"
    first = differing[0]
    return (
        f"reducer {index} expected to have committed mapper {first} up to {expected[first]}, and the store says "
        f"{persisted.committed_row_indices[first]} ({len(differing)} of {len(expected)} mappers differ)"
    )
