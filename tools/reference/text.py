"""Docstrings, tables, signatures and numbers as Markdown."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

_DEFAULT = re.compile(r"\s*Default: (?P<default>.+?)\.?\s*$", re.DOTALL)
_CODE = re.compile(r"``(.+?)``")
_SIGNATURE_CHARS_MAX = 100


def attribute_docs(thing: type | ModuleType) -> dict[str, str]:
    """The docstrings under the attributes of a class, or under the constants of a module, which Python does not keep.

    Those of a class may be in its body, or in its ``__init__``.
    """
    body: list[ast.stmt] = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    if not isinstance(thing, ModuleType):
        assert isinstance(body[0], ast.ClassDef)
        body = body[0].body
        body = [part for statement in body for part in (statement, *_constructed(statement))]
    found: dict[str, str] = {}
    name: str | None = None
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and name is not None:
            found[name] = " ".join(str(statement.value.value).split())
        name = _assigned(statement)
    return found


def _constructed(statement: ast.stmt) -> list[ast.stmt]:
    return statement.body if isinstance(statement, ast.FunctionDef) and statement.name == "__init__" else []


def _assigned(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            return target.attr
        return target.id if isinstance(target, ast.Name) else None
    return None


def without_default(text: str) -> tuple[str, str | None]:
    """A docstring without the sentence ``Default: …`` at its end, and that default."""
    found = _DEFAULT.search(text)
    return (text[: found.start()], found["default"]) if found else (text, None)


def markdown(text: str) -> str:
    """A docstring as Markdown: code is between single backticks instead of double ones."""
    return _CODE.sub(r"`\1`", text)


def sentence(said: str) -> str:
    """A help text as a sentence, for a table."""
    if not said:
        return ""
    return markdown(said[:1].upper() + said[1:]) + ("" if said.endswith((".", "…")) else ".")


def docstring(thing: Any) -> str:
    """The whole docstring as Markdown; raises if there is none."""
    found = inspect.getdoc(thing)
    if not found:
        raise LookupError(f"{thing!r} is public and has no docstring")
    # The lines of a paragraph are joined, as in table cells: where they break matters only in the code.
    return "\n\n".join(_paragraph(part) for part in markdown(found).split("\n\n"))


def _paragraph(text: str) -> str:
    items = re.split(r"\n(?=\d+\. |- )", text)
    return "\n".join(" ".join(item.split()) for item in items)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") or " " for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`"


def either(choices: Sequence[str]) -> str:
    """The choices as Markdown: `a`, `b` or `c`."""
    shown = [code(choice) for choice in choices]
    return " or ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def signature(name: str, function: Any, skip_self: bool = True) -> str:
    """``name(…) -> …``, over several lines if it is long. Only plain defaults are shown: others differ by the run."""
    found = inspect.signature(function)
    parameters = [part for part in found.parameters.values() if not (skip_self and part.name == "self")]
    shown: list[str] = []
    star = False
    for part in parameters:
        if part.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            shown.append("*")
        star = star or part.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        shown.append(_parameter(part))
    returned = _annotation(found.return_annotation)
    arrow = f" -> {returned}" if returned and returned != "None" else ""
    line = f"{name}({', '.join(shown)}){arrow}"
    if len(line) <= _SIGNATURE_CHARS_MAX:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){arrow}"


def _parameter(part: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(part.kind.name, "")
    annotation = _annotation(part.annotation)
    text = f"{stars}{part.name}" + (f": {annotation}" if annotation else "")
    if part.default is inspect.Parameter.empty:
        return text
    return f"{text} = {_value(part.default)}" if annotation else f"{text}={_value(part.default)}"


def _annotation(found: Any) -> str:
    if found is inspect.Parameter.empty:
        return ""
    return found if isinstance(found, str) else getattr(found, "__name__", str(found))


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str | float | tuple):
        return repr(value)
    return f"{value:_}" if isinstance(value, int) else "…"
