"""CHECK constraints over the columns of a table, evaluated on whole batches.

SQL's rules: a row breaks a constraint only if the expression is FALSE; with NULL in it the result is unknown, and
unknown passes. Division by zero is NULL; ``/`` of whole numbers is a whole number. A row for which the expression
cannot be computed (an overflow) breaks the constraint. Text compares as its UTF-8 bytes do.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput, ConstraintViolated
from shuffle.statestore.codec.arrow_bytes import Binary, to_array
from shuffle.statestore.codec.check_parser import Call, CheckError, Column, Literal, Node, parse
from shuffle.statestore.codec.schema import TableSchema
from shuffle.statestore.codec.values import RowCodec

SHOWN_CHARS_MAX = 200
"""The most characters of the offending row in an error: enough to find it, and short enough for a status message."""

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_COMPUTE: dict[str, Callable[[Any, Any], Any]] = {
    "+": pc.add_checked,
    "-": pc.subtract_checked,
    "*": pc.multiply_checked,
}
_WIDEST_WHOLE = pa.decimal128(20, 0)
"""A type that can hold every int64 and every uint64."""


class Constraint:
    """One named CHECK of one table."""

    def __init__(self, table: str, name: str, expression: str, value_schema: pa.Schema) -> None:
        self.table, self.name, self.expression = table, name, expression
        try:
            self._tree = parse(expression)
            self.columns = tuple(sorted(set(_columns_of(self._tree))))
            # An empty batch has all the types and no values: types that cannot be combined are found here.
            result = _evaluate(self._tree, _empty_batch(value_schema))
            if not pa.types.is_boolean(result.type) and not pa.types.is_null(result.type):
                raise CheckError(f"the expression is {result.type}, not true or false", 1)
        except CheckError as error:
            raise BadInput(
                f"table {table!r}, constraint {name!r}, at character {error.position} of {_shorten(expression)!r}:"
                f" {error.message}",
                table=table,
                constraint=name,
                position=error.position,
                column=error.column,
            ) from None

    def check(self, rows: pa.RecordBatch) -> None:
        """Raises ``ConstraintViolated`` for the first row that breaks this constraint."""
        if not rows.num_rows:
            return
        try:
            row, why = self._first_false(rows), ""
        except pa.ArrowInvalid as error:
            row, why = self._first_incomputable(rows), f" (it cannot be computed: {error})"
        if row is None:
            return
        shown = _shorten(", ".join(f"{name}={_show_value(rows.column(name)[row])}" for name in self.columns))
        raise ConstraintViolated(
            f"table {self.table!r}, row {row}: breaks the constraint {self.name!r}, {_shorten(self.expression)}"
            f"{why}; it has {shown}",
            table=self.table,
            constraint=self.name,
            row=row,
            values=shown,
        )

    def _first_false(self, rows: pa.RecordBatch) -> int | None:
        result = _evaluate(self._tree, rows)
        if isinstance(result, pa.Scalar):
            return 0 if result.as_py() is False else None
        if pa.types.is_null(result.type):
            return None
        row = int(pc.index(result, False).as_py())
        return None if row < 0 else row

    def _first_incomputable(self, rows: pa.RecordBatch) -> int:
        low, high = 0, rows.num_rows - 1
        while low < high:
            middle = (low + high) // 2
            try:
                _evaluate(self._tree, rows.slice(low, middle - low + 1))
                low = middle + 1
            except pa.ArrowInvalid:
                high = middle
        return low


class TableConstraints:
    """All constraints of one table, checked on rows in their encoded form."""

    def __init__(self, schema: TableSchema, codec: RowCodec) -> None:
        """``codec`` decodes the values of the table."""
        self._value_schema = schema.value
        self._codec = codec
        self._constraints = [
            Constraint(schema.name, name, expression, schema.value) for name, expression in schema.constraints.items()
        ]

    def check(self, values: Binary) -> None:
        """Raises ``ConstraintViolated`` for the first written row that breaks a constraint; null is a deleted row."""
        if not self._constraints:
            return
        written = to_array(values).drop_null()
        if len(written):
            rows = pa.RecordBatch.from_arrays(self._codec.decode(written), schema=self._value_schema)
            for constraint in self._constraints:
                constraint.check(rows)


def _show_value(value: pa.Scalar) -> str:
    try:
        return repr(value.as_py())
    except (ValueError, OverflowError):
        # A timestamp that Python's datetime cannot hold: it has nanoseconds, or its year is out of range.
        return str(value.cast(pa.string()).as_py())


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"


def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _columns_of(node: Node) -> list[str]:
    if isinstance(node, Column):
        return [node.name]
    if isinstance(node, Call):
        return [name for argument in node.arguments for name in _columns_of(argument)]
    return []


def _evaluate(node: Node, rows: pa.RecordBatch) -> Any:
    """The value of a node, as an Arrow array or scalar.

    Operands of different types are cast to a common one first; where there is none, it is an error.
    """
    if isinstance(node, Literal):
        return _literal(node)
    if isinstance(node, Column):
        if rows.schema.get_field_index(node.name) < 0:
            known = ", ".join(rows.schema.names)
            raise CheckError(f"there is no column {node.name!r} (there are {known})", node.position, node.name)
        return rows.column(node.name)
    arguments = [_evaluate(argument, rows) for argument in node.arguments]
    try:
        return _apply(node, arguments)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        types = " and ".join(str(argument.type) for argument in arguments)
        raise CheckError(f"{node.operator} cannot be used on {types} ({error})", node.position) from None
    except pa.ArrowInvalid as error:
        if rows.num_rows:
            raise
        raise CheckError(str(error), node.position) from None


def _apply(node: Call, arguments: list[Any]) -> Any:
    operator = node.operator
    if operator in ("AND", "OR"):
        result, *others = [_as_boolean(argument, node) for argument in arguments]
        combine = pc.and_kleene if operator == "AND" else pc.or_kleene
        for other in others:
            result = combine(result, other)
        return result
    if operator == "NOT":
        return pc.invert(_as_boolean(arguments[0], node))
    if operator == "IS NULL":
        return pc.is_null(arguments[0])
    if operator == "length":
        return _length(arguments[0], node)
    if operator == "negate":
        left, right = _unify_types(pa.scalar(0, pa.int64()), arguments[0], node)
        return pc.subtract_checked(left, right)
    left, right = _unify_types(*_adapt_literal(node, arguments), node)
    if operator in _COMPARE:
        return _COMPARE[operator](left, right)
    if not (_is_number(left.type) or pa.types.is_null(left.type)):
        raise CheckError(f"{operator} cannot be used on {left.type}", node.position)
    if pa.types.is_null(left.type):
        return left
    if operator in _COMPUTE:
        return _COMPUTE[operator](left, right)
    return _divide(operator, left, right, node)


def _as_boolean(value: Any, node: Call) -> Any:
    if pa.types.is_null(value.type):
        return value.cast(pa.bool_())
    if not pa.types.is_boolean(value.type):
        raise CheckError(f"{node.operator} is used on {value.type}, which is not true or false", node.position)
    return value


def _length(value: Any, node: Call) -> Any:
    if pa.types.is_string(value.type):
        return pc.utf8_length(value).cast(pa.int64())
    if pa.types.is_binary(value.type):
        return pc.binary_length(value).cast(pa.int64())
    raise CheckError(f"length is for string and binary columns, not {value.type}", node.position)


def _divide(operator: str, left: Any, right: Any, node: Call) -> Any:
    zero = pa.scalar(0, pa.int64()).cast(right.type) if not pa.types.is_decimal(right.type) else _decimal(Decimal(0))
    divisor = pc.if_else(pc.equal(right, zero), pa.scalar(None, right.type), right)
    quotient = pc.divide_checked(left, divisor)
    if operator == "/":
        return quotient
    if pa.types.is_decimal(left.type):
        raise CheckError("% is not there for decimals", node.position)
    whole = pc.trunc(quotient) if pa.types.is_floating(quotient.type) else quotient
    return pc.subtract_checked(left, pc.multiply_checked(whole, divisor))


def _literal(node: Literal) -> Any:
    value = node.value
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return pa.scalar(value)
    if isinstance(value, Decimal):
        return pa.scalar(float(value), pa.float64())
    if isinstance(value, int):
        for data_type in (pa.int64(), pa.uint64()):
            try:
                return pa.scalar(value, data_type)
            except (OverflowError, pa.ArrowInvalid):
                continue
    raise CheckError(f"the number {value} is out of range", node.position)


def _adapt_literal(node: Call, arguments: list[Any]) -> tuple[Any, Any]:
    """Both operands, a literal in the other's type: text beside a date is a date, 0.1 beside a decimal is exact."""
    left, right = arguments
    first, second = node.arguments
    if isinstance(second, Literal):
        return left, _literal_as(second, right, left.type)
    if isinstance(first, Literal):
        return _literal_as(first, left, right.type), right
    return left, right


