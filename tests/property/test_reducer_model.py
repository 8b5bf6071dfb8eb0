"""ReducerCore against a naive model of mappers and store.

Two instances of one reducer live side by side. Answers are held back and delivered late, commits are lost, applied
though nobody hears of it, or applied long after; instances crash. Whatever happens: every row has its effect once, in
the order of its mapper, committed never falls, and no mapper is told of a commit that the store does not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffle.durable.reducer_state import ReducerState
from shuffle.ids import MapperIndex, ShuffleIndex
from shuffle.reducer.core import FetchLimits, FetchPlan, ReduceBatch, ReducerCore, Settled

Answer = list[tuple[pa.RecordBatch, ShuffleIndex]]
Effect = tuple[int, int]
"""(mapper, shuffle index) of one row."""


@dataclass
class NaiveStore:
    """One row, and the effects of all commits in their order. A commit applies only upon the row it expects."""

    state: ReducerState
    effects: list[Effect] = field(default_factory=list)

    def commit(self, expected: ReducerState, new: ReducerState, effects: list[Effect]) -> bool:
        if self.state != expected:
            return False
        assert all(a <= b for a, b in zip(self.state.committed_row_indices, new.committed_row_indices, strict=True))
        self.state = new
        self.effects += effects
        return True


class NaiveMapper:
    """The shuffle indexes of this reducer's rows: increasing, with gaps where other reducers' rows are."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.rows: list[int] = []
        self.end = 0

    def produce(self, gaps: list[int]) -> None:
        for gap in gaps:
            self.rows.append(self.end + gap)
            self.end += gap + 1

    def answer(self, plan: FetchPlan, sizes: list[int]) -> Answer:
        wanted = [row for row in self.rows if row > plan.from_row_index][: plan.max_rows]
        batches: Answer = []
        for size in sizes:
            part, wanted = wanted[:size], wanted[size:]
            if part:
                mapper = pa.array([self.index] * len(part), pa.int32())
                batch = pa.record_batch({"mapper": mapper, "row": pa.array(part, pa.int64())})
                batches.append((batch, ShuffleIndex(part[-1])))
        return batches


def effects_of(work: ReduceBatch) -> list[Effect]:
    rows = work.rowset()
    return list(zip(rows["mapper"].to_pylist(), rows["row"].to_pylist(), strict=True))


class Instance:
    def __init__(self, mapper_count: int, limits: FetchLimits, persisted: ReducerState) -> None:
        self.core = ReducerCore(mapper_count, limits)
        self.core.restart(persisted)
        self.reduced: list[ReduceBatch] = []
        """Between reduce and commit; a restart may have overtaken some of it."""
        self.answers: list[tuple[FetchPlan, Answer]] = []
        """On the wire."""


