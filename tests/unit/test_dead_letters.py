"""Rows that were set aside: counted, shown, replayed once, dropped; against a real store in a folder."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from shuffle import cli
from shuffle.errors import BadInput, UserCodeError
from shuffle.preflight.check import check_against_store
from shuffle.run.dead_letters import Replay, Replayed, dead_letter_queues, dead_letter_summary
from shuffle.run.status import collect
from shuffle.run.terminal import Rates, progress_line, render
from shuffle.spec.config import ProcessorSpec, load_spec
from shuffle.statestore import StateClient, Transaction
from shuffle.user_code.poison import DEAD_LETTER_SCHEMA, dead_letters

LOGS = pa.schema([("user", pa.string()), ("n", pa.int64())])
MAPPED = pa.schema([("user", pa.string())])
JOB = """
import pyarrow.compute as pc
from shuffle import AggregateReducer, Count, HashMapper

class ByUser(HashMapper):
    key = ["user"]

class CountUsers(AggregateReducer):
    table = "counts"
    key = ["user"]
    aggregates = {"count": Count()}

    def reduce(self, rows):
        if pc.any(pc.equal(rows["user"], "bad")).as_py():
            raise ValueError("a bad user")
        return super().reduce(rows)

class Broken(CountUsers):
    def reduce(self, rows):
        if rows.num_rows > 1:
            raise ValueError("too many at once")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with StateClient.open(tmp_path / "job.state") as client:
        client.create_queue("logs", schema=LOGS, partitions=2)
        for role in ("mapper", "reducer"):
            client.create_queue(f"job/{role}_dead_letters", schema=DEAD_LETTER_SCHEMA, partitions=1)
    return tmp_path


@pytest.fixture
def spec(folder: Path) -> ProcessorSpec:
    return spec_of(folder)


@pytest.fixture
def client(folder: Path, spec: ProcessorSpec) -> Iterator[StateClient]:
    with StateClient.open(folder / "job.state") as client:
        check_against_store(spec, client)
        yield client


def spec_of(folder: Path, input: str = "{queue: logs}", reducer: str = "CountUsers") -> ProcessorSpec:
    module = "letters_" + folder.name.replace("-", "_")  # Python imports a name only once.
    (folder / f"{module}.py").write_text(JOB)
    path = folder / "job.yaml"
    path.write_text(
        f"processor: job\nstate: ./job.state\ninput: {input}\n"
        f'mapper: {{class: "{module}:ByUser", on_error: dead_letter}}\n'
        f'reducer: {{class: "{module}:{reducer}", count: 2, on_error: dead_letter}}\n'
    )
    return load_spec(path)


def set_aside(client: StateClient, role: str, worker: int, rows: pa.Table, processor: str = "job") -> None:
    count = rows.num_rows
    found = dead_letters(
        processor=processor,
        role=role,
        worker=worker,
        mappers=[worker if role == "mapper" else 0] * count,
        positions=list(range(100, 100 + count)),
        reasons=[f"ValueError: row {row}" for row in range(count)],
        rows=rows,
    )
    client.queue(f"job/{role}_dead_letters").append(0, found)


def logs_of(*numbers: int) -> pa.Table:
    return pa.table({"user": [f"u{n}" for n in numbers], "n": list(numbers)}, schema=LOGS)


def users(*names: str) -> pa.Table:
    return pa.table({"user": list(names)}, schema=MAPPED)


def numbers_in(client: StateClient, partition: int) -> list[int]:
    rows, _ = client.queue("logs").read(partition, 0)
    return [int(n) for n in rows["n"].to_pylist()]


def waiting(client: StateClient, role: str) -> int:
    return sum(end - begin for begin, end in client.queue(f"job/{role}_dead_letters").bounds())


def replay(spec: ProcessorSpec, client: StateClient) -> Replayed:
    replaying = Replay(spec, client)
    for queue in dead_letter_queues(spec, client):
        replaying.run(queue)
    return replaying.done


# Looking -------------------------------------------------------------------------------------------------------------


def test_dead_letters_are_in_the_status_and_on_the_screen(spec: ProcessorSpec, client: StateClient) -> None:
    assert dead_letter_summary(dead_letter_queues(spec, client)) == ""
    assert "dead letter" not in progress_line(collect(spec, client), Rates(), 0)
    set_aside(client, "mapper", 0, logs_of(1, 2))
    set_aside(client, "reducer", 1, users("bad"))
    status = collect(spec, client)
    assert [(queue.queue, queue.roles, queue.rows) for queue in status.dead_letters] == [
        ("job/mapper_dead_letters", ["mapper"], 2),
        ("job/reducer_dead_letters", ["reducer"], 1),
    ]
    assert status.to_json()["dead_letters"][0]["rows_ever"] == 2
    words = "3 dead letters (job/mapper_dead_letters, job/reducer_dead_letters)"
    assert words in progress_line(status, Rates(), 0)
    console = Console(file=io.StringIO(), width=200)
    console.print(render(status, Rates()))
    assert words in console.file.getvalue()  # type: ignore[attr-defined]


