"""Filters on the key columns of a table, as the ranges of keys that they leave.

A range may be wider than the filter, because Spark applies all filters again: a range that is too wide is only slow,
while one that is too narrow would lose rows. So a filter that cannot be translated exactly does not narrow the range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from shuffle.errors import ShuffleError
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.key_range import KeyRange

RANGES_MAX = 1_000
"""The most ranges that filters with ``In`` may multiply into. Beyond that, further key columns are not used."""


def key_ranges(table: Table, filters: Iterable[Filter]) -> list[KeyRange]:
    """The ranges of keys that hold all rows which pass ``filters``."""
    by_column: dict[str, list[Filter]] = {}
    for condition in filters:
        path = getattr(condition, "attribute", None)
        if path is not None and len(path) == 1:
            by_column.setdefault(path[0], []).append(condition)
    prefixes: list[tuple[Any, ...]] = [()]
    for field in table.schema.key:
        if pa.types.is_floating(field.type):
            break  # Spark orders NaN and -0.0 in its own way.
        applying = by_column.get(field.name, [])
        values = _values(applying)
        if values is None or len(prefixes) * len(values) > RANGES_MAX:
            return [keys for prefix in prefixes for keys in _last_ranges(table, prefix, field.name, applying)]
        prefixes = [(*prefix, value) for prefix in prefixes for value in values]
    return [keys for prefix in prefixes for keys in _last_ranges(table, prefix, "", [])]


def _values(filters: Sequence[Filter]) -> list[Any] | None:
    """The only values that the filters leave for a column; None if they leave a range."""
    for condition in filters:
        if isinstance(condition, EqualTo | EqualNullSafe):
            return [condition.value] if condition.value is not None else []
        if isinstance(condition, In):
            return list(dict.fromkeys(value for value in condition.value if value is not None))
    return None


def _last_ranges(table: Table, prefix: tuple[Any, ...], column: str, filters: Sequence[Filter]) -> list[KeyRange]:
    """The range of the rows with ``prefix`` whose next key column passes ``filters``; no range if there can be none."""
    try:
        keys = KeyRange(*table.range(None, None, prefix or None))
    except (ShuffleError, pa.ArrowException, TypeError, ValueError):
        # The column cannot have this value, or not without loss. The whole table is read, and Spark filters.
        return [KeyRange(*table.range(None, None, None))]
    for condition in filters:
        try:
            keys = _narrowed(keys, _range_of(table, prefix, condition))
        except (ShuffleError, pa.ArrowException, TypeError, ValueError):
            continue
    return [keys] if keys.end is None or keys.begin < keys.end else []


def _range_of(table: Table, prefix: tuple[Any, ...], condition: Filter) -> KeyRange:
    if isinstance(condition, GreaterThanOrEqual | GreaterThan):
        return KeyRange(table.range((*prefix, condition.value), None, None)[0], None)
    if isinstance(condition, LessThan):
        return KeyRange(b"", table.range(None, (*prefix, condition.value), None)[1])
    if isinstance(condition, LessThanOrEqual):
        return KeyRange(b"", table.range(None, None, (*prefix, condition.value))[1])
    if isinstance(condition, StringStartsWith):
        return KeyRange(*table.range(None, None, (*prefix, condition.value), partial=True))
    return KeyRange(b"", None)


def _narrowed(one: KeyRange, other: KeyRange) -> KeyRange:
    ends = [end for end in (one.end, other.end) if end is not None]
    return KeyRange(max(one.begin, other.begin), min(ends) if ends else None)
