"""Which exporters a process hosts: all of a processor, some of the outbox, or those of dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shuffle.errors import BadInput, SpecError
from shuffle.reducer.outputs.routes import Route, dead_letter_routes, output_route, routes
from shuffle.spec.config import ProcessorSpec

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

Letters = Literal["mapper", "reducer", "all"]
LETTERS: tuple[Letters, ...] = ("mapper", "reducer", "all")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the command line has chosen; nothing is everything."""

    indexes: Sequence[int] | None = None
    """The partitions of the queue; None for all."""
    letters: Letters | None = None
    """The role whose dead letters are meant, and not the outbox, or ``all`` for those of both."""

    def check(self, spec: ProcessorSpec) -> None:
        """``SpecError`` if there is nothing to export, and ``BadInput`` if the choice is none."""
        if self.letters == "all" and self.indexes is not None:
            raise BadInput("--index is of one queue: write --dead-letters mapper or --dead-letters reducer")
        if not self.routes(spec):
            raise _nothing(spec, self.letters)

    def routes(self, spec: ProcessorSpec) -> list[Route]:
        """The queues whose rows are exported."""
        if self.letters is None and self.indexes is None:
            return routes(spec)
        if self.letters is None:
            output = output_route(spec)
            return [] if output is None else [output]
        return [
            route
            for route in dead_letter_routes(spec)
            if self.letters == "all" or route.queue == spec.dead_letter_queue(self.letters)
        ]

    def exporters(self, spec: ProcessorSpec, client: StateClient) -> list[tuple[Route, int]]:
        """The exporters of this process, each as a route and a partition of its queue. The tables must be there."""
        found = []
        for route in self.routes(spec):
            count = client.queue(route.queue).partitions if route.is_dead_letters else spec.reducer.count
            indexes = range(count) if self.indexes is None else self.indexes
            for index in indexes:
                if not 0 <= index < count:
                    raise _no_such(spec, route, index, count)
            found += [(route, index) for index in indexes]
        return found


def _nothing(spec: ProcessorSpec, letters: Letters | None) -> SpecError:
    field = "output" if letters is None else "dead_letters"
    if letters is not None:
        what = "no dead_letters in its spec" if spec.dead_letters is None else f"no rows of a {letters} set aside"
    elif spec.output is None:
        what = "no output"
    else:
        what = f"a {spec.output.kind} of the state store as its output"
    return SpecError(
        f"{spec.path}: the processor {spec.processor} has {what}, so there is nothing to export", field=field
    )


def _no_such(spec: ProcessorSpec, route: Route, index: int, count: int) -> SpecError:
    each = f"partitions of {route.queue}" if route.is_dead_letters else f"reducers of {spec.path}"
    return SpecError(
        f"there is no exporter {index}: there is one for each of the {count} {each}, counted from 0",
        field="reducer.count",
    )
