"""``input: {class: …}`` as people use it: the input of ``docs/inputs.md``, and one with only the minimum."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shuffle.statestore import StateClient
from tests.daemons import environment
from tests.own_input import append_lines, write_example
from tests.process.test_run_processor import children_of
from tests.waiting import WAIT_S, wait_until

ROWS = 3_000


@pytest.fixture(params=["csv_input:CsvInput", "least_input:Least"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = write_example(tmp_path)
    path.write_text(path.read_text().replace("csv_input:CsvInput", request.param))
    return path


def shuffle(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shuffle.cli", *arguments]


def finished(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        shuffle(*arguments), env=environment(), capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )


def counts_in(client: StateClient) -> Counter[str]:
    if "counts" not in {table.name for table in client.tables()}:
        return Counter()
    return Counter({row["user"]: row["count"] for row in client.scan("counts").read_all().to_pylist()})


def counts(spec: Path) -> Counter[str]:
    with StateClient.open(spec.parent / "csv.state") as client:
        return counts_in(client)


def test_own_input_is_checked_drained_and_seen_in_status(spec: Path) -> None:
    expected = append_lines(spec.parent, ROWS)
    run = finished("run", str(spec), "--until-drained")
    assert run.returncode == 0, run.stderr
    assert counts(spec) == expected
    expected += append_lines(spec.parent, 500, begin=ROWS)
    check = finished("check", str(spec))
    assert check.returncode == 0, check.stderr
    assert "2 mappers, 2 reducers" in check.stdout
    assert "deterministic on a sample of 1000 rows" in check.stdout
    run = finished("run", str(spec), "--until-drained")
    assert run.returncode == 0, run.stderr
    assert counts(spec) == expected
    status = json.loads(finished("status", str(spec), "--json").stdout)
    assert [mapper["input_unread_row_index"] for mapper in status["mappers"]] == [ROWS + 500] * 2
    assert [mapper["input_rows_left"] for mapper in status["mappers"]] == [None, None]


def test_own_input_killed_in_the_middle_counts_every_row_once(spec: Path) -> None:
    path = spec.parent / "csv.yaml"
    path.write_text(path.read_text().replace("trim_period: 100ms", "trim_period: 100ms, batch_rows_max: 50"))
    expected = append_lines(spec.parent, 10 * ROWS)
    with (spec.parent / "out").open("wb") as output:
        controller = subprocess.Popen(
            shuffle("run", str(spec), "--until-drained", "--no-check"),
            env=environment(),
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: {"mapper 0", "mapper 1", "reducer 0", "statestore"} <= children_of(controller.pid).keys())
        with StateClient.open(spec.parent / "csv.state") as client:
            wait_until(lambda: counts_in(client).total() > 0)
            seen = counts_in(client).total()
            for victim in ("mapper 0", "mapper 1", "reducer 0"):
                os.kill(children_of(controller.pid)[victim], signal.SIGKILL)
        assert 0 < seen < expected.total(), "killed in the middle"
        assert controller.wait(2 * WAIT_S) == 0, (spec.parent / "out").read_text()
    finally:
        controller.kill()
        controller.wait()
    assert counts(spec) == expected


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        (
            "CsvInput",
            "CsvInputs",
            2,
            "csv.yaml:3: input.class: csv_input has no class CsvInputs; did you mean 'CsvInput'?",
        ),
        ("CsvInput", "CsvReader", 2, "csv.yaml:3: input.class: csv_input:CsvReader is not a subclass of shuffle.Input"),
        ("files:", "file:", 2, "csv.yaml:3: input: config of CsvInput: 'files' is missing: it must be a text"),
        ("./incoming", "./empty", 2, "csv.yaml:3: input.class: 0 partitions"),
        ("def partition_count", "def partitions", 2, "input.class: csv_input:CsvInput does not define partition_count"),
        ("def reached", "def was_reached", 2, "input.class: csv_input:CsvInput defines ends, but not reached"),
        ('b"%d" % offset', '"%d" % offset', 3, "csv.yaml:3: input.class: CsvReader.read: a token is bytes, not str"),
        ("len(self.paths())", "self.nothing()", 3, "has no attribute 'nothing' (at "),
    ],
)
def test_own_input_that_is_wrong_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, code: int, said: str
) -> None:
    spec = write_example(tmp_path)
    append_lines(tmp_path, 100)
    for path in (spec, tmp_path / "csv_input.py"):
        if path == spec or not old.startswith("CsvInput"):
            path.write_text(path.read_text().replace(old, new))
    ended = finished("run", str(spec), "--until-drained")
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_own_input_with_other_options_is_refused_over_existing_state(tmp_path: Path) -> None:
    spec = write_example(tmp_path)
    append_lines(tmp_path, 100)
    assert finished("run", str(spec), "--until-drained").returncode == 0
    (tmp_path / "incoming").rename(tmp_path / "arrived")
    spec.write_text(spec.read_text().replace("./incoming", "./arrived"))
    ended = finished("run", str(spec), "--until-drained")
    assert ended.returncode == 2
    assert "csv.yaml:3: input: input has changed: class csv_input:CsvInput" in ended.stderr
