"""The command line: what it prints and how it ends, in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle import cli
from shuffle.statestore import StateClient
from shuffle.support.exit_codes import EXIT_SPEC

SPEC = """\
processor: job
state: ./job.state
input: {queue: logs}
mapper: {class: "examples.activity:ParseLogs"}
reducer: {class: "examples.activity:CountByUser", count: 2}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def output_of(code: str) -> str:
    """Of a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("worker", ["mapper", "reducer"])
def test_worker_that_is_started_by_the_command_has_one_pool_of_memory(worker: str) -> None:
    code = f"""
import sys
from shuffle.cli import main
sys.argv = ["shuffle", "{worker}", "missing.yaml", "--index", "0"]
assert main() == 2
import pyarrow
print(pyarrow.default_memory_pool().backend_name, "pandas.core" in sys.modules)
"""
    assert output_of(code) == "system False"


def test_pandas_of_user_code_is_known_to_pyarrow() -> None:
    """Which does not find it at first. A Series would be read by its labels then."""
    code = """
from shuffle.support.process_memory import keep_small
keep_small()
import pandas, pyarrow
print(pyarrow.array(pandas.Series([1.0, None, 3.0]).iloc[::-1]).to_pylist())
"""
    assert output_of(code) == "[3.0, None, 1.0]"


@pytest.mark.parametrize("command", ["run", "check", "status", "top"])
def test_help_of_each_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"shuffle {command} job.yaml" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    output = capsys.readouterr().out
    for command in ("run", "mapper", "reducer", "statestore", "check", "status", "top", "demo", "state"):
        assert command in output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("shuffle ")


def test_no_command_is_help_and_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == EXIT_SPEC
    assert "commands:" in capsys.readouterr().out


def test_wrong_spec_is_told_with_every_mistake(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.write_text(SPEC.replace("count: 2", "cont: 2").replace("queue: logs", "que: logs"))
    assert cli.main(["run", str(spec)]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {spec}:3: ")
    assert "did you mean 'count'?" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("command", ["status", "top", "check"])
def test_looking_at_a_store_that_is_not_there_does_not_make_it(
    command: str, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(spec)]) == 2
    assert "there is no store in" in capsys.readouterr().err
    assert not (spec.parent / "job.state").exists()


def test_status_as_json_and_for_people(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StateClient.open(spec.parent / "job.state") as client:
        schema = pa.schema([("user", pa.string())])
        client.create_queue("logs", schema=schema, partitions=3)
        client.queue("logs").append(2, pa.table({"user": ["a", "b"]}, schema=schema))
    assert cli.main(["status", str(spec), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [mapper["input_rows_left"] for mapper in status["mappers"]] == [0, 0, 2]
    assert len(status["reducers"]) == 2
    assert cli.main(["status", str(spec)]) == 0
    assert "mapper 2" in capsys.readouterr().out
    assert cli.main(["top", str(spec), "--count", "2", "--interval", "0.1"]) == 0
    assert capsys.readouterr().out.count("0 of 5 workers up") == 2


def test_output_into_a_closed_pipe_is_quiet(spec: Path) -> None:
    with StateClient.open(spec.parent / "job.state") as client:
        client.create_queue("logs", schema=pa.schema([("user", pa.string())]), partitions=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "shuffle.cli", "status", str(spec), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as errors:
        assert errors.read() == b""
    process.wait(timeout=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--master", "local[2]"], "add --engine spark"),
        (["--engine", "spark"], "--engine spark needs --master URL"),
        (["--engine", "spark", "--master", "spark://far:7077"], "executors on other machines cannot open the folder"),
    ],
)
def test_engine_and_master_that_do_not_go_together(
    options: list[str], said: str, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(spec), *options]) == EXIT_SPEC
    assert said in capsys.readouterr().err
    assert not (spec.parent / "job.state").exists()
