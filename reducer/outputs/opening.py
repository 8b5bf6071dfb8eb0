"""Opens the output that a spec names, and checks it; what it finds wrong has its place in the spec."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.api import Emit
from shuffle.errors import SpecError
from shuffle.reducer.outputs.output import Output
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.outputs import IS_INPUT, KINDS

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction


def open_output(spec: ProcessorSpec, client: StateClient) -> Output | None:
    """The output of ``spec``, which can take rows; None if the spec names none."""
    if spec.output is None:
        return None
    module, _, name = KINDS[spec.output.kind].implementation.partition(":")
    make: Any = getattr(importlib.import_module(module), name)
    opened: Output = make(spec.output.config, spec.path.parent)
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
