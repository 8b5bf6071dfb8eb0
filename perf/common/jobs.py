"""The jobs that benchmarks give to this project's workers. Workers import this module, so it imports little itself."""

from __future__ import annotations

import pyarrow as pa

from shuffle import HashMapper, Reducer
from shuffle.examples.activity import KEY_COLUMNS, DeclaredCountByUser
from shuffle.statestore import Transaction


class KeyAndTime(HashMapper):
    """The activity job's mapper, which keeps only the columns that are needed. Spark and Flink prune columns
    themselves."""

    key = KEY_COLUMNS
    not_null = ("user",)
    columns = (*KEY_COLUMNS, "timestamp")


class WholeRows(HashMapper):
    """Every row as it is, by user and cluster."""

    key = KEY_COLUMNS


class KeepNothing(Reducer):
    """A reducer for the shuffle alone: every row is fetched and read, and only the positions are committed."""

    def reduce(self, rows: pa.Table) -> Transaction | None:
        if rows.num_rows and rows.nbytes == 0:
            raise ValueError("rows without bytes")
        return None


class NumberedLines(HashMapper):
    """What ``KeyAndTime`` keeps, and the number of the line."""

    key = KEY_COLUMNS
    columns = (*KEY_COLUMNS, "timestamp", "number")


class CountAndPublish(DeclaredCountByUser):
    """The count of the activity job, which also emits the number of every line that it has counted."""

    def reduce(self, rows: pa.Table) -> Transaction | None:
        tx = super().reduce(rows)
        assert tx is not None
        self.emit(tx, rows.select(["number"]))
        return tx
