"""Runs in which a mapper reads several partitions, in an order that is not known before it is durable.

Only with the profile ``partitions`` (``--faults partitions``), and then in every seed. What the oracle takes for a
mapper's input grows with the entries of its reads: as soon as one is on the disk, it is the truth, and all that was
checked before is checked against it. ``GroupChecker`` decodes the entries and the tokens a second time, from their
description.

In some of these runs the input grows (``Growing``): partitions come later, as groups of their own. An instance that is
opened meanwhile may find more partitions in the input than the store knows of.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from shuffle.mapper.reader import Input
from shuffle.mapper.readers.grouped import GroupedInput
from shuffle.mapper.readers.queue import QueueInput
from tests.sim import profiles
from tests.sim.faults import FAULTS_UNTIL_US, Fault, with_more
from tests.sim.workload import HOLE, MAP_POISON, PLAIN, GapReader, Oracle, Workload

if TYPE_CHECKING:
    from tests.sim.durable_tables import DurableTables

MARKS = (
    "a mapper noticed another instance",
    "an entry of another instance was found",
    "an entry was read again",
    "an entry was read again in parts",
    "entries were deleted",
    "a mapper was opened while the input had more partitions than were known",
    "three instances of a mapper",
)
"""What must have happened at least once in a run of many seeds of this profile."""

OFTEN = ("crash mapper", "crash mapper", "pause mapper", "twin mapper", "twin mapper", "crash store", "crash reducer")


GROWS = 0.7
"""How often the input gets more partitions."""


class Growing:
    """The moments of an input that gets more partitions, and what the store knows of them at each.

    Each new group comes in two steps: the input has its partitions, and some time later somebody has persisted that, as
    ``check_fingerprint`` does it, which lets mappers for them start.
    """

    def __init__(self, rng: Random, mapper_count: int, per_mapper: int) -> None:
        first = rng.randrange(1, max(2, mapper_count)) if mapper_count > 1 and rng.random() < GROWS else mapper_count
        self.sizes = [per_mapper] * mapper_count
        if first < mapper_count:
            # The last group of each step has as many as there were. The very first one has two, to be a group at all.
            for mapper in range(first - 1, mapper_count):
                self.sizes[mapper] = rng.randrange(1 if mapper else 2, per_mapper + 1)
        moments = sorted(int(rng.random() * FAULTS_UNTIL_US) for _ in range(2 * (mapper_count - first)))
        self.there_us = [0] * first + moments[::2]
        self.known_us = [0] * first + moments[1::2]
        self._first = first
        self._per_mapper = per_mapper

    @property
    def is_on(self) -> bool:
        return self._first < len(self.sizes)

    def partitions(self, now_us: int) -> int:
        """How many partitions the input has."""
        return sum(size for size, there_us in zip(self.sizes, self.there_us, strict=True) if there_us <= now_us)

    def mapper_count(self, now_us: int) -> int:
        """How many groups are persisted."""
        return sum(known_us <= now_us for known_us in self.known_us)

    def known(self, now_us: int) -> str | None:
        """What is persisted of their numbers: what the input itself says at each step, given what it said before."""
        text: str | None = None
        for step in range(self._first, 1 + self.mapper_count(now_us)):
            counted = GroupedInput(CountedInput(sum(self.sizes[:step])), self._per_mapper, "job")
            counted.known_partitions = text
            text = counted.partitions()
        return text


class Grouping:
    """What one seed has of it."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed}/partitions")
        self.is_on = profiles.current() == profiles.PARTITIONS
        self._growth_rng = Random(f"{seed}/partitions grow")
        self._per_mapper = self._rng.choice([2, 3, 4])
        self.growing: Growing | None = None
        self.world: Any = None

    def workload(self, made: Workload) -> Workload:
        if not self.is_on:
            return made
        self.growing = Growing(self._growth_rng, made.mapper_count, self._per_mapper)
        for rows, size in zip(made.inputs, self.growing.sizes, strict=True):
            if made.on_error == "stop":
                # Which rows come before the one that stops a mapper would depend on the order of the reads.
                rows[:] = [(value, PLAIN if kind == MAP_POISON else kind) for value, kind in rows]
            group: list[list[tuple[int, int]]] = [[] for _ in range(size)]
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
        inner = GapInput(config, client, Path())
        opened = GroupedInput(inner, self._per_mapper, "job")
        assert self.growing is not None
        if self.growing.is_on:
            inner.count = self.growing.partitions(self.world.now_us)
            opened.known_partitions = self.growing.known(self.world.now_us)
            if inner.count > sum(self.growing.sizes[: self.growing.mapper_count(self.world.now_us)]):
                self.world.mark("a mapper was opened while the input had more partitions than were known")
        reader = opened.open(mapper)
        reader.wait_ms = spec.mapper.read_wait_ms
        return reader


class GapInput(QueueInput):
    """The input of the job, whose partitions have holes, and of which some may come later."""

    count: int | None = None
    """How many of them there are by now; None if there are never more."""

    def partition_count(self) -> int:
        return super().partition_count() if self.count is None else self.count

    def partitions(self) -> str | None:
        return None if self.count is None else str(self.count)

    def open(self, partition: int) -> Any:
        reader = super().open(partition)
        return GapReader(reader)  # type: ignore[arg-type]


class CountedInput(Input):
    """An input of which only the number of partitions matters."""

    def __init__(self, count: int) -> None:
        super().__init__({}, None, Path())  # type: ignore[arg-type]
        self._count = count

    def partition_count(self) -> int:
        return self._count

    def partitions(self) -> str | None:
        return str(self._count)

    def open(self, partition: int) -> Any:
        raise NotImplementedError


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
        sizes = [len(group) for group in self._groups]
        self._begins = [sum(sizes[:mapper]) for mapper in range(len(sizes))]
        """Of each mapper: the number of the first partition of its group."""
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
            if partition >= len(group):
                self._violated(5, f"mapper {mapper}: an entry of place {partition} in a group of {len(group)}")
                continue
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
        if count != len(self._groups[mapper]):
            self._violated(5, f"mapper {mapper}: a token of {count} places in a group of {len(self._groups[mapper])}")
            return 0
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
        for partition, position in enumerate(self._positions[mapper]):
            begin = self._input_begin(self._begins[mapper] + partition)
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
                if self._input_begin(self._begins[mapper] + partition) <= last:
                    return False
        return True


def _numbers(value: bytes) -> tuple[int, ...]:
    """The partition and the number of rows of each batch of an entry, one after the other."""
    (length,) = struct.unpack_from("<I", value, 1)
    return struct.unpack_from(f"<{length // 4}I", value, 5)
