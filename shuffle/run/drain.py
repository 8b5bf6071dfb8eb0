"""``--until-drained``: recognises that all input that was there at the start has been committed, and
that what is to go outside is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shuffle.durable.tables import spill_queue
from shuffle.ids import Token
from shuffle.mapper.reader import START, Input
from shuffle.reducer.outputs.routes import unexported_rows
from shuffle.spec.config import ProcessorSpec

if TYPE_CHECKING:
    from shuffle.statestore import StateClient


@dataclass(slots=True)
class DrainGoal:
    """The end of the input as it was when draining began.

    A mapper persists a token only when every row before it is committed by the reducer it was meant for, or is in the
    spill. So a partition is drained when its persisted token has reached the end that it had when draining began. If
    the input cannot tell its end, a partition is drained when nothing can be read after the persisted token. The
    processor is drained when all partitions are and no spilled rows are left.
    """

    input: Input
    """The input that is drained."""
    ends: Mapping[int, Token] | None
    """The token at the end of each partition when draining began; None if the input cannot tell."""
    open_partitions: set[int] = field(default_factory=set)
    """The partitions that are not drained yet."""

    def note(self, partition: int, token: Token | None) -> None:
        """Notes the persisted token of one partition; None if its mapper has never persisted one."""
        if self.ends is not None:
            end = self.ends.get(partition)
            # A partition without an end is empty: an input need not name such partitions.
            done = end is None or self.input.reached(partition, token or START, end)
        else:
            done = token is not None and self.input.reached(partition, token, None)
        if done:
            self.open_partitions.discard(partition)

    @property
    def reached(self) -> bool:
        """Whether all partitions are drained."""
        return not self.open_partitions


def drain_goal(opened: Input, mapper_count: int) -> DrainGoal:
    """The goal to drain the input as it is now."""
    return DrainGoal(opened, opened.ends(), set(range(mapper_count)))


def is_drained(goal: DrainGoal, spec: ProcessorSpec, client: StateClient) -> bool:
    """Reads the persisted tokens and the spills, and returns whether the processor is drained."""
    tokens = {
        row["mapper_index"]: Token(row["continuation_token"])
        for row in client.scan(spec.mappers_table).read_all().to_pylist()
    }
    for partition in sorted(goal.open_partitions):
        goal.note(partition, tokens.get(partition))
    return goal.reached and not spilled_partitions(spec, client) and not unexported_rows(spec, client)


def spilled_partitions(spec: ProcessorSpec, client: StateClient) -> list[tuple[str, int]]:
    """The spills that have rows left, as (queue, reducer)."""
    prefix = spill_queue(spec.processor, 0).rpartition("/")[0] + "/"
    names = [queue.name for queue in client.queues() if queue.name.startswith(prefix)]
    return [
        (name, reducer)
        for name in names
        for reducer, (begin, end) in enumerate(client.queue(name).bounds())
        if begin < end
    ]
