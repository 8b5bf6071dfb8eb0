"""Runs in which a mapper reads several partitions, in an order that is not known before it is durable.

Only with the profile ``partitions`` (``--faults partitions``), and then in every seed. What the oracle takes for a
mapper's input grows with the entries of its reads: as soon as one is on the disk, it is the truth, and all that was
checked before is checked against it. ``GroupChecker`` decodes the entries and the tokens a second time, from their
description.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from shuffle.mapper.readers.grouped import GroupedInput
from shuffle.mapper.readers.queue import QueueInput
from tests.sim import profiles
from tests.sim.faults import Fault, with_more
from tests.sim.workload import HOLE, MAP_POISON, PLAIN, GapReader, Oracle, Workload

if TYPE_CHECKING:
    from tests.sim.durable_tables import DurableTables

MARKS = (
    "a mapper noticed another instance",
    "an entry of another instance was found",
    "an entry was read again",
    "an entry was read again in parts",
    "entries were deleted",
    "three instances of a mapper",
)
"""What must have happened at least once in a run of many seeds of this profile."""

OFTEN = ("crash mapper", "crash mapper", "pause mapper", "twin mapper", "twin mapper", "crash store", "crash reducer")


class Grouping:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed}/partitions")
        self.is_on = profiles.current() == profiles.PARTITIONS
        self._per_mapper = self._rng.choice([2, 3, 4])

    def workload(self, made: Workload) -> Workload:
        if not self.is_on:
            return made
        for rows in made.inputs:
            if made.on_error == "stop":
                # Which rows come before the one that stops a mapper would depend on the order of the reads.
                rows[:] = [(value, PLAIN if kind == MAP_POISON else kind) for value, kind in rows]
            group: list[list[tuple[int, int]]] = [[] for _ in range(self._per_mapper)]
            for row in rows:
                self._rng.choice(group).append(row)
            made.groups.append(group)
            rows.clear()
        return made

    def faults(self, made: list[Fault]) -> list[Fault]:
        if not self.is_on:
            return made
        return with_more(made, len(made), self._rng, OFTEN, [4, 8, 16])

    def open_reader(self, spec: Any, mapper: int, client: Any) -> Any:
        config = {"queue": "input", "start": "beginning"}
        reader = GroupedInput(GapInput(config, client, Path()), self._per_mapper, "job").open(mapper)
        reader.wait_ms = spec.mapper.read_wait_ms
        return reader


class GapInput(QueueInput):
    """The input of the job, whose partitions have holes."""

    def open(self, partition: int) -> Any:
        reader = super().open(partition)
        return GapReader(reader)  # type: ignore[arg-type]


class GroupChecker:
    """The entries of all mappers' reads, and what follows from them."""

    def __init__(
        self,
        oracle: Oracle,
        tables: DurableTables,
        reads: bytes,
        input_begin: Callable[[int], int],
        violated: Callable[[int, str], None],
    ) -> None:
        """``reads`` is the prefix of the table's keys; ``input_begin`` says from where a partition can be read."""
        self._oracle = oracle
        self._groups = oracle.workload.groups
        self._tables = tables
        self._reads = reads
        self._input_begin = input_begin
        self._violated = violated
        self._entries: list[list[bytes]] = [[] for _ in self._groups]
        self._order: list[list[int]] = [[] for _ in self._groups]
        """Of each mapper: the partition of the group that each row came from."""
        self._trimmed = [0] * len(self._groups)
        """Of each mapper: the number of entries before its persisted state."""
        self._positions = [[0] * len(group) for group in self._groups]

    def _key(self, mapper: int, entry: int) -> bytes:
        return self._reads + struct.pack(">IQ", mapper ^ 0x80000000, entry ^ (1 << 63))

    def look(self) -> None:
        """Take in the entries that are new on the disk, and compare the others."""
        for mapper, entries in enumerate(self._entries):
            first = self._trimmed[mapper]
            keys = [self._key(mapper, number) for number in range(first, len(entries) + 1)]
            for number, value in enumerate(self._tables.get_all(keys), first):
                if number < len(entries):
                    if value is not None and value != entries[number]:
                        self._violated(5, f"mapper {mapper}: entry {number} of its reads has changed")
                elif value is not None:
                    self._append(mapper, value)

    def _append(self, mapper: int, value: bytes) -> None:
        numbers = _numbers(value)
        inputs, group = self._oracle.workload.inputs[mapper], self._existing(mapper)
        for partition, count in zip(numbers[::2], numbers[1::2], strict=True):
            done = self._order[mapper].count(partition)
            rows = group[partition][done : done + count]
            if len(rows) < count or not count:
                self._violated(5, f"mapper {mapper}: an entry of {count} rows of partition {partition} after {done}")
            self._order[mapper] += [partition] * len(rows)
            inputs.extend(rows)
        self._entries[mapper].append(value)
        self._oracle.renew(mapper)
        self.look()

    def _existing(self, mapper: int) -> list[list[tuple[int, int]]]:
        return [[row for row in rows if row[1] != HOLE] for rows in self._groups[mapper]]

    def position(self, mapper: int, token: bytes) -> int:
        """The number of rows that a persisted token stands for."""
        if not token:
            return 0
        entry, done, count = struct.unpack_from("<QQH", token)
        at, positions = 18, []
        for _ in range(count):
            (length,) = struct.unpack_from("<H", token, at)
            positions.append(struct.unpack_from(">q", token, at + 2)[0] if length else 0)
            at += 2 + length
        rows = done + sum(sum(_numbers(value)[1::2]) for value in self._entries[mapper][:entry])
        for partition, position in enumerate(positions):
            taken = self._order[mapper][:rows].count(partition)
            there = [at for at, row in enumerate(self._groups[mapper][partition]) if row[1] != HOLE]
            low = there[taken - 1] + 1 if taken else 0
            high = there[taken] if taken < len(there) else len(self._groups[mapper][partition])
            if not low <= position <= high:
                said = f"mapper {mapper}: the token of partition {partition} says {position} after {taken} rows"
                self._violated(5, f"{said}, which is not in {low} to {high}")
        self._trimmed[mapper], self._positions[mapper] = entry, positions
        return rows

    def check_trimmed(self, mapper: int) -> None:
        """Nothing may be gone that is still to be read: neither rows, nor entries of rows that were exposed."""
        size = len(self._groups[mapper])
        for partition, position in enumerate(self._positions[mapper]):
            begin = self._input_begin(mapper * size + partition)
            if begin > position:
                self._violated(7, f"partition {partition} of mapper {mapper} is trimmed to {begin}, read to {position}")
        first, end = self._trimmed[mapper], len(self._entries[mapper])
        found = self._tables.get_all([self._key(mapper, number) for number in range(first, end)])
        if None in found:
            self._violated(7, f"mapper {mapper}: entry {first + found.index(None)} of its reads is gone, and needed")

    def is_done(self) -> bool:
        for mapper, group in enumerate(self._groups):
            if len(self._order[mapper]) != sum(map(len, self._existing(mapper))):
                return False
            for partition, rows in enumerate(group):
                last = max((at for at, row in enumerate(rows) if row[1] != HOLE), default=-1)
                if self._input_begin(mapper * len(group) + partition) <= last:
                    return False
        return True


def _numbers(value: bytes) -> tuple[int, ...]:
    """The partition and the number of rows of each batch of an entry, one after the other."""
    (length,) = struct.unpack_from("<I", value, 1)
    return struct.unpack_from(f"<{length // 4}I", value, 5)
