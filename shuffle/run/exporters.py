"""The exporter processes of a run: one for what reducers emit, and one for dead letters.

They are two, so that a topic for dead letters that is full, away or misspelt does not hold up the results.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shuffle.reducer.outputs.routes import dead_letter_routes, output_route
from shuffle.run.supervisor import Child
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.index_sets import indexes_text

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

EXPORTER_MODULE = "shuffle.reducer.exporter"


def exporter_children(spec: ProcessorSpec, client: StateClient, logs: Path, draining: bool) -> list[Child]:
    """The processes, not started. The spec must have been checked against the store, which creates the queues."""
    children = []
    if output_route(spec) is not None:
        indexes = range(spec.reducer.count)
        text = indexes_text(indexes)
        workers = [f"exporter {index}" for index in indexes]
        children.append(_child(spec, f"exporter {text}", ["--index", text], logs, workers, draining))
    letters = dead_letter_routes(spec)
    if letters:
        workers = [
            f"exporter {route.worker(partition)}"
            for route in letters
            for partition in range(client.queue(route.queue).partitions)
        ]
        children.append(
            _child(spec, "exporter dead-letters", ["--dead-letters", "all"], logs, workers, draining),
        )
    return children


def _child(spec: ProcessorSpec, name: str, options: list[str], logs: Path, workers: list[str], draining: bool) -> Child:
    arguments = [os.fspath(spec.path), *options, *(["--draining"] if draining else [])]
    return Child(name, EXPORTER_MODULE, lambda: arguments, logs / f"{name.replace(' ', '-')}.log", workers=workers)
