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
from shuffle.jobs.held_state import Found, HeldState
from shuffle.limits import MIB

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction

STATE_MEMORY = 256 * MIB
"""The most bytes of state that a reducer keeps in memory between batches. Keys beyond that are looked up again."""

HELD_KEYS_MIN = 64
"""The least keys of a batch for which state is held. Fewer are looked up: the reducer's cache of rows has them."""

SMALL_BATCHES_MAX = 50
"""After so many batches in a row with fewer keys than that, the state is let go: the rush is over."""


class AggregateReducer(Reducer):
    """Keeps aggregates per key in a table, which it creates if it is not there.

    The table's key columns are ``key``, its value columns the ``aggregates`` by name. Types follow from the rows; see
    each aggregate. Nulls are as in SQL, except that a key must not be null: leave such rows out in the mapper.

    While batches are large, the rows that were written stay in memory, up to ``state_memory``, and are not looked up
    again. The table must therefore be written by this class alone. That no other instance of this reducer has written
    to it is checked by the commit anyway: it fails unless the reducer's own row is as the last commit left it, and
    after any failure the rows in memory are dropped.
    """

    table: ClassVar[str]
    """The table that holds the result."""
    key: ClassVar[Sequence[str]]
    """The columns that are the key of the table."""
    aggregates: ClassVar[Mapping[str, Aggregate]]
    """The aggregates that are kept for each key, by the name of their column: ``{"count": Count()}``."""
    state_memory: ClassVar[int] = STATE_MEMORY
    """The most bytes of rows that are kept in memory between batches, in each reducer."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient) -> None:
        super().__init__(check_config(type(self), config), spec, state)
        self._check_declaration()
        self._rows_schema: pa.Schema | None = None
        self._key_schema = pa.schema([])
        self._fields: dict[str, list[pa.Field]] = {}
        self._value_names: list[str] = []
        self._held: HeldState | None = None
        """The rows of the table as of the last commit, as far as they are kept; None if none are."""
        self._small_batches = 0
        """The number of batches in a row that were small."""
        self._written: tuple[Transaction, Found, list[pa.Array]] | None = None
        """The last transaction that ``reduce`` returned, and the rows that are held if it was committed."""

    def forget(self) -> None:
        self._held, self._written = None, None

    def reduce(self, rows: pa.Table) -> Transaction | None:
        if not rows.num_rows:
            return None
        if self._rows_schema is None or not rows.schema.equals(self._rows_schema):
            self._prepare(rows.schema)
        self._settle()
        keys, new = self._aggregate(rows)
        found = self._find(keys)
        tx = self.state.transaction()
        try:
            merged = self._merge(self._load(tx, keys, found), new)
            tx.write(self.table, pa.table([*keys.columns, *merged], names=[*keys.column_names, *self._value_names]))
        except BaseException:
            tx.abort()
            raise
        self._written = None if found is None else (tx, found, merged)
        return tx

    def _settle(self) -> None:
        """Takes over the rows of the last transaction if its commit was acknowledged; otherwise drops the state."""
        if self._written is not None:
            (tx, found, merged), self._written = self._written, None
            if tx.is_committed and self._held is not None:
                self._held.update(found, merged)
            else:
                self._held = None

    def _find(self, keys: pa.Table) -> Found | None:
        """Where the state in memory has these keys; None if none is held, or is not worth holding."""
        self._small_batches = self._small_batches + 1 if keys.num_rows < HELD_KEYS_MIN else 0
        fields = [field for columns in self._fields.values() for field in columns]
        if self._held is None and not self._small_batches and HeldState.can_hold(fields):
            self._held = HeldState(self._key_schema, fields, self.state_memory)
        elif self._small_batches > SMALL_BATCHES_MAX:
            self._held = None
        return None if self._held is None else self._held.find(keys)

    def _load(self, tx: Transaction, keys: pa.Table, found: Found | None) -> list[pa.Array]:
        """The value columns of these keys, in their order; null where the table has no row.

        All reads of the state go through this method.
        """
        if found is None or self._held is None or not len(self._held):
            return [_array(column) for column in tx.lookup_values(self.table, keys).columns]
        if not found.unknown.any():
            return self._held.values(found, None)
        unknown = keys.filter(pa.array(found.unknown))
        looked_up = tx.lookup_values(self.table, unknown)
        return self._held.values(found, [_array(column) for column in looked_up.columns])

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
        self._value_names = [field.name for field in value_fields]
        self._held = None

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

    def _merge(self, old: list[pa.Array], new: dict[str, list[pa.Array]]) -> list[pa.Array]:
        """The state columns after the batch: what was there before, which is null for new keys, and what it adds."""
        merged: list[pa.Array] = []
        for name, aggregate in self.aggregates.items():
            fields = self._fields[name]
            own = old[len(merged) : len(merged) + len(fields)]
            before = [column.cast(field.type) for column, field in zip(own, fields, strict=True)]
            merged += [_array(column) for column in aggregate.merge(before, new[name], fields)]
        return merged


def _array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
