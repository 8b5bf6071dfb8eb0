"""The jobs that benchmarks give to this project's workers. A worker imports this module, so it is light."""

from __future__ import annotations

import pyarrow as pa

from shuffle import HashMapper, Reducer
from shuffle.examples.activity import KEY_COLUMNS
from shuffle.statestore import Transaction


class KeyAndTime(HashMapper):
    """The activity job's mapper where nothing else of the rows is needed. Spark and Flink find that out themselves."""

    key = KEY_COLUMNS
    not_null = ("user",)
    columns = (*KEY_COLUMNS, "timestamp")


class WholeRows(HashMapper):
    """Every row as it is, by user and cluster."""

    key = KEY_COLUMNS


class KeepNothing(Reducer):
    """The shuffle alone: every row is fetched and looked at, and only the positions are committed."""

    def reduce(self, rows: pa.Table) -> Transaction | None:
        if rows.num_rows and rows.nbytes == 0:
            raise ValueError("rows without bytes")
        return None
