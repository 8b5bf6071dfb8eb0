"""What a place outside of the state store is to the exporter: the contract ``Sink``.

Rows reach it in batches, each a range of positions of one partition of the outbox. There are two families, and the rule
that makes rows appear exactly once is in ``shuffle.reducer.exporter.core``:

- A sink that *keeps the position* stores rows and the position after them in one atomic step (a transaction of Kafka, a
  commit of Delta or Iceberg), and lets only the newest instance of an exporter do so.
- Any other sink publishes a batch under a name made of its range, so that the same batch published twice is there once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class SinkPlace:
    """Which exporter a sink is for, and what the spec says about it."""

    config: Mapping[str, Any]
    """The keys of the section of the spec that names the place, and their values."""
    folder: Path
    """The folder of the spec, for values that are relative paths."""
    processor: str
    """The name of the processor."""
    partition: int
    """The partition of the outbox, or of the dead-letter queue."""
    schema: pa.Schema
    """The columns of the rows that are published."""
    section: str = "output"
    """The section of the spec: ``output`` or ``dead_letters``."""
    queue_mark: str = ""
    """What tells the positions of a dead-letter queue from those of the outbox, and of other such queues. It begins
    with a character that no name of a processor has."""

    @property
    def name(self) -> str:
        """The name under which the place knows the rows' origin, beside the partition."""
        return self.processor + self.queue_mark


class Sink(ABC):
    """The way of one partition of the outbox to a place outside. Only one thread uses an object."""

    keeps_position: ClassVar[bool]
    """True if the place stores the position after the rows together with the rows."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The place in words that name no other one. If they change, the output is another one."""

    def check_new(self) -> None:  # noqa: B027 - a sink that keeps the position has other ways
        """Called before the first row of a processor with an empty state. ``PositionLost`` if the place has rows of an
        earlier processor of that name already, which would be taken for those of this one."""

    @abstractmethod
    def open(self) -> int | None:
        """Connect, and return the position that the place has; None if it has none, or keeps none.

        A sink that keeps the position makes sure before it returns that no other object for the same partition can
        publish any more, and that what such an object had under way is either part of the position or will never be.
        Called again after every error.
        """

    @abstractmethod
    def publish(self, rows: pa.Table, begin: int, end: int) -> None:
        """Publish the rows of the positions from ``begin`` up to and without ``end``, in one atomic step.

        A sink that keeps the position stores ``end`` in the same step. It is also called without rows, with ``begin``
        equal to ``end``, to store the position alone.

        Raises ``ServiceUnavailable`` if nothing was published, ``PublishUnknown`` if that is not certain,
        ``SplitBrain`` if another object has taken over, and ``SinkRefused`` if trying again is of no use.
        """

    def keep_alive(self) -> None:  # noqa: B027 - most places forget nothing
        """Called now and then while there is nothing to publish, for places that forget what is not used."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release what ``open`` has acquired. Also called after errors, and possibly twice."""
