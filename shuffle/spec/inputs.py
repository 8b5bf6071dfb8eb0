"""The kinds of input that a spec can name, and the frozen description of each.

A kind is one entry of ``KINDS``: the key that names it in the spec, the class that holds its keys, how their values are
read, and the class that implements it. The implementation is named by its path and loaded when it is used, since it
lies in a layer above, and may import a large library. Everything that a kind can *do* is in the implementation
(``shuffle.mapper.reader.Input``); only what follows from the spec alone is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from shuffle.spec.kafka import KafkaInputOptions

Start = Literal["beginning", "earliest_available"]
_Plain = Literal["queue name", "folder", "class", "place", "names", "count", "size", "duration"]
Value = _Plain | Literal["kafka input", "kafka output", "storage options", "table name"] | tuple[str, ...]
"""The values that a key takes: one of the kinds of value that ``spec_file`` can read, or one of several words."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The input from which the mappers read rows. Each kind of input has a subclass of its own."""

    kind: ClassVar[str]
    """The key of the spec that names the kind."""

    @property
    def consumes(self) -> str | None:
        """The queue of the state store that is read and trimmed, if the spec alone says so."""
        return None

    @property
    def config(self) -> Mapping[str, Any]:
        """The keys of the spec and their values, with which the implementation is created."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class QueueInputSpec(InputSpec):
    """A queue of the state store."""

    kind: ClassVar[str] = "queue"

    queue: str
    """The name of a queue of the state store. There is one mapper for each of its partitions, and rows that were
    processed are trimmed."""
    start: Start = "beginning"
    """The row of a queue at which a processor without state begins: at the ``beginning``, which is refused if rows were
    trimmed already; or at the ``earliest_available`` row, whatever was trimmed before it. Default: beginning."""

    @property
    def consumes(self) -> str | None:
        return self.queue


@dataclass(frozen=True, slots=True)
class FolderInputSpec(InputSpec):
    """A folder of files."""

    kind: ClassVar[str] = "folder"

    folder: str
    """A folder of files, relative to that of the spec. There is one mapper for each of its sub-folders, in the order of
    their names."""
    format: str | None = None
    """The format of the files of ``folder``. Default: by the ending of their names."""


@dataclass(frozen=True, slots=True)
class ClassInputSpec(InputSpec):
    """An input of the user's own."""

    kind: ClassVar[str] = "class"

    class_name: str
    """Your subclass of ``Input``, as ``module:Class``. All other keys beside it are options of that class, which finds
    them in ``self.config``. YAML key: ``class``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the section other than ``class``, and their values."""

    @property
    def config(self) -> Mapping[str, Any]:
        return self.options


@dataclass(frozen=True, slots=True)
class KafkaInputSpec(InputSpec):
    """Topics of Kafka."""

    kind: ClassVar[str] = "kafka"

    kafka: KafkaInputOptions
    """Topics of Kafka: a mapping of its own, see below. There is one mapper for each of their partitions, and nothing
    is deleted there."""


@dataclass(frozen=True, slots=True)
class InputKind:
    """One kind of input."""

    spec: type[InputSpec]
    """The class that holds the keys of this kind; its first field is the key that names the kind."""
    implementation: str | None
    """The subclass of ``Input``, as ``module:Class``; None if the spec names it."""
    values: Mapping[str, Value]
    """The values that each key of this kind takes, by the name of the field."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """The error texts for options of this kind that are given for another kind, by the name of the option."""
    is_named_by_text: bool = True
    """Whether the value of the key that names the kind is a text that says it all, as the name of a queue does."""


KINDS: dict[str, InputKind] = {
    "queue": InputKind(
        QueueInputSpec,
        "shuffle.mapper.readers.queue:QueueInput",
        {"queue": "queue name", "start": ("beginning", "earliest_available")},
        {"start": "is for queues; nothing of a folder is trimmed"},
    ),
    "folder": InputKind(
        FolderInputSpec,
        "shuffle.mapper.readers.folder:FolderInput",
        {"folder": "folder", "format": ("parquet", "arrow", "jsonl")},
        {"format": "is for folders of files; a queue has its own schema"},
    ),
    "kafka": InputKind(
        KafkaInputSpec,
        "shuffle.mapper.readers.kafka.input:KafkaInput",
        {"kafka": "kafka input"},
        is_named_by_text=False,
    ),
    "class": InputKind(ClassInputSpec, None, {"class_name": "class"}),
}
"""The kinds of input, by the key that names each in the spec."""


def kinds_in_words() -> str:
    """The kinds of input as part of a sentence: ``queue, folder or class``."""
    names = list(KINDS)
    return f"{', '.join(names[:-1])} or {names[-1]}"


def input_described_as(text: str) -> InputSpec | None:
    """The built-in input that ``Input.describe`` describes as ``text``; None if there is none.

    Code that has only the state of a processor and not its spec finds the input of the processor in this way.
    """
    name, _, rest = text.partition(" ")
    kind = KINDS.get(name)
    if kind is None or kind.implementation is None or not kind.is_named_by_text or not rest:
        return None
    spec_class: Any = kind.spec
    spec: InputSpec = spec_class(rest)
    return spec
