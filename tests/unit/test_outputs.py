"""The output of a spec: how it is read, what is refused, and what ``Reducer.emit`` does; against a real store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest

from shuffle import Reducer, cli
from shuffle.errors import SpecError
from shuffle.preflight.check import check_against_store
from shuffle.reducer.outputs.opening import emitter, open_output
from shuffle.reducer.outputs.output import Output
from shuffle.reducer.outputs.queue import QueueOutput
from shuffle.reducer.outputs.routes import exporters_missing, routes
from shuffle.run.dead_letters import Replay, Replayed, dead_letter_queues
from shuffle.spec.config import ProcessorSpec, load_spec
from shuffle.spec.outputs import KINDS, OutputKind, OutputSpec, QueueOutputSpec
from shuffle.statestore import StateClient, Transaction
from shuffle.user_code.poison import DEAD_LETTER_SCHEMA, dead_letters

ROWS = pa.schema([("user", pa.string())])
JOB = """
from shuffle import HashMapper, Reducer
from shuffle.mapper.readers.queue import QueueInput

class ByUser(HashMapper):
    key = ["user"]

class Echo(Reducer):
    def __init__(self, config, spec, state):  # Of its own, and without a word about outputs.
        self.state = state

    def reduce(self, rows):
        tx = self.state.transaction()
        self.emit(tx, rows)
        return tx

class Logs(QueueInput):
    def __init__(self, config, state, folder):
        super().__init__({"queue": "logs", "start": "beginning"}, state, folder)
