"""The controller's logic: when what is started again, when a processor is drained, what the screen shows."""

from __future__ import annotations

import io
import json
import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from shuffle.ids import Token
from shuffle.mapper.reader import START, Input, PartitionReader
from shuffle.mapper.readers.opening import built_in_input, open_input
from shuffle.mapper.readers.queue import encode_position
from shuffle.metrics import MapperMetrics, ReducerMetrics, serve_metrics
from shuffle.preflight.check import check_against_store
from shuffle.run.determinism import check_map, first_difference
from shuffle.run.drain import drain_goal, is_drained
from shuffle.run.status import MapperStatus, ProcessorStatus, ReducerStatus, collect
from shuffle.run.supervisor import RestartPolicy
from shuffle.run.terminal import ChildView, Rates, progress_line, render
from shuffle.spec.config import ProcessorSpec, load_spec
from shuffle.spec.inputs import QueueInputSpec
from shuffle.statestore import StateClient
from shuffle.support.logs import get_logger, setup_logging
from tests.deaths import unexpected

# Restarts ------------------------------------------------------------------------------------------------------------


def test_restart_waits_double_up_to_the_longest() -> None:
    policy = RestartPolicy(delay_s_min=0.5, delay_s_max=3.0, healthy_s=20.0)
    assert [policy.died(ran_s=1.0) for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert policy.restarts == 6


def test_restart_after_a_healthy_run_has_a_clean_record() -> None:
    policy = RestartPolicy(healthy_s=20.0, keeps_dying_after=3)
    seen = []
    for ran_s in (0.1, 0.1, 0.1, 25.0):
        policy.died(ran_s)
        seen.append(policy.keeps_dying)
    assert seen == [False, False, True, False]
    assert policy.restarts == 4


def test_restart_after_many_deaths_stays_a_number() -> None:
    policy = RestartPolicy(delay_s_max=10.0, deaths=5_000)
    assert policy.died(ran_s=0.0) == 10.0


# Draining ------------------------------------------------------------------------------------------------------------


def test_drain_of_a_queue_is_reached_at_the_ends_it_had(client: StateClient) -> None:
    source = built_in_input(QueueInputSpec("logs"), client)
    goal = drain_goal(source, 2)
    client.queue("logs").append(1, client.queue("logs").read(1, 0, max_rows=50)[0])  # Comes too late to count.
    goal.note(0, encode_position(0))
    goal.note(1, encode_position(199))
    assert goal.open_partitions == {1}
    goal.note(1, None)
    assert not goal.reached
    goal.note(1, encode_position(212))
    assert goal.reached


class Unsure(Input):
    """An input that does not know its end; its one partition has as many rows as it is told, with gaps between."""

    rows = 1

    def partition_count(self) -> int:
        return 1

    def open(self, partition: int) -> PartitionReader:
        return UnsureReader(self.rows)


class UnsureReader(PartitionReader):
    schema = pa.schema([("n", pa.int64())])

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        place = len(token)  # Two steps for each row: a gap, and the row.
        if place >= 2 * self._rows:
            return self.schema.empty_table(), token
        return self.schema.empty_table() if place % 2 == 0 else pa.table({"n": [place]}), Token(token + b".")

    def trim(self, row_index: int, token: Token) -> None: ...


def test_drain_of_an_input_without_ends_is_reached_when_nothing_is_left(tmp_path: Path, client: StateClient) -> None:
    source = Unsure({}, client, tmp_path)
    goal = drain_goal(source, 1)
    goal.note(0, None)  # Its mapper has not begun.
    goal.note(0, START)
    goal.note(0, Token(b"."))
    assert not goal.reached
    goal.note(0, Token(b".."))
    assert goal.reached


JOB = """
import pyarrow as pa
from shuffle import Mapper, PartitionedRowset, Reducer, hash_partition

class Good(Mapper):
    def map(self, rows):
        return hash_partition(rows.filter(rows["n"].is_valid()), by=["user"], reducers=self.spec.reducer_count)

class ByHash(Mapper):
    def map(self, rows):
        users = rows["user"].to_pylist()
        return PartitionedRowset(rows, pa.array([hash(u) % 2 for u in users], pa.int64()))

class ByBatch(Mapper):
    def map(self, rows):
        numbered = rows.append_column("at", pa.array(range(rows.num_rows)))
        return PartitionedRowset(numbered, pa.array([0] * rows.num_rows))

class Counting(Mapper):
    seen = 0
    def map(self, rows):
        begin, type(self).seen = self.seen, self.seen + rows.num_rows
        numbers = pa.array(range(begin, begin + rows.num_rows))
        return PartitionedRowset(rows.append_column("number", numbers), pa.array([0] * rows.num_rows))

class Picky(Good):
    def map(self, rows):
        if "user-7" in rows["user"].to_pylist():
            raise ValueError("not user-7")
        return super().map(rows)

class Fold(Reducer):
    def reduce(self, rows):
        return None
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "store") as client:
        schema = pa.schema([("user", pa.string()), ("n", pa.int64())])
        client.create_queue("logs", schema=schema, partitions=2)
        users = [f"user-{i % 40}" for i in range(200)]
        rows = pa.table({"user": users, "n": [None if i % 3 else i for i in range(200)]}, schema=schema)
        client.queue("logs").append(1, rows)
        yield client


def spec_for(tmp_path: Path, mapper_class: str) -> ProcessorSpec:
    module = "job_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{module}.py").write_text(JOB)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"processor: job\nstate: ./store\ninput: {{queue: logs}}\n"
        f'mapper: {{class: "{module}:{mapper_class}"}}\nreducer: {{class: "{module}:Fold", count: 2}}\n'
    )
    return load_spec(path)


def test_drain_looks_at_persisted_tokens(tmp_path: Path, client: StateClient) -> None:
    spec = spec_for(tmp_path, "Good")
    mapper_count = check_against_store(spec, client)
    goal = drain_goal(open_input(spec, client), mapper_count)
    assert not is_drained(goal, spec, client)
    assert goal.open_partitions == {1}  # Partition 0 never had a row.
    mappers = client.table(spec.mappers_table)
    for position, drained in ((199, False), (200, True)):
        with client.transaction() as tx:
            row = {
                "mapper_index": [1],
                "input_unread_row_index": [position],
                "shuffle_unread_row_index": [0],
                "continuation_token": [encode_position(position)],
                "generation": [0],
                "front": [None],
            }
            tx.write(spec.mappers_table, pa.table(row, schema=pa.schema([*mappers.key, *mappers.value])))
            tx.commit()
        assert is_drained(goal, spec, client) is drained


# The check of map ----------------------------------------------------------------------------------------------------


def test_first_difference_names_the_first_row_of_all_columns() -> None:
    nan = float("nan")
    first = pa.table({"a": [1, 2, 3], "b": [nan, 1.0, 2.0]})
    assert first_difference(first, first) is None
    assert first_difference(first, pa.table({"a": [1, 2, 4], "b": [nan, 1.5, 2.0]})) == (1, "b is 1.0, then 1.5")
    assert first_difference(first, first.slice(0, 2)) == (2, "there are 3 rows, then 2")
    other = first_difference(first, first.select(["a"]))
    assert other is not None
    assert "the columns are" in other[1]


@pytest.mark.parametrize(
    ("mapper_class", "how"), [("ByBatch", "with other batch boundaries"), ("Counting", "when it is mapped again")]
)
def test_check_of_map_says_which_row_differed(tmp_path: Path, client: StateClient, mapper_class: str, how: str) -> None:
    spec = spec_for(tmp_path, mapper_class)
    result = check_map(spec, client, check_against_store(spec, client))
    assert result.difference is not None
    assert (result.difference.partition, result.difference.how) == (1, how)
    assert result.difference.input_row == result.difference.output_row


def test_check_of_map_leaves_out_rows_that_fail(
    tmp_path: Path, client: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_for(tmp_path, "Picky")
    monkeypatch.setattr(
        "shuffle.run.determinism._map_in_fresh_process", lambda spec, count, at, rows: _mapped(spec, client, rows)
    )
    result = check_map(spec, client, check_against_store(spec, client))
    assert (result.rows, result.rows_failed, result.difference) == (195, 5, None)
    assert result.first_failure == "ValueError: not user-7"


def _mapped(spec: ProcessorSpec, client: StateClient, rows: pa.Table) -> pa.Table:
    """The fresh process has the store to itself to open only if a daemon serves it; here it is in this process."""
    from shuffle.run.determinism import _Run

    return _Run(spec, client, 2, 1, rows.schema).map(rows)


# What people see -----------------------------------------------------------------------------------------------------


def status_at(rows: int) -> ProcessorStatus:
    live = {"window_bytes": 3 * 1024 * 1024, "window_rows": 7, "next_input_index": rows + 10, "read_lag_rows": 5}
    mapper = MapperStatus(0, rows, rows, ["guid"], "grpc://h:1", 15, live)
    return ProcessorStatus("job", "store", [mapper], [ReducerStatus(0, [rows - 1], [], 3)])


def test_rates_are_means_over_the_window() -> None:
    rates = Rates()
    assert rates.of("total") is None
    for second in range(20):
        rates.note(float(second), status_at(100 * second))
    assert rates.of("total") == pytest.approx(100.0)
    assert rates.of("mapper 0") == pytest.approx(100.0)
    assert rates.of("reducer 0") == pytest.approx(100.0)


def test_screen_shows_workers_and_the_last_error() -> None:
    console = Console(file=io.StringIO(), width=140)
    children = {"mapper 0": ChildView(True, 2, None), "reducer 0": ChildView(False, 9, "ValueError: bad row")}
    console.print(render(status_at(1_234), Rates(), children))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("mapper 0", "3.0 MiB", "1,234", "down", "reducer 0: ValueError: bad row"):
        assert part in output
    assert "1,234 rows done" in progress_line(status_at(1_234), Rates(), 11)


def test_rows_in_the_spill_are_not_done() -> None:
    mapper = MapperStatus(0, 1_234, 1_234, live={"buckets": [{"spilled_rows": 1_200}, {"spilled_rows": 4}, {}]})
    reducers = [ReducerStatus(0, [-1], spilled_rows=1_200, spilled_bytes=100), ReducerStatus(1, [-1], spilled_rows=4)]
    line = progress_line(ProcessorStatus("job", "store", [mapper], reducers), Rates(), None)
    assert "30 rows done" in line
    assert "spilled 1,204 rows" in line


def test_screen_of_someone_else_has_no_column_for_restarts() -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(render(status_at(1_234), Rates()))
    shown = console.export_text()
    assert "mapper 0" in shown
    assert "reducer 0" in shown
    assert "restarts" not in shown


def test_status_of_a_processor_that_never_ran(tmp_path: Path, client: StateClient) -> None:
    status = collect(spec_for(tmp_path, "Good"), client)
    assert [mapper.input_rows_left for mapper in status.mappers] == [0, 200]
    assert [reducer.committed_row_indices for reducer in status.reducers] == [[-1, -1], [-1, -1]]
    json.dumps(status.to_json())


def test_metrics_are_served_with_their_labels() -> None:
    metrics = MapperMetrics("job", 3)
    metrics.input_rows.inc(5)
    metrics.map_seconds.observe(0.02)
    with serve_metrics(metrics.registry, unexpected) as server:
        text = urllib.request.urlopen(server.address, timeout=10).read().decode()
    assert 'shuffle_input_rows_total{index="3",processor="job",role="mapper"} 5.0' in text
    assert "shuffle_process_written_bytes" in text
    ReducerMetrics("job", 0).commit_seconds.observe(0.1)


def test_logs_are_json_lines_with_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHUFFLE_LOG", raising=False)
    stream = io.StringIO()
    setup_logging("mapper", "job", 3, stream=stream)
    log = get_logger("somewhere")
    log.info("window trimmed", entries=2, error=ValueError("bad row"))
    log.debug("not written")
    monkeypatch.setenv("SHUFFLE_LOG", "text")
    setup_logging("mapper", "job", 3, stream=stream)
    log.warning("window full", window_bytes=12)
    first, second = stream.getvalue().splitlines()
    line = json.loads(first)
    assert (line["role"], line["processor"], line["index"], line["event"]) == ("mapper", "job", 3, "window trimmed")
    assert (line["entries"], line["error"], line["level"]) == (2, "ValueError: bad row", "info")
    assert "mapper[3]" in second
    assert "warning: window full  window_bytes=12" in second
    logging.getLogger("shuffle-service").handlers.clear()
