"""The positions of a Spark query over a processor's rows: where it began, and what it has committed.

A query reads the rows of all reducers, and commits instead of them: after each micro-batch every reducer's row in the
store is the end of that micro-batch. Two things are stored:

- the *baseline*, in the table ``<processor>/meta``: what the reducers had committed when the query began. Each reducer
  may have been at another row then, while an offset is one number for all of them. The baseline also makes the first
  offset repeatable: Spark requests it again when the first micro-batch has to be run again.
- the reducers' rows, in ``<processor>/reducers``: what mappers may drop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from shuffle.durable.spill_ends import done_row_indexes
from shuffle.durable.tables import meta_table, reducers_group, reducers_table
from shuffle.errors import BadInput, RowsGone
from shuffle.ids import MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.spark_connector.source.offsets import Indexes
from shuffle.spark_connector.source.processor import Processor, Shape
from shuffle.spark_connector.source.query_lease import QueryLease
from shuffle.statestore import StateClient, Transaction

BASELINE = "spark_source"
"""The name of the baseline's row in ``<processor>/meta``."""


@dataclass(frozen=True)
class Baseline:
    """The positions at which a query began."""

    starting: str
    """The value of the option ``startingOffsets``."""
    start: Indexes
    """The shuffle index, for each mapper, up to which no row belongs to the query."""
    committed: list[Indexes]
    """The shuffle index, for each reducer and mapper, up to which rows were committed before the query began."""

    def begin(self, reducer: int, mapper: int, start: int) -> int:
        """The shuffle index after which a reducer's part of a micro-batch that starts at ``start`` begins."""
        return max(start, self.committed[reducer][mapper])


class QueryPositions:
    """Reads and writes the positions of a query. Used in the driver only."""

    def __init__(self, processor: Processor, shape: Shape, lease: QueryLease) -> None:
        self._processor = processor
        self._lease = lease
        self._shape = shape
        self._table = reducers_table(processor.name)
        self._meta = meta_table(processor.name)

    def refuse_reducers(self) -> None:
        """Raise ``BadInput`` if reducers are running: they would commit the rows that this query is to read."""
        store, name = self._processor.store, self._processor.name
        alive = store.with_retries(lambda client: client.leases.members(reducers_group(name)))
        if alive:
            raise BadInput(
                f"processor {name} has {len(alive)} running reducers, which commit the rows that this query would read."
                " Stop them and run only its mappers, or give the query a processor of its own",
                processor=name,
            )

    def start(self) -> Indexes:
        """The shuffle index, for each mapper, up to which all reducers have committed."""
        done = self._processor.store.with_retries(self._done)
        return [min(column) for column in zip(*done, strict=True)]

    def begin(self, starting: str, latest: Indexes | None) -> Baseline:
        """The baseline: the stored one, if the query has committed nothing since, else a new one.

        ``latest`` are the last rows that the mappers have produced. If it is given, the query begins there, and all
        rows before are committed unread.
        """

        def attempt(client: StateClient) -> Baseline:
            with client.transaction() as tx:
                self._lease.check_in(tx)
                committed = self._done(tx)
                stored = self._stored(tx)
                if stored is not None and stored.starting == starting and stored.committed == committed:
                    return stored
                start = [min(column) for column in zip(*committed, strict=True)]
                if latest is not None:
                    start = [max(a, b) for a, b in zip(start, latest, strict=True)]
                    committed = [[max(a, b) for a, b in zip(row, start, strict=True)] for row in committed]
                    self._write(tx, committed)
                baseline = Baseline(starting, start, committed)
                tx.write(self._meta, _meta_row(json.dumps(asdict(baseline))))
                tx.commit()
                return baseline

        return self._processor.store.in_transaction(attempt)

    def baseline(self) -> Baseline:
        """The stored baseline. Raises ``RowsGone`` if there is none."""
        stored = self._processor.store.with_retries(self._stored)
        if stored is None:
            raise RowsGone(
                f"processor {self._processor.name} knows of no Spark query that began: its state was made anew since "
                "this checkpoint was written. Start the query with a new checkpoint"
            )
        return stored

    def commit(self, end: Indexes, baseline: Baseline) -> list[Indexes]:
        """Commit everything up to ``end`` for all reducers; returns what each of them has committed now.

        Idempotent. A committed index never decreases: if a reducer's row is beyond what this query can have committed,
        somebody else has moved it, or this checkpoint is an old one.
        """
        for mapper, (last, began) in enumerate(zip(end, baseline.start, strict=True)):
            if last < began:
                raise self._too_old(mapper, last, began)

        def attempt(client: StateClient) -> list[Indexes]:
            with client.transaction() as tx:
                self._lease.check_in(tx)
                committed = self._processor.committed(tx, self._shape)
                new_indexes = [
                    [baseline.begin(reducer, mapper, last) for mapper, last in enumerate(end)]
                    for reducer in range(self._shape.reducer_count)
                ]
                for row, new in zip(committed, new_indexes, strict=True):
                    for mapper, (had, has) in enumerate(zip(row, new, strict=True)):
                        if had > has:
                            raise self._too_old(mapper, has, had)
                if new_indexes != committed:
                    self._write(tx, new_indexes)
                    tx.commit()
                return new_indexes

        return self._processor.store.in_transaction(attempt)

    def _done(self, source: Any) -> list[Indexes]:
        """For each reducer and mapper, the shuffle index up to which the reducer has no row left to commit.

        Below a mapper's persisted state no reducer has rows left, even if its own last committed row is far below; the
        exception are rows in the spill.
        """
        committed = self._processor.committed(source, self._shape)
        reducers = [ReducerIndex(reducer) for reducer in range(self._shape.reducer_count)]
        for mapper in range(self._shape.mapper_count):
            done = done_row_indexes(
                source,
                self._processor.name,
                MapperIndex(mapper),
                {r: ShuffleIndex(committed[r][mapper]) for r in reducers},
            )
            for reducer in reducers:
                committed[reducer][mapper] = int(done[reducer])
        return committed

    def _stored(self, source: StateClient | Transaction) -> Baseline | None:
        rows = source.lookup(self._meta, pa.table({"name": [BASELINE]}))
        return Baseline(**json.loads(rows["value"][0].as_py())) if rows.num_rows else None

    def _write(self, tx: Transaction, committed: Sequence[Indexes]) -> None:
        states = self._processor.states(tx, self._shape)
        for reducer, (state, indexes) in enumerate(zip(states, committed, strict=True)):
            moved = replace(state, committed_row_indices=tuple(ShuffleIndex(index) for index in indexes))
            tx.write(self._table, moved.to_row(ReducerIndex(reducer)))

    def _too_old(self, mapper: int, requested: int, committed: int) -> RowsGone:
        return RowsGone(
            f"processor {self._processor.name}: this query's checkpoint stands at row {requested} of mapper {mapper}, "
            f"but rows up to {committed} were committed and are gone: the checkpoint is older than that, or another "
            "query or reducer has read the same processor. Start the query with a new checkpoint; it goes on after "
            "what was committed",
            processor=self._processor.name,
            mapper=mapper,
        )


def _meta_row(value: str) -> pa.Table:
    return pa.table({"name": [BASELINE], "value": [value]})