def _literal_as(literal: Literal, value: Any, data_type: pa.DataType) -> Any:
    given = literal.value
    if given is None:
        return pa.scalar(None, data_type)
    try:
        if isinstance(given, str) and (pa.types.is_temporal(data_type) or pa.types.is_binary(data_type)):
            return pa.scalar(given).cast(data_type)
        if isinstance(given, int | Decimal) and not isinstance(given, bool):
            if pa.types.is_decimal(data_type):
                return _decimal(Decimal(given))
            if pa.types.is_uint64(data_type) and isinstance(given, int) and given >= 0:
                return pa.scalar(given, data_type)
    except (pa.ArrowInvalid, ValueError) as error:
        raise CheckError(f"{given!r} is not a value of {data_type} ({error})", literal.position) from None
    return value


def _decimal(value: Decimal) -> Any:
    """The decimal scalar with no more digits than it needs: with more, a product is sooner too wide for its type."""
    _, digits, exponent = value.as_tuple()
    power = int(exponent)
    scale = max(0, -power)
    return pa.scalar(value, pa.decimal128(max(len(digits) + max(0, power), scale, 1), scale))


def _is_number(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_floating(data_type) or pa.types.is_decimal(data_type))


def _unify_types(left: Any, right: Any, node: Call) -> tuple[Any, Any]:
    """Both operands in types that Arrow combines without overflowing where the numbers themselves would not."""
    if pa.types.is_null(left.type):
        return left.cast(right.type), right
    if pa.types.is_null(right.type):
        return left, right.cast(left.type)
    if not (_is_number(left.type) and _is_number(right.type)):
        if left.type != right.type and not (pa.types.is_temporal(left.type) and pa.types.is_temporal(right.type)):
            raise CheckError(f"{node.operator} cannot be used on {left.type} and {right.type}", node.position)
        return left, right
    if pa.types.is_floating(left.type) or pa.types.is_floating(right.type):
        # The nearest float will do; the strict cast would refuse large whole numbers.
        return left.cast(pa.float64(), safe=False), right.cast(pa.float64(), safe=False)
    if pa.types.is_decimal(left.type) or pa.types.is_decimal(right.type):
        return left, right
    if pa.types.is_uint64(left.type) and pa.types.is_uint64(right.type):
        return left, right
    if pa.types.is_uint64(left.type) or pa.types.is_uint64(right.type):
        return left.cast(_WIDEST_WHOLE), right.cast(_WIDEST_WHOLE)
    return left.cast(pa.int64()), right.cast(pa.int64())
