"""The options of ``format("shuffle")``: their names from ``OPTIONS``, their types from the code that reads them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from tools.reference import text
from tools.reference.pages import ROOT

_TAKES = {
    "number": "whole number",
    "size_bytes": "size, like `64MiB`",
    "seconds": "time, like `30s` or `5min`",
    "names": "columns, separated by commas",
    "text": "text",
    "required": "text",
}
"""The type of value that each method of ``Options`` reads, the most specific methods first."""


def regions() -> dict[str, str]:
    options = _options()
    return {f"spark {role}": _table(role, names) for role, names in options.OPTIONS.items()}


def _options() -> Any:
    return importlib.import_module("shuffle.spark_connector.options")


def _table(role: str, names: tuple[str, ...]) -> str:
    meanings = _options().MEANINGS
    rows = []
    for name in names:
        if name not in meanings:
            raise LookupError(f"the option {name!r} to {role} is not in MEANINGS of spark_connector/options.py")
        meaning, default = text.without_default(meanings[name])
        rows.append((text.code(name), takes(name), default or "", meaning))
    return text.table(("option", "takes", "default", "meaning"), rows)


def takes(name: str) -> str:
    """The type of an option's value, found by the calls that read it."""
    calls = read_by()[name]
    for call in calls:
        if call.func.attr == "choice":  # type: ignore[attr-defined]
            return text.either(ast.literal_eval(call.args[1]))
    methods = {call.func.attr for call in calls}  # type: ignore[attr-defined]
    return next((said for method, said in _TAKES.items() if method in methods), "text")


@cache
def read_by() -> dict[str, list[ast.Call]]:
    """For each option, the calls of methods of ``Options`` with its name."""
    found: dict[str, list[ast.Call]] = {name: [] for names in _options().OPTIONS.values() for name in names}
    for call in _calls():
        name = call.args[0]
        if isinstance(name, ast.Constant) and name.value in found:
            found[name.value].append(call)
        elif isinstance(name, ast.List):  # one_of
            for element in name.elts:
                found[ast.literal_eval(element)].append(call)
    return found


def _calls() -> Iterator[ast.Call]:
    for path in sorted((ROOT / "spark_connector").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "options"
                and node.args
            ):
                yield node
