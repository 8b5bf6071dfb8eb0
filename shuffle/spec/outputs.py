"""The kinds of output that a spec can name, and the frozen description of each.

A kind is one entry of ``KINDS``, as kinds of input are in ``shuffle.spec.inputs``: the key that names it in the spec,
the class that holds its keys, how their values are read, and the path of the class that implements it. The
implementation lies in a layer above and is loaded when it is used. Everything that a kind can *do* is in the
implementation (``shuffle.reducer.outputs.output.Output``); only what can be told from the spec alone is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shuffle.spec.inputs import Value
from shuffle.support.suggest import did_you_mean
from shuffle.support.units import quoted


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """Where the rows go that reducers emit. Each kind of output has a subclass of its own."""

    kind: ClassVar[str]
    """The key of the spec that names the kind."""

    @property
    def appends_to(self) -> str | None:
        """The queue of the state store that the reducers append to, if they do."""
        return None

    @property
    def is_outside(self) -> bool:
        """Whether the rows go to a place outside of the state store: through the outbox, by way of an exporter."""
        return False

    @property
    def limits(self) -> tuple[int, int, int]:
        """For a place outside: the most rows of a batch, its most bytes, and the most milliseconds that its first row
        waits for others."""
        raise NotImplementedError(f"{self.kind} is no place outside of the state store")

    @property
    def config(self) -> Mapping[str, Any]:
        """What the implementation is created with: the keys of the spec and their values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class QueueOutputSpec(OutputSpec):
    """A queue of the state store."""

    kind: ClassVar[str] = "queue"

    queue: str
    """A queue of the state store with one partition for each reducer: reducer i appends to partition i. It must be
    there before the processor starts, and may not be its input."""

    @property
    def appends_to(self) -> str | None:
        return self.queue


@dataclass(frozen=True, slots=True)
class SinkOutputSpec(OutputSpec):
    """A place outside of the state store."""

    @property
    def is_outside(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class OutputKind:
    """One kind of output."""

    spec: type[OutputSpec]
    """The description; its first field is the key that names the kind."""
    implementation: str
    """The subclass of ``Output``, as ``module:Class``."""
    values: Mapping[str, Value]
    """What each key of this kind takes, by the name of the field."""
    sink: str | None = None
    """The subclass of ``Sink`` for a place outside of the state store, as ``module:Class``. It is imported by the
    exporter only, since it may need a large library."""


KINDS: dict[str, OutputKind] = {
    "queue": OutputKind(QueueOutputSpec, "shuffle.reducer.outputs.queue:QueueOutput", {"queue": "queue name"}),
}
"""By the key that names each in the spec."""

IS_INPUT = "is also the input: what is emitted would be read again, and the input never drained; emit to another queue"


def kind_named(keys: Sequence[str]) -> OutputKind:
    """The one kind that the keys of a section name; ``ValueError`` says what is wrong if they do not name one."""
    known = f"the kinds of output are {', '.join(KINDS)}"
    named = [key for key in dict.fromkeys(keys) if key in KINDS]
    if len(named) == 1:
        return KINDS[named[0]]
    if named:
        raise ValueError(f"names {' and '.join(named)}: give only one of them")
    if not keys:
        raise ValueError(f"a mapping that names a kind of output is needed here, such as {{queue: NAME}}; {known}")
    raise ValueError(f"{quoted(keys[0])} is none: {known}{did_you_mean(keys[0], KINDS)}")
