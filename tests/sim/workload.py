"""The job that is simulated, and the oracle that knows its outcome without running any of the product.

Input rows have a number and a kind. ``map`` passes a row on, drops it, makes two of it or refuses it; ``reduce`` folds
the rows of each mapper into one row of the table ``effects``: how many there were, and a hash over all of them in their
order. So the state says exactly which rows it has seen, in which order, and how often.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.api import Mapper, PartitionedRowset, Reducer
from shuffle.mapper.reader import PartitionReader
from shuffle.mapper.readers.queue import QueueReader
from tests.sim import kernel, memoise

PLAIN, DROPPED, TWO, MAP_POISON, REDUCE_POISON, HOLE = range(6)

INPUT = pa.schema([("number", pa.int64()), ("kind", pa.int8())])
MAPPED = pa.schema([("mapper", pa.int32()), ("out", pa.int64())])
EFFECTS_KEY = pa.schema([("mapper", pa.int32()), ("reducer", pa.int32())])
EFFECTS_VALUE = pa.schema([("rows", pa.int64()), ("chain", pa.int64())])
EFFECTS_ROW = pa.schema([*EFFECTS_KEY, *EFFECTS_VALUE])
OUTPUT = MAPPED

_MODULUS = (1 << 61) - 1


def chained(chain: int, out: int) -> int:
    return (chain * 1_000_003 + out + 7) % _MODULUS


@dataclass
class Workload:
    """One seed's rows: per mapper what the producer appends, in order."""

    mapper_count: int
    reducer_count: int
    on_error: str
    with_output: bool
    with_outbox: bool = False
    """Whether the output goes on to a sink, by way of an exporter."""
    inputs: list[list[tuple[int, int]]] = field(default_factory=list)
    groups: list[list[list[tuple[int, int]]]] = field(default_factory=list)
    """Of mappers that read several partitions (``grouping``): the rows of each. ``inputs`` is then what is known of
    the order in which they were read."""

    @property
    def partitions(self) -> list[list[tuple[int, int]]]:
        """What the producer appends to each partition of the input."""
        return [rows for group in self.groups for rows in group] if self.groups else self.inputs

    @staticmethod
    def make(rng: Random) -> Workload:
        mapper_count = rng.choice([1, 1, 2, 2, 3])
        reducer_count = rng.choice([1, 1, 2, 2, 3])
        poison = rng.random()
        on_error = "dead_letter" if poison < 0.4 else "stop"
        made = Workload(mapper_count, reducer_count, on_error, rng.random() < 0.3)
        weights = [10.0, rng.choice([0, 2, 20]), rng.choice([0, 2]), 0.0, 0.0, rng.choice([0, 0, 2, 8])]
        if on_error == "dead_letter":
            weights[MAP_POISON], weights[REDUCE_POISON] = rng.choice([0, 0.5, 1.5]), rng.choice([0, 0.5, 1.5])
        kinds = range(6)
        for mapper in range(mapper_count):
            count = rng.choice([8, 16, 30])
            rows = [(mapper * 1000 + i, rng.choices(kinds, weights)[0]) for i in range(count)]
            made.inputs.append(rows)
        if poison > 0.9:
            # One row that stops its partition for good.
            rows = rng.choice(made.inputs)
            at = rng.randrange(len(rows))
            rows[at] = (rows[at][0], MAP_POISON)
        return made

    @property
    def output(self) -> str | None:
        """The queue that rows are emitted to, if any are."""
        return ("job/outbox" if self.with_outbox else "output") if self.with_output else None

    def lengthen(self, rng: Random, counts: list[int]) -> None:
        """More rows of the kinds that there are, one of ``counts`` for each mapper; no more that stop a partition."""
        for mapper, rows in enumerate(self.inputs):
            kinds = [kind for _, kind in rows if kind != MAP_POISON or self.on_error == "dead_letter"] or [0]
            for number in range(len(rows), len(rows) + rng.choice(counts)):
                rows.append((mapper * 1000 + number, rng.choice(kinds)))


