"""Commits that become durable together, and the results of checking them."""

from __future__ import annotations

from dataclasses import dataclass, field

from shuffle.errors import ShuffleError
from shuffle.statestore.engine.catalogue import CatalogueStep
from shuffle.statestore.engine.ordered_table import PartitionPlan
from shuffle.statestore.engine.table_logs import LogReplacement
from shuffle.statestore.request import Committed, Pairs

GROUP_COMMITS_MAX = 1024
"""The most commits in one group: enough to keep the disk busy, and few enough that the first does not wait long."""


@dataclass(slots=True)
class CommitGroup:
    """Commits that become durable together."""

    version_before: int = 0
    """The version of the store before the first commit of the group."""
    results: list[Committed | ShuffleError] = field(default_factory=list)
    """The result of each commit, in the order of the requests."""
    puts: list[Pairs] = field(default_factory=list)
    """The keys and values to write to RocksDB."""
    cleared: list[tuple[bytes, bytes]] = field(default_factory=list)
    """The ranges of keys that are removed before ``puts`` are written."""
    partitions: dict[tuple[int, int], PartitionPlan] = field(default_factory=dict)
    catalogue: CatalogueStep | None = None
    published: list[str] = field(default_factory=list)
    """The ids of the staged appends that the group publishes."""
    unused: list[str] = field(default_factory=list)
    """The files that nothing refers to once the group is durable."""
    plain_tables: set[int] = field(default_factory=set)
    """The ids of the tables to which the group writes rows in RocksDB."""
    logged: dict[int, int] = field(default_factory=dict)
    """The number of rows that the log of each table had before the group, for the tables whose logs it extends."""
    replacement: LogReplacement | None = None
    """The new log of a table. The commit that brings it is alone in its group."""
    table_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The rows and bytes that the group writes to each table, by table id."""
    appended_rows: int = 0
    """The number of rows that the group has added to queues, known once it is applied."""
    appended_bytes: int = 0
    """The number of bytes that the group has written to segments, known once it is applied."""
    room_bytes: int = 0
    """The number of bytes that the group may write before the disk is too full."""
    size_bytes: int = 0
    """The bytes of all commits of the group."""
    changed: bool = False
    """True if a commit of the group changes anything."""
    reached_rocks: bool = False
    """True once writing to RocksDB has begun: from then on a failure leaves the outcome unknown."""
    _written: dict[bytes, bytes | None] = field(default_factory=dict)
    _puts_seen: int = 0

    def written(self) -> dict[bytes, bytes | None]:
        """What the commits of the group write so far, by key; collected only when this is called."""
        for keys, values in self.puts[self._puts_seen :]:
            self._written.update(zip(keys, values, strict=True))
        self._puts_seen = len(self.puts)
        return self._written

    def count_appended(self, rows: int, size_bytes: int) -> None:
        self.appended_rows += rows
        self.appended_bytes += size_bytes

    @property
    def queues(self) -> set[tuple[int, int]]:
        """The partitions that change or are dropped, as pairs of queue id and index."""
        dropped = self.catalogue.dropped_queue if self.catalogue is not None else None
        if dropped is None:
            return set(self.partitions)
        return {(dropped.schema.queue_id, index) for index in range(dropped.schema.partitions)}


@dataclass(slots=True)
class CheckedCommit:
    """A commit that has passed all checks, and what they computed."""

    size_bytes: int
    """The bytes of the commit."""
    rows: list[list[int]]
    """The numbers of rows of the payloads of each append."""
    repeated: list[tuple[int, int] | None]
    """The positions that each append was given before, if it repeats an earlier one; None otherwise."""
    step: CatalogueStep | None
    """The change of the catalogue, if the commit makes one."""
