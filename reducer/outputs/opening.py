"""Opens the output that a spec names, and checks it; what it finds wrong has its place in the spec."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.api import Emit
from shuffle.errors import SpecError
from shuffle.reducer.outputs.outbox import OutboxOutput
from shuffle.reducer.outputs.output import Output
from shuffle.reducer.outputs.routes import Route
from shuffle.reducer.outputs.sink import Sink, SinkPlace
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.outputs import IS_INPUT, KINDS

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def open_sink(spec: ProcessorSpec, route: Route, client: StateClient, partition: int) -> Sink:
    """The sink of one partition of the queue of a route, not yet opened; ``UnknownTable`` while there is no queue."""
    path = KINDS[route.output.kind].sink
    assert path is not None, f"{route.output.kind} is no place outside of the state store"
    schema = route.outside(client.queue(route.queue).schema.empty_table()).schema
    make = _load(path)
    folder = spec.path.parent
    place = SinkPlace(route.output.config, folder, spec.processor, partition, schema, route.section, route.mark)
    sink: Sink = make(place)
    return sink


def open_output(spec: ProcessorSpec, client: StateClient) -> Output | None:
    """The output of ``spec``, which can take rows; None if the spec names none."""
    if spec.output is None:
        return None
    opened: Output
    if spec.output.is_outside:
        opened = OutboxOutput(spec, client)
    else:
        opened = _load(KINDS[spec.output.kind].implementation)(spec.output.config, spec.path.parent)
    try:
        opened.prepare(client, spec.reducer.count)
    except SpecError as error:
        raise SpecError(f"{spec.at(f'output.{spec.output.kind}')}: {error.message}", **error.fields) from None
    return opened


def check_output(spec: ProcessorSpec, client: StateClient, consumed: str | None) -> None:
    """``SpecError`` if the output cannot take rows, or is the queue that the opened input consumes."""
    opened = open_output(spec, client)
    if opened is None or spec.output is None:
        return
    if consumed is not None and spec.output.appends_to == consumed:
        raise SpecError(f"{spec.at(f'output.{spec.output.kind}')}: {IS_INPUT}", queue=consumed)


def emitter(spec: ProcessorSpec, client: StateClient, reducer_index: int) -> Emit:
    """What ``Reducer.emit`` of one reducer does."""
    opened = open_output(spec, client)

    def emit(tx: Transaction, rows: pa.Table | pa.RecordBatch) -> None:
        if opened is None:
            raise SpecError(
                f"{spec.path}: output: is missing, and {spec.reducer.class_name} emits rows: name where they go, for "
                "example `output: {queue: NAME}`",
                field="output",
            )
        opened.emit(tx, reducer_index, rows)

    return emit
