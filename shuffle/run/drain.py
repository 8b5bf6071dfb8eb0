"""``--until-drained``: when all input that was there has been committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shuffle.durable.tables import spill_queue
from shuffle.ids import Token
from shuffle.mapper.reader import START, Input
from shuffle.spec.config import ProcessorSpec

if TYPE_CHECKING:
    from shuffle.statestore import StateClient


@dataclass(slots=True)
class DrainGoal:
    """The end of the input as it was when draining began.

    A mapper persists a token only when every row before it is committed by the reducer it was meant for, or is in the
    spill. So a partition is drained when its persisted token has reached the end that it had when draining began. If
    the input cannot tell its end, a partition is drained when nothing can be read after the persisted token. All is
    drained when nothing is spilled any more, either.
    """

    input: Input
    ends: Mapping[int, Token] | None
    """Per partition; None if the input cannot tell."""
    open_partitions: set[int] = field(default_factory=set)

    def note(self, partition: int, token: Token | None) -> None:
        """Takes in the persisted token of one partition; None if its mapper has never persisted one."""
        if self.ends is not None:
            end = self.ends.get(partition)
            # Without an end there is nothing in it: an input need not name partitions that are empty.
            done = end is None or self.input.reached(partition, token or START, end)
        else:
            done = token is not None and self.input.reached(partition, token, None)
        if done:
            self.open_partitions.discard(partition)

    @property
    def reached(self) -> bool:
        return not self.open_partitions


def drain_goal(opened: Input, mapper_count: int) -> DrainGoal:
    return DrainGoal(opened, opened.ends(), set(range(mapper_count)))


def is_drained(goal: DrainGoal, spec: ProcessorSpec, client: StateClient) -> bool:
    tokens = {
        row["mapper_index"]: Token(row["continuation_token"])
        for row in client.scan(spec.mappers_table).read_all().to_pylist()
    }
    for partition in sorted(goal.open_partitions):
        goal.note(partition, tokens.get(partition))
    return goal.reached and not spilled_partitions(spec, client)


def spilled_partitions(spec: ProcessorSpec, client: StateClient) -> list[tuple[str, int]]:
    """(queue, reducer) of every spill that has rows left."""
    prefix = spill_queue(spec.processor, 0).rpartition("/")[0] + "/"
    names = [queue.name for queue in client.queues() if queue.name.startswith(prefix)]
    return [
        (name, reducer)
        for name in names
        for reducer, (begin, end) in enumerate(client.queue(name).bounds())
        if begin < end
    ]
