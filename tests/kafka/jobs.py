"""The job of the tests with whole processors: how many rows and how much of each user."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shuffle import Mapper, PartitionedRowset, Reducer, hash_partition

TOTALS_KEY = pa.schema([pa.field("user", pa.string(), nullable=False)])
TOTALS_VALUE = pa.schema([("rows", pa.int64()), ("total", pa.int64())])


class ByUser(Mapper):
    def map(self, rows: pa.Table) -> PartitionedRowset:
        kept = rows.select(["user", "n"])
        if pc.any(pc.equal(kept["n"], -13)).as_py():
            raise ValueError("minus thirteen")
        return hash_partition(kept, by=["user"], reducers=self.spec.reducer_count)


class Totals(Reducer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.create_table("totals", key=TOTALS_KEY, value=TOTALS_VALUE, if_not_exists=True)

    def reduce(self, rows: pa.Table) -> Any:
        tx = self.state.transaction()
        fresh = rows.group_by("user").aggregate([("n", "count"), ("n", "sum")])
        fresh = fresh.select(["user", "n_count", "n_sum"]).rename_columns(["user", "rows", "total"])
        before = tx.lookup("totals", fresh.select(["user"])).select(["user", "rows", "total"])
        both = pa.concat_tables([fresh, before], promote_options="permissive")
        totals = both.group_by("user").aggregate([("rows", "sum"), ("total", "sum")])
        tx.write("totals", totals.select(["user", "rows_sum", "total_sum"]).rename_columns(["user", "rows", "total"]))
        return tx
