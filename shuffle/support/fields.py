"""What the fields of a message may be, declared as data, and the one module that checks a message against it.

Whatever comes over a wire is JSON that anybody may have written: ``true`` and ``1.5`` where a number of rows is meant,
``NaN``, numbers of a thousand digits, deeply nested objects. Each type of message has a table of ``Field``; whatever
receives a message calls ``parse_json`` and ``check_fields`` (or a ``Checker``) first, and the code behind it need not
check again.
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
"""The most characters of a refused value that an error shows: the value may be of any length, and the error has to fit
into a response."""


_SHOWN_BITS = 128
"""The most bits of a refused number that an error shows in full."""


class Field(NamedTuple):
    """One field of a message."""

    name: str
    value_type: type
    """The type of the value: ``int``, ``bool``, ``str`` or ``list``, and no subclass, so that ``true`` is not a
    number."""
    low: int = 0
    """The smallest number that is accepted, or the fewest bytes of UTF-8 of a text."""
    high: int = INT64_MAX
    """The largest number that is accepted, or the most bytes of UTF-8 of a text."""
    optional: bool = False
    """True if the field may be missing, or null."""
    pattern: re.Pattern[str] | None = None
    """The pattern that a text must match as a whole, if any."""
    needs: str = ""
    """The name of another field that must be present if this one is (and is not false)."""


def number(name: str, high: int = INT64_MAX, low: int = 0, optional: bool = False, needs: str = "") -> Field:
    return Field(name, int, low, high, optional, needs=needs)


def flag(name: str, needs: str = "") -> Field:
    return Field(name, bool, optional=True, needs=needs)


def text(name: str, low: int = 1, high: int = NAME_BYTES_MAX, optional: bool = False, needs: str = "") -> Field:
    return Field(name, str, low, high, optional, needs=needs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
"""Made once, since ``json.loads`` makes a decoder for each call that has options."""


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text. Raises ``ValueError``, and nothing else, if it is not JSON."""
    text = data if isinstance(data, str) else data.decode()
    try:
        # ``decode`` first looks for white space on either side, which our messages do not have.
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
        if field.needs and value is not False and message.get(field.needs) is None:
            raise BadInput(f"{what}: {field.name} without {field.needs}", field=field.needs)


def check_items(what: str, fields: Sequence[Field], items: Sequence[Any]) -> None:
    """The same for a message that is a list: its fields have positions instead of names."""
    if len(items) != len(fields):
        raise BadInput(f"{what} has {len(items)} fields, not the {len(fields)} that it should have")
    for field, value in zip(fields, items, strict=True):
        if not fits(field, value):
            raise _refused(what, field, value)


def fits(field: Field, value: Any) -> bool:
    """Whether ``value`` is what ``field`` accepts."""
    value_type = type(value)
    if value_type is not field.value_type:
        return value is None and field.optional
    if value_type is int:
        return bool(field.low <= value <= field.high)
    if value_type is not str:
        return True
    if value.isascii():
        size_bytes = len(value)
    else:
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError:  # Half of a pair of surrogates, which JSON can express and UTF-8 cannot.
            return False
    return field.low <= size_bytes <= field.high and (field.pattern is None or bool(field.pattern.fullmatch(value)))


class Checker:
    """``check_fields`` and ``check_items`` for one type of message that is received often and is almost always valid.

    The fields are unpacked once, and a valid message is recognised in one loop, without a call for each field. Any
    other message is left to the two functions, which raise the error that says what is wrong with it.
    """

    __slots__ = ("_fields", "_plan", "_what")

    def __init__(self, what: str, fields: Sequence[Field]) -> None:
        self._what = what
        self._fields = fields
        # Plain tuples are unpacked in one step, while the attributes of a named tuple are looked up one by one.
        self._plan = tuple(
            (field.name, field.value_type, field.low, field.high, field.optional, field.needs, field)
            for field in fields
        )

    def check(self, message: Mapping[str, Any]) -> None:
        """Does the same as the function ``check_fields``."""
        for name, value_type, low, high, optional, needs, field in self._plan:
            value = message.get(name)
            if value is None:
                if optional:
                    continue
                break
            if type(value) is int:
                if value_type is not int or not low <= value <= high:
                    break
            elif type(value) is not value_type or (value_type is str and not fits(field, value)):
                break
            if needs and value is not False and message.get(needs) is None:
                break
        else:
            return
        check_fields(self._what, self._fields, message)

    def check_items(self, items: Sequence[Any]) -> None:
        """Does the same as the function ``check_items``."""
        plan = self._plan
        if len(items) == len(plan):
            for (_, value_type, low, high, _, _, field), value in zip(plan, items, strict=True):
                if type(value) is int:
                    if value_type is not int or not low <= value <= high:
                        break
                elif not fits(field, value):
                    break
            else:
                return
        check_items(self._what, self._fields, items)


def as_int(value: Any) -> Any:
    """A whole number that a user gave, also one of numpy's, as an ``int``. Anything else is returned unchanged, to be
    refused by a later check."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _refused(what: str, field: Field, value: Any) -> BadInput:
    if value is None:
        return BadInput(f"{what}: {field.name} is missing", field=field.name)
    if field.value_type is int:
        error_type = OutOfRange if type(value) is int else BadInput
        expected = f"a whole number from {field.low} to {field.high}"
        return error_type(f"{what}: {field.name} must be {expected}, not {shown(value)}", field=field.name)
    if field.value_type is str:
        form = f" of the form {field.pattern.pattern}" if field.pattern is not None else ""
        expected = f"a text of {field.low} to {field.high} bytes{form}"
    else:
        expected = "true or false" if field.value_type is bool else "a list"
    return BadInput(f"{what}: {field.name} must be {expected}, not {shown(value)}", field=field.name)


def shown(value: Any) -> str:
    """A value as an error message shows it: short, and on one line."""
    if isinstance(value, str | bytes):
        return repr(value[:_SHOWN_CHARACTERS])
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
