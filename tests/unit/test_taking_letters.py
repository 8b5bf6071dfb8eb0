"""``dead-letters replay`` and ``drop`` beside an exporter: a row goes outside, or where it is taken, and never both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shuffle.durable.export_state import EXPORTS_KEY, EXPORTS_VALUE, ExportState
from shuffle.errors import BadInput, CommitConflict, OutOfRange, PublishUnknown, SplitBrain
from shuffle.reducer.exporter.core import BatchLimits, ExporterCore
from shuffle.reducer.exporter.cycle import ExportCycle
from shuffle.run.taking_letters import note_taken, refuse_beside_exporter
from shuffle.statestore import StateClient, Transaction
from shuffle.statestore.client.queue_consumers import create_consumers_table, reserve_queue
from tests.unit.test_exporter import SCHEMA, NoMetrics, Place, PlaceSink, pa

QUEUE = "job/mapper_dead_letters"
TABLE = f"{QUEUE}/exports"


class Exporter:
    """One instance, as the daemon makes it for dead letters."""

    def __init__(self, client: StateClient, place: Place) -> None:
        sink = PlaceSink(place)
        limits = BatchLimits(3, 1_000_000, 0, 0)
        core = ExporterCore(0, sink.identity, sink.keeps_position, limits, ("mapper", QUEUE))
        self.cycle = ExportCycle(client, sink, core, outbox=QUEUE, table=TABLE, clock=lambda: 0.0, metrics=NoMetrics())

    def all_published(self) -> Exporter:
        self.cycle.start()
        while self.cycle.step(0):
            pass
        return self


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "state") as client:
        client.create_queue(QUEUE, SCHEMA, partitions=1)
        yield client


@pytest.fixture(params=[True, False], ids=["keeps the position", "by name"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


def create_exports(client: StateClient) -> None:
    client.create_table(TABLE, key=EXPORTS_KEY, value=EXPORTS_VALUE, if_not_exists=True)


def append(client: StateClient, *numbers: int) -> None:
    client.queue(QUEUE).append(0, pa.table([list(numbers)], schema=SCHEMA))


def taking(client: StateClient, after: int) -> Transaction:
    """A command that has taken rows, and has not committed yet."""
    tx = client.transaction()
    note_taken(client, tx, QUEUE, 0, after)
    tx.trim(QUEUE, 0, after)
    return tx


def test_exporter_goes_on_after_rows_that_a_command_has_taken(client: StateClient, place: Place) -> None:
    create_exports(client)
    append(client, 0, 1)
    Exporter(client, place).all_published().cycle.stop()
    append(client, 2, 3, 4)
    taking(client, after=4).commit()
    Exporter(client, place).all_published()
    assert place.rows == [0, 1, 4], "2 and 3 went the other way"


def test_rows_taken_before_the_first_exporter_are_none_that_it_misses(client: StateClient, place: Place) -> None:
    append(client, 0, 1, 2)
    taking(client, after=2).commit()
    create_exports(client)
    Exporter(client, place).all_published()
    assert place.rows == [2]


def test_rows_that_may_be_outside_cannot_be_taken(client: StateClient, place: Place) -> None:
    create_exports(client)
    exporter = Exporter(client, place).all_published()
    append(client, 0, 1)
    place.answers_lost = 1
    with pytest.raises(PublishUnknown):
        exporter.cycle.step(0)
    with pytest.raises(BadInput, match="from 0 on may be in memory already: the exporter was killed, or runs"):
        taking(client, after=2)


def test_command_that_read_before_an_exporter_began_is_refused(client: StateClient, place: Place) -> None:
    create_exports(client)
    append(client, 0, 1)
    tx = taking(client, after=2)
    Exporter(client, place).all_published()
    with pytest.raises(CommitConflict):
        tx.commit()
    assert place.rows == [0, 1]


def test_command_that_read_before_the_very_first_exporter_registered_is_refused(client: StateClient) -> None:
    create_consumers_table(client)
    append(client, 0, 1)
    tx = taking(client, after=2)
    reserve_queue(client, "job/exporters of it", QUEUE)  # It does so before it reads anything.
    with pytest.raises(CommitConflict):
        tx.commit()


def test_exporter_whose_rows_were_taken_meanwhile_publishes_none_of_them(client: StateClient) -> None:
    create_exports(client)
    place = Place(keeps_position=False)
    exporter = Exporter(client, place)
    exporter.cycle.start()
    append(client, 0, 1)
    exporter.cycle._read(0)  # In memory, and nothing is noted yet.
    taking(client, after=2).commit()
    with pytest.raises((CommitConflict, SplitBrain, OutOfRange)):
        exporter.cycle.step(0)
    append(client, 2)
    Exporter(client, place).all_published()
    assert place.rows == [2]


def test_command_is_refused_while_an_exporter_is_listed(client: StateClient) -> None:
    refuse_beside_exporter(client, "job", QUEUE)
    client.leases.register(f"job/exporters of {QUEUE}", "guid", {}, ttl_ms=10_000)
    with pytest.raises(BadInput, match="an exporter moves the rows of job/mapper_dead_letters to the place"):
        refuse_beside_exporter(client, "job", QUEUE)


def test_position_follows_what_was_taken(client: StateClient, place: Place) -> None:
    create_exports(client)
    append(client, 0)
    Exporter(client, place).all_published().cycle.stop()
    append(client, 1, 2)
    before = ExportState.from_rows(client.lookup(TABLE, ExportState.key(0)))
    taking(client, after=3).commit()
    found = ExportState.from_rows(client.lookup(TABLE, ExportState.key(0)))
    assert before is not None
    assert found is not None
    assert (found.position, found.in_flight_end, found.sink) == (3, None, "memory")
    assert found.owner != before.owner, "an instance that still lives finds that it does not own the row"
