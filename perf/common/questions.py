"""The questions of ``perf.compare``: what is asked of which rows, and how an answer is checked.

What each system is told to do is in its own module, under the name of the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from perf.common import orders
from shuffle.errors import ShuffleError
from shuffle.examples import activity, workload


class Rows(Protocol):
    """A stream of rows. The rows are the same each time."""

    def batches(self, rows: int, batch_rows: int, partition: int) -> Iterator[pa.Table]: ...


@dataclass(frozen=True)
class Question:
    """One keyed aggregation, exactly once."""

    name: str
    """The name by which the processes of Spark and Flink know it."""
    schema: pa.Schema
    """The columns of its rows."""
    key: list[str]
    result: pa.Schema
    """The columns of an answer."""
    mapper: str
    reducer: str
    table: str
    """The class of this project's mapper and reducer, and the table that the reducers keep."""
    oracle_part: Callable[[pa.Table], pa.Table]
    oracle_sum: Callable[[Iterable[pa.Table]], pa.Table]
    wrong: Callable[[pa.Table, pa.Table], str]
    """How an answer differs from the expected one; nothing if it does not."""

    def check(self, expected: pa.Table, actual: pa.Table, system: str) -> None:
        """Raise an error unless the answer is right."""
        verdict = self.wrong(expected, actual.select(self.result.names).cast(self.result))
        if verdict:
            raise ShuffleError(f"the result of {system} is wrong, so its time does not count: {verdict}")


def _wrong_activity(expected: pa.Table, actual: pa.Table) -> str:
    verdict = workload.difference(expected, actual)
    return "" if verdict.exact else str(verdict)


ACTIVITY = Question(
    name="count",
    schema=workload.SCHEMA,
    key=activity.KEY_COLUMNS,
    result=workload.RESULT_SCHEMA,
    mapper="perf.common.jobs:KeyAndTime",
    reducer="examples.activity:DeclaredCountByUser",
    table=activity.TABLE,
    oracle_part=workload.oracle_part,
    oracle_sum=workload.oracle_sum,
    wrong=_wrong_activity,
)
ORDERS = Question(
    name="large_state",
    schema=orders.SCHEMA,
    key=orders.KEY_COLUMNS,
    result=orders.RESULT_SCHEMA,
    mapper="perf.common.orders:CustomerAndAmount",
    reducer="perf.common.orders:OrdersOfCustomer",
    table=orders.TABLE,
    oracle_part=orders.oracle_part,
    oracle_sum=orders.oracle_sum,
    wrong=orders.wrong,
)
