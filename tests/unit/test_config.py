"""Specs: what is read, what is refused and how it is said, and the check against an embedded store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import SpecError
from shuffle.limits import MIB
from shuffle.preflight.check import check_against_store
from shuffle.preflight.fingerprint import has_progress, nothing_ahead
from shuffle.spec.config import ProcessorSpec, SpillSpec, load_spec
from shuffle.spec.inputs import ClassInputSpec
from shuffle.statestore import StateClient
from shuffle.user_code.digest import code_digest
from shuffle.user_code.load import load_class

JOB = """
from shuffle import HashMapper, Mapper, Reducer, hash_partition

class Parse(Mapper):
    def map(self, rows):
        return hash_partition(rows, by=["user"], reducers=self.spec.reducer_count)

class ByUser(HashMapper):
    key = ["user"]
    config_schema = {"limit": (int, 3)}

class Fold(Reducer):
    def reduce(self, rows):
        return None

class Half(Reducer):
    pass

class NotOne:
    pass
"""

SPEC = """\
processor: job
state: ./job.state
input: {queue: logs}
mapper: {class: "JOB:Parse", memory: 64MiB}
reducer: {class: "JOB:Fold", count: 2}
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    """The name of a module of its own for each test: Python imports a name only once."""
    name = "job_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text(JOB)
    return name


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "store") as client:
        client.create_queue("logs", schema=pa.schema([("user", pa.string())]), partitions=3)
        yield client


def write(tmp_path: Path, text: str, job: str = "job") -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("JOB", job))
    return path


def mistakes_of(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(write(tmp_path, text))
    return [line.removeprefix(f"{tmp_path}/job.yaml:") for line in str(caught.value).splitlines()]


def test_spec_of_the_contract_is_read_with_defaults(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, SPEC))
    assert (spec.processor, spec.state) == ("job", str(tmp_path / "job.state"))
    assert spec.input.queue == "logs"
    assert spec.mapper.class_name == "job:Parse"
    assert spec.mapper.memory_bytes == 64 * MIB
    assert spec.reducer.count == 2
    assert spec.reducer.fetch_wait_ms == 500
    assert spec.mapper.on_error == "stop"
    assert spec.state_folder == tmp_path / "job.state"
    assert spec.lines["mapper.class"] == 4


def test_spec_state_at_an_address_has_no_folder(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, SPEC.replace("./job.state", "grpc://store:7070")))
    assert spec.state == "grpc://store:7070"
    assert spec.state_folder is None


def test_spec_state_is_replaced_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHUFFLE_STATE", "grpc://127.0.0.1:1234")
    assert load_spec(write(tmp_path, SPEC)).state == "grpc://127.0.0.1:1234"


def test_spec_times_and_sizes_in_both_spellings(tmp_path: Path) -> None:
    text = SPEC.replace("memory: 64MiB", "memory_bytes: 67108864, trim_period: 5s, read_wait_ms: 250")
    spec = load_spec(write(tmp_path, text.replace("count: 2", "count: 2, backoff: 10ms, backoff_max: 1s")))
    assert (spec.mapper.memory_bytes, spec.mapper.trim_period_ms, spec.mapper.read_wait_ms) == (64 * MIB, 5_000, 250)
    assert (spec.reducer.backoff_ms, spec.reducer.backoff_ms_max) == (10, 1_000)


def test_spec_user_config_keeps_its_types(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, SPEC + "lease_ttl: 2s\nmetrics: 9100\n"))
    assert spec.lease_ttl_ms == 2_000
    assert [spec.metrics_port("reducer", 1), spec.metrics_port("mapper", 0)] == [9101, 9102]
    assert spec.store_metrics_port() == 9099
    assert [replace(spec, metrics=on).store_metrics_port() for on in (True, False)] == [0, None]
    text = SPEC.replace("memory: 64MiB", "config: {a: 1, b: [x, 2.5], c: {d: true}}")
    assert load_spec(write(tmp_path, text)).mapper.config == {"a": 1, "b": ["x", 2.5], "c": {"d": True}}


def test_spec_dead_letter_queues_get_names(tmp_path: Path) -> None:
    text = SPEC.replace("memory: 64MiB", "on_error: dead_letter")
    assert load_spec(write(tmp_path, text)).mapper.dead_letter_queue == "job/mapper_dead_letters"


