"""Reduce, commit and settle against a real store in this process: what each failure leads to, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shuffle.api import Reducer, WorkerSpec
from shuffle.durable.reducer_state import REDUCERS_KEY, REDUCERS_VALUE, ReducerState
from shuffle.errors import (
    CommitConflict,
    CommitUnknown,
    CorruptData,
    ShuffleError,
    SplitBrain,
    StoreUnavailable,
    UserCodeError,
)
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.reducer.commit import Committer
from shuffle.reducer.core import FetchLimits, ReduceBatch, ReducerCore
from shuffle.reducer.cycle import CONFLICTS_MAX, CycleEnvironment, ReduceCycle
from shuffle.reducer.reduce import Reduced, ReduceStage
from shuffle.reducer.shared_core import SharedCore
from shuffle.statestore import StateClient, Transaction
from shuffle.support.retry import Backoff

R0, M0 = ReducerIndex(0), MapperIndex(0)
LIMITS = FetchLimits(100, 10_000, 0, 100, 10_000, 10_000)
PATIENCE_S = 10.0
KEY = pa.table({"name": ["total"]})


class Sums(Reducer):
    """Adds up ``v``; ``before`` is what each test wants to happen in user code."""

    before: Callable[[pa.Table], None] = staticmethod(lambda rows: None)

    def reduce(self, rows: pa.Table) -> Transaction | None:
        self.before(rows)
        transaction = self.state.transaction()
        found = transaction.lookup("totals", KEY)
        total = sum(rows["v"].to_pylist()) + (found["sum"][0].as_py() if found.num_rows else 0)
        transaction.write("totals", pa.table({"name": ["total"], "sum": pa.array([total], pa.int64())}))
        return transaction


class FailingCommitter(Committer):
    """Commits, or not, and then raises what is next in ``errors``; None is a commit like any other."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.errors: list[tuple[bool, ShuffleError] | None] = []
        self.read_errors: list[ShuffleError] = []

    def commit(self, reduced: Reduced) -> None:
        happens, error = (self.errors.pop(0) if self.errors else None) or (True, None)
        if happens:
            super().commit(reduced)
        if error is not None:
            raise error

    def read_state(self) -> ReducerState:
        if self.read_errors:
            raise self.read_errors.pop(0)
        return super().read_state()


class Counted:
    def __init__(self) -> None:
        self.commits: list[tuple[int, int]] = []
        """(rows, of which were set aside)."""
        self.conflicts = self.reduces = self.tries = 0

    def observe_reduce(self, seconds: float) -> None:
        self.reduces += 1

    def observe_commit(self, seconds: float) -> None:
        self.tries += 1

    def count_commit(self, rows: int, size_bytes: int, dead_letter_rows: int) -> None:
        self.commits.append((rows, dead_letter_rows))

    def count_conflict(self) -> None:
        self.conflicts += 1


class Instance:
    """One instance of reducer 0, with a clock that only its own waits move."""

    def __init__(self, store: StateClient, on_error: str = "stop") -> None:
        self.user = Sums({}, WorkerSpec("p", 0, Guid("g"), 1, 1), store)
        self.committer = FailingCommitter(store, "p/reducers", R0, 1)
        self.core = ReducerCore(1, LIMITS)
        self.core.restart(self.committer.read_state())
        self.shared = SharedCore(self.core)
        self.counted = Counted()
        self.now_s = 0.0
        self.forgotten = 0
        self.complete: Callable[[Reduced], None] = lambda reduced: None
        stage = ReduceStage(
            self.user,
            store,
            processor="p",
            index=R0,
            on_error="dead_letter" if on_error == "dead_letter" else "stop",
            dead_letter_queue=None,
            locate=lambda part, place: None,
        )
        surroundings = CycleEnvironment(
            metrics=self.counted,
            backoff=lambda: Backoff(1_000, 4_000, chance=lambda: 1.0),
            clock=lambda: self.now_s,
            sleep=self._sleep,
            on_wait=self._on_wait,
            complete=lambda reduced: self.complete(reduced),
            forget=self._forget,
        )
        self.cycle = ReduceCycle(stage, self.committer, self.shared, surroundings, processor="p", index=R0)

    def _sleep(self, seconds: float) -> bool:
        self.now_s += seconds
        return not self.shared.stopping

    def _on_wait(self, error: Exception, waited_s: float) -> None:
        if waited_s > PATIENCE_S:
            raise StoreUnavailable(f"waited too long: {error}")

    def _forget(self) -> None:
        self.forgotten += 1

    def fetch(self, *values: int) -> ReduceBatch:
        plan = self.core.fetch_plan(M0)
        assert plan is not None
        last = ShuffleIndex(plan.from_row_index + len(values))
        self.core.fetched(plan, [(pa.record_batch({"v": pa.array(values, pa.int64())}), last)])
        return self.taken()

    def taken(self) -> ReduceBatch:
        batch = self.core.take()
        assert batch is not None
        return batch

    def run_in_vain(self, batch: ReduceBatch, times: int) -> None:
        for _ in range(times):
            assert not self.cycle.run(batch)
            batch = self.taken()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "state") as client:
        client.create_table("p/reducers", key=REDUCERS_KEY, value=REDUCERS_VALUE)
        name, total = pa.field("name", pa.string(), nullable=False), pa.field("sum", pa.int64())
        client.create_table("totals", key=pa.schema([name]), value=pa.schema([total]))
        yield client


