"""A queue has one consumer, and a processor does not begin where rows are gone that it never read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.durable.mapper_state import MapperState, state_rows
from shuffle.durable.tables import mappers_table
from shuffle.errors import BadInput, OutOfRange, SpecError, UnknownTable
from shuffle.ids import InputIndex, MapperIndex, ShuffleIndex
from shuffle.mapper.readers.queue import encode_position
from shuffle.preflight.check import check_against_store
from shuffle.spec.config import ProcessorSpec, load_spec
from shuffle.statestore import StateClient
from shuffle.statestore.admin import commands
from shuffle.statestore.client.queue_consumers import queue_consumers

LOGS = pa.schema([("user", pa.string())])
JOB = """
from shuffle import HashMapper, Reducer

class ByUser(HashMapper):
    key = ["user"]

class Fold(Reducer):
    def reduce(self, rows):
        return None
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "store") as client:
        client.create_queue("logs", schema=LOGS, partitions=2)
        yield client


def spec_of(folder: Path, processor: str, input: str = "{queue: logs}") -> ProcessorSpec:
    module = "job_" + folder.name.replace("-", "_")  # Python imports a name only once.
    (folder / f"{module}.py").write_text(JOB)
    path = folder / f"{processor}.yaml"
    path.write_text(
        f"processor: {processor}\nstate: ./store\ninput: {input}\n"
        f'mapper: {{class: "{module}:ByUser"}}\nreducer: {{class: "{module}:Fold", count: 1}}\n'
    )
    return load_spec(path)


def trim(client: StateClient, partition: int, rows: int) -> None:
    client.queue("logs").append(partition, pa.table({"user": ["u"] * rows}, schema=LOGS))
    client.queue("logs").trim(partition, rows)


def tables_of(client: StateClient, processor: str) -> pa.Table:
    return client.scan(f"{processor}/meta").read_all()


def test_second_processor_on_a_queue_is_refused_and_leaves_nothing(tmp_path: Path, client: StateClient) -> None:
    check_against_store(spec_of(tmp_path, "first"), client)
    check_against_store(spec_of(tmp_path, "first"), client)  # The one that is registered may start again.
    with pytest.raises(SpecError) as caught:
        check_against_store(spec_of(tmp_path, "second"), client)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "second.yaml:3: input.queue: the queue 'logs' is consumed by the processor 'first'" in text
    assert "shuffle state release STORE logs" in text
    assert queue_consumers(client) == {"logs": "first"}
    assert tables_of(client, "second").num_rows == 0


def test_one_that_only_looks_does_not_register(tmp_path: Path, client: StateClient) -> None:
    assert check_against_store(spec_of(tmp_path, "second"), client, register=False) == 2
    assert queue_consumers(client) == {}
    check_against_store(spec_of(tmp_path, "first"), client)
    with pytest.raises(SpecError, match="consumed by the processor 'first'"):
        check_against_store(spec_of(tmp_path, "second"), client, register=False)


def test_store_made_before_there_were_registrations_gets_one(tmp_path: Path, client: StateClient) -> None:
    check_against_store(spec_of(tmp_path, "first"), client)
    client.drop_table("store/queue_consumers")
    assert queue_consumers(client) == {}
    check_against_store(spec_of(tmp_path, "first"), client)
    assert queue_consumers(client) == {"logs": "first"}


def test_dropping_a_queue_drops_its_registration(tmp_path: Path, client: StateClient) -> None:
    check_against_store(spec_of(tmp_path, "first"), client)
    client.drop_queue("logs")
    assert queue_consumers(client) == {}
    client.create_queue("logs", schema=LOGS, partitions=2)
    assert queue_consumers(client) == {}
    check_against_store(spec_of(tmp_path, "second"), client)
    assert queue_consumers(client) == {"logs": "second"}


def test_processor_whose_input_was_changed_gives_the_old_one_back(tmp_path: Path, client: StateClient) -> None:
    client.create_queue("others", schema=LOGS, partitions=2)
    check_against_store(spec_of(tmp_path, "first"), client)
    check_against_store(spec_of(tmp_path, "first", "{queue: others}"), client)
    assert queue_consumers(client) == {"others": "first"}
    (tmp_path / "files" / "a").mkdir(parents=True)
    check_against_store(spec_of(tmp_path, "first", "{folder: files}"), client)
    assert queue_consumers(client) == {}


def test_two_processors_may_read_one_folder(tmp_path: Path, client: StateClient) -> None:
    (tmp_path / "files" / "a").mkdir(parents=True)
    for processor in ("first", "second"):
        assert check_against_store(spec_of(tmp_path, processor, "{folder: files}"), client) == 1


def test_processor_without_state_does_not_start_on_a_trimmed_queue(tmp_path: Path, client: StateClient) -> None:
    trim(client, 1, rows=7)
    with pytest.raises(SpecError) as caught:
        check_against_store(spec_of(tmp_path, "first"), client)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "partition 1 begins at row 7;" in text
    assert "start: earliest_available" in text
    assert queue_consumers(client) == {}
    spec = spec_of(tmp_path, "first", "{queue: logs, start: earliest_available}")
    assert check_against_store(spec, client) == 2


