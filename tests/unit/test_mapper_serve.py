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

from shuffle.durable.mapper_state import MapperState
from shuffle.durable.spill_ends import SpillEnd
from shuffle.errors import BadInput, NotServed, RowsGone, ShuffleError, StaleMapper, StoreUnavailable, TooBusy, TooLarge
from shuffle.ids import Guid, InputIndex, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.limits import TICKET_BYTES_MAX
from shuffle.mapper.bucket import ServedBatch
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.mapping import cut
from shuffle.mapper.serve import HostedMapper, MapperServer, joined
from shuffle.mapper.shared_core import CONFIRM_S, CROWDED_WAIT_S, SharedCore
from shuffle.mapper.spill.index import Spill
from shuffle.messages import GetRows, Tail
from shuffle.support import flight
from shuffle.support.slots import Slots
from tests.raw_flight import exchange, messages_of
from tests.waiting import wait_until

SCHEMA = pa.schema([("v", pa.int64())])
GUID = Guid("g")


class Served:
    def __init__(self) -> None:
        self.core = MapperCore(GUID, MapperIndex(0), 2, 1 << 30)
        self.committed: dict[ReducerIndex, ShuffleIndex] = {}
        """What the reducers' rows in the store would say."""
        self.shared = SharedCore(self.core, 2, read_committed=lambda: self.committed)
        self.server = MapperServer([HostedMapper.of(self.shared)])
        self.client = flight.connect(self.server.address)

    def feed(self, values: list[int], reducers: list[int]) -> None:
        rows = pa.table([pa.array(values, pa.int64())], schema=SCHEMA)
        mapped = MappedBatch(SCHEMA, len(values), cut(rows, np.array(reducers), 2))
        self.shared.ingest(None, len(values), Token(b"t"), mapped)

    def get(self, reducer: int = 0, committed: int = -1, wait_ms: int = 0, **more: Any) -> tuple[list[int], list[int]]:
        """The values, and the index after each batch. What is told as committed is so in the store."""
        self.core.learn_committed({ReducerIndex(reducer): ShuffleIndex(committed)})
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
                tail = Tail.decode(chunk.app_metadata.to_pybytes())
                if chunk.data.num_rows == 0:
                    continue
                values.extend(chunk.data.column(0).to_pylist())
                tails.append(tail.last_row_index)
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
    while shared.core.waiting[0] == 0:
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


def test_requests_beyond_the_bound_wait_for_a_short_time_only(mapper: Served) -> None:
    threads = [threading.Thread(target=lambda: mapper.get(wait_ms=20_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + 10
    while mapper.shared.core.waiting[0] < 4 and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    began_s = time.monotonic()
    assert mapper.get(wait_ms=20_000) == ([], [])
    assert CROWDED_WAIT_S <= time.monotonic() - began_s < 5, "who asks again at once rests a little"
    mapper.feed([1], [0])
    for thread in threads:
        thread.join(10)


def test_more_exchanges_than_places_are_refused(mapper: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapper.server, "_slots", Slots("exchanges", 1))
    thread = threading.Thread(target=lambda: mapper.get(wait_ms=20_000))
    thread.start()
    while mapper.core.waiting[0] == 0:
        threading.Event().wait(0.01)
    with pytest.raises(TooBusy, match="no more than 1 exchanges"):
        mapper.get()
    mapper.feed([1], [0])
    thread.join(10)
    assert mapper.get() == ([1], [0])


def test_closing_answers_those_who_wait() -> None:
    served = Served()
    thread = threading.Thread(target=lambda: served.get(wait_ms=60_000))
    thread.start()
    while served.shared.core.waiting[0] == 0:
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
    request = GetRows(GUID, ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(0), 4, 1 << 20, with_metadata=True)
    reader = mapper.client.do_get(flight.Ticket(request.encode()), flight.call_options(10))
    found = pa.Table.from_batches([chunk.data for chunk in reader])
    assert found.schema.names == ["v", "_shuffle_index", "_ingestion_time"]
    assert found["v"].to_pylist() == [12, 13, 10, 12]
    assert found["_shuffle_index"].to_pylist() == [2, 3, 4, 6]
    assert found["_ingestion_time"].cast(pa.int64()).to_pylist() == [1_000_000, 1_000_000, 2_000_000, 2_000_000]


def test_no_error_of_a_mapper_has_a_traceback(mapper: Served) -> None:
    client, options = mapper.client, flight.call_options(10)
    descriptor = flight.FlightDescriptor.for_path("a")

    def ask(command: bytes, question: bytes) -> None:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command), options)
        writer.begin(pa.schema([]))
        writer.write_metadata(question)
        raise flight.FlightServerError(reader.read_chunk().app_metadata.to_pybytes().decode())

    def put() -> None:
        writer, _ = client.do_put(descriptor, SCHEMA, options)
        writer.close()

    for attempt in (
        put,
        lambda: ask(b"getrows/2", b"[" * 50_000),
        lambda: ask(b"getrows/7", b"{}"),
        lambda: client.do_get(flight.Ticket(b"\xff"), options).read_all(),
        lambda: client.get_flight_info(descriptor, options),
        lambda: list(client.list_flights(b"", options)),
        lambda: list(client.do_action(flight.Action("explode", b""), options)),
    ):
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)) as caught:
            attempt()
        assert '"code": "bad_input"' in str(caught.value) or '"code": "wrong_version"' in str(caught.value)
        assert not any(leak in str(caught.value) for leak in ("Traceback", 'File "', ".py"))
    told = client.get_schema(descriptor, options).schema
    assert b"bad_input" in told.metadata[b"error"]
    assert [action.type for action in client.list_actions(options)] == ["status"]