@dataclass
class Oracle:
    """What must come out, computed row by row in plain Python."""

    workload: Workload
    shuffled: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Per mapper: (shuffle index, reducer, out) of every row that ``map`` makes."""
    parts: list[list[list[tuple[int, int]]]] = field(default_factory=list)
    """Per mapper and reducer: (shuffle index, out)."""
    effects: list[list[dict[int, tuple[int, int]]]] = field(default_factory=list)
    """Per mapper and reducer: for each index that can be committed, the rows and the chain of the prefix."""
    input_ends: list[dict[int, int]] = field(default_factory=list)
    """Per mapper: input row number -> shuffle index of the first row made after it (its own not counted before)."""
    positions: list[list[int]] = field(default_factory=list)
    """Per mapper: input row number -> position in the queue."""
    stops: list[int | None] = field(default_factory=list)
    """Per mapper: the queue position of the row that stops it, if one does."""
    map_letters: set[tuple[int, int]] = field(default_factory=set)
    """(mapper, input row number) of what goes to the mappers' dead letters."""
    reduce_letters: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(mapper, reducer, out) -> shuffle index, of what goes to the reducers' dead letters."""

    def __post_init__(self) -> None:
        count, reducers = self.workload.mapper_count, self.workload.reducer_count
        self.stops = [None] * count
        self.shuffled, self.positions = [[] for _ in range(count)], [[] for _ in range(count)]
        self.input_ends = [{} for _ in range(count)]
        self.parts = [[[] for _ in range(reducers)] for _ in range(count)]
        self.effects = [[{} for _ in range(reducers)] for _ in range(count)]
        for mapper in range(count):
            self.renew(mapper)

    def renew(self, mapper: int) -> None:
        """Compute what must come out of what is known of a mapper's input."""
        self._mapper(mapper, self.workload.inputs[mapper])

    def _mapper(self, mapper: int, rows: list[tuple[int, int]]) -> None:
        reducers = self.workload.reducer_count
        letters = self.workload.on_error == "dead_letter"
        shuffled: list[tuple[int, int, int]] = []
        shuffle_at: dict[int, int] = {0: 0}
        positions: list[int] = []
        stop: int | None = None
        number = 0
        for position, (value, kind) in enumerate(rows):
            if kind == HOLE:
                continue
            if kind == MAP_POISON:
                if not letters:
                    stop = position
                    break
                self.map_letters.add((mapper, number))
            for out in outs(value, kind):
                shuffled.append((len(shuffled), abs(out) % reducers, out))
            positions.append(position)
            number += 1
            shuffle_at[number] = len(shuffled)
        self.stops[mapper] = stop
        self.shuffled[mapper] = shuffled
        self.input_ends[mapper] = shuffle_at
        self.positions[mapper] = positions
        self.parts[mapper] = [[(i, out) for i, r, out in shuffled if r == reducer] for reducer in range(reducers)]
        self.effects[mapper] = [self._prefixes(mapper, reducer) for reducer in range(reducers)]

    def _prefixes(self, mapper: int, reducer: int) -> dict[int, tuple[int, int]]:
        count = chain = 0
        found = {-1: (0, 0)}
        for index, out in self.parts[mapper][reducer]:
            if out < 0:
                self.reduce_letters[mapper, reducer, out] = index
            else:
                count, chain = count + 1, chained(chain, out)
            found[index] = count, chain
        return found

    def last(self, mapper: int, reducer: int) -> int:
        part = self.parts[mapper][reducer]
        return part[-1][0] if part else -1


def outs(value: int, kind: int) -> list[int]:
    """What ``map`` makes of one row; a negative number is one that ``reduce`` refuses."""
    if kind in (PLAIN, HOLE):
        return [value * 4]
    if kind == TWO:
        return [value * 4 + 1, value * 4 + 2]
    if kind == REDUCE_POISON:
        return [-(value * 4 + 3)]
    return []


class SimMapper(Mapper):
    def map(self, rows: pa.Table) -> PartitionedRowset:
        made: list[int] = []
        for value, kind in zip(rows["number"].to_pylist(), rows["kind"].to_pylist(), strict=True):
            if kind == MAP_POISON:
                raise ValueError(f"row {value} cannot be mapped")
            made.extend(outs(value, kind))
        values = np.array(made, dtype=np.int64)
        table = pa.table(
            [pa.array(np.full(len(made), self.spec.index, np.int32)), pa.array(values)],
            schema=MAPPED,
        )
        return PartitionedRowset(table, np.abs(values) % self.spec.reducer_count)


def _effect_keys(mappers: tuple[int, ...], reducer: int) -> pa.Table:
    return pa.table(
        [pa.array(mappers, pa.int32()), pa.array([reducer] * len(mappers), pa.int32())],
        schema=EFFECTS_KEY,
    )


class SimReducer(Reducer):
    output: str | None = None
    """The queue that rows are emitted to."""
    slow: Any = staticmethod(lambda index: None)

    def reduce(self, rows: pa.Table) -> Any:
        mappers, values = rows["mapper"].to_pylist(), rows["out"].to_pylist()
        for value in values:
            if value < 0:
                raise ValueError(f"row {value} cannot be reduced")
        self.slow(self.spec.index)
        present = sorted(set(mappers))
        transaction = self.state.transaction()
        reducer = [self.spec.index] * len(present)
        found = transaction.lookup("effects", memoise.fixed_rows(_effect_keys, tuple(present), self.spec.index))
        state = {
            mapper: (count, chain)
            for mapper, count, chain in zip(
                found["mapper"].to_pylist(), found["rows"].to_pylist(), found["chain"].to_pylist(), strict=True
            )
        }
        for mapper, value in zip(mappers, values, strict=True):
            count, chain = state.get(mapper, (0, 0))
            state[mapper] = count + 1, chained(chain, value)
        transaction.write(
            "effects",
            pa.table(
                [
                    pa.array(present, pa.int32()),
                    pa.array(reducer, pa.int32()),
                    pa.array([state[mapper][0] for mapper in present], pa.int64()),
                    pa.array([state[mapper][1] for mapper in present], pa.int64()),
                ],
                schema=EFFECTS_ROW,
            ),
        )
        if self.output is not None:
            transaction.append(self.output, self.spec.index, rows)
        return transaction


class GapReader(PartitionReader):
    """A partition whose positions have holes: the queue's rows of kind HOLE do not exist for the mapper."""

    def __init__(self, inner: QueueReader) -> None:
        self._inner = inner
        self.wait_ms = inner.wait_ms

    @property
    def schema(self) -> pa.Schema:
        return self._inner.schema

    def start(self) -> Any:
        return self._inner.start()

    def read(self, begin_row_index: int, end_row_index: int, token: Any) -> tuple[pa.Table, Any]:
        rows, after = self._inner.read(begin_row_index, end_row_index, token)
        kinds = rows["kind"].to_pylist()
        if HOLE in kinds:
            rows = rows.filter(pa.array([kind != HOLE for kind in kinds], pa.bool_()))
            if not rows.num_rows:
                kernel.world().mark("a gap without rows")
        return rows, after

    def trim(self, row_index: int, token: Any) -> None:
        self._inner.trim(row_index, token)

    def lag_rows(self, token: Any) -> int | None:
        return None
