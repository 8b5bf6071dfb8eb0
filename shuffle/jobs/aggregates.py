"""The aggregates that ``AggregateReducer`` can keep: count, sum, min, max and last.

Each one is three steps over whole columns: what Arrow's ``group_by`` is to compute over a batch (``inputs``), the state
columns that this batch alone would give (``partial``), and their union with the state from before (``merge``).

Nulls are as in SQL: they are not counted, summed or compared, and where there was nothing else the result is null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput, SchemaMismatch

_DECIMAL_DIGITS = 38
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GroupInput:
    """One column for Arrow's ``group_by``, and the aggregate function over it.

    ``values`` is ``None`` for ``count_all``.
    """

    values: pa.ChunkedArray | None
    function: str
    options: Any = None


def state_type(data_type: pa.DataType) -> pa.DataType:
    """The type with which a table stores values of type ``data_type``: without dictionaries, with plain strings."""
    types = pa.types
    if types.is_dictionary(data_type):
        return state_type(data_type.value_type)
    if types.is_large_string(data_type) or types.is_string_view(data_type):
        return pa.string()
    if types.is_large_binary(data_type) or types.is_binary_view(data_type) or types.is_fixed_size_binary(data_type):
        return pa.binary()
    return data_type


class Aggregate(ABC):
    """One entry of ``AggregateReducer.aggregates``."""

    __slots__ = ()

    @abstractmethod
    def needs(self) -> list[str]:
        """The columns of the rows that the aggregate reads."""

    @abstractmethod
    def state_fields(self, name: str, schema: pa.Schema) -> list[pa.Field]:
        """The columns of the table that hold the state of the aggregate. The first one is the result."""

    @abstractmethod
    def inputs(self, rows: pa.Table) -> list[GroupInput]:
        """What Arrow's ``group_by`` is to compute over the rows of a batch."""

    @abstractmethod
    def partial(self, rows: pa.Table, grouped: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        """The state after these rows alone. ``grouped`` has one value per group for each of the ``inputs``."""

    @abstractmethod
    def merge(self, old: list[pa.Array], new: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        """The state after the old and the new rows. Where there was no state before, the columns of ``old`` are
        null."""


@dataclass(frozen=True, slots=True)
class Count(Aggregate):
    """The number of rows; with a column, the number of its values that are not null. An int64."""

    column: str | None = None

    def needs(self) -> list[str]:
        return [] if self.column is None else [self.column]

    def state_fields(self, name: str, schema: pa.Schema) -> list[pa.Field]:
        return [pa.field(name, pa.int64())]

    def inputs(self, rows: pa.Table) -> list[GroupInput]:
        if self.column is None:
            return [GroupInput(None, "count_all")]
        return [GroupInput(rows[self.column], "count", pc.CountOptions(mode="only_valid"))]

    def partial(self, rows: pa.Table, grouped: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        return grouped

    def merge(self, old: list[pa.Array], new: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        return [_checked(lambda: pc.add_checked(pc.fill_null(old[0], 0), new[0]), fields[0])]


@dataclass(frozen=True, slots=True)
class Sum(Aggregate):
    """The sum of a column: of integers an int64, of floats a float64, of decimals one of 38 digits.

    A sum that does not fit is an error, never a wrong number. Sums of floats depend on the order of arrival, as float
    addition does; use decimals where that matters.
    """

    column: str

    def needs(self) -> list[str]:
        return [self.column]

    def state_fields(self, name: str, schema: pa.Schema) -> list[pa.Field]:
        data_type = state_type(schema.field(self.column).type)
        if pa.types.is_integer(data_type):
            return [pa.field(name, pa.int64())]
        if pa.types.is_floating(data_type):
            return [pa.field(name, pa.float64())]
        if pa.types.is_decimal(data_type):
            return [pa.field(name, pa.decimal128(_DECIMAL_DIGITS, data_type.scale))]
        raise SchemaMismatch(f"cannot sum column {self.column!r}: it is {data_type}, not a number", column=self.column)

    def inputs(self, rows: pa.Table) -> list[GroupInput]:
        values = _plain(rows[self.column])
        if pa.types.is_floating(values.type):
            values = values.cast(pa.float64())
        else:
            values = values.cast(_sum_type(values))
        return [GroupInput(values, "sum", pc.ScalarAggregateOptions(skip_nulls=True, min_count=1))]

    def partial(self, rows: pa.Table, grouped: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        return [_checked(lambda: grouped[0].cast(fields[0].type), fields[0])]

    def merge(self, old: list[pa.Array], new: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        data_type = fields[0].type
        # Two decimals of 38 digits add up to one of 39, which only decimal256 has room for.
        wide = pa.decimal256(_DECIMAL_DIGITS, data_type.scale) if pa.types.is_decimal(data_type) else data_type
        zero = pa.scalar(0, pa.int64()).cast(wide)

        def add() -> pa.Array:
            both = pc.add_checked(pc.fill_null(old[0].cast(wide), zero), pc.fill_null(new[0].cast(wide), zero))
            return both.cast(data_type)

        neither = pc.and_(pc.is_null(old[0]), pc.is_null(new[0]))
        return [pc.if_else(neither, pa.scalar(None, data_type), _checked(add, fields[0]))]


def _sum_type(values: pa.ChunkedArray) -> pa.DataType:
    """A type in which no sum of these integers or decimals overflows: Arrow's own sum would wrap around in silence."""
    ends = pc.min_max(values).as_py()
    largest = max(abs(ends["min"] or 0), abs(ends["max"] or 0)) * len(values)
    if pa.types.is_integer(values.type):
        return pa.int64() if largest <= _INT64_MAX else pa.decimal256(76, 0)
    fits = Decimal(largest).adjusted() + 1 + values.type.scale <= _DECIMAL_DIGITS
    return pa.decimal128(_DECIMAL_DIGITS, values.type.scale) if fits else pa.decimal256(76, values.type.scale)


@dataclass(frozen=True, slots=True)
class _Extreme(Aggregate):
    column: str
    _function: ClassVar[str]

    def needs(self) -> list[str]:
        return [self.column]

    def state_fields(self, name: str, schema: pa.Schema) -> list[pa.Field]:
        return [pa.field(name, state_type(schema.field(self.column).type))]

    def inputs(self, rows: pa.Table) -> list[GroupInput]:
        options = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)
        return [GroupInput(_plain(rows[self.column]), self._function, options)]

    def partial(self, rows: pa.Table, grouped: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        return grouped

    def merge(self, old: list[pa.Array], new: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        choose = pc.min_element_wise if self._function == "min" else pc.max_element_wise
        data_type = fields[0].type
        # Arrow does not compare booleans or timestamps with a time zone element by element, but does so with integers.
        numbers = {pa.types.is_boolean(data_type): pa.uint8(), pa.types.is_timestamp(data_type): pa.int64()}.get(
            True, data_type
        )
        return [choose(old[0].cast(numbers), new[0].cast(numbers)).cast(data_type)]


@dataclass(frozen=True, slots=True)
class Min(_Extreme):
    """The smallest value of a column. A NaN counts only if there are no other values."""

    _function: ClassVar[str] = "min"


@dataclass(frozen=True, slots=True)
class Max(_Extreme):
    """The largest value of a column. A NaN counts only if there are no other values."""

    _function: ClassVar[str] = "max"


@dataclass(frozen=True, slots=True)
class Last(Aggregate):
    """The value of the last row, even if it is null.

    With ``by``, the last row is the one with the largest value of the column ``by``; of equal ones, the one that
    arrived later. Rows where ``by`` is null do not count. The value of ``by`` is kept in a second column of the table,
    ``NAME_by``. Without ``by``, rows count in the order of their arrival: that of the input for rows of one mapper, and
    any order between mappers.
    """

    column: str
    by: str | None = None

    def needs(self) -> list[str]:
        return [self.column] if self.by is None else [self.column, self.by]

    def state_fields(self, name: str, schema: pa.Schema) -> list[pa.Field]:
        fields = [pa.field(name, state_type(schema.field(self.column).type))]
        if self.by is not None:
            fields.append(pa.field(f"{name}_by", state_type(schema.field(self.by).type)))
        return fields

    def inputs(self, rows: pa.Table) -> list[GroupInput]:
        ranks = pa.chunked_array([self._ranks(rows)])
        return [GroupInput(ranks, "max", pc.ScalarAggregateOptions(skip_nulls=True, min_count=1))]

    def partial(self, rows: pa.Table, grouped: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        winners = grouped[0]
        if self.by is not None:
            order = _order_by(_plain(rows[self.by]))
            winners = winners if order is None else order.take(winners)
        columns = [self.column] if self.by is None else [self.column, self.by]
        return [_one_chunk(_plain(rows[column]).take(winners)) for column in columns]

    def merge(self, old: list[pa.Array], new: list[pa.Array], fields: list[pa.Field]) -> list[pa.Array]:
        if self.by is None:
            return new
        later = pc.fill_null(pc.greater_equal(new[1], old[1]), pc.is_null(old[1]))
        if pa.types.is_floating(fields[1].type):
            later = pc.or_(later, pc.fill_null(pc.is_nan(new[1]), False))
        wins = pc.and_(later, pc.is_valid(new[1]))
        return [pc.if_else(wins, after, before) for before, after in zip(old, new, strict=True)]

    def _ranks(self, rows: pa.Table) -> pa.Array:
        """For each row, its rank in the order that decides which is last; null if the row does not count."""
        row_numbers = np.arange(rows.num_rows, dtype=np.int64)
        if self.by is None:
            return pa.array(row_numbers)
        by = _plain(rows[self.by])
        order = _order_by(by)
        if order is None:
            return pa.array(row_numbers)
        ranks = np.empty(rows.num_rows, np.int64)
        ranks[order.to_numpy(zero_copy_only=False)] = row_numbers
        return pa.array(ranks, mask=by.is_null().to_numpy())


def _order_by(by: pa.ChunkedArray) -> pa.Array | None:
    """The row numbers in the order of ``by``, equal ones as they came; ``None`` if the rows are in that order already.

    Timestamps usually are, and finding that out costs a fiftieth of sorting them.
    """
    numbers = pa.types.is_integer(by.type) or pa.types.is_timestamp(by.type) or pa.types.is_date32(by.type)
    if numbers and not by.null_count:
        values = by.to_numpy()
        if bool(np.all(values[1:] >= values[:-1])):
            return None
    return pc.sort_indices(by)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    data_type = state_type(column.type)
    return column if column.type == data_type else column.cast(data_type)


def _one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _checked(compute: Any, field: pa.Field) -> pa.Array:
    try:
        return compute()
    except pa.ArrowInvalid as error:
        raise BadInput(
            f"{field.name!r} does not fit into {field.type} any more ({error}): sum a decimal or a float instead",
            column=field.name,
        ) from None
