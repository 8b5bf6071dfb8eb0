"""Who used which cluster, when last and how often: the standard job for this system.

Master nodes write log lines; most of them belong to no user and are dropped in ``map``. The rest are hashed by user and
cluster, so that all lines of one pair meet in one reducer, which keeps the last access and a count in a sorted table.

The job is written twice. ``ParseLogs`` and ``CountByUser`` are written by hand and show every step;
``DeclaredParseLogs`` and ``DeclaredCountByUser`` do the same in a few lines on the base classes of the library. Both
forms keep the same table, so a spec may name either of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from shuffle import AggregateReducer, Count, HashMapper, Mapper, Max, PartitionedRowset, Reducer, hash_partition
from shuffle.api import WorkerSpec
from shuffle.jobs.aggregates import Aggregate
from statestore import StateClient, Transaction

TABLE = "activity"
KEY_COLUMNS = ["user", "cluster"]
KEY = pa.schema([("user", pa.string()), ("cluster", pa.string())])
VALUE = pa.schema([("last_access", pa.timestamp("us")), ("count", pa.int64())])
COLUMNS = [*KEY.names, *VALUE.names]


class ParseLogs(Mapper):
    """Keeps the lines that have a user, and sends all lines of one user on one cluster to the same reducer."""

    def map(self, rows: pa.Table) -> PartitionedRowset:
        kept = rows.filter(pc.is_valid(rows["user"])) if rows["user"].null_count else rows
        return hash_partition(kept, by=KEY_COLUMNS, reducers=self.spec.reducer_count)


class CountByUser(Reducer):
    """Folds each batch into the table ``activity``: the latest time and the number of lines per user and cluster."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient) -> None:
        super().__init__(config, spec, state)
        state.create_table(TABLE, key=KEY, value=VALUE, if_not_exists=True)

    def reduce(self, rows: pa.Table) -> Transaction | None:
        batch = summed(rows)
        tx = self.state.transaction()
        known = tx.lookup(TABLE, batch.select(KEY_COLUMNS))
        tx.write(TABLE, merged(batch, known))
        return tx


def summed(rows: pa.Table) -> pa.Table:
    """One row of the table for each user and cluster among ``rows``."""
    groups = rows.group_by(KEY_COLUMNS, use_threads=False).aggregate([("timestamp", "max"), ("timestamp", "count")])
    return groups.select([*KEY_COLUMNS, "timestamp_max", "timestamp_count"]).rename_columns(COLUMNS)


def merged(batch: pa.Table, known: pa.Table) -> pa.Table:
    """The rows of the table after the batch: stored rows and those of the batch have the same columns, so they are
    concatenated and grouped by key again."""
    both = pa.concat_tables([batch.select(COLUMNS), known.select(COLUMNS)])
    groups = both.group_by(KEY_COLUMNS, use_threads=False).aggregate([("last_access", "max"), ("count", "sum")])
    return groups.select([*KEY_COLUMNS, "last_access_max", "count_sum"]).rename_columns(COLUMNS)


class DeclaredParseLogs(HashMapper):
    """``ParseLogs`` in its declared form."""

    key = KEY_COLUMNS
    not_null = ("user",)


class DeclaredCountByUser(AggregateReducer):
    """``CountByUser`` in its declared form. The table is created with the first rows, and has their types."""

    table = TABLE
    key = KEY_COLUMNS
    aggregates: ClassVar[Mapping[str, Aggregate]] = {"last_access": Max("timestamp"), "count": Count()}
