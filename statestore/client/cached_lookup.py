"""Looking up the same rows again and again, where they seldom change: they are decoded only when they have."""

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
"""Rows that are remembered by one client; the one that was not looked up for longest goes first."""

_At = tuple[str, tuple[Any, ...]]


@dataclass(slots=True)
class _Cached:
    table: Table
    keys: pa.RecordBatch
    encoded: Binary
    last: tuple[bytes | None, pa.Table] | None = None
    """The value that was found last, and what it says. One object, so that no thread sees half of a change."""


class CachedLookups:
    """The rows that one client looks up again and again. Safe to use from many threads."""

    def __init__(self, store: Store, handles: Handles) -> None:
        self._store = store
        self._handles = handles
        self._lock = threading.Lock()
        self._cached: OrderedDict[_At, _Cached] = OrderedDict()

    def lookup(self, table: str, key: Sequence[Any]) -> pa.Table:
        at = table, tuple(key)
        try:
            return self._lookup(at)
        except UnknownTable:
            # Perhaps the table was created anew since, and has another id then.
            self._handles.forget(table)
            with self._lock:
                self._cached.pop(at, None)
            return self._lookup(at)

    def _lookup(self, at: _At) -> pa.Table:
        cached = self._entry(at)
        values = self._store.get(None, cached.table.table_id, cached.encoded)
        value: bytes | None = to_list(values)[0]
        last = cached.last
        if last is None or last[0] != value:
            cached.last = last = value, cached.table.decode_lookup(cached.keys, values)
        return last[1]

    def _entry(self, at: _At) -> _Cached:
        with self._lock:
            cached = self._cached.get(at)
            if cached is not None:
                self._cached.move_to_end(at)
                return cached
        table = self._handles.table(at[0])
        cached = _Cached(table, *table.encode_keys(_key_row(table, at[1])))
        with self._lock:
            self._cached[at] = cached
            while len(self._cached) > CACHED_ROWS_MAX:
                self._cached.popitem(last=False)
        return cached


def _key_row(table: Table, key: tuple[Any, ...]) -> pa.Table:
    schema = table.schema.key
    if len(key) != len(schema):
        raise BadInput(f"table {table.schema.name!r}: a key has the columns {schema.names}, not {len(key)} values")
    try:
        arrays = [pa.array([value], kind) for value, kind in zip(key, schema.types, strict=True)]
        return pa.table(arrays, schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"table {table.schema.name!r}: {key!r} is not a key of it: {error}") from None
