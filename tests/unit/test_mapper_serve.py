"""GetRows over real Flight on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mapper.bucket import ServedBatch
from mapper.core import MappedBatch, MapperCore
from mapper.mapping import cut
from mapper.serve import MapperServer, SharedCore, joined
from mapper.spill import Spill, SpillEnd
from mapper.state import MapperState
from shuffle import flight
from shuffle.errors import BadInput, RowsGone, ShuffleError, StaleMapper, StoreUnavailable, TooLarge
from shuffle.ids import Guid, InputIndex, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.limits import TICKET_BYTES_MAX
from shuffle.messages import BatchTail, GetRows

SCHEMA = pa.schema([("v", pa.int64())])
GUID = Guid("g")


class Served:
    def __init__(self) -> None:
        self.core = MapperCore(GUID, MapperIndex(0), 2, 1 << 30)
        self.shared = SharedCore(self.core, 2)
        self.server = MapperServer(self.shared)
        self.client = flight.connect(self.server.address)

    def feed(self, values: list[int], reducers: list[int]) -> None:
        rows = pa.table([pa.array(values, pa.int64())], schema=SCHEMA)
        mapped = MappedBatch(SCHEMA, len(values), cut(rows, np.array(reducers), 2))
        self.shared.ingest(None, len(values), Token(b"t"), mapped)

    def get(self, reducer: int = 0, committed: int = -1, wait_ms: int = 0, **more: Any) -> tuple[list[int], list[int]]:
        """The values, and the index after each batch."""
        request = GetRows(
            **{
                "mapper_id": GUID,
                "reducer_index": ReducerIndex(reducer),
                "committed_row_index": ShuffleIndex(committed),
                "from_row_index": ShuffleIndex(committed),
                "max_rows": 1000,
                "max_bytes": 1 << 20,
                "wait_ms": wait_ms,
                **more,
            }
        )
        return self.raw(request.encode())

    def raw(self, ticket: bytes) -> tuple[list[int], list[int]]:
        values, tails = [], []
        with flight.typed_errors("mapper 0"):
            for chunk in self.client.do_get(flight.Ticket(ticket), flight.call_options(10)):
                values.extend(chunk.data.column(0).to_pylist())
                tails.append(BatchTail.decode(chunk.app_metadata.to_pybytes()).last_row_index)
        return values, [int(tail) for tail in tails]


@pytest.fixture
def mapper() -> Iterator[Served]:
    served = Served()
    yield served
    served.client.close()
    assert served.server.close()


def test_rows_and_the_index_of_the_last(mapper: Served) -> None:
    mapper.feed([10, 11, 12], [0, 1, 0])
    assert mapper.get() == ([10, 12], [2])
    assert mapper.get(1) == ([11], [1])
    assert mapper.get(committed=2) == ([], [])


def test_before_the_first_batch_the_answer_is_empty(mapper: Served) -> None:
    assert mapper.get() == ([], [])


def test_many_small_batches_come_as_one(mapper: Served) -> None:
    for value in range(50):
        mapper.feed([value], [0])
    assert mapper.get() == (list(range(50)), [49])


def test_errors_arrive_typed_with_their_fields(mapper: Served) -> None:
    mapper.feed([10, 11], [0, 0])
    mapper.get(committed=1)
    with pytest.raises(RowsGone) as gone:
        mapper.get(committed=0)
    assert gone.value.dropped_row_index == 1
    with pytest.raises(StaleMapper) as stale:
        mapper.get(mapper_id=Guid("older"))
    assert stale.value.mapper_id == GUID


@pytest.mark.parametrize(
    ("ticket", "error"),
    [
        (b"", BadInput),
        (b"[]", BadInput),
        (b"{}", BadInput),
        (b"\xff", BadInput),
        (b" " * (TICKET_BYTES_MAX + 1), TooLarge),
    ],
)
def test_tickets_that_are_none(mapper: Served, ticket: bytes, error: type[ShuffleError]) -> None:
    with pytest.raises(error):
        mapper.raw(ticket)
    assert mapper.get() == ([], []), "the server lives on"


def test_request_that_waits_is_woken_by_rows_of_its_reducer(mapper: Served) -> None:
    mapper.feed([1], [1])
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(mapper.get(0, wait_ms=30_000)))
    thread.start()
    mapper.feed([2], [1])
    mapper.feed([3], [0])
    thread.join(10)
    assert answers == [([3], [2])]


def test_request_that_waits_is_woken_by_a_restart_that_finds_rows_in_the_spill() -> None:
    spilled = pa.record_batch([pa.array([7], pa.int64())], schema=SCHEMA)
    core = MapperCore(GUID, MapperIndex(0), 2, 1 << 30)
    shared = SharedCore(core, 2, lambda read: ([], [ServedBatch(spilled, ShuffleIndex(4))]))
    request = GetRows(GUID, ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(-1), 1000, 1 << 20, wait_ms=30_000)
    answers: list[list[ServedBatch]] = []
    thread = threading.Thread(target=lambda: answers.append(shared.get_rows(request)[1]))
    thread.start()
    while shared._waiters[0] == 0:
        threading.Event().wait(0.01)
    end = SpillEnd(position=1, last_row_index=ShuffleIndex(4), rows=1, nbytes=8)
    state = MapperState(InputIndex(5), ShuffleIndex(5), Token(b"t"))
    shared.restart(state, {}, {ReducerIndex(0): Spill(end, 0, 0, 0)})
    thread.join(10)
    assert [batch.last_row_index for batch in answers[0]] == [4]


def test_request_that_waits_ends_in_time(mapper: Served) -> None:
    began_s = time.monotonic()
    assert mapper.get(wait_ms=100) == ([], [])
    assert 0.05 < time.monotonic() - began_s < 5


def test_requests_beyond_the_bound_do_not_wait(mapper: Served) -> None:
    threads = [threading.Thread(target=lambda: mapper.get(wait_ms=20_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + 10
    while mapper.shared._waiters[0] < 4 and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    began_s = time.monotonic()
    assert mapper.get(wait_ms=20_000) == ([], [])
    assert time.monotonic() - began_s < 5
    mapper.feed([1], [0])
    for thread in threads:
        thread.join(10)


def test_closing_answers_those_who_wait() -> None:
    served = Served()
    thread = threading.Thread(target=lambda: served.get(wait_ms=60_000))
    thread.start()
    while served.shared._waiters[0] == 0:
        threading.Event().wait(0.01)
    assert served.server.close(timeout_s=10)
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(StoreUnavailable):
        served.get()


def test_commit_makes_room_for_the_ingestion(mapper: Served) -> None:
    mapper.core.memory_bytes_max = 1
    mapper.feed([1], [0])
    assert not mapper.shared.wait_for_room(0)
    thread = threading.Thread(target=lambda: mapper.get(committed=0))
    thread.start()
    assert mapper.shared.wait_for_room(10)
    thread.join(10)


def test_status_as_json(mapper: Served) -> None:
    mapper.feed([10, 11, 12], [0, 1, 0])
    mapper.get(1, committed=1)
    found = json.loads(flight.do_action(mapper.client, "status", who="mapper 0"))
    assert (found["window_rows"], found["next_input_index"], found["next_shuffle_index"]) == (2, 3, 3)
    assert [bucket["rows"] for bucket in found["buckets"]] == [2, 0]
    assert found["buckets"][1]["committed_row_index"] == 1
    with pytest.raises(BadInput, match="unknown action"):
        flight.do_action(mapper.client, "dance", who="mapper 0")


def test_joining_leaves_large_batches_untouched() -> None:
    large = pa.record_batch([pa.array(range(1000), pa.int64())], schema=SCHEMA)
    small = large.slice(0, 2)
    batches = [ServedBatch(rows, ShuffleIndex(i)) for i, rows in enumerate([small, small, large, small])]
    found = list(joined(batches, join_bytes_max=1000))
    assert [(one.rows.num_rows, one.last_row_index) for one in found] == [(4, 1), (1000, 2), (2, 3)]
    assert found[1].rows is large


def test_rows_come_with_their_shuffle_index_and_time_if_asked_for(mapper: Served) -> None:
    rows = pa.table([pa.array([10, 11, 12, 13], pa.int64())], schema=SCHEMA)
    for moment_us in (1_000_000, 2_000_000):
        parts = cut(rows, np.array([0, 1, 0, 0]), 2)
        mapper.shared.ingest(None, 4, Token(b"t"), MappedBatch(SCHEMA, 4, parts, ingested_us=moment_us))
    request = GetRows(GUID, ReducerIndex(0), ShuffleIndex(0), ShuffleIndex(0), 4, 1 << 20, with_metadata=True)
    reader = mapper.client.do_get(flight.Ticket(request.encode()), flight.call_options(10))
    found = pa.Table.from_batches([chunk.data for chunk in reader])
    assert found.schema.names == ["v", "_shuffle_index", "_ingestion_time"]
    assert found["v"].to_pylist() == [12, 13, 10, 12]
    assert found["_shuffle_index"].to_pylist() == [2, 3, 4, 6]
    assert found["_ingestion_time"].cast(pa.int64()).to_pylist() == [1_000_000, 1_000_000, 2_000_000, 2_000_000]
