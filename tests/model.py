"""A model of fetch, commit and trim, small enough to look at every state it can get into: ``python -m tests.model``.

Two mappers, two reducers, up to two instances of each, a few rows, and a store that answers reads and validates
commits. What is left out is everything that does not decide about exactly once: bytes, batches, memory, time. A step
that does not come stands for a pause, a lost request or a slow network, so those need no actions of their own; crashes,
second instances, lost answers, commits that arrive late and requests that call rows committed which are not are
*faults*, and every way to have up to ``faults_max`` of them is tried.

The model is the protocol as ``docs/protocol.md`` tells it, written a second time; the simulator (``tests/sim``) runs
the code. ``MISTAKES`` are protocols that differ in one step: each must be found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

T = TypeVar("T")

NOTHING = -1


class Mapper(NamedTuple):
    """One instance. The window holds the rows from ``begin`` (see ``local``) up to ``end``."""

    seen: int
    """The persisted state this instance knows: rows below it are done."""
    end: int
    known: tuple[int, ...]
    """By reducer, the last row it said it has committed."""
    lied_to: bool = False
    """Whether one of these may not be so."""


class Reducer(NamedTuple):
    """One instance, with at most one commit under way."""

    expected: tuple[int, ...]
    """By mapper, the last row that this instance takes for committed."""
    cursor: tuple[int, ...]
    phase: str = "fetching"
    """fetching, sent (the commit is on its way), unknown (its answer was lost)."""
    fresh: bool = True
    """Whether nothing was committed to the row since the transaction read it."""


class Late(NamedTuple):
    """A commit whose sender has died or given up, and which may still arrive."""

    expected: tuple[int, ...]
    cursor: tuple[int, ...]
    fresh: bool


class MapperSide(NamedTuple):
    persisted: int
    trimmed: int
    instances: tuple[Mapper, ...]


class ReducerSide(NamedTuple):
    committed: tuple[int, ...]
    effects: tuple[tuple[int, ...], ...]
    """By mapper, how often each of its rows has had its effect."""
    instances: tuple[Reducer, ...]
    late: Late | None


class State(NamedTuple):
    mappers: tuple[MapperSide, ...]
    reducers: tuple[ReducerSide, ...]
    faults_left: int


class Broken(Exception):
    """An invariant does not hold."""


@dataclass
class Model:
    """``rows[m][k]`` is the reducer that row ``k`` of mapper ``m`` is meant for."""

    rows: tuple[tuple[int, ...], ...] = ((0, 1), (1, 0))
    reducer_count: int = 2
    instances: int = 1
    """Of each worker, from the beginning. One that takes no step is one that is paused, or not there."""
    instances_max: int = 2
    faults_max: int = 1
    mistake: str | None = None
    _mine: list[list[list[int]]] = field(init=False)

    def __post_init__(self) -> None:
        self._mine = [
            [[k for k, target in enumerate(rows) if target == reducer] for rows in self.rows]
            for reducer in range(self.reducer_count)
        ]

    # --- the beginning and the end ---

    def initial(self) -> State:
        nothing = (NOTHING,) * len(self.rows)
        mapper = MapperSide(0, 0, (Mapper(0, 0, (NOTHING,) * self.reducer_count),) * self.instances)
        effects = tuple((0,) * len(rows) for rows in self.rows)
        reducer = ReducerSide(nothing, effects, (Reducer(nothing, nothing),) * self.instances, None)
        return State((mapper,) * len(self.rows), (reducer,) * self.reducer_count, self.faults_max)

    def done(self, state: State) -> bool:
        """Everything committed, everything trimmed."""
        return all(
            side.persisted == side.trimmed == len(rows) for side, rows in zip(state.mappers, self.rows, strict=True)
        ) and all(
            side.committed[m] == (self._mine[r][m] or [NOTHING])[-1]
            for r, side in enumerate(state.reducers)
            for m in range(len(self.rows))
        )

    # --- what must hold ---

    def check(self, state: State) -> None:
        for r, side in enumerate(state.reducers):
            for m, counts in enumerate(side.effects):
                for k, count in enumerate(counts):
                    expected = int(k in self._mine[r][m] and k <= side.committed[m])
                    if count != expected:
                        raise Broken(f"row {k} of mapper {m} had its effect {count} times instead of {expected}")
        for m, rows in enumerate(self.rows):
            side = state.mappers[m]
            if side.trimmed > side.persisted:
                raise Broken(f"input {m} is trimmed to {side.trimmed} and the state is at {side.persisted}")
            for k in range(side.persisted):
                if state.reducers[rows[k]].committed[m] < k:
                    raise Broken(f"mapper {m} has passed row {k}, which reducer {rows[k]} has not committed")
            for instance in side.instances:
                for r, known in enumerate(instance.known):
                    if not instance.lied_to and known > state.reducers[r].committed[m]:
                        raise Broken(f"mapper {m} takes row {known} for committed by reducer {r}")

    # --- steps ---

    def local(self, m: int, instance: Mapper) -> int:
        """Where the window begins: rows before it are committed, as far as this instance knows."""
        at = instance.seen
        while at < instance.end and instance.known[self.rows[m][at]] >= at:
            at += 1
        return at

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for m, side in enumerate(state.mappers):
            for i, instance in enumerate(side.instances):
                for what, after in self._mapper_steps(state, m, side, instance):
                    yield f"mapper {m}.{i} {what}", _with_mapper(state, m, side, i, after)
            yield from self._mapper_faults(state, m, side)
        for r, reducers in enumerate(state.reducers):
            for i, one in enumerate(reducers.instances):
                yield from self._fetches(state, r, reducers, i, one)
                for what, changed in self._reducer_steps(r, reducers, i, one):
                    yield f"reducer {r}.{i} {what}", _with_reducer(state, r, changed)
            yield from self._reducer_faults(state, r, reducers)

    def _loaded(self, side: MapperSide) -> Mapper:
        return Mapper(side.persisted, side.persisted, (NOTHING,) * self.reducer_count)

    def _mapper_steps(
        self, state: State, m: int, side: MapperSide, me: Mapper
    ) -> Iterator[tuple[str, tuple[MapperSide, Mapper]]]:
        if me.end < len(self.rows[m]):
            # The persisted state is looked at before rows are exposed; so are rows that the input does not have any
            # more, which only another instance can have trimmed.
            if side.persisted != me.seen:
                yield "starts again", (side, self._loaded(side))
            elif me.end >= side.trimmed:
                yield "reads", (side, me._replace(end=me.end + 1))
        local = self.local(m, me)
        if local > me.seen:
            if not self._is_confirmed(state, m, me.known):
                yield "finds that it was lied to", (side, self._loaded(side))
            elif side.persisted == me.seen or self.mistake == "no compare at trim":
                yield "moves its state", (side._replace(persisted=local), me._replace(seen=local))
            else:
                yield "starts again", (side, self._loaded(side))
        trim_to = local if self.mistake == "input trimmed before the commit" else me.seen
        if trim_to > side.trimmed:
            yield "trims", (side._replace(trimmed=trim_to), me)

    def _is_confirmed(self, state: State, m: int, known: tuple[int, ...]) -> bool:
        """Whether the store says the same of what this mapper was told to be committed."""
        if self.mistake == "claims believed at trim":
            return True
        return all(state.reducers[r].committed[m] >= row for r, row in enumerate(known))

    def _mapper_faults(self, state: State, m: int, side: MapperSide) -> Iterator[tuple[str, State]]:
        if not state.faults_left:
            return
        fewer = state._replace(faults_left=state.faults_left - 1)
        fresh = self._loaded(side)
        if len(side.instances) < self.instances_max:
            yield f"mapper {m} twice", _set_mapper(fewer, m, side._replace(instances=_sorted((*side.instances, fresh))))
        for i, instance in enumerate(side.instances):
            if instance != fresh:
                yield f"mapper {m}.{i} crashes", _with_mapper(fewer, m, side, i, (side, fresh))
            for r in range(self.reducer_count):
                # Only of rows that it has: it refuses to hear of others.
                for k in [k for k in self._mine[r][m] if max(instance.known[r], instance.seen - 1) < k < instance.end]:
                    told = instance._replace(known=_swap(instance.known, r, k), lied_to=True)
                    what = f"somebody tells mapper {m}.{i} that reducer {r} has committed row {k}"
                    yield what, _with_mapper(fewer, m, side, i, (side, told))

    def _fetches(self, state: State, r: int, side: ReducerSide, i: int, me: Reducer) -> Iterator[tuple[str, State]]:
        if me.phase != "fetching":
            return
        for m, mappers in enumerate(state.mappers):
            for j, server in enumerate(mappers.instances):
                told = (me.cursor if self.mistake == "cursor told as committed" else me.expected)[m]
                knows = server
                if told > server.known[r]:
                    knows = server._replace(known=_swap(server.known, r, told))
                begin = self.local(m, knows)
                wanted = next((k for k in self._mine[r][m] if k > me.cursor[m]), None)
                asked = state
                if knows is not server:
                    asked = _with_mapper(state, m, mappers, j, (mappers, knows))
                after = me
                if wanted is not None and wanted < begin:
                    # Gone from the window: somebody has committed it in this reducer's name.
                    after = Reducer(side.committed, side.committed)
                elif wanted is not None and wanted < server.end:
                    after = me._replace(cursor=_swap(me.cursor, m, wanted))
                if after is not me or asked is not state:
                    changed = side._replace(instances=_swap(side.instances, i, after))
                    yield f"reducer {r}.{i} asks mapper {m}.{j}", _with_reducer(asked, r, changed)

    def _reducer_steps(self, r: int, side: ReducerSide, i: int, me: Reducer) -> Iterator[tuple[str, ReducerSide]]:
        def becomes(after: Reducer) -> ReducerSide:
            return side._replace(instances=_swap(side.instances, i, after))

        if me.phase == "fetching" and me.cursor != me.expected:
            # The transaction reads the row; if it is not the expected one, another instance is alive.
            if not self._compares(side.committed, me):
                yield "starts again", becomes(Reducer(side.committed, side.committed))
            else:
                yield "sends a commit", becomes(me._replace(phase="sent", fresh=True))
        elif me.phase == "sent":
            if me.fresh or self.mistake == "conflicts not checked":
                after = self._applied(r, side, me.expected, me.cursor)
                known = Reducer(me.cursor, me.cursor)
                yield "commits", after._replace(instances=_swap(after.instances, i, known))
            else:
                # Nothing happened: the same rows again, in a transaction that reads afresh.
                yield "is refused", becomes(me._replace(phase="fetching", fresh=True))
        elif me.phase == "unknown":
            yield "settles", becomes(self._settled(side, me))

    def _compares(self, committed: tuple[int, ...], me: Reducer) -> bool:
        if self.mistake == "no compare at commit":
            return True
        if self.mistake == "only moved positions compared":
            return all(
                found == wanted
                for found, wanted, cursor in zip(committed, me.expected, me.cursor, strict=True)
                if cursor != wanted
            )
        return committed == me.expected

    def _settled(self, side: ReducerSide, me: Reducer) -> Reducer:
        """After an unknown commit the persisted row decides."""
        if self.mistake == "unknown taken for committed":
            return Reducer(me.cursor, me.cursor)
        if self.mistake == "blind retry after unknown":
            return me._replace(phase="sent", fresh=True)
        if side.committed == me.cursor:
            return Reducer(me.cursor, me.cursor)
        if side.committed == me.expected:
            return me._replace(phase="fetching", fresh=True)
        return Reducer(side.committed, side.committed)

    def _applied(self, r: int, side: ReducerSide, expected: tuple[int, ...], cursor: tuple[int, ...]) -> ReducerSide:
        """The store commits positions and effects in one transaction; whoever has read the row before is stale."""
        effects = []
        for m, counts in enumerate(side.effects):
            mine = [k for k in self._mine[r][m] if expected[m] < k <= cursor[m]]
            effects.append(tuple(count + (k in mine) for k, count in enumerate(counts)))
        instances = tuple(one._replace(fresh=False) for one in side.instances)
        late = side.late._replace(fresh=False) if side.late is not None else None
        return ReducerSide(cursor, tuple(effects), instances, late)

    def _reducer_faults(self, state: State, r: int, side: ReducerSide) -> Iterator[tuple[str, State]]:
        if side.late is not None:
            gone = side._replace(late=None)
            if side.late.fresh or self.mistake == "conflicts not checked":
                gone = self._applied(r, gone, side.late.expected, side.late.cursor)
            yield f"reducer {r}: a late commit arrives", _with_reducer(state, r, gone)
        if not state.faults_left:
            return
        fewer = state._replace(faults_left=state.faults_left - 1)
        fresh = Reducer(side.committed, side.committed)
        if len(side.instances) < self.instances_max:
            yield f"reducer {r} twice", _with_reducer(fewer, r, side._replace(instances=(*side.instances, fresh)))
        for i, one in enumerate(side.instances):
            if one == fresh:
                continue
            dead = side._replace(instances=_swap(side.instances, i, fresh))
            yield f"reducer {r}.{i} crashes", _with_reducer(fewer, r, dead)
            if one.phase != "sent":
                continue
            silent = side._replace(instances=_swap(side.instances, i, one._replace(phase="unknown")))
            if one.fresh or self.mistake == "conflicts not checked":
                yield (
                    f"reducer {r}.{i} commits, answer lost",
                    _with_reducer(fewer, r, self._applied(r, silent, one.expected, one.cursor)),
                )
            if side.late is None:
                late = Late(one.expected, one.cursor, one.fresh)
                yield f"reducer {r}.{i} gives up its commit", _with_reducer(fewer, r, silent._replace(late=late))
                yield f"reducer {r}.{i} crashes, its commit does not", _with_reducer(fewer, r, dead._replace(late=late))


def _swap(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _sorted(instances: tuple[T, ...]) -> tuple[T, ...]:
    """Instances have no names: states that differ in their order only are one."""
    return tuple(sorted(instances))  # type: ignore[type-var]


def _set_mapper(state: State, m: int, side: MapperSide) -> State:
    return state._replace(mappers=_swap(state.mappers, m, side))


def _with_mapper(state: State, m: int, side: MapperSide, i: int, after: tuple[MapperSide, Mapper]) -> State:
    changed, instance = after
    return _set_mapper(state, m, changed._replace(instances=_sorted(_swap(side.instances, i, instance))))


def _with_reducer(state: State, r: int, side: ReducerSide) -> State:
    side = side._replace(instances=_sorted(side.instances))
    return state._replace(reducers=_swap(state.reducers, r, side))


MISTAKES = (
    "no compare at commit",
    "only moved positions compared",
    "conflicts not checked",
    "blind retry after unknown",
    "unknown taken for committed",
    "cursor told as committed",
    "no compare at trim",
    "input trimmed before the commit",
    "claims believed at trim",
)


@dataclass
class Outcome:
    states: int
    steps: int
    depth: int
    stuck: int = 0
    """States from which no way leads to the end."""
    broken: str | None = None
    trail: list[str] = field(default_factory=list)


def explore(model: Model, progress: Callable[[int], None] = lambda states: None) -> Outcome:
    """Every state, the nearest first; stops at the first one that is wrong, and tells how it came about."""
    first = model.initial()
    numbers: dict[State, int] = {first: 0}
    states = [first]
    came: list[tuple[int, str]] = [(0, "")]
    before: list[list[int]] = [[]]
    depths = [0]
    steps = 0
    ends = []
    at = 0
    while at < len(states):
        state = states[at]
        try:
            model.check(state)
        except Broken as error:
            trail = []
            step = at
            while step:
                step, what = came[step]
                trail.append(what)
            return Outcome(len(states), steps, depths[at], broken=str(error), trail=trail[::-1])
        if model.done(state):
            ends.append(at)
        for what, after in model.steps(state):
            steps += 1
            number = numbers.get(after)
            if number is None:
                number = numbers[after] = len(states)
                states.append(after)
                came.append((at, what))
                before.append([])
                depths.append(depths[at] + 1)
            before[number].append(at)
        at += 1
        if at % 10_000 == 0:
            progress(at)
    return Outcome(len(states), steps, depths[-1], stuck=len(states) - _reaching(ends, before))


def _reaching(ends: list[int], before: list[list[int]]) -> int:
    """From how many states one of ``ends`` can be reached."""
    seen = set(ends)
    stack = list(ends)
    while stack:
        for number in before[stack.pop()]:
            if number not in seen:
                seen.add(number)
                stack.append(number)
    return len(seen)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1, help="how many faults at most (default 1)")
    parser.add_argument("--instances", type=int, default=1, help="of each worker from the beginning (default 1)")
    parser.add_argument("--rows", type=int, default=2, help="rows of each mapper (default 2)")
    parser.add_argument("--mistake", choices=MISTAKES, help="a protocol with this mistake in it")
    parser.add_argument("--mistakes", action="store_true", help="every mistake in turn")
    options = parser.parse_args(argv)
    rows = tuple(tuple((k + m) % 2 for k in range(options.rows)) for m in range(2))
    wanted = MISTAKES if options.mistakes else (options.mistake,)
    failed = 0
    for mistake in wanted:
        begin_s = time.monotonic()
        outcome = explore(Model(rows=rows, instances=options.instances, faults_max=options.faults, mistake=mistake))
        told = f"{mistake or 'the protocol'}: {outcome.states:,} states, {outcome.steps:,} steps, depth {outcome.depth}"
        print(f"{told}, {time.monotonic() - begin_s:.1f} s")
        print(
            f"  {outcome.broken or ('holds in every state' if not outcome.stuck else f'{outcome.stuck} states stuck')}"
        )
        for what in outcome.trail:
            print(f"    {what}")
        failed += (outcome.broken is None) is (mistake is not None) or (mistake is None and outcome.stuck > 0)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
