"""No thread that others depend on dies alone: the process ends and says why, or, where it is a user's, every call does.

The threads are killed from outside: a method that they call is made to raise before the process's own ``main`` begins.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shuffle.errors import ShuffleError, StoreUnavailable, ThreadDied
from shuffle.statestore import StateClient
from shuffle.statestore.local import local
from shuffle.statestore.remote import flight_client, remote
from shuffle.statestore.server import lane_server
from shuffle.statestore.server.daemon import StoreDaemon
from shuffle.support.vital_threads import start_vital
from tests.daemons import StoreProcess, environment, wait_until

NUMBERS = pa.schema([("n", pa.int64())])
EXIT_S_MAX = 60.0

DEADLY = """
import importlib, sys
module, place, main, *arguments = sys.argv[1:]
where = importlib.import_module(module)
*path, method = place.split(".")
for name in path:
    where = getattr(where, name)
def die(*args, **kwargs):
    raise RuntimeError("killed by a test")
setattr(where, method, die)
raise SystemExit(importlib.import_module(main).main(arguments))
"""

JOB = """
from shuffle import HashMapper, Reducer

class ByNumber(HashMapper):
    key = ["n"]

class Nothing(Reducer):
    def reduce(self, rows):
        return None
"""


def run_deadly(place: str, main: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process of ours in which the method at ``place`` raises; it must end by itself."""
    module, _, method = place.partition(":")
    return subprocess.run(
        [sys.executable, "-c", DEADLY, module, method, main, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=EXIT_S_MAX,
        check=False,
    )


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("thread", "place"),
    [
        ("store-lane", "shuffle.statestore.server.lane_server:LaneServer._sweep"),
        ("store-writer", "shuffle.statestore.local.local:LocalStore._collect_garbage"),
        ("session-reaper", "shuffle.statestore.engine.sessions:Sessions.expire"),
    ],
)
def test_store_without_one_of_its_threads_ends_with_an_error(tmp_path: Path, thread: str, place: str) -> None:
    path = str(tmp_path / "state")
    ended = run_deadly(
        place, "shuffle.statestore.server.daemon", "--path", path, "--listen", "127.0.0.1:0", folder=tmp_path
    )
    assert ended.returncode == 1
    assert last_line(ended.stderr).startswith(f"error: the thread {thread} has died of RuntimeError: killed by a test")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("job")
    with StoreProcess(folder / "state") as daemon:
        with StateClient.connect(daemon.address) as client:
            client.create_queue("in", schema=NUMBERS, partitions=1)
        (folder / "vital_job.py").write_text(JOB)
        (folder / "job.yaml").write_text(
            f"processor: job\nstate: {daemon.address}\ninput: {{queue: in}}\n"
            'mapper: {class: "vital_job:ByNumber", trim_period_ms: 50}\n'
            'reducer: {class: "vital_job:Nothing", count: 1}\n'
        )
        yield folder


@pytest.mark.parametrize(
    ("role", "thread", "place"),
    [
        ("mapper", "trim", "shuffle.mapper.trim:Trimmer.trim"),
        ("mapper", "membership-job/mappers", "shuffle.discovery:Membership._run"),
        ("mapper", "metrics", "socketserver:BaseServer.serve_forever"),
        ("reducer", "fetch-0", "shuffle.reducer.shared_core:SharedCore.next_plan"),
        ("reducer", "process", "shuffle.reducer.shared_core:SharedCore.next_batch"),
        ("reducer", "directory-job", "shuffle.discovery:MapperDirectory._run"),
        ("reducer", "membership-job/reducers", "shuffle.discovery:Membership._run"),
    ],
)
def test_worker_without_one_of_its_threads_ends_with_an_error(job: Path, role: str, thread: str, place: str) -> None:
    ended = run_deadly(place, f"shuffle.{role}.__main__", "job.yaml", "--index", "0", folder=job)
    assert ended.returncode == 1, ended.stderr
    assert last_line(ended.stderr).startswith(f"error: the thread {thread} has died of RuntimeError: killed by a test")


# --- in a process that is not ours to end ---


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("killed by a test")


