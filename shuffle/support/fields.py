"""What the fields of a message may be, declared as data, and the one place where a message is checked against it.

Whatever comes over a wire is JSON that anybody may have written: ``true`` and ``1.5`` where a number of rows is meant,
``NaN``, numbers of a thousand digits, objects in objects in objects. Each kind of message has a table of ``Field``; who
takes a message in calls ``parse_json`` and ``check_fields`` (or a ``Checker``) first, and nobody behind it has to look
again.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from shuffle.errors import BadInput, OutOfRange
from shuffle.limits import NAME_BYTES_MAX

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT32_MAX, UINT64_MAX = 2**32 - 1, 2**64 - 1

_SHOWN_CHARACTERS = 60
"""Of a value that is refused: it may be of any length, and the error has to fit an answer."""


_SHOWN_BITS = 128
"""Of a number that is refused."""


class Field(NamedTuple):
    """One field of a message."""

    name: str
    value_type: type
    """``int``, ``bool``, ``str`` or ``list``: exactly this, so that ``true`` is not a number."""
    low: int = 0
    """Of a number the smallest; of a text the fewest bytes of UTF-8."""
    high: int = INT64_MAX
    """Of a number the largest; of a text the most bytes of UTF-8."""
    optional: bool = False
    """It may be missing, or null."""
    pattern: re.Pattern[str] | None = None
    """What a text must be as a whole."""
    needs: str = ""
    """Another field that must be there where this one is (and is not false)."""


def number(name: str, high: int = INT64_MAX, low: int = 0, optional: bool = False, needs: str = "") -> Field:
    return Field(name, int, low, high, optional, needs=needs)


def flag(name: str, needs: str = "") -> Field:
    return Field(name, bool, optional=True, needs=needs)


def text(name: str, low: int = 1, high: int = NAME_BYTES_MAX, optional: bool = False, needs: str = "") -> Field:
    return Field(name, str, low, high, optional, needs=needs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
"""Made once: ``json.loads`` makes a decoder for each call that wants anything special."""


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text; ``ValueError`` if it is none, whatever it is instead."""
    text = data if isinstance(data, str) else data.decode()
    try:
        # ``decode`` first looks for white space on either side, which nobody's messages have.
        try:
            value, end = _decoder.raw_decode(text)
        except ValueError:
            end = -1
        return value if end == len(text) else _decoder.decode(text)
    except RecursionError:
        raise ValueError("values inside of values inside of values, deeper than any message is") from None


def check_fields(what: str, fields: Sequence[Field], message: Mapping[str, Any]) -> None:
    """Raises ``BadInput`` for the first field of a message that is not what it should be."""
    for field in fields:
        value = message.get(field.name)
        if value is None and field.optional:
            continue
        if not fits(field, value):
            raise _refused(what, field, value)
        if field.needs and value and message.get(field.needs) is None:
            raise BadInput(f"{what}: {field.name} without {field.needs}", field=field.needs)


def check_items(what: str, fields: Sequence[Field], items: Sequence[Any]) -> None:
    """The same for a message whose fields have places in place of names."""
    if len(items) != len(fields):
        raise BadInput(f"{what} has {len(items)} fields, not the {len(fields)} that it should have")
    for field, value in zip(fields, items, strict=True):
        if not fits(field, value):
            raise _refused(what, field, value)


def fits(field: Field, value: Any) -> bool:
    kind = type(value)
    if kind is not field.value_type:
        return value is None and field.optional
    if kind is int:
        return bool(field.low <= value <= field.high)
    if kind is not str:
        return True
    if value.isascii():
        size_bytes = len(value)
    else:
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError:  # Half of a pair of surrogates, which JSON can say and UTF-8 cannot.
            return False
    return field.low <= size_bytes <= field.high and (field.pattern is None or bool(field.pattern.fullmatch(value)))


class Checker:
    """``check_fields`` and ``check_items`` for one kind of message, of which many come and almost all are right.

    Its fields are laid out once, and a message that is right is seen to be so in one loop, without a call for each
    field. Any other is left to the two functions, which find out what is wrong with it and say so.
    """

    __slots__ = ("_fields", "_plan", "_what")

    def __init__(self, what: str, fields: Sequence[Field]) -> None:
        self._what = what
        self._fields = fields
        # Plain tuples: they are unpacked in one step, and the attributes of a named one are looked up one by one.
        self._plan = tuple(
            (field.name, field.value_type, field.low, field.high, field.optional, field.needs, field)
            for field in fields
        )

    def check(self, message: Mapping[str, Any]) -> None:
        """As ``check_fields`` does."""
        for name, kind, low, high, optional, needs, field in self._plan:
            value = message.get(name)
            if value is None:
                if optional:
                    continue
                break
            if type(value) is int:
                if kind is not int or not low <= value <= high:
                    break
            elif type(value) is not kind or (kind is str and not fits(field, value)):
                break
            if needs and value and message.get(needs) is None:
                break
        else:
            return
        check_fields(self._what, self._fields, message)

    def check_items(self, items: Sequence[Any]) -> None:
        """As ``check_items`` does."""
        plan = self._plan
        if len(items) == len(plan):
            for (_, kind, low, high, _, _, field), value in zip(plan, items, strict=True):
                if type(value) is int:
                    if kind is not int or not low <= value <= high:
                        break
                elif not fits(field, value):
                    break
            else:
                return
        check_items(self._what, self._fields, items)


def as_int(value: Any) -> Any:
    """A number that a user gave, also one of numpy's, as an ``int``; anything else as it is, to be refused."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _refused(what: str, field: Field, value: Any) -> BadInput:
    if value is None:
        return BadInput(f"{what}: {field.name} is missing", field=field.name)
    if field.value_type is int:
        kind = OutOfRange if type(value) is int else BadInput
        wanted = f"a whole number from {field.low} to {field.high}"
        return kind(f"{what}: {field.name} must be {wanted}, not {shown(value)}", field=field.name)
    if field.value_type is str:
        form = f" of the form {field.pattern.pattern}" if field.pattern is not None else ""
        wanted = f"a text of {field.low} to {field.high} bytes{form}"
    else:
        wanted = "true or false" if field.value_type is bool else "a list"
    return BadInput(f"{what}: {field.name} must be {wanted}, not {shown(value)}", field=field.name)


def shown(value: Any) -> str:
    """A value as part of an error: short, and on one line."""
    if isinstance(value, str | bytes):
        return repr(value[:_SHOWN_CHARACTERS])
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
