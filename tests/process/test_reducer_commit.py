"""Reduce and commit against a real store in this process: what is written, and what is refused, in each race."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.api import Reducer, WorkerSpec
from shuffle.durable.reducer_state import REDUCERS_KEY, REDUCERS_VALUE
from shuffle.errors import CommitConflict, SplitBrain, StoreUnavailable, UserCodeError
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.reducer.commit import Committer
from shuffle.reducer.core import FetchLimits, ReduceBatch, ReducerCore, Settled
from shuffle.reducer.reduce import Reduced, ReduceStage
from shuffle.statestore import StateClient, Transaction

R0, M0 = ReducerIndex(0), MapperIndex(0)
LIMITS = FetchLimits(100, 10_000, 0, 100, 10_000, 10_000)
TOTAL_KEY = pa.table({"name": ["total"]})


class Sums(Reducer):
    """Adds up ``v``; ``before`` is what each test wants to happen in user code."""

    before: Callable[[pa.Table], object] = staticmethod(lambda rows: None)

    def reduce(self, rows: pa.Table) -> Transaction | None:
        answer = self.before(rows)
        if answer is not None:
            return answer  # type: ignore[return-value]
        transaction = self.state.transaction()
        found = transaction.lookup("totals", TOTAL_KEY)
        total = sum(rows["v"].to_pylist()) + (found["sum"][0].as_py() if found.num_rows else 0)
        transaction.write("totals", pa.table({"name": ["total"], "sum": pa.array([total], pa.int64())}))
        return transaction


class Instance:
    """One instance of reducer 0: a core, and the stages that the daemon would run in threads."""

    def __init__(self, store: StateClient, on_error: str = "stop") -> None:
        self.user = Sums({}, WorkerSpec("p", 0, Guid("g"), 1, 1), store)
        self.committer = Committer(store, "p/reducers", R0, 1)
        self.core = ReducerCore(1, LIMITS)
        self.core.restart(self.committer.read_state())
        self.stage = ReduceStage(
            self.user,
            store,
            processor="p",
            index=R0,
            on_error="dead_letter" if on_error == "dead_letter" else "stop",
            dead_letter_queue=None,
            locate=lambda part, place: None,
        )

    def fetch(self, *values: int) -> ReduceBatch:
        plan = self.core.fetch_plan(M0)
        assert plan is not None
        last = ShuffleIndex(plan.from_row_index + len(values))
        self.core.fetched(plan, [(pa.record_batch({"v": pa.array(values, pa.int64())}), last)])
        work = self.core.take()
        assert work is not None
        return work

    def commit(self, reduced: Reduced) -> None:
        self.committer.commit(reduced)
        self.core.committed(reduced.batch)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "state") as client:
        client.create_table("p/reducers", key=REDUCERS_KEY, value=REDUCERS_VALUE)
        name, total = pa.field("name", pa.string(), nullable=False), pa.field("sum", pa.int64())
        client.create_table("totals", key=pa.schema([name]), value=pa.schema([total]))
        yield client


def total(store: StateClient) -> int | None:
    found = store.lookup("totals", TOTAL_KEY)
    return found["sum"][0].as_py() if found.num_rows else None


def committed(store: StateClient) -> int:
    return Committer(store, "p/reducers", R0, 1).read_state()[M0]


def test_commit_writes_the_effect_and_the_positions_together(store: StateClient) -> None:
    one = Instance(store)
    work = one.fetch(1, 2, 3)
    reduced = one.stage.reduce(work)
    assert (total(store), committed(store)) == (None, -1)
    one.commit(reduced)
    assert (total(store), committed(store)) == (6, 2)


def test_commit_of_a_work_without_a_transaction_moves_the_positions(store: StateClient) -> None:
    one = Instance(store)
    one.commit(Reduced(one.fetch(1, 2), None))
    assert (total(store), committed(store)) == (None, 1)


def test_commit_after_another_instance_has_committed_the_same_rows_is_a_split_brain(store: StateClient) -> None:
    one, two = Instance(store), Instance(store)
    work, same = one.fetch(1, 2), two.fetch(1, 2)
    one.commit(one.stage.reduce(work))
    late = two.stage.reduce(same)  # Its transaction reads after the commit: the store has no reason to refuse it.
    with pytest.raises(SplitBrain, match="expected to have committed mapper 0 up to -1, and the store says 1"):
        two.committer.commit(late)
    assert (total(store), committed(store)) == (3, 1)


def test_commit_while_another_instance_commits_is_a_conflict(store: StateClient) -> None:
    one, two = Instance(store), Instance(store)
    work, same = one.fetch(1, 2), two.fetch(1, 2)
    early = two.stage.reduce(same)
    one.commit(one.stage.reduce(work))
    with pytest.raises((CommitConflict, SplitBrain)):
        two.committer.commit(early)
    assert (total(store), committed(store)) == (3, 1)
    assert two.core.settle(same, two.committer.read_state()) is Settled.COMMITTED, "these very rows, once"


def test_conflict_over_a_key_of_the_user_reduces_the_same_rows_again(store: StateClient) -> None:
    one = Instance(store)
    work = one.fetch(1, 2)
    reduced = one.stage.reduce(work)
    with store.transaction() as other:
        other.write("totals", pa.table({"name": ["total"], "sum": pa.array([100], pa.int64())}))
        other.commit()
    with pytest.raises(CommitConflict):
        one.committer.commit(reduced)
    assert one.core.settle(work, one.committer.read_state()) is Settled.RERUN
    again = one.core.take()
    assert again is not None
    one.commit(one.stage.reduce(again))
    assert (total(store), committed(store)) == (103, 1)


def test_transaction_that_the_user_committed_is_refused(store: StateClient) -> None:
    one = Instance(store)
    transaction = store.transaction()
    transaction.commit()
    one.user.before = lambda rows: transaction
    with pytest.raises(UserCodeError, match="committed already"):
        one.committer.commit(one.stage.reduce(one.fetch(1)))
    assert committed(store) == -1


def test_reduce_that_returns_something_else_is_reported(store: StateClient) -> None:
    one = Instance(store)
    one.user.before = lambda rows: "done"
    with pytest.raises(UserCodeError, match=r"mapper 0: 0 to 0.*returned a str; it must return the transaction"):
        one.stage.reduce(one.fetch(1))


@pytest.mark.parametrize("on_error", ["stop", "dead_letter"])
def test_store_that_is_away_is_not_the_fault_of_a_row(store: StateClient, on_error: str) -> None:
    def away(rows: pa.Table) -> None:
        raise StoreUnavailable("away")

    one = Instance(store, on_error)
    one.user.before = away
    with pytest.raises(StoreUnavailable):
        one.stage.reduce(one.fetch(1, 2))


def test_dead_letters_are_written_only_with_the_commit_and_say_what_is_known_of_the_position(
    store: StateClient,
) -> None:
    def refuse(rows: pa.Table) -> None:
        if 7 in rows["v"].to_pylist():
            raise ValueError("seven")

    one = Instance(store, "dead_letter")
    one.user.before = refuse
    reduced = one.stage.reduce(one.fetch(1, 7, 2))
    assert reduced.dead_letter_rows == 1
    assert store.queue("p/reducer_dead_letters").bounds() == [(0, 0)]
    one.commit(reduced)
    assert (total(store), committed(store)) == (3, 2)
    letters, _ = store.queue("p/reducer_dead_letters").read(0, 0)
    assert letters["reason"].to_pylist() == ["ValueError: seven (its position lies between 0 and 2)"]


def test_batch_of_poison_only_commits_its_dead_letters(store: StateClient) -> None:
    def refuse(rows: pa.Table) -> None:
        raise ValueError("no")

    one = Instance(store, "dead_letter")
    one.user.before = refuse
    one.commit(one.stage.reduce(one.fetch(1, 2)))
    assert (total(store), committed(store)) == (None, 1)
    assert store.queue("p/reducer_dead_letters").bounds() == [(0, 2)]
