"""What a user's module imports to write a streaming processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shuffle.aggregates import Count, Last, Max, Min, Sum
from shuffle.api import Mapper, PartitionedRowset, Reducer
from shuffle.errors import ShuffleError
from shuffle.library import AggregateReducer, HashMapper
from shuffle.partition import hash_partition

if TYPE_CHECKING:
    from mapper.reader import PartitionReader

__all__ = [
    "AggregateReducer",
    "Count",
    "HashMapper",
    "Last",
    "Mapper",
    "Max",
    "Min",
    "PartitionReader",
    "PartitionedRowset",
    "Reducer",
    "ShuffleError",
    "Sum",
    "hash_partition",
]


def __getattr__(name: str) -> Any:
    # The mapper imports this package, so its part of the user API is looked up when it is first asked for.
    if name == "PartitionReader":
        from mapper.reader import PartitionReader

        return PartitionReader
    raise AttributeError(f"module 'shuffle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
