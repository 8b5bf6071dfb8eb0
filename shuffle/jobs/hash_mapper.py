"""A mapper that is declared in a few lines:

class ParseLogs(HashMapper):
    key = ["user", "cluster"]
    not_null = ["user"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from shuffle.api import Mapper, PartitionedRowset, WorkerSpec
from shuffle.config_schema import check_config
from shuffle.errors import SpecError
from shuffle.jobs.columns import check_column, check_names
from shuffle.partition import hash_partition

if TYPE_CHECKING:
    from shuffle.statestore import StateClient


class HashMapper(Mapper):
    """Filters and projects rows, and sends each to the reducer that its key columns hash to."""

    key: ClassVar[Sequence[str]]
    """The columns that decide which reducer a row goes to."""
    columns: ClassVar[Sequence[str] | None] = None
    """The columns that the reducers get; all of them by default."""
    not_null: ClassVar[Sequence[str]] = ()
    """Rows with a null in one of these columns are left out."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient, schema: pa.Schema) -> None:
        super().__init__(check_config(type(self), config), spec, state, schema)
        check_names(type(self), "key", required=True)
        for attribute in ("key", "columns", "not_null"):
            for column in getattr(self, attribute, None) or ():
                check_column(column, schema.names, f"{type(self).__name__}.{attribute}", SpecError)

    def where(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray | None:
        """Override to keep only some rows: a boolean for each, where false and null leave the row out."""
        return None

    def map(self, rows: pa.Table) -> PartitionedRowset:
        mask = self.where(rows)
        for column in self.not_null:
            if rows[column].null_count:
                valid = rows[column].is_valid()
                mask = valid if mask is None else pc.and_kleene(mask, valid)
        columns = rows.column_names if self.columns is None else list(self.columns)
        # The key columns decide where a row goes even if the reducers do not get them.
        kept = rows.select([*columns, *(column for column in self.key if column not in columns)])
        if mask is not None:
            kept = kept.filter(mask)
        partitioned = hash_partition(kept, self.key, self.spec.reducer_count, self.spec.max_parallelism)
        return PartitionedRowset(kept.select(columns), partitioned.partition_indexes)
