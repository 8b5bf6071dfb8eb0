"""The process stage: the user's ``reduce`` on one batch, and what becomes of rows that it cannot take."""

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
    place_of,
    reason_of,
    split_rows,
)

RANGES_SHOWN_MAX = 8
"""Mappers whose positions an error names; the rest are counted."""

Locate = Callable[[FetchedBatch, int], ShuffleIndex | None]
"""The shuffle index of the row at a place in a part; None if it cannot be had now."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A batch that was reduced and waits for its commit."""

    batch: ReduceBatch
    transaction: Transaction | None
    """The user's, not committed; None if there is nothing to write but the positions."""
    dead_letter_rows: int = 0

    def abort(self) -> None:
        if self.transaction is not None:
            self.transaction.abort()


class ReduceStage:
    """Runs user code. Raises UserCodeError when it is at fault; what is transient is raised as it came."""

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
        """``forget``: drops what is known of the state without asking the store; whether there was something."""
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
            # The state is not what this instance left: it begins with what somebody else did, or without what it did.
            self._epoch = batch.epoch
            self._reducer.forget()
        try:
            return Reduced(batch, self._call_surely(rows))
        except Exception as error:
            if is_transient(error) or isinstance(error, SpecError):  # No row is to blame for a mistake in the spec.
                raise
            if self._on_error == "stop":
                raise self._report(batch, error) from error
        return self._without_poison(batch, rows)

    def _without_poison(self, batch: ReduceBatch, rows: pa.Table) -> Reduced:
        """The good rows and the dead letters in one transaction, so that no row is lost, and none counted twice."""
        try:
            found = locate_poison(rows, self._attempt)
            good, bad = split_rows(rows, [poison.row for poison in found])
            transaction = self._call(good) if good.num_rows else None
        except Exception as error:
            if is_transient(error) or isinstance(error, SpecError):
                raise
            # Not the fault of single rows: nothing that could be set aside would help.
            raise self._report(batch, error) from error
        if found:
            transaction = transaction or self._client.transaction()
            transaction.append(self._queue, self._partition, self._dead_letters(batch, bad, found))
        return Reduced(batch, transaction, len(found))

    def _call_surely(self, rows: pa.Table) -> Transaction | None:
        """``_call``; what it raises is not the doing of a state that was remembered and is not so any more."""
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
            # A row that breaks a constraint is found here, where it can be told from the others, not at the commit.
            result.check()
        return result

    def _attempt(self, rows: pa.Table) -> None:
        transaction = self._call(rows)
        if transaction is not None:
            transaction.abort()

    def _dead_letters(self, batch: ReduceBatch, bad: pa.Table, found: list[PoisonRow]) -> pa.Table:
        mappers, positions, reasons = [], [], []
        for poison in found:
            part, place = batch.origin(poison.row)
            exact = part.last_row_index if place == part.batch.num_rows - 1 else self._locate(part, place)
            mappers.append(part.mapper_index)
            positions.append(part.last_row_index if exact is None else exact)
            # The mapper could not be asked, and the row must not wait for it: the bound is what is known.
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
    """What a person needs to find the row and the line: who, which positions, the user's exception and its place."""
    ranges = batch.ranges()
    shown = ", ".join(f"mapper {mapper}: {first} to {last}" for mapper, first, last in ranges[:RANGES_SHOWN_MAX])
    more = f", and {len(ranges) - RANGES_SHOWN_MAX} more mappers" if len(ranges) > RANGES_SHOWN_MAX else ""
    return UserCodeError(
        f"processor {processor}, reducer {index}: reduce failed on {batch.row_count} rows (shuffle indexes of {shown}"
        f"{more}): {reason_of(error)}{place_of(error, __file__)}. Nothing of this batch was committed. "
        "Correct the code, or set reducer.on_error to dead_letter to set such rows aside",
        processor=processor,
        reducer=index,
        positions=[[mapper, first, last] for mapper, first, last in ranges[:RANGES_SHOWN_MAX]],
        reason=reason_of(error),
    )