def test_processor_that_trimmed_the_queue_itself_starts_again(tmp_path: Path, client: StateClient) -> None:
    check_against_store(spec_of(tmp_path, "first"), client)
    state = MapperState(InputIndex(7), ShuffleIndex(7), encode_position(7))
    with client.transaction() as tx:
        tx.write(mappers_table("first"), state_rows(MapperIndex(1), state))
        tx.commit()
    trim(client, 1, rows=7)
    assert check_against_store(spec_of(tmp_path, "first"), client) == 2


def test_start_is_for_queues(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"first\.yaml:3: input\.start: is for queues"):
        spec_of(tmp_path, "first", "{folder: files, start: earliest_available}")


# The commands for it -------------------------------------------------------------------------------------------------


def state(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    commands.add_parsers(parser)
    assert commands.run(parser.parse_args(arguments)) == 0
    return capsys.readouterr().out


def test_consumer_is_listed_and_released(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(tmp_path / "store")
    with StateClient.open(store) as client:
        client.create_queue("logs", schema=LOGS, partitions=2)
        check_against_store(spec_of(tmp_path, "first"), client)
    assert json.loads(state(capsys, "consumers", store, "--json")) == {"logs": "first"}
    assert state(capsys, "consumers", store).split() == ["queue", "consumer", "logs", "first"]
    assert "released from the processor first" in state(capsys, "release", store, "logs")
    assert json.loads(state(capsys, "consumers", store, "--json")) == {}
    with pytest.raises(BadInput, match="has no consumer"):
        state(capsys, "release", store, "logs")
    with StateClient.open(store) as client:
        check_against_store(spec_of(tmp_path, "second"), client)


def test_consumer_that_runs_is_not_released(
    tmp_path: Path, client: StateClient, capsys: pytest.CaptureFixture[str]
) -> None:
    check_against_store(spec_of(tmp_path, "first"), client)
    client.leases.register("first/mappers", "guid", {}, ttl_ms=60_000)
    with pytest.raises(BadInput, match="'first' is running"):
        commands._release(client, argparse.Namespace(queue="logs", json=False))
    assert queue_consumers(client) == {"logs": "first"}


def test_tables_and_queues_are_dropped_only_with_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(tmp_path / "store")
    with StateClient.open(store) as client:
        client.create_queue("logs", schema=LOGS, partitions=2)
        client.create_queue("others", schema=LOGS, partitions=1)
        client.queue("logs").append(1, pa.table({"user": ["ada", "bob"]}, schema=LOGS))
        client.create_table("counts", key=LOGS, value=pa.schema([("n", pa.int64())]))
    with pytest.raises(BadInput, match=r"would delete the queue logs, with 2 rows; the table counts\. Nothing"):
        state(capsys, "drop", store, "logs", "counts")
    with pytest.raises(UnknownTable, match="no table or queue 'count'"):
        state(capsys, "drop", store, "logs", "count", "--yes")
    assert state(capsys, "drop", store, "logs", "counts", "--yes").splitlines() == [
        "dropped the queue logs, with 2 rows",
        "dropped the table counts",
    ]
    assert json.loads(state(capsys, "drop", store, "others", "--yes", "--json")) == {"dropped": ["others"]}
    with StateClient.open(store) as client:
        assert client.queues() == []
        assert "counts" not in {table.name for table in client.tables()}


@pytest.mark.parametrize("name", ["logs", "first/exports"])
def test_what_a_running_processor_uses_is_not_dropped(tmp_path: Path, client: StateClient, name: str) -> None:
    check_against_store(spec_of(tmp_path, "first"), client)
    client.create_table("first/exports", key=LOGS, value=pa.schema([("n", pa.int64())]))
    client.leases.register("first/exporters", "guid", {}, ttl_ms=60_000)
    with pytest.raises(BadInput, match=f"'first' is running and uses '{name}'"):
        commands._drop(client, argparse.Namespace(names=[name], yes=True, json=False))


def test_rows_of_a_queue_are_printed_with_their_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(tmp_path / "store")
    with StateClient.open(store) as client:
        client.create_queue("logs", schema=LOGS, partitions=2)
        for partition in (0, 1):
            client.queue("logs").append(partition, pa.table({"user": [f"u{i}" for i in range(5)]}, schema=LOGS))
        client.queue("logs").trim(1, 2)
    lines = [json.loads(line) for line in state(capsys, "read", store, "logs", "--json").splitlines()]
    assert [(line["partition"], line["position"]) for line in lines] == [
        *((0, position) for position in range(5)),
        *((1, position) for position in (2, 3, 4)),
    ]
    assert lines[-1]["row"] == {"user": "u4"}
    cut = state(capsys, "read", store, "logs", "--partition", "0", "--begin", "3", "--rows", "1")
    assert cut.splitlines()[-1].split() == ["0", "3", "u3"]
    with pytest.raises(OutOfRange, match="trimmed"):
        state(capsys, "read", store, "logs", "--partition", "1", "--begin", "1")
    with pytest.raises(BadInput, match="give --partition"):
        state(capsys, "read", store, "logs", "--begin", "1")
