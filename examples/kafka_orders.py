"""Orders from a topic of Kafka: counted and summed for each customer, enriched, and published to another topic.

    kafka_orders.yaml           topic orders -> ByCustomer -> Totals -> topic totals
    kafka_orders_archive.yaml   topic totals -> ByCustomer -> Archive -> a folder of Parquet files, by country

Each row is counted once and each result is published once, whoever is killed. The countries are in the table
``customers`` of the same store, to which anybody may write (``remember_customers``); a customer that is not there has
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shuffle import Mapper, PartitionedRowset, Reducer, hash_partition
from shuffle.api import WorkerSpec
from statestore import StateClient, Transaction

CUSTOMER = pa.schema([("customer", pa.string())])
TOTAL = pa.schema([("orders", pa.int64()), ("cents", pa.int64())])
COUNTRY = pa.schema([("country", pa.string())])


class ByCustomer(Mapper):
    """Sends all rows of a customer to one reducer; rows without a customer are dropped."""

    def map(self, rows: pa.Table) -> PartitionedRowset:
        kept = rows.filter(pc.is_valid(rows["customer"]))
        return hash_partition(kept, by=["customer"], reducers=self.spec.reducer_count)


class Totals(Reducer):
    """Adds the orders of each batch to the totals of their customers, and emits the new totals with the country."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient) -> None:
        super().__init__(config, spec, state)
        state.create_table("totals", key=CUSTOMER, value=TOTAL, if_not_exists=True)
        state.create_table("customers", key=CUSTOMER, value=COUNTRY, if_not_exists=True)

    def reduce(self, rows: pa.Table) -> Transaction | None:
        tx = self.state.transaction()
        batch = rows.group_by("customer").aggregate([("cents", "count"), ("cents", "sum")])
        batch = batch.rename_columns(["customer", "orders", "cents"])
        customers = batch.select(["customer"])
        both = pa.concat_tables([batch, tx.lookup("totals", customers).select(batch.column_names)])
        totals = both.group_by("customer").aggregate([("orders", "sum"), ("cents", "sum")])
        totals = totals.rename_columns(["customer", "orders", "cents"])
        tx.write("totals", totals)
        countries = tx.lookup_values("customers", totals.select(["customer"]))
        self.emit(tx, totals.append_column("country", countries["country"]))
        return tx


class Archive(Reducer):
    """Emits every row as it is: the output does the rest."""

    def reduce(self, rows: pa.Table) -> Transaction | None:
        tx = self.state.transaction()
        self.emit(tx, rows)
        return tx


def remember_customers(state: StateClient, countries: Mapping[str, str]) -> None:
    """Write the country of some customers, for the totals that are computed from now on."""
    state.create_table("customers", key=CUSTOMER, value=COUNTRY, if_not_exists=True)
    with state.transaction() as tx:
        tx.write(
            "customers", pa.table([list(countries), list(countries.values())], schema=pa.schema([*CUSTOMER, *COUNTRY]))
        )
        tx.commit()
