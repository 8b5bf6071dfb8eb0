"""Opens the input that a spec names: the one that comes with the project, or the user's own class."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.durable.meta import META_KEY, PARTITIONS
from shuffle.errors import ShuffleError, SpecError, UnknownTable, UserCodeError
from shuffle.mapper.reader import Input, PartitionReader
from shuffle.mapper.readers.checked import CheckedInput, CheckedReader
from shuffle.mapper.readers.grouped import GroupedInput, GroupedReader, fitting
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.inputs import KINDS, InputSpec
from shuffle.user_code.load import load_input_class
from shuffle.user_code.poison import raised_at, reason_of

if TYPE_CHECKING:
    from shuffle.statestore import StateClient


def open_input(spec: ProcessorSpec, client: StateClient) -> Input:
    """The input of ``spec``, with a partition for each mapper, and those that are numbered already as they are.

    Raises ``SpecError`` with the path in the spec if it is the user's own and its class cannot be loaded or refuses its
    options.
    """
    opened = _open_input(spec, client)
    opened.processor = spec.processor
    if spec.mapper.partitions_per_mapper > 1:
        opened = GroupedInput(opened, spec.mapper.partitions_per_mapper, spec.processor)
    opened.known_partitions = known_partitions(spec, client)
    return opened


def known_partitions(spec: ProcessorSpec, client: StateClient) -> str | None:
    """What ``Input.partitions`` returned when it was last persisted."""
    try:
        rows = client.lookup(spec.meta_table, pa.table([[PARTITIONS]], schema=META_KEY))
    except UnknownTable:
        return None  # The processor was never started.
    found = str(rows["value"][0].as_py()) if rows.num_rows else None
    return fitting(found, spec.mapper.partitions_per_mapper > 1)


def _open_input(spec: ProcessorSpec, client: StateClient) -> Input:
    if KINDS[spec.input.kind].implementation is not None:
        return built_in_input(spec.input, client, spec.path.parent)
    from shuffle.config_schema import check_config

    input_class = load_input_class(spec, Input)
    where = spec.at("input.class")
    try:
        config = check_config(input_class, spec.input.config)
    except SpecError as error:
        raise SpecError(f"{spec.at('input')}: {error.message}", **error.fields) from None
    try:
        made: Input = input_class(config, client, spec.path.parent)
    except ShuffleError:
        raise
    except Exception as error:
        name = input_class.__qualname__
        raise UserCodeError(f"{where}: {name} could not be created: {reason_of(error)}{raised_at(error)}") from error
    return CheckedInput(made, where)


def built_in_input(spec: InputSpec, client: StateClient, folder: Path = Path()) -> Input:
    """An input that comes with the project: a queue or a folder."""
    implementation = KINDS[spec.kind].implementation
    if implementation is None:
        raise SpecError("an input of the user's own class can be opened only with its spec")
    # Loaded here, since Parquet's library would take memory in every mapper that reads a queue.
    module, _, name = implementation.partition(":")
    make: Any = getattr(importlib.import_module(module), name)
    made: Input = make(spec.config, client, folder)
    return made


def open_reader(spec: ProcessorSpec, partition: int, client: StateClient) -> PartitionReader:
    """A reader for one partition, for a mapper, with the wait and the size of batches that the spec sets."""
    opened = open_input(spec, client)
    reader = opened.open(partition)
    if isinstance(reader, CheckedReader | GroupedReader):
        reader.closes = opened
    reader.wait_ms = spec.mapper.read_wait_ms
    reader.batch_bytes_max = spec.mapper.batch_bytes_max
    return reader


@contextmanager
def mistakes_located(spec: ProcessorSpec) -> Iterator[None]:
    """Adds the path in the spec to a mistake that an input finds in its options."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{spec.at(f'input.{spec.input.kind}')}: {error.message}", **error.fields) from None