"""
SPEC = """\
processor: job
state: ./job.state
input: {queue: logs}
mapper: {class: "JOB:ByUser"}
reducer: {class: "JOB:Echo", count: 2}
output: {queue: totals}
"""
OUTPUT = "output: {queue: totals}\n"
KNOWN = f"the kinds of output are {', '.join(KINDS)}"
"""The kinds that there are before a test registers one."""
SETTING_ASIDE = {"count: 2": "count: 2, on_error: dead_letter"}


@pytest.fixture
def job(tmp_path: Path) -> str:
    """The name of a module of its own for each test: Python imports a name only once."""
    name = "job_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text(JOB)
    return name


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(tmp_path / "job.state") as client:
        client.create_queue("logs", schema=ROWS, partitions=3)
        yield client


def spec_of(tmp_path: Path, job: str, output: str = OUTPUT, **changes: str) -> ProcessorSpec:
    text = SPEC.replace(OUTPUT, output).replace("JOB", job)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_spec(path)


def rows(*users: str) -> pa.Table:
    return pa.table([list(users)], schema=ROWS)


def emitted(client: StateClient, queue: str = "totals") -> list[list[str]]:
    """The users in each partition."""
    handle = client.queue(queue)
    return [handle.read(partition, 0)[0]["user"].to_pylist() for partition in range(handle.partitions)]


# --- reading ---


def test_output_of_a_spec_is_its_description_and_optional(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "m")
    assert spec.output == QueueOutputSpec("totals")
    assert (spec.output.appends_to, spec.output.config) == ("totals", {"queue": "totals"})
    assert spec_of(tmp_path, "m", output="").output is None


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("output: {quue: totals}\n", f"6: output: 'quue' is none: {KNOWN}; did you mean 'queue'?"),
        ("output:\n  rabbit: totals\n", f"7: output: 'rabbit' is none: {KNOWN}"),
        ("output: totals\n", "6: output: a mapping that names a kind of output is needed here, such as {queue: NAME}"),
        ("output: {}\n", "6: output: a mapping that names a kind"),
        ("output: {[a]: b}\n", "6: output: "),
        ("output: {queue: totals, start: 3}\n", "6: output.start: unknown key; known here: queue"),
        ("output: {queue: totals, queue: more}\n", "6: output.queue: is given twice"),
        ("output: {queue: [a]}\n", "6: output.queue: a single value is needed here, not a list"),
        ("output: {queue: logs}\n", "6: output.queue: is also the input"),
    ],
)
def test_output_mistake_is_refused_with_its_line(tmp_path: Path, output: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(tmp_path, "m", output)
    assert caught.value.message.startswith(f"{tmp_path}/job.yaml:{expected}")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "dead_letters: {queue: bad}\n",
            "6: dead_letters: a queue is in the state store: name one as dead_letter_queue",
        ),
        ("dead_letters: {parquet: ./x, batch_age: 2d}\n", "6: dead_letters.batch_age: "),
        ("dead_letters: {rabbit: x}\n", f"6: dead_letters: 'rabbit' is none: {KNOWN}"),
        ("dead_letters: {kafka: {properties: {}}}\n", "6: dead_letters.kafka.topic: is missing"),
    ],
)
def test_mistake_about_dead_letters_is_refused_with_its_line(tmp_path: Path, section: str, expected: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"job.yaml:{expected}")):
        spec_of(tmp_path, "m", section, **SETTING_ASIDE)


def test_place_for_dead_letters_that_nobody_sets_aside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"job\.yaml:6: dead_letters: is never used with on_error: stop"):
        spec_of(tmp_path, "m", "dead_letters: {parquet: ./x}\n")


def test_dead_letters_of_two_roles_in_one_queue_have_one_way_out(tmp_path: Path) -> None:
    one = {"on_error: dead_letter}": "on_error: dead_letter, dead_letter_queue: bad rows/1}"}
    aside = {**SETTING_ASIDE, 'ByUser"}': 'ByUser", on_error: dead_letter}'}
    both = spec_of(tmp_path, "m", "dead_letters: {parquet: ./x}\n", **aside)
    assert [(route.queue, route.mark) for route in routes(both)] == [
        ("job/mapper_dead_letters", "~mapper_dead_letters"),
        ("job/reducer_dead_letters", "~reducer_dead_letters"),
    ]
    path = tmp_path / "job.yaml"
    for old, new in one.items():
        path.write_text(path.read_text().replace(old, new))
    [shared] = routes(load_spec(path))
    assert (shared.queue, shared.mark, shared.worker(0)) == ("bad rows/1", "~bad%20rows~1", "bad rows/1/0")


def test_output_that_is_a_dead_letter_queue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"job\.yaml:6: output\.queue: is also a dead letter queue"):
        spec_of(tmp_path, "m", "output: {queue: job/reducer_dead_letters}\n", **SETTING_ASIDE)


# --- a kind of one's own ---


@dataclass(frozen=True, slots=True)
class NotedOutputSpec(OutputSpec):
    kind: ClassVar[str] = "noted"

    noted: str
    """What is noted with each row."""
    how: str = "once"


class NotedOutput(Output):
    """Rows go to a table, and what was prepared is noted."""

    prepared: ClassVar[list[tuple[str, str, Path, int]]] = []

    def prepare(self, client: StateClient, reducer_count: int) -> None:
        if self.config["noted"] == "never":
            raise SpecError("nothing can be noted", noted="never")
        self.prepared.append((self.config["noted"], self.config["how"], self.folder, reducer_count))

    def emit(self, tx: Transaction, reducer_index: int, rows: pa.Table | pa.RecordBatch) -> None:
        tx.append("notes", 0, rows)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"noted": "queue name", "how": ("once", "twice")}
    kind = OutputKind(NotedOutputSpec, f"{__name__}:NotedOutput", keys)  # type: ignore[arg-type]
    monkeypatch.setitem(KINDS, "noted", kind)
    monkeypatch.setattr(NotedOutput, "prepared", [])


@pytest.mark.usefixtures("noted")
def test_registered_kind_is_read_checked_and_used(tmp_path: Path, job: str, client: StateClient) -> None:
    client.create_queue("notes", schema=ROWS, partitions=1)
    spec = spec_of(tmp_path, job, "output: {noted: x, how: twice}\n")
    assert spec.output == NotedOutputSpec("x", "twice")
    assert check_against_store(spec, client) == 3
    assert NotedOutput.prepared == [("x", "twice", tmp_path, 2)]
    with client.transaction() as tx:
        emitter(spec, client, 1)(tx, rows("a", "b"))
        tx.commit()
    assert emitted(client, "notes") == [["a", "b"]]


@pytest.mark.usefixtures("noted")
def test_registered_kind_is_listed_and_its_mistakes_are_located(tmp_path: Path, job: str, client: StateClient) -> None:
    with pytest.raises(SpecError, match=f"6: output: 'rabbit' is none: {KNOWN}, noted"):
        spec_of(tmp_path, job, "output: {rabbit: x}\n")
    with pytest.raises(SpecError, match=r"6: output: names queue and noted: give only one of them"):
        spec_of(tmp_path, job, "output: {queue: a, noted: b}\n")
    with pytest.raises(SpecError, match=r"6: output\.how: 'thrice' is none of once, twice"):
        spec_of(tmp_path, job, "output: {noted: a, how: thrice}\n")
    with pytest.raises(SpecError, match=r"job\.yaml:6: output\.noted: nothing can be noted") as caught:
        check_against_store(spec_of(tmp_path, job, "output: {noted: never}\n"), client)
    assert len(caught.value.mistakes) == 1


# --- against a store ---


def test_queue_that_is_missing_is_refused_with_what_to_do(tmp_path: Path, job: str, client: StateClient) -> None:
    spec = spec_of(tmp_path, job)
    with pytest.raises(SpecError) as caught:
        check_against_store(spec, client)
    assert caught.value.message == (
        f"{tmp_path}/job.yaml:6: output.queue: there is no queue 'totals'; there are logs. Create it before the start, "
        "with the schema of the rows that are emitted: StateClient.create_queue('totals', schema, partitions=2)"
    )
    client.create_queue("total", schema=ROWS, partitions=2)
    with pytest.raises(SpecError, match=r"no queue 'totals'; did you mean 'total'\? Create it"):
        open_output(spec, client)


def test_queue_with_other_partitions_than_reducers_is_refused(tmp_path: Path, job: str, client: StateClient) -> None:
    client.create_queue("totals", schema=ROWS, partitions=3)
    with pytest.raises(SpecError, match=r"6: output\.queue: the queue 'totals' has 3 partitions .* 2 reducers"):
        check_against_store(spec_of(tmp_path, job), client)


def test_mistakes_of_input_and_output_are_told_together(tmp_path: Path, job: str, client: StateClient) -> None:
    spec = spec_of(tmp_path, job, **{"queue: logs": "queue: nothing"})
    with pytest.raises(SpecError) as caught:
        check_against_store(spec, client)
    assert [text.partition(": there")[0] for text in caught.value.mistakes] == [
        f"{tmp_path}/job.yaml:3: input.queue",
        f"{tmp_path}/job.yaml:6: output.queue",
    ]


def test_queue_that_an_own_input_consumes_is_refused(tmp_path: Path, job: str, client: StateClient) -> None:
    own = {"input: {queue: logs}": f'input: {{class: "{job}:Logs"}}', "count: 2": "count: 3"}
    spec = spec_of(tmp_path, job, "output: {queue: logs}\n", **own)
    with pytest.raises(SpecError, match=r"job\.yaml:6: output\.queue: is also the input"):
        check_against_store(spec, client)


def test_check_reports_a_missing_output_queue(
    tmp_path: Path, job: str, client: StateClient, capsys: pytest.CaptureFixture[str]
) -> None:
    spec_of(tmp_path, job)
    client.close()
    assert cli.main(["check", str(tmp_path / "job.yaml")]) == 2
    assert "job.yaml:6: output.queue: there is no queue 'totals'" in capsys.readouterr().err


def test_emitted_rows_are_there_once_the_transaction_is_committed(
    tmp_path: Path, job: str, client: StateClient
) -> None:
    client.create_queue("totals", schema=ROWS, partitions=2)
    spec = spec_of(tmp_path, job)
    assert isinstance(open_output(spec, client), QueueOutput)
    emit = emitter(spec, client, 1)
    with client.transaction() as dropped:
        emit(dropped, rows("dropped"))
    with client.transaction() as tx:
        emit(tx, rows("a"))
        emit(tx, rows())
        emit(tx, rows("b").to_batches()[0])
        assert emitted(client) == [[], []]
        tx.commit()
    assert emitted(client) == [[], ["a", "b"]]


def test_emit_without_an_output_names_the_missing_key(tmp_path: Path, job: str, client: StateClient) -> None:
    emit = emitter(spec_of(tmp_path, job, output=""), client, 0)
    with (
        client.transaction() as tx,
        pytest.raises(SpecError, match=r"job\.yaml: output: is missing, and .*:Echo emits"),
    ):
        emit(tx, rows("a"))


def test_emit_of_a_reducer_that_nobody_gave_an_output(client: StateClient) -> None:
    class Plain(Reducer):
        def reduce(self, rows: pa.Table) -> None:
            return None

    with client.transaction() as tx, pytest.raises(SpecError, match="the key `output` of the spec") as caught:
        Plain({}, None, client).emit(tx, rows("a"))  # type: ignore[arg-type]
    assert caught.value.field == "output"


# --- replay of dead letters ---


def set_aside(client: StateClient, *users: str) -> None:
    client.create_queue("job/reducer_dead_letters", schema=DEAD_LETTER_SCHEMA, partitions=1)
    letters = dead_letters(
        processor="job",
        role="reducer",
        worker=1,
        mappers=[0] * len(users),
        positions=list(range(len(users))),
        reasons=["ValueError: a bad day"] * len(users),
        rows=rows(*users),
    )
    client.queue("job/reducer_dead_letters").append(0, letters)


def replay(spec: ProcessorSpec, client: StateClient) -> Replayed:
    replayed = Replay(spec, client)
    [queue] = dead_letter_queues(spec, client, "reducer")
    replayed.run(queue)
    return replayed.done


def test_replayed_rows_are_emitted_once_to_the_partition_of_their_reducer(
    tmp_path: Path, job: str, client: StateClient
) -> None:
    client.create_queue("totals", schema=ROWS, partitions=2)
    spec = spec_of(tmp_path, job, **SETTING_ASIDE)
    check_against_store(spec, client)
    set_aside(client, "a", "b")
    assert replay(spec, client) == Replayed(reduced=2)
    assert emitted(client) == [[], ["a", "b"]]


def test_replay_without_an_output_leaves_the_rows_where_they_are(tmp_path: Path, job: str, client: StateClient) -> None:
    spec = spec_of(tmp_path, job, output="", **SETTING_ASIDE)
    check_against_store(spec, client)
    set_aside(client, "a", "b")
    with pytest.raises(SpecError, match="output: is missing"):
        replay(spec, client)
    assert client.queue("job/reducer_dead_letters").bounds() == [(0, 2)]


def test_missing_exporters_are_named_until_they_are_registered(tmp_path: Path, job: str, client: StateClient) -> None:
    text = "output: {parquet: ./out}\ndead_letters: {parquet: ./letters}\n"
    spec = spec_of(tmp_path, job, text, **SETTING_ASIDE)
    check_against_store(spec, client)
    said = exporters_missing(spec, client)
    assert said.startswith("no exporter is registered for job/outbox and job/reducer_dead_letters: rows stay there")
    client.leases.register("job/exporters", "guid", {}, ttl_ms=60_000)
    assert exporters_missing(spec, client).startswith("no exporter is registered for job/reducer_dead_letters: ")
    client.leases.register("job/exporters of job/reducer_dead_letters", "guid", {}, ttl_ms=60_000)
    assert exporters_missing(spec, client) == ""
    assert exporters_missing(spec_of(tmp_path, job), client) == "", "a queue of the store needs none"
