"""Fetching from real Flight servers of real mapper cores: answers, errors, several instances, single rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shuffle.discovery import MapperAddress, MapperDirectory, Membership
from shuffle.durable.reducer_state import ReducerState
from shuffle.durable.tables import mappers_group
from shuffle.errors import ShuffleError, StaleMapper, StoreUnavailable
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex, Token, new_guid
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.mapping import cut
from shuffle.mapper.serve import HostedMapper, MapperServer
from shuffle.mapper.shared_core import SharedCore as SharedMapperCore
from shuffle.messages import GetRows, Tail
from shuffle.metrics import ReducerMetrics
from shuffle.reducer.core import FetchedBatch, FetchLimits, ReduceBatch, ReducerCore
from shuffle.reducer.fetch import Fetcher, InstanceChoice, RowLocator, get_rows
from shuffle.reducer.shared_core import SharedCore
from shuffle.statestore import StateClient
from shuffle.support import flight
from shuffle.support.retry import Backoff
from tests import waiting

WAIT_S = 10.0
wait_until = partial(waiting.wait_until, wait_s=WAIT_S)

SCHEMA = pa.schema([("v", pa.int64())])
LIMITS = FetchLimits(
    fetch_rows_max=1000,
    fetch_bytes_max=1 << 20,
    fetch_wait_ms=100,
    batch_rows_max=1000,
    batch_bytes_max=1 << 20,
    queued_bytes_max=1 << 20,
)


class ServedMapper:
    """One instance of a mapper, with the value of each row equal to its shuffle index; rows go to two reducers."""

    def __init__(self, index: int = 0) -> None:
        self.guid = new_guid()
        self.core = MapperCore(self.guid, MapperIndex(index), 2, 1 << 30, processor="p")
        self.committed: dict[ReducerIndex, ShuffleIndex] = {}
        """What the reducers' rows in the store would say."""
        self.shared = SharedMapperCore(self.core, 2, read_committed=lambda: self.committed)
        self.server = MapperServer([HostedMapper.of(self.shared)])
        self.address = self.server.address

    def produce(self, count: int) -> None:
        begin = self.core.next_shuffle_index
        rows = pa.table([pa.array(range(begin, begin + count), pa.int64())], schema=SCHEMA)
        parts = cut(rows, np.arange(begin, begin + count) % 2, 2)
        self.shared.ingest(self.core.persisted, count, Token(b"t"), MappedBatch(SCHEMA, count, parts, None))

    def request(self, cursor: int = -1, guid: Guid | None = None, max_rows: int = 1000) -> GetRows:
        return GetRows(
            mapper_id=guid or self.guid,
            reducer_index=ReducerIndex(0),
            committed_row_index=ShuffleIndex(-1),
            from_row_index=ShuffleIndex(cursor),
            max_rows=max_rows,
            max_bytes=1 << 20,
            processor="p",
        )

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def mapper() -> Iterator[ServedMapper]:
    served = ServedMapper()
    yield served
    served.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "state") as client:
        yield client


# ---- one call -------------------------------------------------------------------------------------------------------


def test_get_rows_returns_batches_with_the_index_of_their_last_row(mapper: ServedMapper) -> None:
    mapper.produce(5)
    client = flight.connect(mapper.address)
    answer = get_rows(client, mapper.request(), who="mapper 0", timeout_s=5)
    assert [(batch["v"].to_pylist(), last) for batch, last in answer.batches] == [([0, 2, 4], 4)]
    assert [(tail.last_row_index, tail.more) for tail in answer.tails] == [(4, False)]
    nothing = get_rows(client, mapper.request(cursor=4), who="mapper 0", timeout_s=5)
    assert nothing.batches == []
    assert [tail.last_row_index for tail in nothing.tails] == [4], "an answer without rows has a tail, too"
    assert nothing.tails[0].complete_up_to == mapper.shared.core.next_shuffle_index - 1
    client.close()


def test_get_rows_of_a_mapper_that_has_mapped_nothing_yet(mapper: ServedMapper) -> None:
    client = flight.connect(mapper.address)
    answer = get_rows(client, mapper.request(), who="mapper 0", timeout_s=5)
    assert (answer.batches, answer.tails) == ([], [Tail(ShuffleIndex(-1), ShuffleIndex(-1))])
    client.close()


def test_get_rows_of_another_instance_is_a_stale_mapper(mapper: ServedMapper) -> None:
    client = flight.connect(mapper.address)
    with pytest.raises(StaleMapper):
        get_rows(client, mapper.request(guid=Guid("gone")), who="mapper 0", timeout_s=5)
    client.close()


def test_get_rows_of_nobody_is_a_typed_error_in_bounded_time() -> None:
    client = flight.connect("grpc://127.0.0.1:1")
    begin_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="mapper 7"):
        get_rows(
            client,
            GetRows(Guid("x"), ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(-1), 1, 1),
            who="mapper 7",
            timeout_s=2,
        )
    assert time.monotonic() - begin_s < 5
    client.close()


def test_choice_is_the_youngest_and_after_failures_the_next_in_turn() -> None:
    young, old = MapperAddress(Guid("b"), "grpc://h:2"), MapperAddress(Guid("a"), "grpc://h:1")
    choice = InstanceChoice()
    assert choice.choose([]) is None
    assert choice.choose([young, old]) == young
    choice.failed()
    assert choice.choose([young, old]) == old
    choice.failed()
    assert choice.choose([young, old]) == young
    choice.failed()
    assert choice.choose([young]) == young
    newest = MapperAddress(Guid("c"), "grpc://h:3")
    assert choice.choose([newest, young]) == newest, "a new list begins with its youngest"


# ---- a fetcher ------------------------------------------------------------------------------------------------------


