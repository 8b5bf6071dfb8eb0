"""Orders of many customers, and the job on them: how many orders has each customer placed, and for how much?

This is the large state of ``perf.compare``: millions of keys of 20 bytes, few rows for each, drawn evenly, so that
hardly two rows of a batch have the same key. Workers import this module for the job, so it imports little itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle import AggregateReducer, Count, HashMapper, Sum
from shuffle.jobs.aggregates import Aggregate

SCHEMA = pa.schema(
    [
        ("ordered_at", pa.timestamp("us")),
        ("customer", pa.string()),
        ("amount", pa.int64()),
        ("product", pa.string()),
        ("channel", pa.string()),
        ("city", pa.string()),
    ]
)
"""The columns of an order. The amount is in cents."""
RESULT_SCHEMA = pa.schema([("customer", pa.string()), ("orders", pa.int64()), ("spent", pa.int64())])
KEY_COLUMNS = ["customer"]
TABLE = "customers"
CUSTOMERS_DEFAULT = 3_000_000

_NAME = "customer-"
_CHANNELS = ("web", "app", "store", "phone")
_CITIES = ("Amsterdam", "Belgrade", "Lisbon", "Nairobi", "Osaka", "Quito", "Riga", "Tbilisi")
_PRODUCTS = 10_000
_EPOCH_US = 1_767_225_600_000_000  # 2026-01-01 00:00:00 UTC
_ROW_STEP_US = 250


class CustomerAndAmount(HashMapper):
    """Only the columns that are needed. Spark and Flink prune columns themselves."""

    key = KEY_COLUMNS
    columns = (*KEY_COLUMNS, "amount")


class OrdersOfCustomer(AggregateReducer):
    table = TABLE
    key = KEY_COLUMNS
    aggregates: ClassVar[Mapping[str, Aggregate]] = {"orders": Count(), "spent": Sum("amount")}


@dataclass(frozen=True, slots=True)
class Orders:
    """One stream of orders; equal objects give equal rows for the same size of batches."""

    seed: int = 1
    customers: int = CUSTOMERS_DEFAULT

    def batches(self, rows: int, batch_rows: int, partition: int = 0) -> Iterator[pa.Table]:
        """The first ``rows`` rows of one partition, in tables of at most ``batch_rows``."""
        for begin in range(0, rows, batch_rows):
            yield self._rows(begin, min(begin + batch_rows, rows), partition)

    def _rows(self, begin: int, end: int, partition: int) -> pa.Table:
        random = np.random.default_rng([self.seed, partition, begin])
        count = end - begin

        def one_of(values: pa.Array) -> pa.Array:
            return values.take(pa.array(random.integers(0, len(values), count, dtype=np.int32)))

        columns = [
            pa.array(np.arange(begin, end) * _ROW_STEP_US + _EPOCH_US).cast(pa.timestamp("us")),
            one_of(_names(self.customers)),
            pa.array(random.integers(100, 100_000, count)),
            one_of(_products()),
            one_of(pa.array(_CHANNELS)),
            one_of(pa.array(_CITIES)),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)


@lru_cache(maxsize=2)
def _names(customers: int) -> pa.Array:
    """``customer-00000000000`` and so on: 20 bytes each."""
    return pa.array([f"{_NAME}{number:011d}" for number in range(customers)], pa.string())


@lru_cache(maxsize=1)
def _products() -> pa.Array:
    return pa.array([f"sku-{number:07d}" for number in range(_PRODUCTS)], pa.string())


# --- the independent count -------------------------------------------------------------------------------------------


def numbers_of(customers: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The numbers of customers, from their names."""
    digits = pc.utf8_slice_codeunits(customers, start=len(_NAME))
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = digits.cast(pa.int64()).to_numpy()
    return found


def oracle_part(rows: pa.Table) -> pa.Table:
    """What the oracle needs of some of the rows."""
    return pa.table({"number": numbers_of(rows["customer"]), "amount": rows["amount"]})


def oracle_sum(parts: Iterable[pa.Table]) -> pa.Table:
    """The expected result. It is counted by NumPy over the numbers of customers: neither code nor method is the
    job's."""
    whole = pa.concat_tables(parts)
    numbers, amounts = whole["number"].to_numpy(), whole["amount"].to_numpy()
    orders = np.bincount(numbers)
    # Sums of floats are exact here: all of them are far below 2^53.
    spent = np.bincount(numbers, weights=amounts).astype(np.int64)
    there = np.flatnonzero(orders)
    names = _names(len(orders)).take(pa.array(there))
    return pa.Table.from_arrays([names, pa.array(orders[there]), pa.array(spent[there])], schema=RESULT_SCHEMA)


def wrong(expected: pa.Table, actual: pa.Table) -> str:
    """How a result differs from the expected one; nothing if it does not."""
    numbers = numbers_of(actual["customer"])
    order = np.argsort(numbers, kind="stable")
    if not np.array_equal(numbers[order], numbers_of(expected["customer"])):
        return f"{len(numbers)} rows, and not the {expected.num_rows} customers that there are"
    for name in ("orders", "spent"):
        off = np.count_nonzero(actual[name].to_numpy()[order] != expected[name].to_numpy())
        if off:
            return f"{name!r} is wrong for {off} of {expected.num_rows} customers"
    return ""
