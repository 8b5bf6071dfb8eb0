"""The fingerprint of a processor: what may not change under its state, and which processor consumes its input queue.

Rows are identified by their number alone, so a state is valid only together with the numbering and the partitioning it
was made with. Whatever may not change is kept beside it, in ``<processor>/meta``, and compared at every start; at the
first start it is written, in one transaction with the registration as the consumer of the input's queue.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.durable.meta import META_ROW, PARTITIONS
from shuffle.durable.reducer_state import ReducerState
from shuffle.durable.tables import mappers_group, reducers_group
from shuffle.errors import CommitConflict, SpecError
from shuffle.ids import Token
from shuffle.mapper.reader import Input
from shuffle.mapper.readers.grouped import fitting
from shuffle.mapper.readers.opening import mistakes_located
from shuffle.spec.config import ProcessorSpec
from shuffle.statestore.client.queue_consumers import queue_consumers, register_consumer
from shuffle.user_code.digest import code_digest

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction

ATTEMPTS_MAX = 10
"""The most attempts to write the fingerprint, when several workers start at the same time."""
PARTITION_FUNCTION = "xxhash64/42"
"""The name of the partition function in the fingerprint: the hash and its seed."""

_OF_THE_PARTITIONS = ("mapper_count", PARTITIONS)
_OF_THE_MAP = ("mapper_class", "mapper_config", "mapper_code")


def fingerprint(spec: ProcessorSpec, mapper_count: int, mapper_class: type[Any], opened: Input) -> dict[str, str]:
    partitions = opened.partitions()
    numbers = {} if partitions is None else {PARTITIONS: partitions}
    return numbers | {
        "reducer_count": str(spec.reducer.count),
        "mapper_count": str(mapper_count),
        "max_parallelism": str(spec.max_parallelism),
        "partition_function": PARTITION_FUNCTION,
        "input": opened.describe(),
        "mapper_class": spec.mapper.class_name,
        "mapper_config": json.dumps(spec.mapper.config, sort_keys=True, default=str),
        "mapper_code": code_digest(mapper_class),
    }


def check_fingerprint(
    spec: ProcessorSpec,
    client: StateClient,
    mapper_count: int,
    mapper_class: type[Any],
    opened: Input,
    accept_new_map: bool = False,
    register: bool = True,
) -> int:
    """Writes the fingerprint if the state is empty, or the input has more partitions; raises ``SpecError`` if it does
    not fit a state that is not empty. Returns the number of mappers.

    With ``register`` the processor becomes the consumer of its queue in the same transaction.
    """
    ours = fingerprint(spec, mapper_count, mapper_class, opened)
    for _ in range(ATTEMPTS_MAX):
        tx = client.transaction()
        with tx:
            stored = {row["name"]: row["value"] for row in tx.scan(spec.meta_table).read_all().to_pylist()}
            known = fitting(stored.get(PARTITIONS), spec.mapper.partitions_per_mapper > 1)
            if opened.known_partitions != known:
                # Another worker has numbered them meanwhile: what is new comes after what it has found.
                opened.known_partitions = known
                mapper_count = opened.partition_count()
                ours = fingerprint(spec, mapper_count, mapper_class, opened)
            grown = _has_grown(ours, stored)
            may_differ = _OF_THE_PARTITIONS if grown else ()
            changed = [
                name
                for name in ours
                if name in stored and name not in may_differ and not _same(name, ours[name], stored[name])
            ]
            if changed:
                _refuse_change(spec, client, ours, stored, changed, accept_new_map)
            check_consumer(spec, client, tx, opened.consumes)
            check_begin(spec, client, opened)
            registers = register and register_consumer(client, tx, spec.processor, opened.consumes)
            if changed or grown or not stored.keys() >= ours.keys():
                names = sorted(ours)
                tx.write(spec.meta_table, pa.table([names, [ours[name] for name in names]], schema=META_ROW))
            elif not registers:
                return mapper_count
            try:
                tx.commit()
                return mapper_count
            except CommitConflict:
                continue  # Another worker of this processor was faster: compare with the fingerprint that it wrote.
    raise SpecError(f"{spec.path}: {spec.meta_table} is being changed all the time; is something else writing to it?")


def _has_grown(ours: dict[str, str], stored: dict[str, str]) -> bool:
    """Whether the input has more partitions than when the fingerprint was written, and may have.

    Those that are numbered keep their numbers, which is for the input to see to, and rows of the new ones are in no
    state yet."""
    if PARTITIONS not in ours or PARTITIONS not in stored:
        return False
    return int(ours["mapper_count"]) > int(stored["mapper_count"])


def _same(name: str, ours: str, stored: str) -> bool:
    if name == "mapper_code" and ours.partition(":")[0] != stored.partition(":")[0]:
        return True
    return ours == stored


_KEY_PATHS = {
    "reducer_count": "reducer.count",
    "mapper_count": "input",
    PARTITIONS: "input",
    "max_parallelism": "max_parallelism",
    "partition_function": "processor",
    "input": "input",
    "mapper_class": "mapper.class",
    "mapper_config": "mapper.config",
    "mapper_code": "mapper.class",
}


def _refuse_change(
    spec: ProcessorSpec,
    client: StateClient,
    ours: dict[str, str],
    stored: dict[str, str],
    changed: list[str],
    accept_new_map: bool,
) -> None:
    """Returns if the change is harmless; otherwise raises a ``SpecError`` that says what to do."""
    alive = client.leases.members(mappers_group(spec.processor)) + client.leases.members(reducers_group(spec.processor))
    mappers = client.scan(spec.mappers_table).read_all()
    reducers = client.scan(spec.reducers_table).read_all()
    if not alive and not has_progress(mappers, reducers):
        return
    only_map = all(name in _OF_THE_MAP for name in changed)
    if only_map and accept_new_map and not alive:
        if nothing_ahead(mappers, reducers):
            return
        raise SpecError(
            f"{spec.at('mapper.class')}: a new map cannot be accepted yet: reducers have committed rows whose input"
            " is not trimmed; put the old one back, end with `shuffle run SPEC --until-drained`, then try again"
        )
    mistakes = []
    for name in changed:
        was = "" if name == "mapper_code" else f": {ours[name]}, but the existing state was made with {stored[name]}"
        word = "the code of the mapper class" if name == "mapper_code" else name.replace("_", " ")
        mistakes.append(f"{spec.at(_KEY_PATHS[name])}: {word} has changed{was}")
    advice = "put it back, or give the processor another name, so that it begins with an empty state"
    if only_map:
        advice = "put it back, or, with no worker running and all input drained, start once with --accept-new-map"
    mistakes.append(f"{spec.path}: what to do: {advice}")
    raise SpecError("\n".join(mistakes), path=str(spec.path), mistakes=mistakes, changed=changed)


# The consumer of the queue


def check_consumer(spec: ProcessorSpec, client: StateClient, tx: Transaction, queue: str | None) -> None:
    """Refuses a queue that another processor consumes. ``queue`` is None for an input from which nothing is deleted."""
    consumer = None if queue is None else queue_consumers(client, tx).get(queue)
    if consumer is not None and consumer != spec.processor:
        raise SpecError(
            f"{spec.at(f'input.{spec.input.kind}')}: the queue {queue!r} is consumed by the processor {consumer!r},"
            " which trims what it has committed: let the producer write to two queues, or, if that processor is over"
            f" for good, run `shuffle state release STORE {queue}`",
            queue=queue,
            consumer=consumer,
        )


def check_begin(spec: ProcessorSpec, client: StateClient, opened: Input) -> None:
    """Refuses to start on an input from which rows were deleted that this processor has never read."""

    def started() -> dict[int, Token]:
        rows = client.scan(spec.mappers_table, columns=["mapper_index", "continuation_token"]).read_all()
        return {row["mapper_index"]: Token(row["continuation_token"]) for row in rows.to_pylist()}

    with mistakes_located(spec):
        opened.check_start(started)


# The progress of the state


def has_progress(mappers: pa.Table, reducers: pa.Table) -> bool:
    """Whether anything has been committed by a reducer or trimmed by a mapper."""
    if any(row["input_unread_row_index"] or row["shuffle_unread_row_index"] for row in mappers.to_pylist()):
        return True
    return any(max(indices, default=-1) >= 0 for indices in _committed(reducers))


def nothing_ahead(mappers: pa.Table, reducers: pa.Table) -> bool:
    """Whether no reducer has committed a row that a mapper would map again.

    Then numbers after the persisted state can be given to other rows: no row with such a number has been counted.
    """
    unread = {row["mapper_index"]: row["shuffle_unread_row_index"] for row in mappers.to_pylist()}
    return all(
        committed < unread.get(index, 0) for indices in _committed(reducers) for index, committed in enumerate(indices)
    )


def _committed(reducers: pa.Table) -> Iterator[tuple[int, ...]]:
    """For every reducer, its committed shuffle indexes by mapper."""
    for encoded in reducers["committed_row_indices"].to_pylist():
        yield ReducerState.decode_any(encoded).committed_row_indices