def test_spec_spill_as_a_mapping_a_flag_and_left_out(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, SPEC)).spill == SpillSpec()
    assert load_spec(write(tmp_path, SPEC + "spill: false\n")).spill == SpillSpec(enabled=False)
    text = SPEC + "spill: {reducers_done_share: 75%, age: 5s, memory_share: 0.25, compression: zstd}\n"
    assert load_spec(write(tmp_path, text)).spill == SpillSpec(True, 0.75, 5_000, 0.25, "zstd")


@pytest.mark.parametrize(
    ("spill", "expected"),
    [
        ("maybe", "spill: 'maybe' is neither true nor false"),
        ("{compression: gzip}", "spill.compression: 'gzip' is none of none, lz4, zstd"),
        ("{memory_share: 1.5}", "spill.memory_share: 1.5 is not between 0 and 1"),
        ("{memory_share: much}", "spill.memory_share: 'much' is not a share"),
        ("{agee: 2s}", "spill.agee: unknown key; did you mean 'age'?"),
        ("{age: 0}", "spill.age: 0 is not between 1 and 86400000"),
    ],
)
def test_spec_spill_mistake_is_named_with_its_line(tmp_path: Path, spill: str, expected: str) -> None:
    assert any(line.startswith(f"6: {expected}") for line in mistakes_of(tmp_path, f"{SPEC}spill: {spill}\n"))


def test_spec_every_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    text = """\
processor: two words
state: http://x
input: {queue: a, folder: b}
mapper:
  class: nowhere
  memry: 1GiB
  memory: 5 apples
reducer: {class: "m:C", count: 0, fetch_rows_max: x}
colour: red
"""
    found = mistakes_of(tmp_path, text)
    assert [line.split(":", 2)[:2] for line in found] == [
        ["1", " processor"],
        ["2", " state"],
        ["3", " input"],
        ["5", " mapper.class"],
        ["6", " mapper.memry"],
        ["7", " mapper.memory"],
        ["8", " reducer.count"],
        ["8", " reducer.fetch_rows_max"],
        ["9", " colour"],
    ]
    assert "did you mean 'memory'?" in found[4]
    assert "at least one reducer is needed" in found[6]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("count: 2", "", "reducer.count: is missing"),
        ("processor: job\n", "", "processor: is missing"),
        ("{queue: logs}", "{}", "input: give either queue, folder, kafka or class"),
        ("{queue: logs}", "logs", "input: a mapping with the keys"),
        ("{queue: logs}", "{queue: [logs]}", "input.queue: a single value is needed here, not a list"),
        ("{queue: logs}", "{queue: }", "input.queue: a single value is needed here, not nothing"),
        ("count: 2", "count: 2, count: 3", "reducer.count: is given twice, first in line 5"),
        ("count: 2", "count: 5000", "reducer.count: 5000 is not between 1 and 4096"),
        ("count: 2", "count: 2, backoff: 9s", "reducer.backoff_ms: 9000 is above backoff_ms_max=5000"),
        ("count: 2", "count: 2, on_error: dead_leter", "did you mean 'dead_letter'?"),
        (
            "count: 2",
            "count: 2, pipeline_depth: 1",
            "reducer.pipeline_depth: has no effect and is not an option",
        ),
        ("count: 2", "count: 2, dead_letter_queue: x", "is never used with on_error: stop"),
        ("memory: 64MiB", "memory: 2MiB", "raise it or lower batch_bytes_max"),
        ("memory: 64MiB", "listen: nowhere", "write it as host:port"),
        ("processor: job", "processor: job\nmax_parallelism: 1", "2 cannot share 1 key groups"),
        ("{queue: logs}", "{queue: logs, format: parquet}", "input.format: is for folders of files"),
        ("{queue: logs}", "{queue: logs", "not YAML"),
        ("{queue: logs}", '{queue: logs, class: "m:C"}', "input: give either queue, folder, kafka or class, not more"),
        ("{queue: logs}", "{class: nowhere, a: 1}", "input.class: 'nowhere' is not a class"),
        ("{queue: logs}", '{class: "m:C", a: 1, a: 2}', "input.a: is given twice"),
        ("{queue: logs}", '{class: "m:C", a: 2026-13-13}', "input.a: cannot be read"),
    ],
)
def test_spec_mistake_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert any(expected in line for line in mistakes_of(tmp_path, SPEC.replace(old, new)))


def test_spec_input_of_an_own_class_has_options_of_any_name(tmp_path: Path) -> None:
    own = '{class: "m:C", start: 3, topics: [a, b], format: {deep: true}}'
    write(tmp_path, SPEC.replace("{queue: logs}", own))
    spec = load_spec(tmp_path / "job.yaml")
    assert spec.input == ClassInputSpec("m:C", {"start": 3, "topics": ["a", "b"], "format": {"deep": True}})
    assert (spec.input.consumes, spec.input.config["start"]) == (None, 3)


