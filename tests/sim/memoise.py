"""Memoises pure functions of the product, to make the simulation faster.

A mapper looks up the same row with the same key before every batch, and thousands of runs go through the same few
states, so mostly the same values are encoded and decoded again. These functions depend on their arguments alone, and
Arrow data is immutable, so a result can be returned twice. Nothing of this can be seen from inside a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

import shuffle.durable.mapper_state
import shuffle.mapper.ingest
import shuffle.mapper.trim
import shuffle.statestore.client.handles
from shuffle.durable.reducer_state import ReducerState
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.engine.catalogue import QueueEntry, TableEntry

ENTRIES_MAX = 20_000
"""The number of entries after which the memo is emptied, except for ``_fixed``."""

_fixed: dict[Any, Any] = {}
"""Schemas, codecs and keys: there are few, and they are kept for ever, so that their addresses stay theirs."""
_kept: dict[Any, tuple[Any, Any]] = {}
"""The results by function and arguments, each with the arguments that are identified by their address: keeping them
alive keeps the address theirs."""
_known: dict[int, Any] = {}
"""Rows that were returned from here, by their address."""


def fixed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` of arguments that have few values."""
    at = (function, *arguments)
    found = _fixed.get(at)
    if found is None:
        found = _fixed[at] = function(*arguments)
    return found


def fixed_rows(function: Callable[..., Any], *arguments: Any) -> Any:
    """The same for functions that return rows, which are then registered for the functions below."""
    found = fixed(function, *arguments)
    _known[id(found)] = found
    return found


def _remember(at: Any, result: Any, arguments: Any, rows: Any = None) -> Any:
    if len(_kept) >= ENTRIES_MAX:
        _kept.clear()
        _known.clear()
    _kept[at] = result, arguments
    if rows is not None:
        _known[id(rows)] = rows
    return result


def install() -> None:
    _remember_schemas()
    _remember_tables()
    _remember_states()


def _remember_schemas() -> None:
    for owner in (TableSchema, QueueSchema):
        parse = owner.from_json
        owner.from_json = staticmethod(lambda text, parse=parse: fixed(parse, text))  # type: ignore[method-assign]
    for entry in (TableEntry, QueueEntry):
        make = entry.of
        entry.of = staticmethod(  # type: ignore[method-assign]
            lambda schema, make=make: _of_schema(make, schema)
        )
    handles: Any = shuffle.statestore.client.handles
    handles.Table = lambda schema: _of_schema(Table, schema)


def _of_schema(make: Callable[[Any], Any], schema: Any) -> Any:
    """By its address, because a schema has no hash; the entry keeps the schema, and so the address."""
    at = (make, id(schema))
    found = _fixed.get(at)
    if found is None:
        found = _fixed[at] = schema, make(schema)
    return found[1]


def _remember_tables() -> None:
    encode_keys, encode_rows, decode_lookup = Table.encode_keys, Table.encode_rows, Table.decode_lookup

    def keys_encoded(self: Table, keys: Any) -> Any:
        if id(keys) not in _known:
            return encode_keys(self, keys)
        at = (encode_keys, id(self), id(keys))
        found = _kept.get(at)
        if found is not None:
            return found[0]
        result = encode_keys(self, keys)
        return _remember(at, result, (self, keys), rows=result[0])

    def rows_encoded(self: Table, rows: Any) -> Any:
        if id(rows) not in _known:
            return encode_rows(self, rows)
        at = (encode_rows, id(self), id(rows))
        found = _kept.get(at)
        return found[0] if found is not None else _remember(at, encode_rows(self, rows), (self, rows))

    def rows_found(self: Table, keys: pa.RecordBatch, values: Any) -> Any:
        if id(keys) not in _known:
            return decode_lookup(self, keys, values)
        at = (decode_lookup, id(self), id(keys), *(values if isinstance(values, list) else values.to_pylist()))
        found = _kept.get(at)
        if found is not None:
            return found[0]
        result = decode_lookup(self, keys, values)
        return _remember(at, result, (self, keys), rows=result)

    Table.encode_keys, Table.encode_rows, Table.decode_lookup = keys_encoded, rows_encoded, rows_found  # type: ignore[method-assign]


def _remember_states() -> None:
    mapper_key, mapper_rows, mapper_parse = (
        shuffle.durable.mapper_state.key_rows,
        shuffle.durable.mapper_state.state_rows,
        shuffle.durable.mapper_state.state_from_rows,
    )
    reducer_key, reducer_rows, reducer_parse = ReducerState.key, ReducerState.to_row, ReducerState.from_rows

    def rows_of(make: Callable[..., Any], *arguments: Any) -> Any:
        at = (make, *arguments)
        found = _kept.get(at)
        if found is not None:
            return found[0]
        result = make(*arguments)
        return _remember(at, result, None, rows=result)

    def parsed(parse: Callable[..., Any], rows: Any, *arguments: Any) -> Any:
        if id(rows) not in _known:
            return parse(rows, *arguments)
        at = (parse, id(rows), *arguments)
        found = _kept.get(at)
        return found[0] if found is not None else _remember(at, parse(rows, *arguments), rows)

    states: Any = shuffle.durable.mapper_state
    states.key_rows = lambda index: rows_of(mapper_key, index)
    states.state_from_rows = lambda rows: parsed(mapper_parse, rows)
    users: tuple[Any, ...] = (shuffle.durable.mapper_state, shuffle.mapper.ingest, shuffle.mapper.trim)
    for module in users:
        module.state_rows = lambda index, state: rows_of(mapper_rows, index, state)
    reducers: Any = ReducerState
    reducers.key = staticmethod(lambda index: rows_of(reducer_key, index))
    reducers.to_row = lambda state, index: rows_of(reducer_rows, state, index)
    reducers.from_rows = staticmethod(lambda rows, count: parsed(reducer_parse, rows, count))
