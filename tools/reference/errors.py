"""The tree of errors, and the limits."""

from __future__ import annotations

from collections.abc import Iterator

from shuffle import errors, limits
from shuffle.statestore.codec import check_parser, schema
from shuffle.statestore.engine import leases
from shuffle.support import units
from tools.reference import text
from tools.reference.command import exit_code


def regions() -> dict[str, str]:
    return {"errors": _table(), "limits": _limits()}


def tree(kind: type[errors.ShuffleError] = errors.ShuffleError) -> Iterator[type[errors.ShuffleError]]:
    """Every error class, each followed by its subclasses."""
    yield kind
    for inner in kind.__subclasses__():
        if inner.__module__ == errors.__name__:
            yield from tree(inner)


def _table() -> str:
    rows = []
    for kind in tree():
        if "__doc__" not in vars(kind) or not kind.__doc__:
            raise LookupError(f"{kind.__name__} does not say what it means: give it a docstring")
        base = "" if kind is errors.ShuffleError else text.code(kind.__bases__[0].__name__)
        rows.append((text.code(kind.__name__), base, text.code(kind.code), str(exit_code(kind)), text.docstring(kind)))
    return text.table(("error", "is a", "code", "exit", "what it means, and what to do"), rows)


def _limits() -> str:
    others = [schema, check_parser, leases]
    rows = []
    for module in (limits, *others):
        for name, doc in text.attribute_docs(module).items():
            value = getattr(module, name)
            if not name.startswith("_") and isinstance(value, int | float):
                rows.append((text.code(name), _shown(name, value), text.markdown(doc)))
    return text.table(("limit", "value", "what it bounds, and why"), rows)


def _shown(name: str, value: int | float) -> str:
    if "_BYTES_" in name:
        return units.exact_size(int(value))
    if "_MS_" in name:
        return units.exact_duration(int(value))
    return f"{value:g} s" if "_S_" in name else f"{value:,}"