def test_spec_that_is_missing_or_empty(tmp_path: Path) -> None:
    write(tmp_path, "")
    with pytest.raises(SpecError, match="the file is empty"):
        load_spec(tmp_path / "job.yaml")
    with pytest.raises(SpecError, match=r"did you mean 'job\.yaml'"):
        load_spec(tmp_path / "jobs.yaml")


def test_plain_number_is_a_duration_only_where_the_key_says_its_unit(tmp_path: Path) -> None:
    text = SPEC.replace("memory: 64MiB", "trim_period: 500")
    assert mistakes_of(tmp_path, text) == ["4: mapper.trim_period: '500' has no unit of time: write 500s or 500ms"]


# Against a store -----------------------------------------------------------------------------------------------------


def spec_of(tmp_path: Path, job: str, *changes: tuple[str, str]) -> ProcessorSpec:
    text = SPEC
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return load_spec(write(tmp_path, text, job))


def commit_progress(client: StateClient, mapper_unread: int, reducer_committed: int) -> None:
    with client.transaction() as tx:
        row = {
            "mapper_index": [0],
            "input_unread_row_index": [mapper_unread],
            "shuffle_unread_row_index": [mapper_unread],
            "continuation_token": [b"t"],
            "generation": [0],
            "front": [None],
        }
        mappers = client.table("job/mappers")
        tx.write("job/mappers", pa.table(row, schema=pa.schema([*mappers.key, *mappers.value])))
        committed = np.array([reducer_committed, -1, -1], dtype="<i8").tobytes()
        reducers = client.table("job/reducers")
        schema = pa.schema([*reducers.key, *reducers.value])
        reduced = {"reducer_index": [0], "committed_row_indices": [committed], "generation": [0], "fronts": [None]}
        tx.write("job/reducers", pa.table(reduced, schema=schema))
        tx.commit()


def test_check_counts_mappers_and_creates_tables(tmp_path: Path, job: str, client: StateClient) -> None:
    spec = spec_of(tmp_path, job)
    assert check_against_store(spec, client) == 3
    assert {"job/mappers", "job/reducers", "job/meta"} <= {table.name for table in client.tables()}
    assert check_against_store(spec, client) == 3


def test_check_names_all_of_queue_and_classes(tmp_path: Path, job: str, client: StateClient) -> None:
    spec = spec_of(tmp_path, job, ("queue: logs", "queue: log"), ("JOB:Parse", "JOB:Pars"), ("JOB:Fold", "JOB:NotOne"))
    with pytest.raises(SpecError) as caught:
        check_against_store(spec, client)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "job.yaml:4: mapper.class" in lines[0]
    assert "did you mean 'Parse'?" in lines[0]
    assert "is not a subclass of shuffle.Reducer" in lines[1]
    assert "there is no queue 'log'; did you mean 'logs'?" in lines[2]


def test_check_class_that_cannot_be_used(tmp_path: Path, job: str) -> None:
    with pytest.raises(SpecError, match="does not define reduce"):
        load_class(spec_of(tmp_path, job, ("JOB:Fold", "JOB:Half")), "reducer")
    with pytest.raises(SpecError, match=f"there is no module {job}s; did you mean '{job}'"):
        load_class(spec_of(tmp_path, job, ("JOB:Fold", "JOBs:Fold")), "reducer")


def test_check_user_module_that_fails_is_one_line_with_its_place(tmp_path: Path, job: str) -> None:
    (tmp_path / f"{job}_broken.py").write_text("import os\n\nvalue = os.environ['NO SUCH THING']\n")
    with pytest.raises(SpecError) as caught:
        load_class(spec_of(tmp_path, job, ("JOB:Parse", "JOB_broken:Parse")), "mapper")
    assert len(str(caught.value).splitlines()) == 1
    assert f"{job}_broken.py:3: KeyError" in str(caught.value)
    (tmp_path / f"{job}_syntax.py").write_text("def x(:\n")
    with pytest.raises(SpecError, match=r"_syntax\.py:1: SyntaxError"):
        load_class(spec_of(tmp_path, job, ("JOB:Parse", "JOB_syntax:Parse")), "mapper")


