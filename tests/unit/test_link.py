"""One exchange for many pairs, against Flight servers of real mapper cores: answers, errors of one, and of all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import ShuffleError, StaleMapper, StoreUnavailable
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.mapping import cut
from shuffle.mapper.serve import HostedMapper, MapperServer
from shuffle.mapper.shared_core import SharedCore
from shuffle.messages import GetRows
from shuffle.reducer.connections import ClientPool
from shuffle.reducer.core import FetchPlan
from shuffle.reducer.exchange import ManyAnswer, RowsResponse, RowStream
from shuffle.reducer.link import Link, Links
from shuffle.support import flight
from tests import waiting

wait_until = partial(waiting.wait_until, wait_s=10.0)
SCHEMA = pa.schema([("v", pa.int64())])
REDUCERS = 3


class Process:
    """A process of mappers, each with rows for three reducers; the value of a row is its shuffle index."""

    def __init__(self, mappers: int) -> None:
        self.committed: dict[ReducerIndex, ShuffleIndex] = {}
        self.mappers: list[SharedCore] = []
        for index in range(mappers):
            core = MapperCore(Guid(f"g{index}"), MapperIndex(index), REDUCERS, 256 << 20, processor="p")
            self.mappers.append(SharedCore(core, REDUCERS, read_committed=lambda: self.committed))
        self.server = MapperServer([HostedMapper.of(one) for one in self.mappers])

    def produce(self, mapper: int, rows: int, schema: pa.Schema = SCHEMA) -> None:
        shared = self.mappers[mapper]
        begin = shared.core.next_shuffle_index
        table = pa.table([pa.array(range(begin, begin + rows), pa.int64())], schema=schema)
        parts = cut(table, np.arange(begin, begin + rows) % REDUCERS, REDUCERS)
        shared.ingest(shared.core.persisted, rows, Token(b"t"), MappedBatch(schema, rows, parts, None))

    @property
    def waiting(self) -> int:
        return sum(sum(one.core.waiting) for one in self.mappers)


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process(2)
    yield made
    made.server.close()


def request(mapper: int, reducer: int, cursor: int = -1, committed: int = -1, guid: str = "") -> GetRows:
    return GetRows(
        mapper_id=Guid(guid or f"g{mapper}"),
        reducer_index=ReducerIndex(reducer),
        committed_row_index=ShuffleIndex(committed),
        from_row_index=ShuffleIndex(cursor),
        max_rows=1_000_000,
        max_bytes=64 << 20,
        processor="p",
    )


def values(answer: ManyAnswer) -> list[int]:
    assert isinstance(answer, RowsResponse)
    return [value for batch, _ in answer.batches for value in batch["v"].to_pylist()]


@pytest.fixture
def stream(process: Process) -> Iterator[RowStream]:
    client = flight.connect(process.server.address)
    made = RowStream(client, "mappers", share_memory=False)
    yield made
    made.close()
    client.close()


# ---- one message ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_memory", [False, True])
@pytest.mark.parametrize("rows", [30, 300_000])
def test_each_pair_gets_its_own_rows(process: Process, share_memory: bool, rows: int) -> None:
    process.produce(0, rows)
    process.produce(1, rows // 2)
    client = flight.connect(process.server.address)
    stream = RowStream(client, "mappers", share_memory)
    pairs = [(mapper, reducer) for reducer in range(REDUCERS) for mapper in range(2)]
    answers = stream.get_many([request(*pair) for pair in pairs], 0, 5.0)
    for (mapper, reducer), answer in zip(pairs, answers, strict=True):
        assert values(answer) == list(range(reducer, rows // (mapper + 1), REDUCERS))
    stream.close()
    client.close()


def test_rows_are_divided_among_the_pairs_where_there_is_not_room_for_all(
    process: Process, stream: RowStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shuffle.mapper.serve.MANY_BYTES_MAX", 3 * 8 * 10)
    process.produce(0, 300)
    answers = stream.get_many([request(0, reducer) for reducer in range(REDUCERS)], 0, 5.0)
    assert [len(values(answer)) for answer in answers] == [10, 10, 10]
    alone = stream.get_many([request(1, 0), request(0, 1)], 0, 5.0)
    assert [len(values(answer)) for answer in alone] == [0, 30], "the second may use what the first has left"


def test_error_of_one_pair_leaves_the_others_their_rows(process: Process, stream: RowStream) -> None:
    process.produce(0, 3)
    answers = stream.get_many([request(0, 0), request(0, 1, guid="gone"), request(0, 2)], 5_000, 5.0)
    assert values(answers[0]) == [0]
    assert isinstance(answers[1], StaleMapper)
    assert values(answers[2]) == [2]
    assert values(stream.get_many([request(0, 1)], 0, 5.0)[0]) == [1], "the exchange goes on"


def test_wait_ends_when_any_pair_has_rows_and_says_so_to_the_others(process: Process, stream: RowStream) -> None:
    process.produce(0, 3)
    process.produce(1, 3)
    requests = [request(0, 0, cursor=0), request(1, 0, cursor=0), request(1, 1, cursor=1)]
    threading.Thread(target=lambda: (wait_until(lambda: process.waiting == 3), process.produce(1, 1))).start()
    answers = stream.get_many(requests, 8_000, 10.0)
    assert [values(answer) for answer in answers] == [[], [3], []]
    assert [answer.is_early for answer in answers if isinstance(answer, RowsResponse)] == [True, False, True]
    assert process.waiting == 0


def test_wait_that_nothing_ends_is_as_long_as_requested(process: Process, stream: RowStream) -> None:
    process.produce(0, 3)
    begin_s = time.monotonic()
    answers = stream.get_many([request(0, 0, cursor=0), request(0, 1, cursor=1)], 100, 5.0)
    assert time.monotonic() - begin_s >= 0.1
    assert [answer.is_early for answer in answers if isinstance(answer, RowsResponse)] == [False, False]
    assert [tail.complete_up_to for answer in answers if isinstance(answer, RowsResponse) for tail in answer.tails] == [
        2,
        2,
    ]


def test_request_that_needs_the_store_is_to_be_made_alone(process: Process, stream: RowStream) -> None:
    process.produce(0, 6)
    process.committed[ReducerIndex(1)] = ShuffleIndex(1)
    claiming = request(0, 1, cursor=1, committed=1)
    answers = stream.get_many([request(0, 0), claiming], 0, 5.0)
    assert values(answers[0]) == [0, 3]
    assert answers[1] is None
    assert values(stream.get_rows(claiming, 5.0)) == [4]
    assert values(stream.get_many([replace(claiming)], 0, 5.0)[0]) == [4], "the claim is believed from now on"


def test_rows_of_another_schema_are_to_be_fetched_alone(process: Process, stream: RowStream) -> None:
    process.produce(0, 3)
    process.produce(1, 3, pa.schema([("w", pa.int64())]))
    answers = stream.get_many([request(0, 0), request(1, 0)], 0, 5.0)
    assert values(answers[0]) == [0]
    assert answers[1] is None


# ---- a link ---------------------------------------------------------------------------------------------------------


class Pair:
    """A passenger that takes rows until it is told to get off, and keeps them."""

    def __init__(self, mapper: int, reducer: int, guid: str = "") -> None:
        self.asked = replace(request(mapper, reducer, guid=guid), wait_ms=500)
        self.rows: list[int] = []
        self.alone: int | None = None
        self.error: ShuffleError | None = None
        self.is_done = False
        self.thread: threading.Thread | None = None

    def plan_on_board(self) -> FetchPlan | None:
        asked = self.asked
        cursor = ShuffleIndex(self.rows[-1] if self.rows else -1)
        plan = FetchPlan(MapperIndex(0), 0, asked.committed_row_index, cursor, 1_000, 1 << 20, 500)
        return None if self.is_done else plan

    def request_of(self, plan: FetchPlan) -> GetRows:
        return replace(self.asked, from_row_index=plan.from_row_index)

    def took(self, plan: FetchPlan, response: RowsResponse, seconds: float) -> int:
        self.rows += values(response)
        return 8 * len(response.batches)

    def pause_s(self, response_bytes: int) -> float:
        return 0.0

    def board(self, link: Link) -> Pair:
        self.thread = threading.Thread(target=self._ride, args=(link,), daemon=True)
        self.thread.start()
        return self

    def _ride(self, link: Link) -> None:
        try:
            self.alone = link.ride(self)
            while self.alone and not self.is_done:  # It was late; a fetcher would make requests of its own now.
                time.sleep(0.01)
                self.alone = link.ride(self)
        except ShuffleError as error:
            self.error = error

    def joined(self) -> bool:
        assert self.thread is not None
        self.thread.join(10.0)
        return not self.thread.is_alive()


@pytest.fixture
def link(process: Process) -> Link:
    return Link(process.server.address, ClientPool(), share_memory=False)


def test_pairs_on_board_get_their_rows_as_they_come(process: Process, link: Link) -> None:
    pairs = [Pair(mapper, reducer).board(link) for mapper in range(2) for reducer in range(REDUCERS)]
    for _ in range(20):
        process.produce(0, 3)
        process.produce(1, 3)
    wait_until(lambda: all(len(pair.rows) == 20 for pair in pairs))
    assert [pair.rows for pair in pairs] == [
        list(range(reducer, 60, REDUCERS)) for _ in range(2) for reducer in (0, 1, 2)
    ]
    for pair in pairs:
        pair.is_done = True
    assert all(pair.joined() for pair in pairs)
    assert link.is_empty


def test_pair_that_is_refused_gets_off_and_the_others_stay(process: Process, link: Link) -> None:
    driver, other = Pair(0, 0, guid="gone").board(link), Pair(0, 1).board(link)
    assert driver.joined()
    assert isinstance(driver.error, StaleMapper)
    process.produce(0, 3)
    wait_until(lambda: other.rows == [1])
    other.is_done = True
    process.produce(0, 3)
    assert other.joined()
    assert other.error is None


def test_all_get_off_with_an_error_when_the_process_of_the_mappers_is_gone(process: Process, link: Link) -> None:
    process.produce(0, 3)
    pairs = [Pair(0, reducer).board(link) for reducer in range(REDUCERS)]
    wait_until(lambda: all(pair.rows for pair in pairs))
    process.server.close()
    assert all(pair.joined() for pair in pairs)
    assert all(isinstance(pair.error, StoreUnavailable) for pair in pairs)
    assert len({id(pair.error) for pair in pairs}) == REDUCERS, "each has an error of its own"


def test_interrupted_link_lets_all_off_without_an_error(process: Process, link: Link) -> None:
    pairs = [Pair(0, reducer).board(link) for reducer in range(REDUCERS)]
    process.produce(0, 3)
    wait_until(lambda: all(pair.rows for pair in pairs))
    wait_until(lambda: process.waiting == REDUCERS)
    for pair in pairs:
        pair.is_done = True
    begin_s = time.monotonic()
    link.interrupt()
    assert all(pair.joined() for pair in pairs)
    assert time.monotonic() - begin_s < 5.0
    assert [pair.error for pair in pairs] == [None] * REDUCERS


def test_links_are_few_and_those_that_nobody_uses_are_dropped() -> None:
    links = Links(ClientPool(), share_memory=False, reducers=8)
    assert links.to("grpc://a:1", 0) is links.to("grpc://a:1", 7), "64 pairs share one"
    assert links.to("grpc://a:1", 8) is not links.to("grpc://a:1", 7)
    before = links.to("grpc://a:1", 0)
    for port in range(100):
        links.to(f"grpc://b:{port}", 0)
    assert links.to("grpc://a:1", 0) is not before
