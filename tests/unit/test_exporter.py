"""The exporter's rule, step by step, over a real store and a sink in memory: where it goes on after what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.durable.export_state import ANY_END, EXPORTS_KEY, EXPORTS_VALUE, ExportState
from shuffle.errors import CommitConflict, PositionLost, PublishUnknown, SplitBrain
from shuffle.reducer.exporter.core import BatchLimits, ExporterCore
from shuffle.reducer.exporter.cycle import ExportCycle
from shuffle.reducer.outputs.sink import Sink
from shuffle.statestore import StateClient

SCHEMA = pa.schema([("n", pa.int64())])
OUTBOX, TABLE = "job/outbox", "job/exports"


class NoMetrics:
    def count_publish(self, rows: int, size_bytes: int, seconds: float) -> None: ...


class Place:
    """What is outside: rows, and the position if it keeps one."""

    def __init__(self, keeps_position: bool, name: str = "memory") -> None:
        self.keeps_position = keeps_position
        self.name = name
        self.batches: dict[tuple[int, int], list[int]] = {}
        self.position: int | None = None
        self.epoch = 0
        self.answers_lost = 0

    @property
    def rows(self) -> list[int]:
        return [n for name in sorted(self.batches) for n in self.batches[name]]


class PlaceSink(Sink):
    def __init__(self, place: Place) -> None:
        self.place = place
        self.__dict__["keeps_position"] = place.keeps_position

    @property
    def identity(self) -> str:
        return self.place.name

    def open(self) -> int | None:
        self.place.epoch += 1
        self._epoch = self.place.epoch
        return self.place.position

    def publish(self, rows: pa.Table, begin: int, end: int) -> None:
        if self.place.keeps_position and self._epoch != self.place.epoch:
            raise SplitBrain("another one was opened")
        if begin < end:
            self.place.batches[begin, end] = rows["n"].to_pylist()
        self.place.position = end if self.place.keeps_position else None
        if self.place.answers_lost:
            self.place.answers_lost -= 1
            raise PublishUnknown("no answer")


class Exporter:
    """One instance, with a clock that is set by hand."""

    def __init__(self, client: StateClient, place: Place, limits: BatchLimits | None = None) -> None:
        self.now_s = 0.0
        self.sink = PlaceSink(place)
        limits = limits or BatchLimits(3, 1_000_000, 0, 0)
        self.core = ExporterCore(0, self.sink.identity, self.sink.keeps_position, limits)
        self.cycle = ExportCycle(
            client, self.sink, self.core, outbox=OUTBOX, table=TABLE, clock=lambda: self.now_s, metrics=NoMetrics()
        )

    def started(self) -> Exporter:
        self.cycle.start()
        return self


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "state") as client:
        client.create_queue(OUTBOX, SCHEMA, partitions=1)
        client.create_table(TABLE, key=EXPORTS_KEY, value=EXPORTS_VALUE)
        yield client


@pytest.fixture(params=[True, False], ids=["keeps the position", "by name"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


def append(client: StateClient, *numbers: int) -> None:
    client.queue(OUTBOX).append(0, pa.table([list(numbers)], schema=SCHEMA))


def row(client: StateClient) -> ExportState | None:
    return ExportState.from_rows(client.lookup(TABLE, ExportState.key(0)))


def bounds(client: StateClient) -> tuple[int, int]:
    return client.queue(OUTBOX).bounds()[0]


def test_rows_are_published_in_batches_and_the_outbox_is_trimmed(client: StateClient, place: Place) -> None:
    append(client, 0, 1, 2, 3)
    exporter = Exporter(client, place).started()
    assert [exporter.cycle.step(0) for _ in range(3)] == [3, 1, 0]
    assert place.batches == {(0, 3): [0, 1, 2], (3, 4): [3]}
    assert bounds(client) == (4, 4)
    exporter.cycle.stop()
    found = row(client)
    assert found is not None
    assert (found.position, found.in_flight_end) == (4, None)


def test_exporter_killed_between_publication_and_trim_publishes_nothing_twice(
    client: StateClient, place: Place
) -> None:
    append(client, 0, 1)
    place.answers_lost = 1
    with pytest.raises(PublishUnknown):
        Exporter(client, place).started().cycle.step(0)
    append(client, 2)  # The batch would be another one now.
    successor = Exporter(client, place).started()
    while successor.cycle.step(0):
        pass
    assert place.rows == [0, 1, 2]
    assert bounds(client) == (3, 3)


def test_batch_that_was_noted_is_published_exactly_as_noted(client: StateClient) -> None:
    place = Place(keeps_position=False)
    append(client, 0, 1)
    first = Exporter(client, place).started()
    first.cycle._note(first.core.under_way(2))
    append(client, 2)
    successor = Exporter(client, place).started()
    assert successor.cycle.step(0) == 2
    assert place.batches == {(0, 2): [0, 1]}


def test_second_instance_takes_over_and_the_first_can_do_nothing_any_more(client: StateClient, place: Place) -> None:
    append(client, 0, 1, 2, 3)
    first = Exporter(client, place).started()
    assert first.cycle.step(0) == 3
    second = Exporter(client, place).started()
    with pytest.raises((SplitBrain, CommitConflict)):
        first.cycle.step(0)
    assert second.cycle.step(0) == 1
    assert place.rows == [0, 1, 2, 3]


def test_rows_that_another_instance_has_trimmed_are_a_split_brain(client: StateClient, place: Place) -> None:
    first = Exporter(client, place).started()
    append(client, 0, 1)
    second = Exporter(client, place).started()
    second.cycle.step(0)
    second.cycle.stop()
    with pytest.raises(SplitBrain, match="trimmed"):
        first.cycle.step(0)
    first.cycle.start()
    assert first.core.position == 2


def test_sink_without_a_position_is_told_it_before_anything_is_noted_as_under_way(client: StateClient) -> None:
    place = Place(keeps_position=True)
    exporter = Exporter(client, place)
    exporter.cycle.start()
    assert place.position == 0
    found = row(client)
    assert found is not None
    assert found.in_flight_end == ANY_END


def test_sink_that_lost_its_position_while_rows_were_under_way_is_an_error(client: StateClient) -> None:
    place = Place(keeps_position=True)
    append(client, 0)
    Exporter(client, place).started().cycle.step(0)
    place.position = None
    with pytest.raises(PositionLost, match="has no position, and rows before 1 have been published"):
        Exporter(client, place).started()
    place.position = 0
    with pytest.raises(PositionLost, match="says 0, and rows before 1 have been published"):
        Exporter(client, place).started()


def test_sink_that_lost_its_position_after_a_clean_stop_goes_on_from_the_row(client: StateClient) -> None:
    place = Place(keeps_position=True)
    append(client, 0)
    exporter = Exporter(client, place).started()
    exporter.cycle.stop()
    place.position = None
    append(client, 1)
    assert Exporter(client, place).started().cycle.step(0) == 1
    assert place.rows == [0, 1]


def test_instance_that_was_replaced_before_it_looked_at_the_outbox_finds_a_split_brain(
    client: StateClient, place: Place
) -> None:
    append(client, 0, 1, 2)
    paused = Exporter(client, place)
    opened = paused.sink.open

    def open_late() -> int | None:
        found = opened()
        Exporter(client, place).started().cycle.step(0)  # Another one claims, publishes and trims.
        assert bounds(client) == (3, 3)
        return found

    paused.sink.open = open_late  # type: ignore[method-assign]
    with pytest.raises(SplitBrain, match=r"another instance has taken the partition over: .* rows between them were"):
        paused.cycle.start()
    assert place.rows == [0, 1, 2]


def test_position_ahead_of_the_outbox_is_an_error(client: StateClient) -> None:
    place = Place(keeps_position=True)
    append(client, 0)
    Exporter(client, place).started().cycle.step(0)
    place.position = 7
    with pytest.raises(PositionLost, match="it has rows that the outbox never had"):
        Exporter(client, place).started()
    assert place.rows == [0]


def test_position_of_an_earlier_processor_of_that_name_is_an_error(client: StateClient) -> None:
    place = Place(keeps_position=True)
    place.position = 2
    append(client, 0, 1, 2)
    for _ in range(2):  # The second one finds the row that the first has claimed.
        with pytest.raises(PositionLost, match="says 2, and of the outbox only rows before 0 were ever published"):
            Exporter(client, place).started()
    assert place.rows == []


def test_outbox_that_somebody_else_has_trimmed_is_an_error(client: StateClient, place: Place) -> None:
    append(client, 0, 1)
    client.queue(OUTBOX).trim(0, 1)
    with pytest.raises(PositionLost, match="no exporter has ever worked on it"):
        Exporter(client, place).started()
    assert place.rows == []


def test_rows_trimmed_behind_the_exporters_back_are_an_error(client: StateClient, place: Place) -> None:
    Exporter(client, place).started().cycle.stop()
    append(client, 0, 1)
    client.queue(OUTBOX).trim(0, 1)
    with pytest.raises(PositionLost, match="rows between them were trimmed"):
        Exporter(client, place).started()


def test_output_is_changed_after_a_clean_stop_only(client: StateClient, place: Place) -> None:
    other = Place(place.keeps_position, "elsewhere")
    append(client, 0)
    first = Exporter(client, place).started()
    place.answers_lost = 1
    with pytest.raises(PublishUnknown):
        first.cycle.step(0)
    with pytest.raises(PositionLost, match="changed from memory to elsewhere"):
        Exporter(client, other).started()
    again = Exporter(client, place).started()
    again.cycle.step(0)
    again.cycle.stop()
    append(client, 1)
    Exporter(client, other).started().cycle.step(0)
    assert (place.rows, other.rows) == ([0], [1])


def test_output_that_is_changed_back_begins_where_the_other_one_ended(client: StateClient) -> None:
    place, other = Place(True), Place(True, "elsewhere")
    for number, to in enumerate((place, other, place)):
        append(client, number)
        exporter = Exporter(client, to).started()
        exporter.cycle.step(0)
        exporter.cycle.stop()
    assert (place.rows, other.rows) == ([0, 2], [1])


def test_batch_waits_for_its_age_and_not_longer(client: StateClient, place: Place) -> None:
    exporter = Exporter(client, place, BatchLimits(100, 1_000_000, 5_000, 0)).started()
    append(client, 0)
    assert exporter.cycle.step(0) == 0
    exporter.now_s = 4.9
    append(client, 1)
    assert exporter.cycle.step(0) == 0
    exporter.now_s = 5.0
    assert exporter.cycle.step(0) == 2
    assert place.batches == {(0, 2): [0, 1]}


def test_batch_ends_at_its_bytes(client: StateClient, place: Place) -> None:
    append(client, *range(100))
    exporter = Exporter(client, place, BatchLimits(1_000, 160, 60_000, 0)).started()
    assert exporter.cycle.step(0) == 20
    assert exporter.cycle.step(0) == 20


def test_clean_stop_publishes_what_is_in_the_outbox(client: StateClient, place: Place) -> None:
    append(client, *range(10))
    exporter = Exporter(client, place, BatchLimits(4, 1_000_000, 60_000, 60_000)).started()
    exporter.cycle.stop()
    assert place.rows == list(range(10))
    assert bounds(client) == (10, 10)