class Fetching:
    """One fetcher of mapper 0 against a real directory."""

    def __init__(self, store: StateClient) -> None:
        self.store = store
        self.core = ReducerCore(1, LIMITS)
        self.shared = SharedCore(self.core)
        self.directory = MapperDirectory(store, "p", self.shared.fail, wait_ms=100)
        self.rows_gone = 0
        self.fetcher = Fetcher(
            MapperIndex(0),
            ReducerIndex(0),
            self.shared,
            self.directory,
            Backoff(5, 50),
            ReducerMetrics("p", 0),
            self._on_rows_gone,
        )
        self.members: list[Membership] = []
        self.fetcher.start()

    def _on_rows_gone(self) -> None:
        self.rows_gone += 1

    def register(self, guid: Guid, address: str) -> Membership:
        attributes = {"index": "0", "address": address}
        member = Membership(self.store, mappers_group("p"), guid, attributes, 5000, self.shared.fail)
        member.start()
        self.members.append(member)
        return member

    def work(self) -> ReduceBatch:
        found = self.shared.next_batch()
        assert found is not None
        return found

    def close(self) -> None:
        self.shared.stop()
        self.fetcher.interrupt()
        self.directory.close()
        self.fetcher.join(5)
        assert not self.fetcher.is_alive()
        for member in self.members:
            member.close()
        assert self.shared.failure is None


@pytest.fixture
def fetching(store: StateClient) -> Iterator[Fetching]:
    one = Fetching(store)
    yield one
    one.close()


def test_fetcher_waits_for_a_missing_mapper_and_takes_it_up_when_it_comes(
    fetching: Fetching, mapper: ServedMapper
) -> None:
    mapper.produce(3)
    fetching.register(mapper.guid, mapper.address)
    work = fetching.work()
    assert work.rowset()["v"].to_pylist() == [0, 2]
    mapper.produce(3)
    assert fetching.shared.committed(work)
    assert fetching.work().rowset()["v"].to_pylist() == [4]
    wait_until(lambda: mapper.core.buckets[0].committed == 2)


def test_fetcher_passes_over_a_dead_young_instance_for_a_living_old_one(
    fetching: Fetching, mapper: ServedMapper
) -> None:
    mapper.produce(1)
    dead = ServedMapper()
    dead.close()
    fetching.register(mapper.guid, mapper.address)
    fetching.register(dead.guid, dead.address)
    assert fetching.work().rowset()["v"].to_pylist() == [0]


def test_fetcher_goes_on_with_the_replacement_exactly_at_its_cursor(fetching: Fetching) -> None:
    first, second = ServedMapper(), ServedMapper()
    first.produce(4)
    second.produce(6)
    member = fetching.register(first.guid, first.address)
    work = fetching.work()
    assert work.rowset()["v"].to_pylist() == [0, 2]
    fetching.shared.committed(work)
    first.close()
    member.close()
    second.committed[ReducerIndex(0)] = ShuffleIndex(2)
    fetching.register(second.guid, second.address)
    assert fetching.work().rowset()["v"].to_pylist() == [4]
    second.close()


def test_fetcher_reports_rows_that_another_instance_has_committed(fetching: Fetching, mapper: ServedMapper) -> None:
    mapper.produce(4)
    mapper.committed[ReducerIndex(0)] = ShuffleIndex(2)
    twin = GetRows(mapper.guid, ReducerIndex(0), ShuffleIndex(2), ShuffleIndex(2), 10, 1000, processor="p")
    mapper.shared.get_rows(twin)
    fetching.register(mapper.guid, mapper.address)
    wait_until(lambda: fetching.rows_gone > 0)
    fetching.shared.restart(ReducerState((ShuffleIndex(2),)))
    mapper.produce(1)
    assert fetching.work().rowset()["v"].to_pylist() == [4]


def test_locator_finds_the_index_of_a_single_row(fetching: Fetching, mapper: ServedMapper) -> None:
    mapper.produce(9)
    fetching.register(mapper.guid, mapper.address)
    part = fetching.work().parts[0]
    locate = RowLocator(ReducerIndex(0), fetching.shared, fetching.directory)
    assert [locate(part, place) for place in range(4)] == [0, 2, 4, 6]
    elsewhere = FetchedBatch(MapperIndex(5), part.from_row_index, part.last_row_index, part.batch, 1)
    assert locate(elsewhere, 0) is None


# ---- the shared core ------------------------------------------------------------------------------------------------


def test_reconcile_believes_its_own_commits_and_restarts_for_those_of_others() -> None:
    core = ReducerCore(1, LIMITS)
    shared = SharedCore(core)
    other = ReducerState((ShuffleIndex(5),))
    assert shared.reconcile(lambda: core.committed_state) is None
    assert shared.reconcile(lambda: other) == other
    assert core.committed_state == other


def test_reconcile_does_not_go_back_to_a_state_read_before_its_own_commit() -> None:
    core = ReducerCore(1, LIMITS)
    shared = SharedCore(core)
    plan = core.fetch_plan(MapperIndex(0))
    assert plan is not None
    core.fetched(plan, [(pa.record_batch({"v": [1]}), ShuffleIndex(0))])
    work = core.take()
    assert work is not None

    def read_while_the_commit_goes_through() -> ReducerState:
        before = core.committed_state
        shared.committed(work)
        return before

    assert shared.reconcile(read_while_the_commit_goes_through) is None
    assert core.committed_state == work.new


def test_stopped_core_hands_out_nothing() -> None:
    shared = SharedCore(ReducerCore(1, LIMITS))
    shared.fail(ShuffleError("first"))
    shared.fail(ShuffleError("second"))
    assert shared.next_plan(MapperIndex(0)) is None
    assert shared.next_batch() is None
    assert str(shared.failure) == "first"
    assert not shared.sleep(10)
