"""The checks of a spec that need the store, made before any worker starts.

1. The user's classes can be imported and are subclasses of ``Mapper`` and ``Reducer``.
2. The input exists; there is one mapper for each of its partitions. The output, if there is one, can take rows.
3. The processor's own tables exist, or are created.
4. The input queue has no other consumer, and nothing of it was trimmed before this processor could read it.
5. The state in them was made by the same processor: its *fingerprint* in ``<processor>/meta``.

At the first start the fingerprint and the registration as the queue's consumer are written in one transaction.

On 5: rows are identified by their number alone, so a state is valid only together with the numbering and the
partitioning it was made with. Whatever may not change is kept beside it and compared at every start.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from shuffle.durable.export_state import EXPORTS_KEY, EXPORTS_VALUE
from shuffle.durable.mapper_state import MAPPERS_KEY, MAPPERS_VALUE
from shuffle.durable.meta import META_KEY, META_VALUE
from shuffle.durable.read_order import READS_KEY, READS_VALUE
from shuffle.durable.reducer_state import REDUCERS_KEY, REDUCERS_VALUE
from shuffle.durable.spill_ends import SPILLS_KEY, SPILLS_VALUE
from shuffle.durable.upgrade import refuse_old_tables
from shuffle.errors import SpecError, TableExists
from shuffle.mapper.reader import Input
from shuffle.mapper.readers.opening import mistakes_located, open_input
from shuffle.preflight.fingerprint import check_fingerprint
from shuffle.reducer.outputs.opening import check_output
from shuffle.reducer.outputs.routes import routes
from shuffle.spec.config import ProcessorSpec
from shuffle.statestore.client.queue_consumers import create_consumers_table
from shuffle.user_code.load import load_class
from shuffle.user_code.poison import DEAD_LETTER_SCHEMA

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

MAPPERS_MAX = 4096
"""The most mappers of a processor. As with reducers, each is a process with a connection to every reducer."""


def check_against_store(
    spec: ProcessorSpec, client: StateClient, accept_new_map: bool = False, register: bool = True
) -> int:
    """Makes the checks 1 to 5 above and returns the number of mappers. One ``SpecError`` names all mistakes of 1 and 2.

    Without ``register`` the processor does not become the consumer of its queue; commands that only inspect use that.
    """
    mistakes: list[str] = []
    classes: dict[str, type[Any]] = {}
    roles: tuple[Literal["mapper", "reducer"], ...] = ("mapper", "reducer")
    for role in roles:  # 1
        try:
            classes[role] = load_class(spec, role)
        except SpecError as error:
            mistakes.append(error.message)
    consumed: str | None = None
    with ExitStack() as closing:
        try:  # 2
            opened = closing.enter_context(open_input(spec, client))
            mapper_count = count_partitions(spec, opened)
            consumed = opened.consumes
        except SpecError as error:
            mistakes.append(error.message)
        try:
            check_output(spec, client, consumed)
        except SpecError as error:
            mistakes.append(error.message)
        if mistakes:
            raise SpecError("\n".join(mistakes), path=str(spec.path), mistakes=mistakes)
        create_tables(spec, client)  # 3
        mapper_class = classes["mapper"]
        return check_fingerprint(spec, client, mapper_count, mapper_class, opened, accept_new_map, register)  # 4, 5


# 2. Input ------------------------------------------------------------------------------------------------------------


def count_mappers(spec: ProcessorSpec, client: StateClient) -> int:
    """The number of mappers: one for each partition of the input."""
    with open_input(spec, client) as opened:
        return count_partitions(spec, opened)


def count_partitions(spec: ProcessorSpec, opened: Input) -> int:
    """The number of partitions of the input. Raises ``SpecError`` if there cannot be so many mappers."""
    at = spec.at(f"input.{spec.input.kind}")
    with mistakes_located(spec):
        count = opened.partition_count()
    if not 1 <= count <= MAPPERS_MAX:
        raise SpecError(f"{at}: {count} partitions; there can be 1 to {MAPPERS_MAX} mappers")
    return count


# 3. Tables -----------------------------------------------------------------------------------------------------------


def create_tables(spec: ProcessorSpec, client: StateClient) -> None:
    refuse_old_tables(client, spec.processor)
    client.create_table(spec.meta_table, key=META_KEY, value=META_VALUE, if_not_exists=True)
    client.create_table(spec.mappers_table, key=MAPPERS_KEY, value=MAPPERS_VALUE, if_not_exists=True)
    client.create_table(spec.spills_table, key=SPILLS_KEY, value=SPILLS_VALUE, if_not_exists=True)
    if spec.mapper.partitions_per_mapper > 1:
        client.create_table(spec.reads_table, key=READS_KEY, value=READS_VALUE, if_not_exists=True)
    client.create_table(spec.reducers_table, key=REDUCERS_KEY, value=REDUCERS_VALUE, if_not_exists=True)
    for route in routes(spec):
        client.create_table(route.table, key=EXPORTS_KEY, value=EXPORTS_VALUE, if_not_exists=True)
        if route.is_dead_letters:
            _create_dead_letter_queue(spec, client, route.queue)
    create_consumers_table(client)


def _create_dead_letter_queue(spec: ProcessorSpec, client: StateClient, name: str) -> None:
    try:
        client.create_queue(name, schema=DEAD_LETTER_SCHEMA, partitions=1, if_not_exists=True)
    except TableExists as error:
        raise SpecError(f"{spec.path}: dead_letter_queue {name} is not one: {error}", queue=name) from None
