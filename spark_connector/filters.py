"""Filters on the key columns of a table, as the ranges of keys that they leave.

A range may be wider than the filter: Spark applies all filters again, so being too wide is slow and being too narrow
would be wrong. That is why everything that is not certain is left out here.
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
"""Ranges that ``In`` may multiply into; beyond it the rest of the key is not looked at."""


def key_ranges(table: Table, filters: Iterable[Filter]) -> list[KeyRange]:
    """The ranges of keys in which all rows lie that pass ``filters``."""
    by_column: dict[str, list[Filter]] = {}
    for found in filters:
        path = getattr(found, "attribute", None)
        if path is not None and len(path) == 1:
            by_column.setdefault(path[0], []).append(found)
    prefixes: list[tuple[Any, ...]] = [()]
    for field in table.schema.key:
        if pa.types.is_floating(field.type):
            break  # Spark orders NaN and -0.0 in its own way.
        applying = by_column.get(field.name, [])
        values = _values(applying)
        if values is None or len(prefixes) * len(values) > RANGES_MAX:
            return [found for prefix in prefixes for found in _last_ranges(table, prefix, field.name, applying)]
        prefixes = [(*prefix, value) for prefix in prefixes for value in values]
    return [found for prefix in prefixes for found in _last_ranges(table, prefix, "", [])]


def _values(filters: Sequence[Filter]) -> list[Any] | None:
    """The only values that the filters leave for a column; None if they leave a range."""
    for found in filters:
        if isinstance(found, EqualTo | EqualNullSafe):
            return [found.value] if found.value is not None else []
        if isinstance(found, In):
            return list(dict.fromkeys(value for value in found.value if value is not None))
    return None


def _last_ranges(table: Table, prefix: tuple[Any, ...], column: str, filters: Sequence[Filter]) -> list[KeyRange]:
    """The rows with ``prefix`` whose next key column passes ``filters``."""
    try:
        wanted = KeyRange(*table.range(None, None, prefix or None))
    except (ShuffleError, pa.ArrowException, TypeError, ValueError):
        # A value that the column cannot have, or not without loss; Spark will see.
        return [KeyRange(*table.range(None, None, None))]
    for found in filters:
        try:
            wanted = _narrowed(wanted, _range_of(table, prefix, found))
        except (ShuffleError, pa.ArrowException, TypeError, ValueError):
            continue
    return [wanted] if wanted.end is None or wanted.begin < wanted.end else []


def _range_of(table: Table, prefix: tuple[Any, ...], found: Filter) -> KeyRange:
    if isinstance(found, GreaterThanOrEqual | GreaterThan):
        return KeyRange(table.range((*prefix, found.value), None, None)[0], None)
    if isinstance(found, LessThan):
        return KeyRange(b"", table.range(None, (*prefix, found.value), None)[1])
    if isinstance(found, LessThanOrEqual):
        return KeyRange(b"", table.range(None, None, (*prefix, found.value))[1])
    if isinstance(found, StringStartsWith):
        return KeyRange(*table.range(None, None, (*prefix, found.value), partial=True))
    return KeyRange(b"", None)


def _narrowed(one: KeyRange, other: KeyRange) -> KeyRange:
    ends = [end for end in (one.end, other.end) if end is not None]
    return KeyRange(max(one.begin, other.begin), min(ends) if ends else None)