def health_of(daemon: StoreDaemon) -> int:
    with grpc.insecure_channel(daemon.address.removeprefix("grpc://")) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status)


def test_health_is_turned_off_before_anybody_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[ShuffleError, int]] = []
    daemon = StoreDaemon(str(tmp_path / "state"), "127.0.0.1:0", lambda error: seen.append((error, health_of(daemon))))
    try:
        assert health_of(daemon) == health_pb2.HealthCheckResponse.SERVING
        with StateClient.connect(daemon.address) as client:
            client.create_queue("q", schema=NUMBERS, partitions=1)
            monkeypatch.setattr(lane_server.LaneServer, "_sweep", raising)
            wait_until(lambda: bool(seen), "the daemon is told")
            [(error, health)] = seen
            assert isinstance(error, ThreadDied)
            assert health == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises((ThreadDied, StoreUnavailable)):
                client.create_queue("r", schema=NUMBERS, partitions=1)
    finally:
        daemon.close()


def test_embedded_store_without_its_writer_says_so_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"n": pa.array([1], pa.int64())})
    with StateClient.open(tmp_path / "state") as client:
        queue = client.create_queue("q", schema=NUMBERS, partitions=1)
        client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.int64())]))
        monkeypatch.setattr(local.LocalStore, "_collect_garbage", raising)

        def refused() -> bool:
            try:
                queue.bounds()
            except ThreadDied:
                return True
            return False

        wait_until(refused, "the store is known to be broken")
        calls: list[Callable[[], object]] = [
            lambda: queue.append(0, rows),
            lambda: queue.read(0, 0),
            lambda: queue.stage(rows),
            lambda: client.lookup("t", rows),
            lambda: client.scan("t").read_all(),
            client.snapshot,
            client.transaction().commit,
            lambda: client.create_queue("r", schema=NUMBERS, partitions=1),
        ]
        for call in calls:
            with pytest.raises(ThreadDied, match="store-writer"):
                call()


@pytest.mark.parametrize(
    ("thread", "place", "method"),
    [
        ("store-deadlines", flight_client.FlightClient, "_watch"),
        ("store-session", remote.RemoteStore, "_renew_session"),
    ],
)
def test_client_without_one_of_its_threads_says_so_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str, place: type, method: str
) -> None:
    monkeypatch.setattr(place, method, raising)
    with StoreProcess(tmp_path / "state") as daemon, StateClient.connect(daemon.address) as client:

        def refused() -> bool:
            try:
                client.snapshot().close()
            except ThreadDied:
                return True
            return False

        wait_until(refused, "the client is known to be broken")
        for call in (client.tables, client.snapshot, lambda: client.leases.members("g")):
            with pytest.raises(ThreadDied, match=thread):
                call()


def test_thread_that_returns_has_not_died() -> None:
    deaths: list[ThreadDied] = []
    start_vital(lambda: None, "short", deaths.append).join()
    assert deaths == []


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), MemoryError()])
def test_whatever_a_thread_dies_of_is_told(error: BaseException) -> None:
    deaths: list[ThreadDied] = []

    def die() -> None:
        raise error

    start_vital(die, "doomed", deaths.append).join()
    [died] = deaths
    assert f"the thread doomed has died of {type(error).__name__}" in died.message
    assert "in die, line" in died.message
    assert died.thread == "doomed"


NOISY = """
import sys, threading
from shuffle.support.vital_threads import leave

def write():
    while True:
        sys.stderr.buffer.write(b"." * 100)
        sys.stderr.buffer.flush()

for _ in range(4):
    threading.Thread(target=write, daemon=True).start()
leave(3)
"""


def test_worker_that_ends_while_its_threads_write_ends_with_its_own_code(tmp_path: Path) -> None:
    """Python may abort a process that it takes apart while threads still write, and the code would be lost with it."""
    for attempt in range(10):
        with (tmp_path / f"{attempt}.log").open("wb") as log:
            ended = subprocess.run([sys.executable, "-c", NOISY], stderr=log, env=environment(), check=False)
        assert ended.returncode == 3
