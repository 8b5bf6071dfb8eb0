"""Commits that become durable together, and what is found out about them on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from shuffle.errors import ShuffleError
from shuffle.statestore.engine.catalogue import CatalogueStep
from shuffle.statestore.engine.ordered_table import PartitionPlan
from shuffle.statestore.request import Committed, Pairs

GROUP_COMMITS_MAX = 1024
"""Commits in one group: enough to keep the disk busy, few enough that the first of them does not wait long."""


@dataclass(slots=True)
class CommitGroup:
    """Commits that become durable together."""

    version_before: int = 0
    """Of the store, before the first commit of the group."""
    results: list[Committed | ShuffleError] = field(default_factory=list)
    puts: list[Pairs] = field(default_factory=list)
    cleared: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Ranges of keys that are removed before anything is put."""
    partitions: dict[tuple[int, int], PartitionPlan] = field(default_factory=dict)
    catalogue: CatalogueStep | None = None
    published: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Files that nothing refers to once the group is durable."""
    table_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)
    appended_rows: int = 0
    """How many rows the group has added to queues, known once it is applied."""
    appended_bytes: int = 0
    """How many bytes the group has written to segments, known once it is applied."""
    room_bytes: int = 0
    """What the group may write before the disk is too full."""
    size_bytes: int = 0
    changed: bool = False
    reached_rocks: bool = False
    """Whether writing to RocksDB was begun: from then on a failure leaves the outcome open."""
    _written: dict[bytes, bytes | None] = field(default_factory=dict)
    _puts_seen: int = 0

    def written(self) -> dict[bytes, bytes | None]:
        """What the commits of the group so far write, by key; only gathered when somebody asks."""
        for keys, values in self.puts[self._puts_seen :]:
            self._written.update(zip(keys, values, strict=True))
        self._puts_seen = len(self.puts)
        return self._written

    @property
    def queues(self) -> set[tuple[int, int]]:
        """The partitions that change, or cease to be."""
        dropped = self.catalogue.dropped_queue if self.catalogue is not None else None
        if dropped is None:
            return set(self.partitions)
        return {(dropped.schema.queue_id, index) for index in range(dropped.schema.partitions)}


@dataclass(slots=True)
class CheckedCommit:
    """What checking a commit has found out."""

    puts: list[Pairs]
    """Of each write: its keys and values."""
    size_bytes: int
    rows: list[list[int]]
    """Of each append: the rows of its payloads."""
    repeated: list[tuple[int, int] | None]
    """Of each append: the answer it got before, if it was made before."""
    step: CatalogueStep | None
