"""Reads a spec file: YAML with the line of every key, so that every mistake can be named with its line and key."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shuffle.durable.tables import Role, dead_letter_queue
from shuffle.errors import BadInput, SpecError
from shuffle.limits import NAME_BYTES_MAX
from shuffle.spec.config import RANGES, MapperSpec, ProcessorSpec, ReducerSpec, SpillSpec, relation_mistakes
from shuffle.spec.inputs import KINDS, ClassInputSpec, InputSpec, Value, kinds_in_words
from shuffle.spec.kafka import input_options
from shuffle.spec.kafka_output import output_options
from shuffle.spec.lake_output import storage_options
from shuffle.spec.options import read_options
from shuffle.spec.outputs import OutputKind, OutputSpec, kind_named
from shuffle.spec.values import Reader, _File, _folder, _names, _place, _scalar
from shuffle.spec.yaml_file import Node, compose_file, in_one_line
from shuffle.support.endpoint import HOST_MAYBE_PORT, HOST_PORT
from shuffle.support.suggest import did_you_mean
from shuffle.support.units import NUMBER_CHARS_MAX, TEXT_SHOWN_MAX, parse_duration_ms, parse_size, quoted

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_CLASS_NAME = re.compile(r"[A-Za-z_][\w]*(\.[A-Za-z_][\w]*)*:[A-Za-z_][\w]*(\.[A-Za-z_][\w]*)*")

# Readers of one value ------------------------------------------------------------------------------------------------


def _number(parse: Callable[[str, str], int]) -> Reader:
    """A reader of numbers; ``parse`` gets the text, and the key as it was written."""

    def read(file: _File, key_path: str, node: Node) -> int | None:
        text = _scalar(file, key_path, node)
        if text is None:
            return None
        try:
            section, _, name = key_path.rpartition(".")
            value = parse(text, name)
        except ValueError as error:
            file.note(key_path, node, str(error))
            return None
        name = _ALIASES.get(name, name)
        least, most = RANGES.get(key_path) or RANGES.get(f"{section}.{name}") or RANGES[name]
        if not least <= value <= most:
            hint = "; at least one reducer is needed" if key_path == "reducer.count" and value == 0 else ""
            file.note(key_path, node, f"{value} is not between {least} and {most}{hint}")
            return None
        return value

    return read


def _parse_bytes(text: str, key: str) -> int:
    return parse_size(text)


def _parse_ms(text: str, key: str) -> int:
    """A duration in milliseconds. Only a key that names its unit, as ``trim_period_ms`` does, takes a plain number."""
    return parse_duration_ms(text, plain_ms="_ms" in key)


def _parse_count(text: str, key: str) -> int:
    try:
        if len(text) <= NUMBER_CHARS_MAX:
            return int(text.replace("_", ""))
    except ValueError:
        pass
    raise ValueError(f"{quoted(text)} is not a whole number")


def _pattern(pattern: re.Pattern[str], expected: str) -> Reader:
    def read(file: _File, key_path: str, node: Node) -> str | None:
        text = _scalar(file, key_path, node)
        if text is None:
            return None
        if not pattern.fullmatch(text) or len(text.encode()) > NAME_BYTES_MAX:
            file.note(key_path, node, f"{quoted(text)} is not {expected}")
            return None
        return text

    return read


def _choice(*choices: str) -> Reader:
    def read(file: _File, key_path: str, node: Node) -> str | None:
        text = _scalar(file, key_path, node)
        if text is None or text in choices:
            return text
        file.note(key_path, node, f"{quoted(text)} is none of {', '.join(choices)}{_did_you_mean(text, choices)}")
        return None

    return read


def _queue_name(file: _File, key_path: str, node: Node) -> str | None:
    text = _scalar(file, key_path, node)
    if text is not None and not 0 < len(text.encode()) <= NAME_BYTES_MAX:
        file.note(key_path, node, f"a name has 1 to {NAME_BYTES_MAX} bytes")
        return None
    return text


def _state(file: _File, key_path: str, node: Node) -> str | None:
    text = _scalar(file, key_path, node)
    if text is None or ":" not in text:
        return None if text is None else _folder(file, key_path, node)
    # Imported only here: a value without a scheme is a folder, which is known without importing the store.
    from shuffle.statestore.client.open_store import address_forms, folder_of, is_address

    if is_address(text):
        return text
    try:
        folder = folder_of(text)
    except BadInput as error:
        file.note(key_path, node, error.message)
        return None
    if folder is not None:
        return _folder(file, key_path, node, os.fspath(folder))
    file.note(key_path, node, f"{quoted(text)} is neither a folder nor {' nor '.join(address_forms())}")
    return None


_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _metrics(file: _File, key_path: str, node: Node) -> bool | int | None:
    text = _scalar(file, key_path, node)
    if text is None:
        return None
    if text.lower() in _FLAGS:
        return _FLAGS[text.lower()]
    if text.isdecimal() and len(text) <= 5 and 1025 <= int(text) <= 60_000:
        return int(text)
    file.note(key_path, node, f"{quoted(text)} is neither true, false nor a port from 1025 to 60000")
    return None


def _flag(file: _File, key_path: str, node: Node) -> bool | None:
    text = _scalar(file, key_path, node)
    if text is None:
        return None
    if text.lower() in _FLAGS:
        return _FLAGS[text.lower()]
    file.note(key_path, node, f"{quoted(text)} is neither true nor false")
    return None


def _share(file: _File, key_path: str, node: Node) -> float | None:
    text = _scalar(file, key_path, node)
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        file.note(key_path, node, f"{quoted(text)} is not a share: write for example 0.5 or 50%")
        return None
    if not 0 < value <= 1:
        file.note(key_path, node, f"{value:g} is not between 0 and 1")
        return None
    return value


def _user_config(file: _File, key_path: str, node: Node) -> Mapping[str, Any] | None:
    before = len(file.mistakes)
    value = _own_value(file, key_path, node)
    if not isinstance(value, dict):
        if len(file.mistakes) == before:
            file.note(key_path, node, "the user's configuration is a mapping of names to values")
        return None
    return value


def _own_value(file: _File, key_path: str, node: Node) -> Any:
    """Any value at all, which only the user's own class understands."""
    try:
        value = _construct(node)
        json.dumps(value, sort_keys=True, default=str)  # The store keeps it in this form, to compare it at every start.
    except Exception as error:  # The library raises many types, for 2026-13-13, !!timestamp x, or keys that are lists.
        file.note(key_path, node, f"cannot be read: {in_one_line(error)}")
        return None
    return value


