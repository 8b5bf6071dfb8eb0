"""Repeated lookups of rows that seldom change: a row is decoded only when it has changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput, UnknownTable
from shuffle.statestore.client.handles import Handles
from shuffle.statestore.codec.arrow_bytes import Binary, to_list
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.store import Store

CACHED_ROWS_MAX = 256
"""The most rows that one client remembers; the least recently used one is removed first."""

_CacheKey = tuple[str, tuple[Any, ...]]


@dataclass(slots=True)
class _CachedRow:
    table: Table
    keys: pa.RecordBatch
    encoded: Binary
    last: tuple[bytes | None, pa.Table] | None = None
    """The value that was read last, and its decoded row. One object, so that no thread sees half of a change."""


class CachedLookups:
    """The rows that one client looks up repeatedly. Safe to use from many threads."""

    def __init__(self, store: Store, handles: Handles) -> None:
        self._store = store
        self._handles = handles
        self._lock = threading.Lock()
        self._cached: OrderedDict[_CacheKey, _CachedRow] = OrderedDict()

    def lookup(self, table: str, key: Sequence[Any]) -> pa.Table:
        cache_key = table, tuple(key)
        try:
            return self._lookup(cache_key)
        except UnknownTable:
            # The table may have been dropped and created anew since, and then has another id.
            self._handles.forget(table)
            with self._lock:
                self._cached.pop(cache_key, None)
            return self._lookup(cache_key)

    def _lookup(self, cache_key: _CacheKey) -> pa.Table:
        cached = self._entry(cache_key)
        values = self._store.get(None, cached.table.table_id, cached.encoded)
        value: bytes | None = to_list(values)[0]
        last = cached.last
        if last is None or last[0] != value:
            cached.last = last = value, cached.table.decode_lookup(cached.keys, values)
        return last[1]

    def _entry(self, cache_key: _CacheKey) -> _CachedRow:
        with self._lock:
            cached = self._cached.get(cache_key)
            if cached is not None:
                self._cached.move_to_end(cache_key)
                return cached
        table = self._handles.table(cache_key[0])
        cached = _CachedRow(table, *table.encode_keys(_key_row(table, cache_key[1])))
        with self._lock:
            self._cached[cache_key] = cached
            while len(self._cached) > CACHED_ROWS_MAX:
                self._cached.popitem(last=False)
        return cached


def _key_row(table: Table, key: tuple[Any, ...]) -> pa.Table:
    schema = table.schema.key
    if len(key) != len(schema):
        raise BadInput(f"table {table.schema.name!r}: a key has the columns {schema.names}, not {len(key)} values")
    try:
        arrays = [pa.array([value], data_type) for value, data_type in zip(key, schema.types, strict=True)]
        return pa.table(arrays, schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"table {table.schema.name!r}: {key!r} is not a key of it: {error}") from None
