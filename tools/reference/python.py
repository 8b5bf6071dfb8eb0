"""The classes and functions that users import: signatures and docstrings of what is in ``__all__``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from types import FunctionType
from typing import Any

import pyarrow as pa

import shuffle
from shuffle import statestore
from shuffle.jobs.aggregates import Aggregate
from tools.reference import text

PACKAGES = ("shuffle", "statestore", "spark_connector")

LEFT_OUT = {
    "StateClient.serving": "what open does, without its way out",
    "StateClient.store": "the layer below",
    "StateClient.table_handle": "the layer below",
    "StateClient.with_row_cache": "for the reducer",
    "StateClient.serves": "for open and the workers",
    "Queue.encode_append": "for Transaction",
    "Queue.conform": "for Appender",
    "Transaction.appends_to": "for the Spark connector",
    "Snapshot.split": "for the Spark connector",
    "Snapshot.scan_range": "for the Spark connector",
    "TableSchema.validate": "create_table does it",
    "TableSchema.conform_keys": "for the client",
    "TableSchema.row_columns": "for the client",
    "TableSchema.to_json": "the store's own form",
    "TableSchema.from_json": "the store's own form",
    "QueueSchema.validate": "create_queue does it",
    "QueueSchema.conform_rows": "for the client",
    "QueueSchema.to_json": "the store's own form",
    "QueueSchema.from_json": "the store's own form",
}
"""Members that have a public name but are for this project's own use, by class."""

MADE_BY_USERS = {"PartitionedRowset", "Count", "Sum", "Min", "Max", "Last"}
"""Classes that users instantiate themselves. They get objects of the others, or derive from them."""

ORDER = {
    "shuffle": (
        "Mapper",
        "Reducer",
        "hash_partition",
        "PartitionedRowset",
        "HashMapper",
        "AggregateReducer",
        "Count",
        "Sum",
    ),
    "statestore": ("StateClient", "Queue", "Appender", "Transaction", "Snapshot"),
}
"""The names that come first; the others follow in the order of ``__all__``."""

_TYPES: tuple[pa.DataType, ...] = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string(), pa.binary()),
    *(pa.large_binary(), pa.binary(16), pa.date32(), pa.date64(), pa.time64("us"), pa.timestamp("us")),
    *(pa.timestamp("us", "UTC"), pa.duration("us"), pa.decimal128(38, 2), pa.decimal256(50, 2), pa.list_(pa.int64())),
    *(pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64()), pa.dictionary(pa.int32(), pa.string())),
)


def regions() -> dict[str, str]:
    found = {f"python {package}": _package(package) for package in PACKAGES}
    return found | {"column types": _column_types(), "worker spec": _worker_spec()}


def public(package: str) -> dict[str, Any]:
    module = importlib.import_module(package)
    first = ORDER.get(package, ())
    return {name: getattr(module, name) for name in (*first, *(name for name in module.__all__ if name not in first))}


def _package(package: str) -> str:
    things = public(package)
    listed = ", ".join(f"[`{name}`](#{name.lower()})" for name in things)
    return "\n\n".join([listed, *(_thing(name, thing) for name, thing in things.items())])


def _thing(name: str, thing: Any) -> str:
    if not inspect.isclass(thing):
        return "\n\n".join([f"### {name}", _block(text.signature(name, thing)), text.docstring(thing)])
    parts = [f"### {name}"]
    if name in MADE_BY_USERS:
        parts.append(_block(text.signature(name, thing)))
    bases = [f"A {text.code(base.__name__)}. " for base in thing.__bases__ if base.__name__ in _all_names()]
    parts.append("".join(bases) + text.docstring(thing))
    if not issubclass(thing, Aggregate):
        parts += [part for part in (_attributes(thing), _methods(thing)) if part]
    return "\n\n".join(parts)


def _all_names() -> set[str]:
    return {name for module in (shuffle, statestore) for name in module.__all__}


def _holders(thing: type) -> list[type]:
    """The class itself, and those of its bases that are not public: their members are documented as its own."""
    known = _all_names() - {thing.__name__}
    return [base for base in thing.__mro__ if base.__name__ not in known and base.__module__ != "builtins"]


def members(thing: type) -> Iterator[tuple[str, Any]]:
    """The public members that are documented, in the order of the code; each name once."""
    seen: set[str] = set()
    for holder in _holders(thing):
        if holder.__module__.startswith("abc"):
            continue
        for name, member in vars(holder).items():
            if name.startswith("_") or name in seen or f"{thing.__name__}.{name}" in LEFT_OUT:
                continue
            seen.add(name)
            yield name, member


def _attributes(thing: type) -> str:
    rows = []
    docs: dict[str, str] = {}
    for holder in reversed(_holders(thing)):
        docs |= text.attribute_docs(holder)
    wanted = [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    wanted += [name for name in docs if name not in wanted and not name.startswith("_")]
    rows += [(text.code(name), text.markdown(docs[name])) for name in wanted]
    for name, member in members(thing):
        if isinstance(member, property | cached_property):
            rows.append((text.code(name), text.docstring(member)))
    return text.table(("attribute", "what it is"), rows) if rows else ""


def _methods(thing: type) -> str:
    parts = []
    for name, member in members(thing):
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if not isinstance(function, FunctionType):
            continue
        shown = f"{thing.__name__}.{name}" if isinstance(member, staticmethod) else name
        parts.append(f"{_block(text.signature(shown, function))}\n\n{_doc_of(thing, name, function)}")
    return "\n\n".join(parts)


def _doc_of(thing: type, name: str, function: Any) -> str:
    """The docstring of a method, or that of the method that it overrides."""
    if function.__doc__:
        return text.docstring(function)
    for base in thing.__mro__[1:]:
        if (inherited := vars(base).get(name)) is not None and inherited.__doc__:
            return text.docstring(inherited)
    raise LookupError(f"{thing.__name__}.{name} is public and has no docstring")


def _block(code: str) -> str:
    return f"```python\n{code}\n```"


def _worker_spec() -> str:
    return _attributes(shuffle.Mapper.__init__.__globals__["WorkerSpec"])


def _column_types() -> str:
    """A table of the column types that tables and queues accept, found by trying each of them."""
    rows = []
    for kind in _TYPES:
        in_table = _kept(statestore.TableSchema("t", pa.schema([("k", kind)]), pa.schema([])), "key", kind)
        in_queue = _kept(statestore.QueueSchema("q", pa.schema([("c", kind)]), 1), "schema", kind)
        rows.append((text.code(str(kind)), in_table, in_queue))
    return text.table(("Arrow type", "in a table", "in a queue"), rows)


def _kept(schema: Any, columns: str, kind: pa.DataType) -> str:
    try:
        schema.validate()
    except shuffle.ShuffleError:
        return "no"
    found = getattr(schema, columns).field(0).type
    return "yes" if found == kind else f"as {text.code(str(found))}"
