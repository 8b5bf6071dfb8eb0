"""The exporter's persisted state: one row for each partition of the outbox, with what is known to be outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from shuffle.ids import Guid

EXPORTS_KEY = pa.schema([pa.field("partition", pa.int32(), nullable=False)])
EXPORTS_VALUE = pa.schema(
    [
        pa.field("owner", pa.string(), nullable=False),
        pa.field("sink", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("in_flight_end", pa.int64()),
    ]
)

ANY_END = 2**63 - 1
"""The ``in_flight_end`` of a sink that keeps the position itself: how many rows are under way, only the sink knows."""


@dataclass(frozen=True, slots=True)
class ExportState:
    """The row of one partition of the outbox. Two states are equal if all fields are: a commit compares the whole row.

    Rows before ``position`` are in the sink. Rows from there up to ``in_flight_end`` may be, in whole or in part. Rows
    after that are not.
    """

    owner: Guid
    """The instance of the exporter that works on the partition. Another one that takes over writes its own guid, and
    the commits of the one before are refused from then on."""
    sink: str
    """The sink that the rows go to, in words that name no other one."""
    position: int
    """The position in the outbox before which all rows are in the sink. The outbox is trimmed up to it."""
    in_flight_end: int | None = None
    """The end of the rows that may be in the sink already; None if nothing is under way."""

    def to_row(self, partition: int) -> pa.Table:
        """The row as it is written to the table of exports."""
        return pa.table(
            {
                "partition": pa.array([partition], pa.int32()),
                "owner": pa.array([self.owner], pa.string()),
                "sink": pa.array([self.sink], pa.string()),
                "position": pa.array([self.position], pa.int64()),
                "in_flight_end": pa.array([self.in_flight_end], pa.int64()),
            }
        )

    @staticmethod
    def key(partition: int) -> pa.Table:
        return pa.table({"partition": pa.array([partition], pa.int32())})

    @staticmethod
    def from_rows(rows: pa.Table) -> ExportState | None:
        """The state in the result of a lookup of ``key``; None if no exporter has ever worked on the partition."""
        return ExportState.from_row(rows.to_pylist()[0]) if rows.num_rows else None

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> ExportState:
        """The state in one row of the table."""
        return ExportState(Guid(row["owner"]), row["sink"], row["position"], row["in_flight_end"])