def total(store: StateClient) -> int | None:
    found = store.lookup("totals", KEY)
    return found["sum"][0].as_py() if found.num_rows else None


def failing(errors: list[Exception]) -> Callable[[pa.Table], None]:
    def before(rows: pa.Table) -> None:
        if errors:
            raise errors.pop(0)

    return before


def test_acknowledged_commit_is_counted_once_and_the_core_moves_on(store: StateClient) -> None:
    one = Instance(store)
    assert one.cycle.run(one.fetch(1, 2))
    assert (total(store), one.counted.commits, one.forgotten) == (3, [(2, 0)], 0)
    assert one.core.committed_state[M0] == 1
    assert one.core.in_flight is None


def test_store_that_is_away_in_reduce_is_waited_for_however_the_user_wraps_it(store: StateClient) -> None:
    wrapped = RuntimeError("lookup failed")
    wrapped.__cause__ = StoreUnavailable("away")
    one = Instance(store)
    one.user.before = failing([StoreUnavailable("away"), wrapped])
    assert one.cycle.run(one.fetch(1, 2))
    assert (total(store), one.now_s, one.counted.reduces, one.counted.tries) == (3, 3.0, 3, 1)


def test_reduce_gives_up_when_whoever_runs_it_is_out_of_patience(store: StateClient) -> None:
    one = Instance(store)
    one.user.before = failing([StoreUnavailable("away") for _ in range(100)])
    with pytest.raises(StoreUnavailable, match="waited too long: away"):
        one.cycle.run(one.fetch(1))
    assert PATIENCE_S < one.now_s < 2 * PATIENCE_S


def test_stopped_while_waiting_for_the_store_commits_nothing(store: StateClient) -> None:
    one = Instance(store)
    one.user.before = failing([StoreUnavailable("away")])
    batch = one.fetch(1)
    one.shared.stop()
    assert not one.cycle.run(batch)
    assert (total(store), one.counted.commits) == (None, [])


def test_result_that_a_restart_has_overtaken_is_not_committed(store: StateClient) -> None:
    one = Instance(store)
    one.user.before = lambda rows: one.shared.restart(ReducerState((ShuffleIndex(7),)))
    assert not one.cycle.run(one.fetch(1))
    assert (total(store), one.counted.tries, one.counted.commits) == (None, 0, [])


def test_commit_whose_answer_was_lost_is_counted_with_the_rows_set_aside(store: StateClient) -> None:
    def refuse(rows: pa.Table) -> None:
        if 7 in rows["v"].to_pylist():
            raise ValueError("seven")

    one = Instance(store, "dead_letter")
    one.user.before = refuse
    one.committer.errors = [(True, CommitUnknown("no answer"))]
    assert one.cycle.run(one.fetch(1, 7, 2))
    assert (total(store), one.counted.commits, one.forgotten) == (3, [(3, 1)], 1)


def test_commit_that_did_not_happen_is_handed_out_again_with_the_same_rows(store: StateClient) -> None:
    one = Instance(store)
    one.committer.errors = [(False, CommitUnknown("no answer"))]
    assert not one.cycle.run(one.fetch(1, 2))
    again = one.taken()
    assert (again.attempt, again.row_count) == (2, 2)
    assert one.cycle.run(again)
    assert (total(store), one.counted.commits) == (3, [(2, 0)])


def test_commits_without_an_answer_do_not_go_on_for_ever_where_patience_ends(store: StateClient) -> None:
    one = Instance(store)
    one.committer.errors = [(False, CommitUnknown("no answer")) for _ in range(100)]
    batch = one.fetch(1)
    with pytest.raises(StoreUnavailable, match="waited too long: no answer"):
        one.run_in_vain(batch, 100)
    assert one.counted.commits == []


