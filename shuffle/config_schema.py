"""Checks the user's own part of a spec (``config``) against what the user's class declares (``config_schema``).

This module lies in a layer below the ready-made jobs, whose constructors use it, and below ``shuffle.user_code``, which
creates objects of the user's classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shuffle.errors import SpecError
from shuffle.support.suggest import did_you_mean

_REQUIRED = object()


def check_config(cls: type, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The user's configuration with defaults filled in, checked against ``cls.config_schema`` if the class has one.

    ``config_schema`` maps each name to its type, or to ``(type, default)``. Raises ``SpecError`` with every mistake.
    """
    given = dict(config or {})
    schema: Mapping[str, Any] | None = getattr(cls, "config_schema", None)
    if schema is None:
        return given
    problems = []
    for name in given.keys() - schema.keys():
        hint = did_you_mean(str(name), schema, f"; there are: {', '.join(sorted(schema)) or 'none'}")
        problems.append(f"unknown key {name!r}{hint}")
    checked = {}
    for name, declared in schema.items():
        value_type, default = declared if isinstance(declared, tuple) else (declared, _REQUIRED)
        if name not in given:
            if default is _REQUIRED:
                problems.append(f"{name!r} is missing: it must be {_describe(value_type)}")
            checked[name] = default
        elif _fits(given[name], value_type) or (default is None and given[name] is None):
            checked[name] = float(given[name]) if value_type is float else given[name]
        else:
            problems.append(f"{name!r} must be {_describe(value_type)}, not {given[name]!r}")
    if problems:
        raise SpecError(f"config of {cls.__name__}: " + "; ".join(sorted(problems)), problems=sorted(problems))
    return checked


def _fits(value: Any, value_type: type) -> bool:
    if isinstance(value, bool):
        # To Python a bool is an int; to the writer of a spec ``limit: true`` is a mistake.
        return value_type in (bool, object)
    return isinstance(value, (int, float) if value_type is float else value_type)


def _describe(value_type: type) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
    return names.get(value_type, f"a {value_type.__name__}" if value_type is not dict else "a mapping")
