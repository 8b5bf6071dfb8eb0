"""The names that a user's module imports to write a streaming processor.

Each name is imported when it is first used: a worker loads only what its user's module needs, and can configure the
large libraries before the first of them is imported (``shuffle.support.process_memory``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shuffle.api import Mapper, PartitionedRowset, Reducer
    from shuffle.errors import ShuffleError
    from shuffle.jobs.aggregate_reducer import AggregateReducer
    from shuffle.jobs.aggregates import Count, Last, Max, Min, Sum
    from shuffle.jobs.hash_mapper import HashMapper
    from shuffle.mapper.reader import Input, PartitionReader
    from shuffle.partition import hash_partition

__all__ = [
    "AggregateReducer",
    "Count",
    "HashMapper",
    "Input",
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

_MODULES = {
    "shuffle.mapper.reader": ("Input", "PartitionReader"),
    "shuffle.jobs.aggregates": ("Count", "Last", "Max", "Min", "Sum"),
    "shuffle.api": ("Mapper", "PartitionedRowset", "Reducer"),
    "shuffle.errors": ("ShuffleError",),
    "shuffle.jobs.aggregate_reducer": ("AggregateReducer",),
    "shuffle.jobs.hash_mapper": ("HashMapper",),
    "shuffle.partition": ("hash_partition",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shuffle' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