class TwoReducers:
    """The world: mappers, a store, two instances, and everything that is on the wire between them."""

    def __init__(self, mapper_count: int, batch_rows_max: int) -> None:
        self.limits = FetchLimits(
            fetch_rows_max=10,
            fetch_bytes_max=1 << 20,
            fetch_wait_ms=0,
            batch_rows_max=batch_rows_max,
            batch_bytes_max=1 << 20,
            queued_bytes_max=200,
        )
        self.mappers = [NaiveMapper(i) for i in range(mapper_count)]
        self.store = NaiveStore(ReducerState.initial(mapper_count))
        self.instances = [Instance(mapper_count, self.limits, self.store.state) for _ in range(2)]
        self.late: list[tuple[ReducerState, ReducerState, list[Effect]]] = []
        self.before = self.store.state
        self.seen: Counter[str] = Counter()

    def produce(self, who: int, n: int) -> None:
        """A mapper produces rows, with gaps between them."""
        self.mappers[n % len(self.mappers)].produce([(n >> i) % 3 for i in range(1 + n % 5)])

    def ask(self, who: int, n: int) -> None:
        """A mapper answers; the answer is on the wire."""
        instance, mapper_index = self.instances[who], MapperIndex(n % len(self.mappers))
        plan = instance.core.fetch_plan(mapper_index)
        if plan is not None:
            assert plan.committed_row_index <= self.store.state[mapper_index], (
                "told of a commit the store does not hold"
            )
            assert plan.committed_row_index <= plan.from_row_index
            instance.answers.append((plan, self.mappers[mapper_index].answer(plan, [1 + n % 4, 1 + n % 3])))

    def arrive(self, who: int, n: int) -> None:
        """One of the answers arrives, not always the first, and sometimes twice."""
        instance = self.instances[who]
        if instance.answers:
            which = n % 5 % len(instance.answers)
            plan, batches = instance.answers[which] if n % 7 == 0 else instance.answers.pop(which)
            if not instance.core.fetched(plan, batches) and batches:
                self.seen["answers ignored"] += 1

    def fetch(self, who: int, n: int) -> None:
        """A mapper answers and the answer arrives."""
        self.ask(who, n)
        if self.instances[who].answers:
            self.instances[who].core.fetched(*self.instances[who].answers.pop())

    def reduce(self, who: int, n: int) -> None:
        instance = self.instances[who]
        work = instance.core.take()
        if work is not None:
            assert instance.core.in_flight is work
            assert work.row_count <= self.limits.batch_rows_max or len(work.parts) == 1
            instance.reduced.append(work)

    def _oldest(self, who: int) -> ReduceBatch | None:
        instance = self.instances[who]
        while instance.reduced:
            work = instance.reduced.pop(0)
            if instance.core.is_current(work):
                return work
            self.seen["batches superseded"] += 1
        return None

    def commit(self, who: int, n: int) -> None:
        work, core = self._oldest(who), self.instances[who].core
        if work is not None:
            if self.store.commit(work.expected, work.new, effects_of(work)):
                core.committed(work)
                self.seen["commits"] += 1
            else:
                settled = core.settle(work, self.store.state)
                assert settled is not Settled.RERUN
                self.seen[settled.value] += 1

    def lose_race(self, who: int, n: int) -> None:
        """A conflict over a key of the user's: the reducer's own row has not changed."""
        work, core = self._oldest(who), self.instances[who].core
        if work is not None:
            self.seen[core.settle(work, self.store.state).value] += 1

    def lose_answer(self, who: int, n: int) -> None:
        """The answer to a commit is lost; it was applied, or will be later, or never."""
        work, core = self._oldest(who), self.instances[who].core
        if work is not None:
            commit = (work.expected, work.new, effects_of(work))
            if n % 2:
                self.store.commit(*commit)
            else:
                self.late.append(commit)
            self.seen[core.settle(work, self.store.state).value] += 1

    def reconcile(self, who: int, n: int) -> None:
        """A mapper knows of more commits than this instance, which then looks at the row and starts again from it."""
        core = self.instances[who].core
        if not core.agrees(self.store.state):
            core.restart(self.store.state)
            self.seen["reconciled"] += 1

    def apply_late(self, who: int, n: int) -> None:
        if self.late and self.store.commit(*self.late.pop(n % len(self.late))):
            self.seen["late commits applied"] += 1

    def crash(self, who: int, n: int) -> None:
        self.instances[who] = Instance(len(self.mappers), self.limits, self.store.state)

    def check(self) -> None:
        """Committed never falls, and the effects are those of the prefix it names, once and in order."""
        now = self.store.state
        assert all(a <= b for a, b in zip(self.before.committed_row_indices, now.committed_row_indices, strict=True))
        self.before = now
        for mapper in self.mappers:
            had_effect = [row for index, row in self.store.effects if index == mapper.index]
            committed = now[MapperIndex(mapper.index)]
            assert had_effect == [row for row in mapper.rows if row <= committed], f"mapper {mapper.index}"

    def drain(self, who: int) -> None:
        """When the faults stop, one instance commits everything in bounded time."""
        for _ in range(4 + 2 * sum(len(mapper.rows) for mapper in self.mappers)):
            for mapper in self.mappers:
                self.fetch(who, mapper.index)
            self.reduce(who, 0)
            self.commit(who, 0)
        self.check()
        assert len(self.store.effects) == sum(len(mapper.rows) for mapper in self.mappers)


WEIGHTS = {
    TwoReducers.produce: 4,
    TwoReducers.ask: 2,
    TwoReducers.arrive: 2,
    TwoReducers.fetch: 8,
    TwoReducers.reduce: 8,
    TwoReducers.commit: 6,
    TwoReducers.lose_race: 2,
    TwoReducers.lose_answer: 2,
    TwoReducers.reconcile: 2,
    TwoReducers.apply_late: 2,
    TwoReducers.crash: 1,
}
STEPS = st.tuples(
    st.sampled_from([step for step, weight in WEIGHTS.items() for _ in range(weight)]),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 1000),
)
WORLDS = st.builds(TwoReducers, st.integers(1, 3), st.integers(1, 8))


@settings(max_examples=150, deadline=None)
@given(WORLDS, st.lists(STEPS, min_size=60, max_size=150), st.integers(0, 1))
def test_two_reducers_with_every_fault_have_every_effect_once(
    world: TwoReducers, steps: list[tuple[Callable[[TwoReducers, int, int], None], int, int]], last: int
) -> None:
    for step, who, n in steps:
        step(world, who, n)
        world.check()
    world.drain(last)


def test_the_faults_of_the_model_do_happen() -> None:
    """A model in which nothing goes wrong would prove nothing."""
    random, seen = Random(7), Counter[str]()
    steps = list(WEIGHTS)
    for _ in range(40):
        world = TwoReducers(random.randint(1, 3), random.randint(1, 8))
        for _ in range(120):
            step = random.choices(steps, list(WEIGHTS.values()))[0]
            step(world, int(random.random() < 0.25), random.randrange(1000))
            world.check()
        world.drain(random.randint(0, 1))
        seen += world.seen
    kinds = [
        "commits",
        "committed",
        "rerun",
        "split brain",
        "answers ignored",
        "batches superseded",
        "reconciled",
        "late commits applied",
    ]
    assert {kind: seen[kind] >= 5 for kind in kinds} == dict.fromkeys(kinds, True), seen