def _construct(node: Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


# Sections ------------------------------------------------------------------------------------------------------------

_COUNT, _SIZE, _DURATION = _number(_parse_count), _number(_parse_bytes), _number(_parse_ms)
_TABLE = _pattern(re.compile(r"[\w\-]+(\.[\w\-]+)+"), "a table: write it as namespace.table")
_CLASS = _pattern(_CLASS_NAME, "a class: write it as module:Class, for example my_job:ParseLogs")

_MAPPER: dict[str, Reader] = {
    "class_name": _CLASS,
    "config": _user_config,
    "memory_bytes": _SIZE,
    "batch_rows_max": _COUNT,
    "batch_bytes_max": _SIZE,
    "read_wait_ms": _DURATION,
    "trim_period_ms": _DURATION,
    "split_brain_delay_ms": _DURATION,
    "on_error": _choice("stop", "dead_letter"),
    "dead_letter_queue": _queue_name,
    "listen": _pattern(HOST_PORT, "an address: write it as host:port, port 0 for any free one"),
    "advertise": _pattern(HOST_MAYBE_PORT, "a host: write it as host or host:port, as others reach it"),
    "partitions_per_mapper": _COUNT,
    "per_process": _COUNT,
}
_REDUCER: dict[str, Reader] = {
    "class_name": _CLASS,
    "config": _user_config,
    "count": _COUNT,
    "fetch_rows_max": _COUNT,
    "fetch_bytes_max": _SIZE,
    "fetch_wait_ms": _DURATION,
    "share_memory": _flag,
    "batch_rows_max": _COUNT,
    "batch_bytes_max": _SIZE,
    "backoff_ms": _DURATION,
    "backoff_ms_max": _DURATION,
    "on_error": _choice("stop", "dead_letter"),
    "dead_letter_queue": _queue_name,
    "per_process": _COUNT,
}
_SPILL: dict[str, Reader] = {
    "enabled": _flag,
    "reducers_done_share": _share,
    "age_ms": _DURATION,
    "memory_share": _share,
    "compression": _choice("none", "lz4", "zstd"),
}
_ALIASES = {
    "class": "class_name",
    "memory": "memory_bytes",
    "read_wait": "read_wait_ms",
    "trim_period": "trim_period_ms",
    "split_brain_delay": "split_brain_delay_ms",
    "fetch_wait": "fetch_wait_ms",
    "backoff": "backoff_ms",
    "backoff_max": "backoff_ms_max",
    "lease_ttl": "lease_ttl_ms",
    "age": "age_ms",
    "batch_age": "batch_age_ms",
}

_REMOVED = {
    "reducer.pipeline_depth": "has no effect and is not an option any more: reduce and commit always take turns. "
    "Remove the line",
}
"""Keys that only earlier versions took, and the error text for each."""


def _section(readers: Mapping[str, Reader], required: tuple[str, ...]) -> Reader:
    """A reader of a mapping, into a dict by field name; keys that are unknown, repeated or missing are mistakes."""
    aliases = {field: key for key, field in _ALIASES.items()}
    known = [aliases.get(name, name) if name == "class_name" else name for name in readers]
    known += [key for key, name in _ALIASES.items() if name in readers and key not in known]

    def read(file: _File, key_path: str, node: Node) -> dict[str, Any] | None:
        if not isinstance(node, yaml.MappingNode):
            file.note(key_path, node, f"a mapping with the keys {', '.join(sorted(known))} is needed here")
            return None
        values: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                file.note(key_path, key_node, f"a key is one of {', '.join(sorted(known))}, not a list or a mapping")
                continue
            key = str(key_node.value)
            is_plain = key.isprintable() and len(key) <= TEXT_SHOWN_MAX
            inner_path = f"{key_path}." * bool(key_path) + (key if is_plain else quoted(key))
            name = _ALIASES.get(key, key)
            if key not in known:
                why = _REMOVED.get(inner_path) or f"unknown key{_did_you_mean(key, known)}"
                file.note(inner_path, key_node, why)
                continue
            if name in seen:
                file.note(inner_path, key_node, f"is given twice, first in line {seen[name]}")
                continue
            seen[name] = file.lines[inner_path] = key_node.start_mark.line + 1
            values[name] = readers[name](file, inner_path, value_node)
        for name in required:
            if name not in seen:
                key = aliases.get(name, name)
                file.note(f"{key_path}.{key}" if key_path else key, node, "is missing")
        return values

    return read


def _did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    return did_you_mean(word, known, f"; known here: {', '.join(sorted(known))}")


_VALUES: dict[Value, Reader] = {
    "queue name": _queue_name,
    "folder": _folder,
    "class": _CLASS,
    "place": _place,
    "names": _names,
    "table name": _TABLE,
    "count": _COUNT,
    "size": _SIZE,
    "duration": _DURATION,
}
_KAFKA_INPUT = _VALUES["kafka input"] = read_options(input_options, _own_value)
_KAFKA_OUTPUT = _VALUES["kafka output"] = read_options(output_options, _own_value)
_STORAGE_OPTIONS = _VALUES["storage options"] = read_options(storage_options, _own_value)


def _value(takes: Value) -> Reader:
    return _choice(*takes) if isinstance(takes, tuple) else _VALUES[takes]


_INPUT_SECTION = _section({key: _value(takes) for kind in KINDS.values() for key, takes in kind.values.items()}, ())


def _input(file: _File, key_path: str, node: Node) -> InputSpec | None:
    """The description of the one kind of input that the section names."""
    own = _own_class_options(file, key_path, node)
    values = _INPUT_SECTION(file, key_path, node if own is None else own.known)
    if values is None:
        return None
    given = [name for name in KINDS if _ALIASES.get(name, name) in values]
    if len(given) != 1:
        file.note(key_path, None, f"give either {kinds_in_words()}" + (", not more than one of them" if given else ""))
        return None
    kind = KINDS[given[0]]
    others = {key: what for other in KINDS.values() if other is not kind for key, what in other.elsewhere.items()}
    for key in values.keys() - kind.values.keys():
        file.note(f"{key_path}.{key}", None, others.get(key, f"is not an option of an input with {given[0]}"))
    if file.mistakes:  # Also those elsewhere in the file, with which the description is not used anyway.
        return None
    return ClassInputSpec(**values, options=own.options) if own is not None else kind.spec(**values)


class _ClassInput(NamedTuple):
    """The section of an input with ``class``, divided into our keys and the options of the user's class."""

    known: Node
    """The section without the options of the class."""
    options: dict[str, Any]
    """The options of the class, by name."""


def _own_class_options(file: _File, key_path: str, node: Node) -> _ClassInput | None:
    """The section of an input with ``class``: all other keys are options of the class, whatever their names and values.

    An option may not have the name of another kind of input, so that typing errors are found.
    """
    if not isinstance(node, yaml.MappingNode):
        return None
    keys = [key.value if isinstance(key, yaml.ScalarNode) else None for key, _ in node.value]
    if "class" not in keys:
        return None
    known, options = [], {}
    for (key_node, value_node), key in zip(node.value, keys, strict=True):
        if key is None or key in KINDS:
            known.append((key_node, value_node))
            continue
        option_path = f"{key_path}.{key}" if key.isprintable() and len(key) <= TEXT_SHOWN_MAX else key_path
        if key in options:
            file.note(option_path, key_node, "is given twice")
        file.lines[option_path] = key_node.start_mark.line + 1
        options[key] = _own_value(file, option_path, value_node)
    return _ClassInput(yaml.MappingNode(node.tag, known, node.start_mark, node.end_mark), options)


def _output(file: _File, place: str, node: Node) -> OutputSpec | None:
    """The description of the one kind of output that the section names."""
    try:
        kind = kind_named([str(key.value) for key, _ in node.value] if isinstance(node, yaml.MappingNode) else [])
    except ValueError as error:
        file.note(place, node, str(error))
        return None
    values = _output_section(kind)(file, place, node)
    return None if values is None or file.mistakes else kind.spec(**values)


def _dead_letters(file: _File, place: str, node: Node) -> OutputSpec | None:
    """The section ``dead_letters``: a kind of output that is outside of the state store."""
    made = _output(file, place, node)
    if made is not None and not made.is_outside:
        file.note(
            place, node, f"a {made.kind} is in the state store: name one as dead_letter_queue of mapper or reducer"
        )
        return None
    return made


def _output_section(*kinds: OutputKind) -> Reader:
    return _section({key: _value(takes) for kind in kinds for key, takes in kind.values.items()}, ())


_SPILL_SECTION = _section(_SPILL, ())


def _spill(file: _File, key_path: str, node: Node) -> dict[str, Any] | None:
    """The section ``spill``: a mapping, or ``true`` or ``false`` for ``enabled``."""
    if isinstance(node, yaml.ScalarNode):
        return {"enabled": _flag(file, key_path, node)}
    values: dict[str, Any] | None = _SPILL_SECTION(file, key_path, node)
    return values


_SPEC = _section(
    {
        "processor": _pattern(_NAME, "a name: letters, digits, '_', '-' and '.'"),
        "state": _state,
        "input": _input,
        "mapper": _section(_MAPPER, ("class_name",)),
        "reducer": _section(_REDUCER, ("class_name", "count")),
        "output": _output,
        "dead_letters": _dead_letters,
        "spill": _spill,
        "max_parallelism": _COUNT,
        "lease_ttl_ms": _DURATION,
        "metrics": _metrics,
    },
    ("processor", "state", "input", "mapper", "reducer"),
)


def parse_spec(path: Path) -> ProcessorSpec:
    """The spec in ``path``: (1) YAML, (2) each value, (3) relations between values. Mistakes in 1 or 2 end it."""
    file = _File(path)
    root = compose_file(path)  # 1
    if root is None:
        raise SpecError(f"{path}:1: the file is empty; a spec has processor, state, input, mapper and reducer")
    values = _SPEC(file, "", root)  # 2
    file.raise_if_mistaken()
    spec = _build(values, file)
    for key_path, what in relation_mistakes(spec):  # 3
        file.note(key_path, None, what)
    file.raise_if_mistaken()
    return spec


def _build(values: dict[str, Any] | None, file: _File) -> ProcessorSpec:
    assert values is not None
    processor = values["processor"]
    mapper, reducer = dict(values["mapper"]), dict(values["reducer"])
    sections: tuple[tuple[dict[str, Any], Role], ...] = ((mapper, "mapper"), (reducer, "reducer"))
    for part, role in sections:
        if part.get("on_error") == "dead_letter":
            part.setdefault("dead_letter_queue", dead_letter_queue(processor, role))
    top = {field.name: values[field.name] for field in fields(ProcessorSpec) if field.name in values}
    top |= {
        "mapper": MapperSpec(**mapper),
        "reducer": ReducerSpec(**reducer),
        "spill": SpillSpec(**values.get("spill", {})),
        "path": file.path.resolve(),
        "lines": file.lines,
    }
    return ProcessorSpec(**top)
