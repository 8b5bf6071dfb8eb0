"""A user's modules have the names that users give them: also those of our own folders and of Python's modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.statestore import StateClient
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]

MAPPER = """
import reducer  # The user's own, beside this file.
from shuffle import HashMapper

class ByUser(HashMapper):
    key = reducer.KEY
"""

REDUCER = """
from shuffle import AggregateReducer, Count
from statestore import StateClient

KEY = ["user"]

class CountUsers(AggregateReducer):
    table = "counts"
    key = KEY
    aggregates = {"count": Count()}
"""


def write_job(folder: Path, mapper: str = "mapper:ByUser") -> Path:
    """A job in files that are named like the folders of this project, beside one that is named like Python's own."""
    (folder / "mapper.py").write_text(MAPPER)
    (folder / "reducer.py").write_text(REDUCER)
    (folder / "queue.py").write_text("raise RuntimeError('the working folder hides a module of Python')\n")
    spec = folder / "job.yaml"
    spec.write_text(
        "processor: job\nstate: ./job.state\ninput: {queue: logs}\n"
        f'mapper: {{class: "{mapper}", trim_period: 100ms}}\n'
        'reducer: {class: "reducer:CountUsers", count: 2}\n'
    )
    with StateClient.open(folder / "job.state") as client:
        client.create_queue("logs", schema=pa.schema([("user", pa.string())]), partitions=1)
        client.queue("logs").append(0, pa.table({"user": ["ada", "bob", "ada"]}))
    return spec


def shuffle(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as it is installed: its own folder is on the path, and not the working folder."""
    code = "import sys; from shuffle.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )


def test_user_modules_named_mapper_and_reducer_run(tmp_path: Path) -> None:
    write_job(tmp_path)
    ended = shuffle(tmp_path, "run", "job.yaml", "--until-drained")
    assert ended.returncode == 0, ended.stderr
    with StateClient.open(tmp_path / "job.state") as client:
        assert client.scan("counts").read_all().to_pylist() == [
            {"user": "ada", "count": 2},
            {"user": "bob", "count": 1},
        ]


@pytest.mark.parametrize("name", ["mapper", "reducer", "statestore", "spark_connector"])
def test_a_script_beside_a_module_of_our_name_uses_ours_where_it_means_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("MINE = True\n")
    (tmp_path / "script.py").write_text(
        f"import {name}\nassert {name}.MINE\n"
        "import pyspark_shuffle\n"
        "from shuffle.mapper.daemon import run\nfrom shuffle.reducer.daemon import ReducerDaemon\n"
        "from shuffle.statestore import StateClient\nStateClient.open('a.state').close()\n"
    )
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_the_top_level_names_are_the_packages_of_shuffle() -> None:
    import shuffle.statestore as ours
    import statestore

    assert statestore.StateClient is ours.StateClient


def test_user_module_named_like_this_project_is_refused_by_its_name(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "shuffle.py").write_text("")
    ended = shuffle(tmp_path, "check", "job.yaml")
    assert ended.returncode != 0
    assert f"{tmp_path / 'shuffle.py'} has the name of this project" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_user_module_that_python_hides_is_named(tmp_path: Path) -> None:
    write_job(tmp_path, mapper="queue:ByUser")
    ended = shuffle(tmp_path, "check", "job.yaml")
    assert ended.returncode != 0
    assert f"{tmp_path / 'queue.py'} was not imported; rename yours" in ended.stderr