def test_state_is_read_again_until_the_store_answers(store: StateClient) -> None:
    one = Instance(store)
    one.committer.errors = [(True, CommitUnknown("no answer"))]
    one.committer.read_errors = [StoreUnavailable("away"), StoreUnavailable("away")]
    assert one.cycle.run(one.fetch(1, 2))
    assert one.counted.commits == [(2, 0)]


def test_conflicts_in_a_row_end_the_worker_and_a_commit_between_them_begins_anew(store: StateClient) -> None:
    one = Instance(store)
    lost = (False, CommitConflict("a key has changed"))
    one.committer.errors = [*[lost] * (CONFLICTS_MAX - 1), None, *[lost] * CONFLICTS_MAX]
    batch = one.fetch(1)
    while not one.cycle.run(batch):
        batch = one.taken()
    assert one.counted.conflicts == CONFLICTS_MAX - 1
    batch = one.fetch(2)
    with pytest.raises(CommitConflict, match=f"reducer 0: {CONFLICTS_MAX} commits in a row lost a race"):
        one.run_in_vain(batch, CONFLICTS_MAX)
    assert total(store) == 1


def test_rows_that_another_instance_has_committed_are_its_own_to_count(store: StateClient) -> None:
    one, two = Instance(store), Instance(store)
    same = two.fetch(1, 2)
    assert one.cycle.run(one.fetch(1, 2))
    assert two.cycle.run(same)
    assert (one.counted.commits, two.counted.commits, total(store)) == ([(2, 0)], [], 3)
    assert two.core.committed_state == one.core.committed_state


def test_another_instance_that_has_gone_elsewhere_is_a_split_brain_and_the_core_goes_on_from_there(
    store: StateClient,
) -> None:
    one, two = Instance(store), Instance(store)
    behind = two.fetch(1, 2)
    assert one.cycle.run(one.fetch(1, 2, 3))
    with pytest.raises(SplitBrain, match="the store says 2"):
        two.cycle.run(behind)
    assert two.core.committed_state[M0] == 2
    assert two.core.take() is None
    assert two.cycle.run(two.fetch(4))
    assert (total(store), two.counted.commits, two.forgotten) == (10, [(1, 0)], 1)


def test_what_the_caller_adds_is_part_of_the_transaction(store: StateClient) -> None:
    schema = pa.schema([("v", pa.int64())])
    store.create_queue("out", schema=schema, partitions=1)
    one = Instance(store)

    def add(reduced: Reduced) -> None:
        assert reduced.transaction is not None
        reduced.transaction.append("out", 0, pa.table({"v": [5]}, schema=schema))

    one.complete = add
    one.committer.errors = [(False, CommitUnknown("no answer"))]
    assert not one.cycle.run(one.fetch(1))
    assert store.queue("out").bounds() == [(0, 0)]
    assert one.cycle.run(one.taken())
    assert store.queue("out").bounds() == [(0, 1)]


def test_store_that_is_away_for_what_the_caller_adds_runs_the_batch_again(store: StateClient) -> None:
    one = Instance(store)
    seen: list[Reduced] = []

    def away(reduced: Reduced) -> None:
        seen.append(reduced)
        raise StoreUnavailable("away")

    one.complete = away
    assert not one.cycle.run(one.fetch(1))
    transaction = seen[0].transaction
    assert transaction is not None
    with pytest.raises(ShuffleError, match="aborted already"):
        transaction.lookup("totals", KEY)
    one.complete = lambda reduced: None
    assert one.cycle.run(one.taken())
    assert total(store) == 1


def test_what_waiting_does_not_mend_is_raised_as_it_came(store: StateClient) -> None:
    one = Instance(store)
    one.user.before = failing([CorruptData("a checksum does not match")])
    with pytest.raises(CorruptData):
        one.cycle.run(one.fetch(1))
    two = Instance(store)
    two.committer.errors = [(False, CorruptData("a checksum does not match"))]
    with pytest.raises(CorruptData):
        two.cycle.run(two.fetch(1))
    assert two.now_s == 0.0


def test_transaction_that_the_store_refuses_is_reported_with_the_positions(store: StateClient) -> None:
    one = Instance(store)
    one.complete = lambda reduced: reduced.transaction.abort() if reduced.transaction is not None else None
    with pytest.raises(UserCodeError, match=r"mapper 0: 0 to 1.*aborted already"):
        one.cycle.run(one.fetch(1, 2))
    assert total(store) is None
