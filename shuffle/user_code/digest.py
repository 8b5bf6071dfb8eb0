"""A digest of the user's mapper class, by which a start notices that ``map`` has changed under an existing state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import xxhash


def code_digest(mapper_class: type[Any]) -> str:
    """A digest of what the user's class does: its compiled methods, its plain attributes, and the constants and
    functions of its module that they use. Comments, docstrings and layout do not matter.

    It is compared only with a digest that has the same prefix: of the same version of Python, since another one
    compiles differently, and of the same algorithm. (``hashlib`` would load OpenSSL into each worker, which is 4 MB.)
    """
    parts: list[str] = []
    for cls in mapper_class.__mro__:
        if cls.__module__.split(".")[0] in ("builtins", "abc", "typing", "shuffle"):
            continue
        for name, member in sorted(vars(cls).items()):
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                parts.append(name)
                parts.extend(_function_parts(function, set()))
            elif not name.startswith("__") and name != "_abc_impl":
                parts.append(f"{name}={_plain(member)}")
    digest = xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "backslashreplace"))
    return f"{sys.implementation.cache_tag}-xxh3:{digest}"


def _function_parts(function: FunctionType, seen: set[CodeType]) -> Iterator[str]:
    """A function and the functions and constants of the same module that it names, each once."""
    if function.__code__ in seen:
        return
    seen.add(function.__code__)
    yield from _code_parts(function.__code__, function.__doc__)
    for name in sorted(_names_in(function.__code__)):
        used = function.__globals__.get(name)
        if isinstance(used, FunctionType) and used.__module__ == function.__module__:
            yield name
            yield from _function_parts(used, seen)
        elif used is not None:
            yield f"{name}={_plain(used)}"


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _code_parts(code: CodeType, doc: str | None) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant, None)
        elif constant is None or constant != doc:
            yield _plain(constant)


def _plain(value: Any) -> str:
    """The text of a value made of plain data, the same in every process; only the type of any other value."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_plain(name)}: {_plain(part)}' for name, part in value.items())}}}"
    plain = value is None or value is ... or isinstance(value, (str, bytes, bool, int, float, complex))
    return repr(value) if plain else type(value).__qualname__
