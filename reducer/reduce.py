"""The process stage: the user's ``reduce`` on one batch, and what becomes of rows on which it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from shuffle.api import Reducer
from shuffle.durable import tables
from shuffle.errors import SpecError, UserCodeError
from shuffle.ids import ReducerIndex, ShuffleIndex
from shuffle.reducer.core import FetchedBatch, ReduceBatch
from shuffle.statestore import StateClient, Transaction
from shuffle.user_code.poison import (
    DEAD_LETTER_SCHEMA,
    PoisonRow,
    dead_letters,
    is_transient,
    locate_poison,
    raised_at,
    reason_of,
    split_rows,
)

RANGES_SHOWN_MAX = 8
"""The most mappers whose positions an error names; the rest are counted."""

Locate = Callable[[FetchedBatch, int], ShuffleIndex | None]
"""A function that finds the shuffle index of the row with this number in a part; None if it cannot be found now."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A batch that was reduced and waits for its commit."""

    batch: ReduceBatch
    transaction: Transaction | None
    """The user's transaction, not committed; None if there is nothing to write but the positions."""
    dead_letter_rows: int = 0
    """The number of rows of the batch that became dead letters."""

    def abort(self) -> None:
        if self.transaction is not None:
            self.transaction.abort()


class ReduceStage:
    """Runs user code. Raises UserCodeError when it is at fault; transient errors are raised as they are."""

    def __init__(
        self,
        reducer: Reducer,
        client: StateClient,
        *,
        processor: str,
        index: ReducerIndex,
        on_error: Literal["stop", "dead_letter"],
        dead_letter_queue: str | None,
        locate: Locate,
        forget: Callable[[], bool] = lambda: False,
    ) -> None:
        """``forget`` empties the cache of rows (``row_cache``), and returns whether there was something in it."""
        self._reducer = reducer
        self._client = client
        self._processor = processor
        self._index = index
        self._on_error = on_error
        self._locate = locate
        self._forget = forget
        self._queue = dead_letter_queue or tables.dead_letter_queue(processor, "reducer")
        self._partition = 0
        self._epoch: int | None = None
        if on_error == "dead_letter":
            client.create_queue(self._queue, schema=DEAD_LETTER_SCHEMA, partitions=1, if_not_exists=True)
            self._partition = index % client.queue(self._queue).partitions

    def reduce(self, batch: ReduceBatch) -> Reduced:
        rows = batch.rowset()
        if batch.epoch != self._epoch or batch.attempt > 1:
            # The state is not what the user's object may remember: another instance has written to it, or what this one
            # wrote was not committed.
            self._epoch = batch.epoch
            self._reducer.forget()
        try:
            return Reduced(batch, self._call_without_stale_cache(rows))
        except Exception as error:
            if is_transient(error) or isinstance(error, SpecError):  # No row is to blame for a mistake in the spec.
                raise
            if self._on_error == "stop":
                raise self._report(batch, error) from error
        return self._without_poison(batch, rows)

    def _without_poison(self, batch: ReduceBatch, rows: pa.Table) -> Reduced:
        """The good rows and the dead letters in one transaction, so that no row is lost, and none counted twice."""
        try:
            poison_rows = locate_poison(rows, self._attempt)
            good, bad = split_rows(rows, [poison.row for poison in poison_rows])
            transaction = self._call(good) if good.num_rows else None
        except Exception as error:
            if is_transient(error) or isinstance(error, SpecError):
                raise
            # It is not the fault of single rows, so no dead letter would help.
            raise self._report(batch, error) from error
        if poison_rows:
            transaction = transaction or self._client.transaction()
            transaction.append(self._queue, self._partition, self._dead_letters(batch, bad, poison_rows))
        return Reduced(batch, transaction, len(poison_rows))

    def _call_without_stale_cache(self, rows: pa.Table) -> Transaction | None:
        """``_call``, and once more without cached rows if it fails, so that no error is due to a stale cache."""
        try:
            return self._call(rows)
        except Exception as error:
            if is_transient(error) or not self._forget():
                raise
        return self._call(rows)

    def _call(self, rows: pa.Table) -> Transaction | None:
        result = self._reducer.reduce(rows)
        if result is not None and not isinstance(result, Transaction):
            raise TypeError(
                f"reduce returned a {type(result).__name__}; it must return the transaction that it wrote to, not "
                "committed, or None"
            )
        if result is not None:
            # A row that breaks a constraint is found here, where it can be singled out, and not at the commit.
            result.check()
        return result

    def _attempt(self, rows: pa.Table) -> None:
        transaction = self._call(rows)
        if transaction is not None:
            transaction.abort()

    def _dead_letters(self, batch: ReduceBatch, bad: pa.Table, poison_rows: list[PoisonRow]) -> pa.Table:
        mappers, positions, reasons = [], [], []
        for poison in poison_rows:
            part, row = batch.origin(poison.row)
            exact = part.last_row_index if row == part.batch.num_rows - 1 else self._locate(part, row)
            mappers.append(part.mapper_index)
            positions.append(part.last_row_index if exact is None else exact)
            # If the mapper does not respond, the row does not wait for it: its position is known within bounds.
            inexact = f" (its position lies between {part.from_row_index + 1} and {part.last_row_index})"
            reasons.append(poison.reason + (inexact if exact is None else ""))
        return dead_letters(
            processor=self._processor,
            role="reducer",
            worker=self._index,
            mappers=mappers,
            positions=positions,
            reasons=reasons,
            rows=bad,
        )

    def _report(self, batch: ReduceBatch, error: Exception) -> UserCodeError:
        return user_code_error(self._processor, self._index, batch, error)


def user_code_error(processor: str, index: ReducerIndex, batch: ReduceBatch, error: Exception) -> UserCodeError:
    """An error with what a person needs to find the row and the line of code: processor and reducer, positions, the
    user's exception and the line that raised it."""
    ranges = batch.ranges()
    shown = ", ".join(f"mapper {mapper}: {first} to {last}" for mapper, first, last in ranges[:RANGES_SHOWN_MAX])
    more = f", and {len(ranges) - RANGES_SHOWN_MAX} more mappers" if len(ranges) > RANGES_SHOWN_MAX else ""
    return UserCodeError(
        f"processor {processor}, reducer {index}: reduce failed on {batch.row_count} rows (shuffle indexes of {shown}"
        f"{more}): {reason_of(error)}{raised_at(error, __file__)}. Nothing of this batch was committed. "
        "Correct the code, or set reducer.on_error to dead_letter to set such rows aside",
        processor=processor,
        reducer=index,
        positions=[[mapper, first, last] for mapper, first, last in ranges[:RANGES_SHOWN_MAX]],
        reason=reason_of(error),
    )
