"""A reducer that is declared in a few lines:

class CountByUser(AggregateReducer):
    table = "activity"
    key = ["user", "cluster"]
    aggregates = {"count": Count(), "last_access": Max("timestamp")}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.api import Reducer, WorkerSpec
from shuffle.config_schema import check_config
from shuffle.errors import NullKey, SchemaMismatch, SpecError
from shuffle.jobs.aggregates import Aggregate, state_type
from shuffle.jobs.columns import check_column, check_names
from shuffle.limits import MIB

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction

STATE_BYTES_MAX = 64 * MIB
"""The most bytes of state that a reducer keeps in memory between batches; above that, rows are looked up again."""

STATE_ROWS_PER_KEY_MAX = 8
"""State is kept only while a batch touches at least one in this many of its rows. Below that, going through all of them
costs more than a lookup of a few in the store."""


class AggregateReducer(Reducer):
    """Keeps aggregates per key in a table, which it creates if it is not there.

    The table's key columns are ``key``, its value columns the ``aggregates`` by name. Types follow from the rows; see
    each aggregate. Nulls are as in SQL, except that a key must not be null: leave such rows out in the mapper.

    While batches are large, the rows that were written stay in memory and are not looked up again. The table must
    therefore be written by this class alone. That no other instance of this reducer has written to it is checked by the
    commit anyway: it fails unless the reducer's own row is as the last commit left it, and after any failure the rows
    in memory are dropped.
    """

    table: ClassVar[str]
    """The table that holds the result."""
    key: ClassVar[Sequence[str]]
    """The columns that are the key of the table."""
    aggregates: ClassVar[Mapping[str, Aggregate]]
    """The aggregates that are kept for each key, by the name of their column: ``{"count": Count()}``."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient) -> None:
        super().__init__(check_config(type(self), config), spec, state)
        self._check_declaration()
        self._rows_schema: pa.Schema | None = None
        self._key_schema = pa.schema([])
        self._fields: dict[str, list[pa.Field]] = {}
        self._state: pa.Table | None = None
        """The rows of the table as of the last commit, as far as they are kept; None if none are."""
        self._written: tuple[Transaction, pa.Table | None] | None = None
        """The last transaction that ``reduce`` returned, and the state that holds if it was committed."""

    def forget(self) -> None:
        self._state, self._written = None, None

    def reduce(self, rows: pa.Table) -> Transaction | None:
        if not rows.num_rows:
            return None
        if self._rows_schema is None or not rows.schema.equals(self._rows_schema):
            self._prepare(rows.schema)
        self._settle()
        keys, new = self._aggregate(rows)
        tx = self.state.transaction()
        try:
            merged = self._merge(keys, self.load(tx, keys), new)
            tx.write(self.table, merged)
        except BaseException:
            tx.abort()
            raise
        self._written = tx, self._after(merged)
        return tx

    def _settle(self) -> None:
        """Takes over the state of the last transaction if its commit was acknowledged; otherwise drops the state."""
        if self._written is not None:
            tx, state = self._written
            self._state, self._written = state if tx.is_committed else None, None

    def _after(self, merged: pa.Table) -> pa.Table | None:
        """The state once ``merged`` is committed, or None if it is not worth keeping."""
        state = merged
        if self._state is not None:
            replaced = _row_offsets(self._state.select(self.key), merged)
            state = pa.concat_tables([self._state.filter(replaced.is_null()), merged]).combine_chunks()
        small_batch = merged.num_rows * STATE_ROWS_PER_KEY_MAX < state.num_rows
        return None if small_batch or state.nbytes > STATE_BYTES_MAX else state

    def load(self, tx: Transaction, keys: pa.Table) -> pa.Table:
        """The table's rows for these keys: key and value columns, missing keys absent, in the order of ``keys``.

        All reads of the state go through this method.
        """
        if self._state is None or keys.num_rows * STATE_ROWS_PER_KEY_MAX < self._state.num_rows:
            self._state = None
            return tx.lookup(self.table, keys)
        offsets = _row_offsets(keys, self._state)
        if not offsets.null_count:
            return self._state.take(offsets)
        unknown = offsets.is_null()
        missing = keys.filter(unknown)
        looked_up = tx.lookup(self.table, missing).select(self._state.column_names).cast(self._state.schema)
        if looked_up.num_rows:
            behind = pc.add(_row_offsets(missing, looked_up), self._state.num_rows)
            offsets = pc.replace_with_mask(offsets, unknown, behind)
        return pa.concat_tables([self._state, looked_up]).combine_chunks().take(offsets.drop_null())

    def _check_declaration(self) -> None:
        cls = type(self)
        check_names(cls, "key", required=True)
        table, aggregates = getattr(cls, "table", None), getattr(cls, "aggregates", None)
        if not isinstance(table, str) or not table:
            raise SpecError(f'{cls.__name__} needs the name of its table: table = "…"')
        if not isinstance(aggregates, Mapping) or not aggregates:
            raise SpecError(f'{cls.__name__} needs aggregates, like {{"count": Count()}}')
        for name, aggregate in aggregates.items():
            if not isinstance(aggregate, Aggregate):
                hint = "; write it with parentheses" if isinstance(aggregate, type) else ""
                raise SpecError(f"{cls.__name__}.aggregates[{name!r}] is {aggregate!r}, which is no aggregate{hint}")

    def _prepare(self, schema: pa.Schema) -> None:
        """Derives the table's columns from those of the rows, and creates the table if it is missing."""
        where = f"{type(self).__name__}.%s"
        for column in self.key:
            check_column(column, schema.names, where % "key", SchemaMismatch)
        for name, aggregate in self.aggregates.items():
            for column in aggregate.needs():
                check_column(column, schema.names, where % f"aggregates[{name!r}]", SchemaMismatch)
        key_schema = pa.schema(
            [pa.field(name, state_type(schema.field(name).type), nullable=False) for name in self.key]
        )
        fields = {name: aggregate.state_fields(name, schema) for name, aggregate in self.aggregates.items()}
        value_fields = [field for columns in fields.values() for field in columns]
        names = [*self.key, *(field.name for field in value_fields)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"{type(self).__name__}: table {self.table!r} would have two columns {twice[0]!r}")
        self.state.create_table(self.table, key=key_schema, value=pa.schema(value_fields), if_not_exists=True)
        self._rows_schema, self._key_schema, self._fields = schema, key_schema, fields

    def _aggregate(self, rows: pa.Table) -> tuple[pa.Table, dict[str, list[pa.Array]]]:
        """The distinct keys of a batch, and the state that the batch alone gives for each."""
        columns = {f"k{position}": self._key_column(rows, name) for position, name in enumerate(self.key)}
        group_by = list(columns)
        functions: list[tuple[Any, str, Any]] = []
        outputs: dict[str, list[str]] = {}
        for position, (name, aggregate) in enumerate(self.aggregates.items()):
            outputs[name] = []
            for part, needed in enumerate(aggregate.inputs(rows)):
                column = f"a{position}_{part}"
                if needed.values is None:
                    outputs[name].append(needed.function)
                    if ([], needed.function, None) not in functions:
                        functions.append(([], needed.function, None))
                    continue
                columns[column] = needed.values
                functions.append((column, needed.function, needed.options))
                outputs[name].append(f"{column}_{needed.function}")
        # One thread: the reducer's stages run side by side already, and the order of arrival must be kept.
        grouped = pa.table(columns).group_by(group_by, use_threads=False).aggregate(functions).combine_chunks()
        keys = pa.table([grouped[name] for name in group_by], schema=self._key_schema)
        new = {}
        for name, aggregate in self.aggregates.items():
            results = [_array(grouped[output]) for output in outputs[name]]
            new[name] = aggregate.partial(rows, results, self._fields[name])
        return keys, new

    def _key_column(self, rows: pa.Table, name: str) -> pa.ChunkedArray:
        column = rows[name]
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            raise NullKey(
                f"key column {name!r} of {type(self).__name__} is null in row {row} of {rows.num_rows}; "
                f"leave such rows out in the mapper (not_null = [{name!r}])",
                table=self.table,
                column=name,
                row=row,
            )
        data_type = self._key_schema.field(name).type
        column = column if column.type == data_type else column.cast(data_type)
        if pa.types.is_floating(data_type):
            # As keys of a table -0.0 is 0.0 and there is one NaN; group_by would make them rows of their own.
            nan = pa.scalar(np.nan, data_type)
            column = pc.if_else(pc.is_nan(column), nan, pc.add(column, pa.scalar(0.0, data_type)))
        return column

    def _merge(self, keys: pa.Table, old: pa.Table, new: dict[str, list[pa.Array]]) -> pa.Table:
        columns = dict(zip(keys.column_names, keys.columns, strict=True))
        # If every key has an old row, the old rows are in the order of the keys.
        all_old = old.num_rows == keys.num_rows
        offsets = pa.array(np.arange(keys.num_rows)) if all_old else _row_offsets(keys, old) if old.num_rows else None
        for name, aggregate in self.aggregates.items():
            fields, states = self._fields[name], new[name]
            if offsets is not None:
                before = [_array(old[field.name].take(offsets)).cast(field.type) for field in fields]
                states = aggregate.merge(before, states, fields)
            columns.update(zip((field.name for field in fields), states, strict=True))
        return pa.table(columns)


def _row_offsets(keys: pa.Table, old: pa.Table) -> pa.Array:
    """For each of ``keys`` the offset of the row of ``old`` that has it, or null."""
    names = keys.column_names
    old_keys = old.select(names).cast(keys.schema)
    old_offsets = pa.array(np.arange(old.num_rows, dtype=np.int64))
    key_offsets = pa.array(np.arange(keys.num_rows, dtype=np.int64))
    both = pa.concat_tables(
        [
            keys.append_column("_key", key_offsets).append_column("_old", pa.nulls(keys.num_rows, pa.int64())),
            old_keys.append_column("_key", pa.nulls(old.num_rows, pa.int64())).append_column("_old", old_offsets),
        ]
    )
    joined = both.group_by(names, use_threads=False).aggregate([("_key", "max"), ("_old", "max")])
    requested = joined.filter(joined["_key_max"].is_valid())
    in_order = np.argsort(requested["_key_max"].to_numpy(), kind="stable")
    return _array(requested["_old_max"].take(pa.array(in_order)))


def _array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