def test_what_a_handler_did_not_foresee_is_one_line(monkeypatch: pytest.MonkeyPatch, mapper: Served) -> None:
    def failing(*args: Any) -> Any:
        raise ZeroDivisionError("of two\nlines")

    monkeypatch.setattr(mapper.shared, "get_rows", failing)
    with pytest.raises(ShuffleError) as caught:
        mapper.get()
    assert caught.value.message == "ZeroDivisionError: of two lines"


def test_exchange_that_begins_with_columns_is_refused(mapper: Served) -> None:
    """With a dictionary among them, and nothing behind it, it once ended the process inside of Flight."""
    rows = messages_of(pa.record_batch({"d": pa.array(["a", "b"]).dictionary_encode()}))
    for messages in ([*rows[:2], (b"", b"")], rows):
        assert "bad_input" in exchange(mapper.server.address, b"getrows/2", messages)
    mapper.feed([1], [0])
    assert mapper.get() == ([1], [0])


def test_store_is_asked_about_a_claim_that_was_not_served_and_seldom(mapper: Served) -> None:
    asked: list[float] = []
    shared = SharedCore(mapper.core, 2, read_committed=lambda: asked.append(time.monotonic()) or mapper.committed)
    mapper.feed([0, 1, 2], [0, 1, 0])
    claim = GetRows(GUID, ReducerIndex(0), ShuffleIndex(2), ShuffleIndex(2), 10, 1 << 20)
    begin_s = time.monotonic()
    for _ in range(2000):
        with pytest.raises(NotServed):
            shared.get_rows(claim)
    assert 1 <= len(asked) <= 1 + (time.monotonic() - begin_s) / CONFIRM_S
    assert mapper.core.window_size.rows == 3, "nothing was changed"
    mapper.committed[ReducerIndex(0)] = ShuffleIndex(2)
    wait_until(lambda: _is_believed(shared, claim), "the store confirms it")
    assert mapper.core.window_size.rows == 1


def _is_believed(shared: SharedCore, claim: GetRows) -> bool:
    try:
        shared.get_rows(claim)
    except NotServed:
        return False
    return True


def test_rows_from_the_spill_count_as_served() -> None:
    core = MapperCore(GUID, MapperIndex(0), 1, 1 << 30)
    rows = pa.record_batch([pa.array([1, 2], pa.int64())], schema=SCHEMA)
    shared = SharedCore(core, 1, lambda read: ([], [ServedBatch(rows, ShuffleIndex(4))]))
    core.load_spill({ReducerIndex(0): Spill(SpillEnd(1, ShuffleIndex(4), 2, 20), 0, 0, 0)})
    shared.get_rows(GetRows(GUID, ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(-1), 10, 1 << 20))
    assert core.buckets[0].served == 4
    assert _is_believed(shared, GetRows(GUID, ReducerIndex(0), ShuffleIndex(4), ShuffleIndex(4), 10, 1 << 20))


@pytest.mark.parametrize(
    "wrong", [{"committed_row_index": 1 << 70}, {"to_row_index": 1.5}, {"processor": 7}, {"mapper_id": None}]
)
def test_field_of_another_type_or_out_of_range_is_refused(mapper: Served, wrong: dict[str, Any]) -> None:
    good = json.loads(GetRows(GUID, ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(-1), 10, 1 << 20).encode())
    with pytest.raises(BadInput, match=next(iter(wrong))):
        mapper.raw(json.dumps({**good, **wrong}).encode())
