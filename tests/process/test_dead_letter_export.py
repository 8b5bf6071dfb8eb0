"""``dead_letters: {parquet: …}`` as people use it: rows set aside are outside exactly once, whoever is killed."""

from __future__ import annotations

import base64
import json
import os
import signal
import urllib.request
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shuffle.statestore import StateClient
from shuffle.user_code.poison import decode_row
from tests.process.test_run_processor import children_of, finished, running
from tests.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
ROWS = 4_000
"""In each of two partitions."""

JOB = """
import pathlib
import time
import pyarrow.compute as pc
from shuffle import AggregateReducer, Count, HashMapper

fixed = pathlib.Path(__file__).with_name("fixed")

def refuse(rows, n):
    bad = rows.filter(pc.equal(pc.subtract(rows["n"], pc.multiply(pc.divide(rows["n"], 100), 100)), n))
    if bad.num_rows and not fixed.exists():
        raise ValueError(f"cannot take {bad['n'][0]}")

class ByUser(HashMapper):
    key = ["user"]

    def where(self, rows):
        refuse(rows, 50)
        return None

class CountUsers(AggregateReducer):
    table = "counts"
    key = ["user"]
    aggregates = {"count": Count()}

    def reduce(self, rows):
        time.sleep(0.002)  # So that there is a middle to be killed in.
        refuse(rows, 60)
        return super().reduce(rows)
"""
SPEC = """\
processor: job
state: ./job.state
input: {queue: in}
mapper: {class: "letters_job:ByUser", trim_period: 50ms, batch_rows_max: 200, on_error: dead_letter}
reducer: {class: "letters_job:CountUsers", count: 2, batch_rows_max: 200, fetch_rows_max: 100, on_error: dead_letter}
dead_letters: {parquet: ./letters, batch_age: 20ms}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "letters_job.py").write_text(JOB)
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def fill(spec: Path, rows: int) -> None:
    """Different rows in each partition."""
    with StateClient.open(spec.parent / "job.state") as client:
        client.create_queue("in", schema=SCHEMA, partitions=2)
        for partition in range(2):
            numbers = range(partition * rows, (partition + 1) * rows)
            users = [f"u{n % 7}" for n in numbers]
            client.queue("in").append(partition, pa.table([users, list(numbers)], schema=SCHEMA))


def files(spec: Path) -> list[Path]:
    return sorted((spec.parent / "letters").glob("*.parquet"))


def outside(spec: Path, role: str) -> Counter[int]:
    """The numbers of the refused rows that are outside."""
    letters = [letter for path in files(spec) for letter in pq.read_table(path).to_pylist()]
    return Counter(json.loads(letter["row"])["n"] for letter in letters if letter["role"] == role)


def counted(spec: Path) -> int:
    with StateClient.open(spec.parent / "job.state") as client:
        return sum(client.scan("counts").read_all()["count"].to_pylist())


def left(spec: Path) -> list[tuple[int, int]]:
    with StateClient.open(spec.parent / "job.state") as client:
        return [
            bounds for role in ("mapper", "reducer") for bounds in client.queue(f"job/{role}_dead_letters").bounds()
        ]


def test_dead_letters_are_outside_exactly_once_while_everybody_is_killed(spec: Path) -> None:
    fill(spec, ROWS)
    with running("run", str(spec), "--until-drained", "--no-check") as controller:
        for victim in ("exporter", "mapper 0", "reducer 0", "statestore", "exporter"):
            seen = len(files(spec))
            wait_until(lambda seen=seen: len(files(spec)) > seen + 1)  # type: ignore[misc]
            wait_until(lambda victim=victim: victim in children_of(controller.pid))  # type: ignore[misc]
            os.kill(children_of(controller.pid)[victim], signal.SIGKILL)
        assert outside(spec, "mapper").total() < 2 * ROWS // 100, "killed in the middle"
        assert controller.wait(3 * WAIT_S) == 0, spec.with_suffix(".out").read_text()
    assert outside(spec, "mapper") == Counter(range(50, 2 * ROWS, 100))
    assert outside(spec, "reducer") == Counter(range(60, 2 * ROWS, 100))
    assert counted(spec) == 2 * ROWS - 2 * (2 * ROWS // 100)
    assert all(begin == end for begin, end in left(spec)), "what is outside is no longer in the store"
    assert "dead letters" not in spec.with_suffix(".out").read_text().splitlines()[-1]


def test_dead_letter_outside_has_the_row_itself_and_its_position_can_be_set_by_hand(spec: Path) -> None:
    fill(spec, 100)
    ended = finished("run", str(spec), "--until-drained", "--no-check")
    assert ended.returncode == 0, ended.stderr
    names = {path.name.rsplit("-", 3)[0] for path in files(spec)}
    assert names == {"job~mapper_dead_letters", "job~reducer_dead_letters"}
    letters = [letter for path in files(spec) for letter in pq.read_table(path).to_pylist()]
    [first, _] = sorted(
        (letter for letter in letters if letter["role"] == "mapper"),
        key=lambda letter: (letter["worker"], letter["position"]),
    )
    original = decode_row(base64.b64decode(first.pop("row_arrow")))
    assert original.equals(pa.table([["u1"], [50]], schema=SCHEMA))
    assert first == {
        "processor": "job",
        "role": "mapper",
        "worker": 0,
        "mapper": 0,
        "position": 50,
        "reason": "ValueError: cannot take 50",
        "row": '{"user": "u1", "n": 50}',
    }
    refused = finished("exporter", str(spec), "--dead-letters", "mapper", "--index", "0", "--position", "3")
    assert "job/mapper_dead_letters has the rows from 2 up to 2" in refused.stderr
    done = finished("exporter", str(spec), "--dead-letters", "mapper", "--index", "0", "--position", "2")
    assert "exporter mapper_dead_letters/0 goes on at 2" in done.stdout, done.stderr
    nothing = finished("exporter", str(spec), "--index", "0")
    assert "has no output, so there is nothing to export" in nothing.stderr


def test_status_screen_and_metrics_show_what_waits_and_a_clean_stop_moves_it(spec: Path) -> None:
    spec.write_text(SPEC.replace("batch_age: 20ms", "batch_age: 1h"))
    fill(spec, 500)
    with running("run", str(spec), "--no-check") as controller:
        wait_until(lambda: waiting(spec) == {"mapper_dead_letters/0": 10, "reducer_dead_letters/0": 10})
        assert files(spec) == [], "a batch may wait for an hour"
        shown = finished("top", str(spec), "--count", "1").stdout
        assert "dead letters are exported, 20 dead letters (job/mapper_dead_letters," in shown, shown
        assert "exporter mapper_dead_letters/0" in finished("status", str(spec)).stdout
        lag = 'shuffle_export_lag_rows{index="mapper_dead_letters/0",processor="job",role="exporter"} 10.0'
        wait_until(lambda: lag in metrics(spec), lambda: metrics(spec))
        refused = finished("dead-letters", str(spec), "replay", "--role", "mapper")
        assert refused.returncode == 2
        assert "an exporter moves the rows of job/mapper_dead_letters" in refused.stderr
        os.kill(controller.pid, signal.SIGTERM)
        assert controller.wait(2 * WAIT_S) == 0
    assert outside(spec, "mapper") == Counter(range(50, 1_000, 100)), "a clean stop publishes what was set aside"
    assert outside(spec, "reducer") == Counter(range(60, 1_000, 100))


def waiting(spec: Path) -> dict[str, int]:
    ended = finished("status", str(spec), "--json")
    if ended.returncode:
        return {}
    return {exporter["name"]: exporter["waiting_rows"] for exporter in json.loads(ended.stdout)["exporters"]}


def metrics(spec: Path) -> str:
    with StateClient.open(spec.parent / "job.state") as client:
        members = client.leases.members("job/exporters of job/mapper_dead_letters")
    return "".join(
        urllib.request.urlopen(member.attributes["metrics"], timeout=10).read().decode() for member in members
    )


def test_rows_that_are_not_outside_can_be_replayed_and_are_then_never_exported(spec: Path) -> None:
    spec.write_text(SPEC.partition("dead_letters:")[0])
    fill(spec, 500)
    assert finished("run", str(spec), "--until-drained", "--no-check").returncode == 0
    (spec.parent / "fixed").touch()
    replayed = finished("dead-letters", str(spec), "replay", "--role", "reducer")
    assert "10 were reduced" in replayed.stdout, replayed.stderr
    (spec.parent / "fixed").unlink()
    spec.write_text(SPEC)  # From now on they are moved: those that were there before, too, but not those replayed.
    ended = finished("run", str(spec), "--until-drained", "--no-check")
    assert ended.returncode == 0, ended.stderr
    assert outside(spec, "mapper") == Counter(range(50, 1_000, 100))
    assert outside(spec, "reducer") == Counter()
    assert counted(spec) == 1_000 - 10
    assert left(spec) == [(10, 10), (10, 10)]
