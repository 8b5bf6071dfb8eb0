"""``shuffle run``, ``check`` and ``status`` as people use them: real processes, a folder as the store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.errors import ShuffleError
from shuffle.statestore import StateClient
from shuffle.statestore.wire.announcement import served_at
from tests.waiting import WAIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])

JOB = """
import pyarrow as pa
from shuffle import AggregateReducer, Count, HashMapper, Mapper, PartitionedRowset

class ByUser(HashMapper):
    key = ["user"]
    not_null = ["user"]

class CountUsers(AggregateReducer):
    table = "counts"
    key = ["user"]
    aggregates = {"count": Count()}

class ByHash(Mapper):
    def map(self, rows):
        users = rows["user"].to_pylist()
        return PartitionedRowset(rows, pa.array([hash(user) % 2 for user in users], pa.int64()))

class Broken(ByUser):
    def where(self, rows):
        if 1500 in rows["n"].to_pylist():
            raise ValueError("cannot take 1500")
        return None
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "users_job.py").write_text(JOB)
    return write_spec(tmp_path, "ByUser")


def write_spec(folder: Path, mapper_class: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(
        "processor: job\nstate: ./job.state\ninput: {queue: logs}\n"
        f'mapper: {{class: "users_job:{mapper_class}", trim_period: 100ms}}\n'
        'reducer: {class: "users_job:CountUsers", count: 2}\n'
    )
    return path


def append(client: StateClient, rows: int, begin: int = 0) -> Counter[str]:
    """The same rows to each of two partitions; the counts of users that are to come out of it."""
    users = [None if i % 5 == 0 else f"user-{i % 37}" for i in range(begin, begin + rows)]
    table = pa.table({"user": users, "n": list(range(begin, begin + rows))}, schema=SCHEMA)
    for partition in (0, 1):
        client.queue("logs").append(partition, table)
    counts = Counter(user for user in users if user is not None)
    return counts + counts


def fill(spec: Path, rows: int) -> Counter[str]:
    with StateClient.open(spec.parent / "job.state") as client:
        client.create_queue("logs", schema=SCHEMA, partitions=2)
        return append(client, rows)


def counts_in(client: StateClient) -> Counter[str]:
    if "counts" not in {table.name for table in client.tables()}:
        return Counter()
    return Counter({row["user"]: row["count"] for row in client.scan("counts").read_all().to_pylist()})


def shuffle(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shuffle.cli", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def finished(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        shuffle(*arguments), env=environment(), capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    log = Path(arguments[1]).with_suffix(".out")
    with log.open("wb") as output:
        process = subprocess.Popen(shuffle(*arguments), env=environment(), stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def children_of(pid: int) -> dict[str, int]:
    """The workers of a controller by name, from what the kernel knows."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except (OSError, IndexError):
                continue
            if parent == pid and "shuffle.run.launch" in words:
                role = words[words.index("shuffle.run.launch") + 2].removeprefix("shuffle.").removeprefix("reducer.")
                index = words[words.index("--index") + 1] if "--index" in words else ""
                found[f"{role} {index}".strip()] = int(entry.name)
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


ALL_CHILDREN = {"statestore", "mapper 0", "mapper 1", "reducer 0", "reducer 1"}


def test_run_until_drained_counts_every_row_once(spec: Path) -> None:
    expected = fill(spec, 2_000)
    ended = finished("run", str(spec), "--until-drained")
    assert ended.returncode == 0, ended.stderr
    assert "drained after" in ended.stderr
    with StateClient.open(spec.parent / "job.state") as client:  # Nobody serves it any more.
        assert counts_in(client) == expected
        assert client.queue("logs").bounds() == [(2_000, 2_000), (2_000, 2_000)]
    again = finished("run", str(spec), "--until-drained")
    assert again.returncode == 0, again.stderr
    status = json.loads(finished("status", str(spec), "--json").stdout)
    assert [mapper["input_unread_row_index"] for mapper in status["mappers"]] == [2_000, 2_000]


@pytest.mark.parametrize("victim", ["mapper 0", "reducer 1", "statestore"])
def test_run_goes_on_when_a_child_is_killed(spec: Path, victim: str) -> None:
    expected = fill(spec, 500)
    with running("run", str(spec), "--no-check") as controller:
        wait_until(lambda: children_of(controller.pid).keys() == ALL_CHILDREN)
        with StateClient.open(spec.parent / "job.state") as client:
            wait_until(lambda: counts_in(client) == expected)
        killed = children_of(controller.pid)[victim]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: children_of(controller.pid).get(victim, killed) != killed)
        with client_of_the_daemon(spec) as client:
            expected_now = expected + append(client, 300, begin=500)
            wait_until(lambda: counts_in(client) == expected_now)
        children = children_of(controller.pid)
        assert children.keys() == ALL_CHILDREN
        controller.send_signal(signal.SIGTERM)
        assert controller.wait(WAIT_S) == 0
        assert all(is_gone(pid) for pid in children.values())


def client_of_the_daemon(spec: Path) -> StateClient:
    """``StateClient.open`` would take the folder for itself while the daemon is being started again."""
    found: list[StateClient] = []

    def connected() -> bool:
        address = served_at(spec.parent / "job.state")
        try:
            found.append(StateClient.connect(address or ""))
            found[-1].queues()
        except ShuffleError:
            return False
        return True

    wait_until(connected)
    return found[-1]


def test_run_ends_with_130_on_ctrl_c_and_leaves_nothing(spec: Path) -> None:
    fill(spec, 100)
    with running("run", str(spec), "--no-check") as controller:
        wait_until(lambda: children_of(controller.pid).keys() == ALL_CHILDREN)
        children = children_of(controller.pid)
        controller.send_signal(signal.SIGINT)
        assert controller.wait(WAIT_S) == 130
        assert all(is_gone(pid) for pid in children.values())


def test_run_killed_takes_its_children_along(spec: Path) -> None:
    fill(spec, 100)
    with running("run", str(spec), "--no-check") as controller:
        wait_until(lambda: children_of(controller.pid).keys() == ALL_CHILDREN)
        children = children_of(controller.pid)
        controller.kill()
        controller.wait()
        wait_until(lambda: all(is_gone(pid) for pid in children.values()))


def test_run_until_drained_gives_up_with_the_error_of_the_users_code(spec: Path) -> None:
    fill(spec, 2_000)
    write_spec(spec.parent, "Broken")
    ended = finished("run", str(spec), "--until-drained", "--no-check")
    assert ended.returncode == 3
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: job: not drained: mapper ")
    assert "ValueError: cannot take 1500" in last
    assert "Traceback" not in ended.stderr


def test_run_refuses_a_map_that_depends_on_the_hash_seed(spec: Path) -> None:
    fill(spec, 200)
    write_spec(spec.parent, "ByHash")
    for command in ("check", "run"):
        ended = finished(command, str(spec))
        assert ended.returncode == 2, ended.stderr
        assert "is not deterministic row by row" in ended.stderr
        assert "in a fresh process with another hash seed" in ended.stderr


def test_check_of_a_good_job(spec: Path) -> None:
    fill(spec, 200)
    ended = finished("check", str(spec))
    assert ended.returncode == 0, ended.stderr
    assert "2 mappers, 2 reducers" in ended.stdout
    assert "deterministic on a sample of 400 rows" in ended.stdout