def test_check_user_config_against_the_schema_of_its_class(tmp_path: Path, job: str) -> None:
    change = ('"JOB:Parse", memory: 64MiB', '"JOB:ByUser", config: {limt: 3}')
    with pytest.raises(SpecError, match=r"mapper.config: config of ByUser: unknown key 'limt'; did you mean 'limit'"):
        load_class(spec_of(tmp_path, job, change), "mapper")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("count: 2", "count: 3"), "reducer.count: reducer count has changed: 3, but .* 2"),
        (("processor: job", "processor: job\nmax_parallelism: 64"), "max_parallelism: max parallelism has changed"),
        (("JOB:Parse", "JOB:ByUser"), "mapper.class: mapper class has changed"),
        (("memory: 64MiB", "config: {by: x}"), "mapper.config: mapper config has changed"),
    ],
)
def test_check_change_over_existing_state_is_refused(
    tmp_path: Path, job: str, client: StateClient, change: tuple[str, str], said: str
) -> None:
    check_against_store(spec_of(tmp_path, job), client)
    commit_progress(client, mapper_unread=0, reducer_committed=4)
    with pytest.raises(SpecError, match=said) as caught:
        check_against_store(spec_of(tmp_path, job, change), client)
    assert "what to do" in str(caught.value)
    assert check_against_store(spec_of(tmp_path, job), client) == 3


def test_check_change_before_anything_was_committed_is_fine(tmp_path: Path, job: str, client: StateClient) -> None:
    check_against_store(spec_of(tmp_path, job), client)
    changed = spec_of(tmp_path, job, ("count: 2", "count: 3"))
    assert check_against_store(changed, client) == 3
    commit_progress(client, mapper_unread=1, reducer_committed=0)
    assert check_against_store(changed, client) == 3


def test_check_new_map_is_accepted_once_nothing_is_ahead(tmp_path: Path, job: str, client: StateClient) -> None:
    check_against_store(spec_of(tmp_path, job), client)
    changed = spec_of(tmp_path, job, ("JOB:Parse", "JOB:ByUser"))
    commit_progress(client, mapper_unread=4, reducer_committed=4)
    with pytest.raises(SpecError, match="cannot be accepted yet"):
        check_against_store(changed, client, accept_new_map=True)
    commit_progress(client, mapper_unread=5, reducer_committed=4)
    assert check_against_store(changed, client, accept_new_map=True) == 3
    assert check_against_store(changed, client) == 3


def test_check_folder_input(tmp_path: Path, job: str, client: StateClient) -> None:
    spec = spec_of(tmp_path, job, ("{queue: logs}", "{folder: files}"))
    with pytest.raises(SpecError, match=r"input\.folder"):
        check_against_store(spec, client)
    (tmp_path / "files" / "a").mkdir(parents=True)
    (tmp_path / "files" / "b").mkdir()
    assert check_against_store(spec, client) == 2


def _class_of(source: str) -> type:
    names: dict[str, object] = {"__name__": "user"}
    exec(compile(source, "user.py", "exec"), names)
    found = names["M"]
    assert isinstance(found, type)
    return found


USER_MAP = """
KEY = ['a']

def f(x):
    return x + 1

class M:
    'doc'
    n = 1

    def map(self, r):
        'doc'
        return f(r), KEY, r in {'x', 'y'}
"""


def test_code_digest_sees_what_matters_only() -> None:
    source = USER_MAP
    digest = code_digest(_class_of(source))
    assert code_digest(_class_of(source.replace("'doc'", "'other words'").replace("KEY = ", "# why\nKEY = "))) == digest
    for old, new in [("['a']", "['b']"), ("x + 1", "x + 2"), ("n = 1", "n = 2"), ("r in {", "r not in {")]:
        assert code_digest(_class_of(source.replace(old, new))) != digest


def test_progress_and_what_is_ahead() -> None:
    def tables(unread: int, committed: list[int]) -> tuple[pa.Table, pa.Table]:
        mappers = {"mapper_index": [0], "input_unread_row_index": [unread], "shuffle_unread_row_index": [unread]}
        return pa.table(mappers), pa.table({"committed_row_indices": [np.array(committed, dtype="<i8").tobytes()]})

    assert not has_progress(*tables(0, [-1, -1]))
    assert has_progress(*tables(0, [-1, 0]))
    assert has_progress(*tables(3, [-1, -1]))
    assert nothing_ahead(*tables(3, [2, -1]))
    assert not nothing_ahead(*tables(3, [3, -1]))
    assert not nothing_ahead(*tables(3, [2, 0]))  # Mapper 1 has persisted nothing.


def test_spec_objects_are_frozen(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, SPEC))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.processor = "other"  # type: ignore[misc]