def command(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["dead-letters", str(folder / "job.yaml"), *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_dead_letters_are_listed_and_shown(
    folder: Path, spec: ProcessorSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(capsys, folder, "list") == (0, "job: no dead letters\n", "")
    with StateClient.open(folder / "job.state") as client:
        set_aside(client, "mapper", 1, logs_of(1, 2))
        set_aside(client, "reducer", 1, users("\x1b[31m"))
    _, listed, _ = command(capsys, folder, "list")
    assert listed.splitlines() == [
        "job/mapper_dead_letters: 2 rows (2 ever)",
        "  newest: mapper 1, input row 101: ValueError: row 1",
        "job/reducer_dead_letters: 1 rows (1 ever)",
        "  newest: reducer 1, row 100 of mapper 0 (in its shuffle numbering): ValueError: row 0",
    ]
    _, shown, _ = command(capsys, folder, "show", "--role", "mapper", "--rows", "1")
    assert shown.splitlines() == [
        "job/mapper_dead_letters, partition 0, row 0: mapper 1, input row 100",
        "  ValueError: row 0",
        '  {"user": "u1", "n": 1}',
    ]
    _, printed, _ = command(capsys, folder, "show", "--json")
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["row"] for row in rows] == [{"user": "u1", "n": 1}, {"user": "u2", "n": 2}, {"user": "\x1b[31m"}]
    assert [row["origin_position"] for row in rows] == [100, 101, 100]
    assert "\x1b" not in command(capsys, folder, "show")[1]


def test_dead_letters_are_dropped_only_when_that_is_meant(
    folder: Path, spec: ProcessorSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    with StateClient.open(folder / "job.state") as client:
        set_aside(client, "mapper", 0, logs_of(1, 2))
        set_aside(client, "reducer", 0, users("bad"))
    code, _, errors = command(capsys, folder, "drop")
    assert code == 2
    assert "this gives up 3 dead letters" in errors
    assert "--yes" in errors
    assert command(capsys, folder, "drop", "--role", "mapper", "--yes")[:2] == (0, "job: 2 rows dropped\n")
    with StateClient.open(folder / "job.state") as client:
        assert (waiting(client, "mapper"), waiting(client, "reducer")) == (0, 1)


# Replaying -----------------------------------------------------------------------------------------------------------


def test_rows_that_map_refused_go_to_the_partition_they_came_from(spec: ProcessorSpec, client: StateClient) -> None:
    set_aside(client, "mapper", 0, logs_of(1, 2))
    set_aside(client, "mapper", 1, logs_of(3))
    set_aside(client, "mapper", 0, logs_of(4))
    assert replay(spec, client) == Replayed(to_input=4)
    assert (numbers_in(client, 0), numbers_in(client, 1)) == ([1, 2, 4], [3])
    assert waiting(client, "mapper") == 0
    assert replay(spec, client) == Replayed()


class Interrupted(Replay):
    """Another replay runs to its end between this one's reading of the letters and its commit."""

    other: Replay | None = None

    def _to_input(self, mapper: int, rows: pa.Table, done: Replayed) -> Transaction:
        other, self.other = self.other, None
        if other is not None:
            for queue in dead_letter_queues(self._spec, self._client):
                other.run(queue)
        return super()._to_input(mapper, rows, done)


@pytest.mark.parametrize("earlier", [0, 2])
def test_two_replays_at_once_append_each_row_once(spec: ProcessorSpec, client: StateClient, earlier: int) -> None:
    set_aside(client, "mapper", 0, logs_of(*range(earlier)))
    replay(spec, client)  # With and without a marker that is there already.
    set_aside(client, "mapper", 0, logs_of(7, 8, 9))
    first = Interrupted(spec, client)
    first.other = second = Replay(spec, client)
    first.run(dead_letter_queues(spec, client, "mapper")[0])
    assert numbers_in(client, 0)[earlier:] == [7, 8, 9]
    assert (first.done, second.done) == (Replayed(), Replayed(to_input=3))


def test_rows_of_a_folder_cannot_be_replayed(folder: Path, client: StateClient) -> None:
    (folder / "files" / "a").mkdir(parents=True)
    spec = spec_of(folder, input="{folder: files}")
    set_aside(client, "mapper", 0, logs_of(1))
    with pytest.raises(BadInput, match="correct the file that they are from"):
        replay(spec, client)
    assert waiting(client, "mapper") == 1


def test_rows_of_another_processor_are_left_to_it(spec: ProcessorSpec, client: StateClient) -> None:
    set_aside(client, "mapper", 0, logs_of(1))
    set_aside(client, "mapper", 0, logs_of(2), processor="other")
    with pytest.raises(BadInput, match="is of the processor 'other'"):
        replay(spec, client)
    assert numbers_in(client, 0) == [1]
    assert waiting(client, "mapper") == 1


def test_rows_that_reduce_refused_are_reduced_and_the_bad_ones_stay(spec: ProcessorSpec, client: StateClient) -> None:
    set_aside(client, "reducer", 0, users("ann", "bad", "ann"))
    set_aside(client, "reducer", 1, users("bob"))
    assert replay(spec, client) == Replayed(reduced=3, refused=1)
    counts = {row["user"]: row["count"] for row in client.scan("counts").read_all().to_pylist()}
    assert counts == {"ann": 2, "bob": 1}
    rows, _ = client.queue("job/reducer_dead_letters").read(0, 4)
    assert [(row["worker"], row["position"], row["reason"]) for row in rows.to_pylist()] == [
        (0, 101, "ValueError: a bad user")
    ]
    assert replay(spec, client) == Replayed(refused=1)


def test_reduce_that_fails_as_a_whole_changes_nothing(folder: Path, client: StateClient) -> None:
    set_aside(client, "reducer", 0, users("ann", "bob"))
    with pytest.raises(UserCodeError, match="too many at once"):
        replay(spec_of(folder, reducer="Broken"), client)
    assert waiting(client, "reducer") == 2


def test_rows_are_not_reduced_beside_reducers_that_run(spec: ProcessorSpec, client: StateClient) -> None:
    set_aside(client, "reducer", 0, users("ann"))
    client.leases.register("job/reducers", "guid", {"index": "0"}, ttl_ms=60_000)
    with pytest.raises(BadInput, match="job is running: stop it"):
        replay(spec, client)
    assert waiting(client, "reducer") == 1
