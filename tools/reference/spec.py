"""The keys of a spec: from the classes that hold them, and from the readers that accept them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shuffle.formats.opening import FormatOptions, RegistryOptions
from shuffle.spec import config, inputs, outputs, spec_file, values
from shuffle.spec.kafka import KafkaInputOptions
from shuffle.spec.kafka_output import KafkaOutputOptions
from shuffle.support import units
from tools.reference import text

EXAMPLE_VALUES = {
    "processor": "activity",
    "state": "./activity.state",
    "input.queue": "logs",
    "output.queue": "totals",
    "mapper.class": '"jobs:ParseLogs"',
    "reducer.class": '"jobs:CountByUser"',
    "reducer.count": "4",
}
"""The values in the complete example spec for keys that have no default."""

_KINDS: dict[Any, tuple[str, str]] = {
    spec_file._COUNT: ("whole number", ""),
    spec_file._SIZE: ("size", ""),
    spec_file._DURATION: ("time", ""),
    spec_file._CLASS: ("`module:Class`", ""),
    spec_file._flag: ("`true` or `false`", ""),
    spec_file._share: ("share", "above 0, up to 1"),
    values._folder: ("folder", ""),
    spec_file._state: ("folder or address", ""),
    spec_file._metrics: ("`true`, `false` or a port", "1025 to 60000"),
    spec_file._queue_name: ("name of a queue", ""),
    spec_file._user_config: ("mapping", ""),
    values._place: ("folder or address", ""),
    values._names: ("list of names", ""),
    spec_file._STORAGE_OPTIONS: ("mapping", ""),
    spec_file._TABLE: ("`namespace.table`", ""),
    spec_file._dead_letters: ("mapping, as for `output`", ""),
}
"""The type of value that each reader accepts, and its range where that is not in ``RANGES``."""

_NUMBERS = (spec_file._COUNT, spec_file._SIZE, spec_file._DURATION)


@dataclass(frozen=True)
class Key:
    """One key of a spec, and everything that the reference says about it."""

    section: str
    """The section that has the key; empty for the keys at the top level."""
    field: dataclasses.Field[Any]
    names: tuple[str, ...]
    """The names by which the key may be written, the usual one first."""
    kind: str
    allowed: str
    default: str
    needed: bool
    meaning: str
    inner: type | None
    """The class that holds the section, if the key is a section; else None."""
    reader: Any

    @property
    def place(self) -> str:
        return f"{self.section}.{self.names[0]}" if self.section else self.names[0]


def regions() -> dict[str, str]:
    found: dict[str, str] = {}
    for section in sections():
        found[f"spec {section or 'top'}"] = _table(section)
    found["spec input.kafka"] = _options_table(KafkaInputOptions, FormatOptions)
    found["spec output.kafka"] = _options_table(KafkaOutputOptions, FormatOptions)
    found["spec schema_registry"] = _options_table(RegistryOptions)
    return found | {"spec with everything": "```yaml\n" + example() + "```"}


def _options_table(*holders: type[Any]) -> str:
    """The keys of a section that a module of its own checks: names and meanings, which tell the values as well."""
    rows = []
    for holder in holders:
        docs = text.attribute_docs(holder)
        for field in dataclasses.fields(holder):
            if field.name in docs:
                meaning, said = text.without_default(docs[field.name])
                rows.append((text.code(field.name), text.markdown(said) if said else "none", text.markdown(meaning)))
    return text.table(("key", "default", "meaning"), rows)


def sections() -> dict[str, list[Key]]:
    """The keys by section, in the order of the classes; the top level is the section with the empty name."""
    top = _keys("", config.ProcessorSpec, spec_file._SPEC)
    return {"": top} | {
        key.names[0]: [one for holder in holders(key.inner) for one in _keys(key.names[0], holder, key.reader)]
        for key in top
        if key.inner
    }


def holders(inner: type[Any]) -> list[type[Any]]:
    """The classes that hold the keys of a section; ``input`` and ``output`` have one for each kind."""
    if inner is outputs.OutputSpec:
        return [*(kind.spec for kind in outputs.KINDS.values()), outputs.SinkOutputSpec]
    return [kind.spec for kind in inputs.KINDS.values()] if inner is inputs.InputSpec else [inner]


def _keys(section: str, holder: type[Any], reader: Any) -> list[Key]:
    made = _section_of(reader)
    docs = text.attribute_docs(holder)
    hints = typing.get_type_hints(holder, vars(config) | vars(inputs) | vars(outputs) | {"Mapping": Mapping})
    found = []
    for field in dataclasses.fields(holder):
        if field.name not in vars(holder)["__annotations__"]:
            continue  # It is inherited, and listed where it comes from.
        if field.name not in made["readers"]:
            continue  # This field is not a key of the file: it holds the path of the file and the lines.
        if field.name not in docs:
            raise LookupError(f"{holder.__name__}.{field.name} has no docstring")
        found.append(_key(section, field, made, docs[field.name], hints[field.name]))
    return found


def _key(section: str, field: dataclasses.Field[Any], made: Mapping[str, Any], doc: str, hint: Any) -> Key:
    reader = made["readers"][field.name]
    names = [name for name in made["known"] if spec_file._ALIASES.get(name, name) == field.name]
    names.sort(key=lambda name: name == field.name)  # ``memory`` before ``memory_bytes``
    hint = next((part for part in typing.get_args(hint) if dataclasses.is_dataclass(part)), hint)
    inner: type | None = hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None
    if reader is spec_file._dead_letters:
        inner = None  # Its keys are those of ``output``, and are listed there.
    meaning, said = text.without_default(doc.partition(" YAML key:")[0] + _after_yaml_key(doc))
    needed = field.name in made["required"]
    return Key(
        section,
        field,
        tuple(names),
        _kind(reader, hint, inner),
        _allowed(section, field.name, reader),
        _default(section, field, reader, said, needed),
        needed,
        text.markdown(meaning),
        inner,
        reader,
    )


def _after_yaml_key(doc: str) -> str:
    """The docstring without the name of the key, which it has where the key is not named as the field is: the table
    shows the name."""
    _, _, rest = doc.partition(" YAML key:")
    return " Default:" + rest.partition(" Default:")[2] if " Default:" in rest else ""


def _section_of(reader: Any) -> Mapping[str, Any]:
    """The arguments that a reader of a section was made with: ``readers``, ``known`` keys and ``required`` keys."""
    if reader is spec_file._output:  # Its section is made anew for each kind.
        reader = spec_file._output_section(*outputs.KINDS.values())
    found = inspect.getclosurevars(reader)
    if "readers" in found.nonlocals:
        return found.nonlocals
    # ``spill`` may be a mapping or a flag; its reader calls that of the mapping.
    inner = [value for value in found.globals.values() if inspect.isfunction(value)]
    sections = [made for value in inner if "readers" in (made := inspect.getclosurevars(value).nonlocals)]
    if len(sections) != 1:
        raise LookupError(f"{reader} reads no section that can be found")
    return sections[0]


def _kind(reader: Any, hint: Any, inner: type | None) -> str:
    if inner is not None:
        either = ", or `true` or `false`" if "_flag" in inspect.getclosurevars(reader).globals else ""
        return f"mapping, see below{either}"
    if reader in _KINDS:
        return _KINDS[reader][0]
    made = inspect.getclosurevars(reader).nonlocals
    if "choices" in made:
        return text.either(made["choices"])
    if "expected" in made:
        return str(made["expected"].partition(":")[0].removeprefix("a ").removeprefix("an "))
    hint = next((part for part in typing.get_args(hint) if part is not type(None)), hint)
    return {str: "text", int: "whole number", bool: "`true` or `false`", float: "number"}.get(hint, "text")


def limits(section: str, name: str) -> tuple[int, int]:
    """The least and the greatest value of a number, looked up as ``spec_file`` does."""
    return config.RANGES.get(f"{section}.{name}") or config.RANGES[name]


def _allowed(section: str, name: str, reader: Any) -> str:
    if reader not in _NUMBERS:
        return _KINDS[reader][1] if reader in _KINDS else ""
    least, most = limits(section, name)
    return f"{_number(least, reader)} to {_number(most, reader)}"


def _number(value: int, reader: Any) -> str:
    if reader is spec_file._SIZE:
        return units.exact_size(value)
    return units.exact_duration(value) if reader is spec_file._DURATION else f"{value:,}"


def _default(section: str, field: dataclasses.Field[Any], reader: Any, said: str | None, needed: bool) -> str:
    if needed:
        return "must be given"
    value = field.default
    if section in ("input", "output") and value is dataclasses.MISSING:
        return "none"  # It names a kind, and one of them is given.
    if value is None or value is dataclasses.MISSING:
        return text.markdown(said) if said else "all as below" if value is dataclasses.MISSING else "none"
    if value == ():
        return "none"
    if isinstance(value, bool):
        return text.code(str(value).lower())
    return _number(value, reader) if isinstance(value, int) else text.code(str(value))


def _table(section: str) -> str:
    rows = [
        (" or ".join(text.code(name) for name in key.names), key.kind, key.default, key.allowed, key.meaning)
        for key in sections()[section]
    ]
    return text.table(("key", "takes", "default", "range", "meaning"), rows)


def example() -> str:
    """A spec with every key, each with its default; keys without a default, or that exclude another, are comments."""
    found = sections()
    lines: list[str] = []
    for key in found[""]:
        lines.append(f"{key.names[0]}:" if key.inner else _line(key))
        lines += ["  " + _line(inner) for inner in found.get(key.names[0], [])]
    return "".join(f"{line}\n" for line in lines)


def _line(key: Key) -> str:
    if key.place in EXAMPLE_VALUES:
        return f"{key.names[0]}: {EXAMPLE_VALUES[key.place]}"
    value = key.field.default
    is_of_another_kind = key.section == "output" or (key.section == "input" and value is dataclasses.MISSING)
    if value is None or is_of_another_kind:
        return f"# {key.names[0]}: ({key.kind.replace('`', '')})"
    if value is dataclasses.MISSING:
        return f"{key.names[0]}: {{}}"
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    if key.reader in _NUMBERS:
        shown = _number(value, key.reader).replace(",", "_" if value >= 10_000 else "").replace(" ", "")
    return f"{key.names[0]}: {shown}"
