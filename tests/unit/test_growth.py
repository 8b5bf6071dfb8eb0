"""Inputs that get more partitions: the fingerprint, the row of a reducer, and who starts mappers for them."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.durable.mapper_state import lookup_committed
from shuffle.durable.reducer_state import REDUCERS_KEY, REDUCERS_VALUE, ReducerState
from shuffle.errors import Outgrown, SpecError
from shuffle.ids import NOTHING_COMMITTED, MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.mapper.readers.grouped import GroupedInput
from shuffle.mapper.readers.opening import open_input
from shuffle.preflight.check import check_against_store
from shuffle.reducer.commit import Committer
from shuffle.run import growth
from shuffle.run.growth import Growth
from shuffle.spec.config import load_spec
from shuffle.spec.index_sets import share_out_of
from shuffle.statestore import StateClient
from tests.waiting import wait_until

INPUT = '''
from pathlib import Path
from shuffle import HashMapper, AggregateReducer, Count, Input, PartitionReader
import pyarrow as pa

class Reader(PartitionReader):
    schema = pa.schema([("user", pa.string())])
    def read(self, begin_row_index, end_row_index, token):
        return self.schema.empty_table(), token
    def trim(self, row_index, token): ...

class Growing(Input):
    """As many partitions as a file says; the last one that was numbered is what is known."""
    def describe(self): return "growing"
    def partition_count(self): return int((self.folder / "count").read_text())
    def partitions(self):
        count = self.partition_count()
        return f"{count} after {self.known_partitions}"
    def open(self, partition): return Reader()

class Numbered(Growing):
    def partitions(self): return str(self.partition_count())

class Fixed(Growing):
    def partitions(self): return None

class ByUser(HashMapper):
    key = ["user"]

class CountUsers(AggregateReducer):
    table = "counts"
    key = ["user"]
    aggregates = {"count": Count()}
'''


def spec_of(folder: Path, kind: str = "Growing") -> Path:
    (folder / "growing_job.py").write_text(INPUT)
    (folder / "count").write_text("2")
    path = folder / "job.yaml"
    path.write_text(
        f'processor: job\nstate: ./job.state\ninput: {{class: "growing_job:{kind}"}}\n'
        'mapper: {class: "growing_job:ByUser"}\nreducer: {class: "growing_job:CountUsers", count: 2}\n'
    )
    return path


def meta(client: StateClient) -> dict[str, str]:
    return {row["name"]: row["value"] for row in client.scan("job/meta").read_all().to_pylist()}


def with_progress(client: StateClient, mappers: int) -> None:
    state = ReducerState((ShuffleIndex(5),) * mappers)
    with client.transaction() as tx:
        tx.write("job/reducers", state.to_row(ReducerIndex(0)))
        tx.commit()


def test_more_partitions_are_taken_into_the_fingerprint_and_fewer_refused(tmp_path: Path) -> None:
    spec = load_spec(spec_of(tmp_path))
    with StateClient.open(tmp_path / "job.state") as client:
        assert check_against_store(spec, client) == 2
        with_progress(client, 2)
        assert meta(client)["partitions"] == "2 after None"
        (tmp_path / "count").write_text("5")
        assert check_against_store(spec, client) == 5
        assert meta(client)["mapper_count"] == "5"
        assert meta(client)["partitions"] == "5 after 2 after None"
        (tmp_path / "count").write_text("4")
        with pytest.raises(SpecError, match="mapper count has changed: 4, but the existing state was made with 5"):
            check_against_store(spec, client)


def test_input_that_cannot_grow_is_refused_more_partitions(tmp_path: Path) -> None:
    spec = load_spec(spec_of(tmp_path, "Fixed"))
    with StateClient.open(tmp_path / "job.state") as client:
        check_against_store(spec, client)
        with_progress(client, 2)
        (tmp_path / "count").write_text("3")
        with pytest.raises(SpecError, match="mapper count has changed"):
            check_against_store(spec, client)


def test_growth_names_each_new_mapper_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "LOOK_S", 0.0)
    spec = load_spec(spec_of(tmp_path))
    with StateClient.open(tmp_path / "job.state") as client:
        count = check_against_store(spec, client)
        looking = Growth(spec, client, count)
        assert not looking.look(time.monotonic())
        (tmp_path / "count").write_text("5")
        found: list[int] = []
        wait_until(lambda: bool(found.extend(looking.look(time.monotonic())) or found))
        assert found == [2, 3, 4]
        (tmp_path / "count").write_text("nonsense")  # What is wrong with the input is for its readers to say.
        for _ in range(5):
            assert not looking.look(time.monotonic())
            time.sleep(0.02)


def test_new_mappers_share_processes_as_the_spec_says() -> None:
    assert share_out_of(range(3, 8), 2) == [range(3, 5), range(5, 7), range(7, 8)]
    assert share_out_of(range(3, 3), 2) == []


# The row of a reducer ------------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path) -> StateClient:
    opened = StateClient.open(tmp_path / "store")
    opened.create_table("job/reducers", key=REDUCERS_KEY, value=REDUCERS_VALUE)
    return opened


def row_of(client: StateClient) -> ReducerState:
    rows = client.scan("job/reducers").read_all().to_pylist()
    return ReducerState.from_any_row(rows[0])


def write(client: StateClient, state: ReducerState) -> None:
    with client.transaction() as tx:
        tx.write("job/reducers", state.to_row(ReducerIndex(0)))
        tx.commit()


def test_row_is_widened_before_it_is_gone_on_from(client: StateClient) -> None:
    before = ReducerState((ShuffleIndex(7), NOTHING_COMMITTED), 3, (5, None))
    write(client, before)
    found = Committer(client, "job/reducers", ReducerIndex(0), 4).read_state()
    assert found == ReducerState((ShuffleIndex(7), *(NOTHING_COMMITTED,) * 3), 3, (5, None, None, None))
    assert row_of(client) == found, "it is so in the store, for every other instance to see"
    with pytest.raises(Outgrown, match="knows of 2 mappers, and its persisted row has 4"):
        Committer(client, "job/reducers", ReducerIndex(0), 2).read_state()
    client.close()


def test_reducer_without_a_row_begins_with_all_mappers(client: StateClient) -> None:
    assert Committer(client, "job/reducers", ReducerIndex(0), 3).read_state() == ReducerState.initial(3)
    assert client.scan("job/reducers").read_all().num_rows == 0
    client.close()


def test_nothing_is_committed_of_a_mapper_that_a_row_does_not_know(client: StateClient) -> None:
    write(client, ReducerState((ShuffleIndex(7),)))
    assert lookup_committed(client, "job", MapperIndex(0), 2) == {0: 7}
    assert lookup_committed(client, "job", MapperIndex(1), 2) == {0: NOTHING_COMMITTED}
    assert isinstance(client.scan("job/reducers").read_all(), pa.Table)
    client.close()


def grouped_spec(folder: Path, per_mapper: int) -> Path:
    path = spec_of(folder, "Numbered")
    path.write_text(path.read_text().replace('ByUser"', f'ByUser", partitions_per_mapper: {per_mapper}'))
    return path


def groups(spec: Path, client: StateClient, mappers: int) -> list[range]:
    with open_input(load_spec(spec), client) as opened:
        assert isinstance(opened, GroupedInput)
        assert opened.partition_count() == mappers
        return [opened._group(mapper) for mapper in range(mappers)]


def test_partitions_that_are_new_become_groups_of_their_own_and_no_group_ever_changes(tmp_path: Path) -> None:
    spec = grouped_spec(tmp_path, 3)
    (tmp_path / "count").write_text("4")
    with StateClient.open(tmp_path / "job.state") as client:
        assert check_against_store(load_spec(spec), client) == 2
        with_progress(client, 2)
        first = [range(3), range(3, 4)]
        assert groups(spec, client, 2) == first
        (tmp_path / "count").write_text("6")
        with open_input(load_spec(spec), client) as opened:
            assert isinstance(opened, GroupedInput)
            assert [opened._group(mapper) for mapper in range(2)] == first, "though the second has room"
            # Another worker has numbered one more than this one has found.
            (tmp_path / "count").write_text("7")
            assert check_against_store(load_spec(spec), client) == 3
        (tmp_path / "count").write_text("8")
        assert check_against_store(load_spec(spec), client) == 4
        assert groups(spec, client, 4) == [*first, range(4, 7), range(7, 8)]
        assert check_against_store(load_spec(spec), client) == 4, "and nothing has changed now"
        (tmp_path / "count").write_text("0")
        with open_input(load_spec(spec), client) as opened:
            assert opened.partition_count() == 4, "what is known is enough"


@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (1, 3)])
def test_other_groups_over_existing_state_are_refused(tmp_path: Path, before: int, after: int) -> None:
    (tmp_path / "count").write_text("4")
    with StateClient.open(tmp_path / "job.state") as client:
        mappers = check_against_store(load_spec(grouped_spec(tmp_path, before)), client)
        changed = load_spec(grouped_spec(tmp_path, after))
        check_against_store(changed, client)  # Nothing was read yet.
        check_against_store(load_spec(grouped_spec(tmp_path, before)), client)
        with_progress(client, mappers)
        with pytest.raises(SpecError, match="input has changed: "):
            check_against_store(changed, client)
