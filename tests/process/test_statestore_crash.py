"""The daemon of the state store as a real process: killed at any moment, refused, filled up, left by its clients."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shuffle.errors import (
    CommitConflict,
    CommitUnknown,
    CorruptData,
    DiskFull,
    Expired,
    StoreLocked,
    StoreUnavailable,
)
from shuffle.limits import MIB
from shuffle.run.controller import serving_address
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.statestore import StateClient
from shuffle.support import flight
from tests.daemons import StoreProcess, environment, run_store, wait_until

WRITERS = 16
ROUNDS = 4
KEYS_PER_COMMIT = 3
NUMBERS = pa.schema([("n", pa.int64())])
VALUES = pa.schema([("v", pa.binary())])


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def create(client: StateClient) -> None:
    key = pa.schema([("writer", pa.int64()), ("n", pa.int64()), ("part", pa.int64())])
    client.create_table("commits", key=key, value=pa.schema([("check", pa.int64())]))
    client.create_queue("log", schema=NUMBERS, partitions=WRITERS)


class Writer(threading.Thread):
    """Commits transactions that each write several rows and append one, until the store is gone."""

    def __init__(self, client: StateClient, index: int, first: int) -> None:
        super().__init__(name=f"writer-{index}")
        self.client = client
        self.index = index
        self.next = first
        self.acknowledged: set[int] = set()
        self.unknown: set[int] = set()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while self._commit(self.next):
                self.next += 1
        except BaseException as error:
            self.failure = error

    def _commit(self, n: int) -> bool:
        parts = range(KEYS_PER_COMMIT)
        rows = pa.table(
            {"writer": [self.index] * len(parts), "n": [n] * len(parts), "part": parts, "check": [n * 7] * len(parts)}
        )
        with self.client.transaction() as tx:
            tx.write("commits", rows)
            try:
                if n % 5:
                    tx.append("log", self.index, numbers(n))
                else:
                    tx.publish("log", self.index, self.client.queue("log").stage(numbers(n)))
            except StoreUnavailable:
                return False
            try:
                tx.commit()
            except CommitUnknown:
                self.unknown.add(n)
                return False
            except StoreUnavailable:
                return False
        self.acknowledged.add(n)
        return True


def wait_for_first_commits(writers: list[Writer]) -> None:
    wait_until(lambda: all(writer.acknowledged for writer in writers), "the writers write")


def committed(client: StateClient) -> dict[int, set[int]]:
    """What is there by writer, after it was found to be whole: all parts of each, and the same in the queue."""
    found: dict[tuple[int, int], list[int]] = {}
    for row in client.scan("commits").read_all().to_pylist():
        assert row["check"] == row["n"] * 7
        found.setdefault((row["writer"], row["n"]), []).append(row["part"])
    assert all(parts == list(range(KEYS_PER_COMMIT)) for parts in found.values()), "a commit came apart"
    log = client.queue("log")
    by_writer: dict[int, set[int]] = {}
    for index, (begin, end) in enumerate(log.bounds()):
        assert begin == 0
        rows, position = log.read(index, 0, max_rows=10**6)
        assert position == end
        appended = rows["n"].to_pylist()
        assert len(appended) == len(set(appended))
        assert set(appended) == {n for writer, n in found if writer == index}, "the queue and the table disagree"
        by_writer[index] = set(appended)
    return by_writer


def test_killed_at_any_moment_every_acknowledged_commit_is_there_and_every_other_whole_or_absent(
    tmp_path: Path,
) -> None:
    chance = random.Random(20)
    folder = tmp_path / "state"
    daemon = StoreProcess(folder)
    acknowledged: dict[int, set[int]] = {index: set() for index in range(WRITERS)}
    unknown: dict[int, set[int]] = {index: set() for index in range(WRITERS)}
    try:
        with StateClient.connect(daemon.address) as client:
            create(client)
            for number in range(ROUNDS):
                writers = [Writer(client, index, 100_000 * number) for index in range(WRITERS)]
                for writer in writers:
                    writer.start()
                wait_for_first_commits(writers)
                time.sleep(chance.uniform(0, 0.3))
                daemon.kill()
                for writer in writers:
                    writer.join(60)
                    assert not writer.is_alive()
                    assert writer.failure is None
                    acknowledged[writer.index] |= writer.acknowledged
                    unknown[writer.index] |= writer.unknown
                # At the same address, so that the client finds it again by itself.
                daemon = StoreProcess(folder, daemon.listen)
                for index, there in committed(client).items():
                    assert acknowledged[index] <= there <= acknowledged[index] | unknown[index]
        assert daemon.stop() == 0
        with StateClient.open(folder) as embedded:
            assert all(acknowledged[index] <= there for index, there in committed(embedded).items())
    finally:
        if daemon.running:
            daemon.kill()


def segment_files(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


def test_torn_tail_of_a_segment_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StoreProcess(folder) as daemon, StateClient.connect(daemon.address) as client:
        log = client.create_queue("log", schema=NUMBERS, partitions=1)
        log.append(0, numbers(1, 2))
        daemon.kill()
    [file] = segment_files(folder)
    size = file.stat().st_size
    with file.open("ab") as torn:
        torn.write(file.read_bytes()[-70:] + os.urandom(33))
    with StoreProcess(folder) as daemon, StateClient.connect(daemon.address) as client:
        assert file.stat().st_size == size
        log = client.queue("log")
        assert log.bounds() == [(0, 2)]
        assert log.append(0, numbers(3)) == (2, 3)
        assert log.read(0, 0)[0]["n"].to_pylist() == [1, 2, 3]


@pytest.mark.parametrize("local_files", [True, False])
def test_corrupt_middle_of_a_segment_is_refused_by_file_and_offset(tmp_path: Path, local_files: bool) -> None:
    folder = tmp_path / "state"
    with StateClient.open(folder) as client:
        log = client.create_queue("log", schema=NUMBERS, partitions=2)
        for n in range(3):
            log.append(0, numbers(*range(n * 100, n * 100 + 100)))
        log.append(1, numbers(7))
    file = next(file for file in segment_files(folder) if "-p0-" in file.name)
    data = bytearray(file.read_bytes())
    middle = data.index((150).to_bytes(8, "little"))
    data[middle] ^= 1
    file.write_bytes(bytes(data))
    with StoreProcess(folder) as daemon:
        with StateClient.connect(daemon.address, local_files=local_files) as client:
            log = client.queue("log")
            assert log.read(0, 0, max_rows=100)[0].num_rows == 100
            with pytest.raises(CorruptData, match=r"checksum") as caught:
                log.read(0, 100)
            assert file.name in caught.value.file
            assert 0 < caught.value.offset < middle < caught.value.offset + 1000
            assert log.read(0, 200)[0].num_rows == 100
            assert log.read(1, 0)[0]["n"].to_pylist() == [7]
            assert log.append(0, numbers(1)) == (300, 301)


# --- refused at the start: one clear line, and an exit code that is not 0 ---


def refusal(path: Path, listen: str = "127.0.0.1:0") -> str:
    done = run_store(path, listen)
    assert done.returncode != 0
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in line
    return line


def test_second_process_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StoreProcess(folder) as daemon:
        line = refusal(folder)
        assert f"pid {daemon.pid}" in line
        assert str(folder) in line
        with StateClient.open(folder) as client:
            assert client.address == daemon.address, "the daemon's address was left in the folder"
            client.create_table("t", key=NUMBERS, value=VALUES)
        assert daemon.stop() == 0
    with StateClient.open(folder) as client:
        assert [table.name for table in client.tables()] == ["t"]
        assert f"pid {os.getpid()}" in refusal(folder)


def test_folder_in_use_by_a_process_that_serves_nobody_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shuffle.statestore.client.open_store._OPEN_WAIT_S", 0.2)
    with StateClient.open(tmp_path / "state"), pytest.raises(StoreLocked, match=f"pid {os.getpid()}"):
        StateClient.open(tmp_path / "state")


def test_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text("999\n")
    assert "format 999" in refusal(tmp_path)
    for text in ("what\n", "-1\n", "0\n"):
        (tmp_path / "FORMAT").write_text(text)
        assert "damaged" in refusal(tmp_path)


def test_damaged_log_is_refused_by_the_daemon(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state") as daemon, StateClient.connect(daemon.address) as client:
        for name in ("t", "u"):
            client.create_table(name, key=NUMBERS, value=VALUES)
        daemon.kill()
    [log] = (tmp_path / "state" / "rocks").glob("*.log")
    os.truncate(log, log.stat().st_size - 3)
    assert "version 1, but version 2 was acknowledged" in refusal(tmp_path / "state")


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refusal(tmp_path / "file" / "state")
    assert "cannot be written" in line


@pytest.mark.parametrize("limit_mib", [800, 1200, 2000])
def test_too_little_address_space_is_said_and_not_waited_for(tmp_path: Path, limit_mib: int) -> None:
    limit_bytes = limit_mib * MIB
    done = subprocess.run(
        [sys.executable, "-m", "statestore", "--path", str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(),
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: the state store cannot start")
    assert "ulimit -v" in line


def test_taken_port_is_refused_and_the_folder_given_back(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "one") as daemon:
        assert daemon.listen in refusal(tmp_path / "two", daemon.listen)
        with StateClient.connect(daemon.address) as client:
            assert client.tables() == []
    with StateClient.open(tmp_path / "two") as client:
        assert client.tables() == []


@pytest.mark.parametrize("listen", ["127.0.0.1:x", "192.0.2.1:0"])
def test_address_that_is_none_of_this_machine_is_refused(tmp_path: Path, listen: str) -> None:
    assert f"cannot listen on {listen}" in refusal(tmp_path / "state", listen)


def test_address_left_by_a_killed_daemon_is_not_taken_for_another_one(tmp_path: Path) -> None:
    """Its port may belong to the daemon of another store by now."""
    with StoreProcess(tmp_path / "one") as first:
        first.kill()
    with StateClient.open(tmp_path / "one") as client:
        assert client.address == str(tmp_path / "one"), "nobody listens there: opened in this process"
        client.create_table("mine", key=NUMBERS, value=VALUES)
    with StoreProcess(tmp_path / "two", first.listen), StateClient.open(tmp_path / "one") as client:
        assert [table.name for table in client.tables()] == ["mine"]


# --- a full disk ---


SMALL_DISK_BYTES = 96 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, int | None]]:
    """A file system of its own, or where none may be mounted a large one of which the store must leave most free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        status = os.statvfs(folder)
        yield folder, status.f_bavail * status.f_frsize - SMALL_DISK_BYTES + (16 << 20)
        return
    yield folder, None
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_refuses_commits_serves_reads_and_goes_on_when_there_is_room(
    small_disk: tuple[Path, int | None],
) -> None:
    disk, reserve_bytes = small_disk
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(40 << 20))
    started = StoreProcess(disk / "state", disk_reserve_bytes=reserve_bytes)
    with started as daemon, StateClient.connect(daemon.address) as client:
        client.create_table("t", key=NUMBERS, value=VALUES)
        log = client.create_queue("log", schema=VALUES, partitions=1)
        chance = random.Random(1)
        written = fill(client, chance, first=0)
        assert written > 3
        for _ in range(3):
            assert there(client) == set(range(written))
            assert log.bounds() == [(0, written)]
            assert log.read(0, written - 1, max_bytes=1)[1] == written
            with pytest.raises(DiskFull, match="room"):
                put(client, written, chance.randbytes(1 << 20))
            with pytest.raises(DiskFull):
                log.stage(pa.table({"v": [chance.randbytes(1 << 20)]}))
        ballast.unlink()
        again = fill(client, chance, first=written)
        assert again > 3
        assert there(client) == set(range(written + again))
        log.trim(0, written + again)
        with client.transaction() as tx:
            tx.delete("t", numbers(*range(written)))
            tx.commit()
        assert there(client) == set(range(written, written + again))
        daemon.kill()
    with StoreProcess(disk / "state") as daemon, StateClient.connect(daemon.address) as client:
        assert there(client) == set(range(written, written + again))
        assert client.queue("log").bounds() == [(written + again, written + again)]


def put(client: StateClient, n: int, value: bytes) -> None:
    with client.transaction() as tx:
        tx.write("t", pa.table({"n": [n], "v": [value]}))
        tx.append("log", 0, pa.table({"v": [value[: 64 << 10]]}))
        tx.commit()


def fill(client: StateClient, chance: random.Random, first: int) -> int:
    """Commits rows until there is no room; returns how many were acknowledged."""
    for count in range(200):
        try:
            put(client, first + count, chance.randbytes(1 << 20))
        except DiskFull:
            return count
    raise AssertionError("the disk never filled up")


def there(client: StateClient) -> set[int]:
    return set(client.scan("t", columns=["n"]).read_all()["n"].to_pylist())


# --- clients that die ---

ABANDONING = """
import sys, time
import pyarrow as pa
from shuffle.statestore import StateClient
from shuffle.statestore.remote.remote import RemoteStore

client = StateClient(RemoteStore(sys.argv[1], session_ttl_ms=500))
snapshots = [client.snapshot() for _ in range(3)]
transaction = client.transaction()
transaction.lookup("t", pa.table({"n": [1]}))
reader = client.scan("t")
staged = client.queue("log").stage(pa.table({"n": [1]}), ttl_ms=1000)
client.leases.register("group", "me", {}, ttl_ms=500)
print("ready", flush=True)
time.sleep(600)
"""


def test_killed_client_leaves_nothing_behind(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state") as daemon, StateClient.connect(daemon.address) as client:
        client.create_table("t", key=NUMBERS, value=VALUES)
        client.create_queue("log", schema=NUMBERS, partitions=1)

        def held() -> tuple[Any, ...]:
            total = client.stats()["total"]
            return total["open_moments"], total["staged"], len(client.leases.members("group"))

        with subprocess.Popen(
            [sys.executable, "-c", ABANDONING, daemon.address], stdout=subprocess.PIPE, text=True, env=environment()
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            assert held()[0] == 5
            child.kill()
        wait_until(lambda: held() == (0, 0, 0), "everything the client held is given back")
        wait_until(lambda: not segment_files(tmp_path / "state"), "its staged file is removed")


def test_restarted_daemon_ends_old_snapshots_and_serves_new_ones(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StoreProcess(folder) as daemon, StateClient.connect(daemon.address) as client:
        create(client)
        lease = client.leases.register("group", "me", {}, ttl_ms=60_000)
        with client.transaction() as tx:
            tx.scan("commits").read_all()
            with client.snapshot() as snapshot:
                daemon.kill()
                with pytest.raises(StoreUnavailable, match="grpc://"):
                    client.tables()
                with pytest.raises(StoreUnavailable):
                    client.scan("commits").read_all()
                with pytest.raises(StoreUnavailable):
                    client.queue("log").read(0, 0)
                with StoreProcess(folder, daemon.listen):
                    assert client.scan("commits").read_all().num_rows == 0
                    with pytest.raises(Expired):
                        snapshot.scan("commits").read_all()
                    with pytest.raises(Expired):
                        lease.renew()
                    tx.append("log", 0, numbers(1))
                    with pytest.raises(CommitConflict):
                        tx.commit()
                    assert client.queue("log").append(0, numbers(2)) == (0, 1)


@pytest.mark.parametrize("by", ["another store", "another server"])
def test_address_that_a_killed_daemon_has_left_leads_to_nobody_else(tmp_path: Path, by: str) -> None:
    folder = tmp_path / "state"
    with StoreProcess(folder) as killed, StateClient.connect(killed.address) as client:
        create(client)
        killed.kill()
    with ExitStack() as stack:
        if by == "another store":
            address = stack.enter_context(StoreProcess(tmp_path / "other")).address
        else:
            address = f"grpc://127.0.0.1:{stack.enter_context(flight.FlightServerBase('grpc://127.0.0.1:0')).port}"
        (folder / "daemon.json").write_text(json.dumps({"address": address, "pid": killed.pid}))
        assert serving_address(folder) is None
        with pytest.raises(StoreUnavailable, match="no daemon serves"):
            StoreHandle(os.fspath(folder), timeout_s=0).client()
        with StateClient.open(folder) as embedded:
            assert {table.name for table in embedded.tables()} == {"commits"}
    with StoreProcess(folder) as alive:
        assert serving_address(folder) == alive.address
        StoreHandle(os.fspath(folder), timeout_s=0).client().close()


# --- an orderly end, and what orchestrators ask ---


def test_sigterm_ends_it_in_order_under_load(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StoreProcess(folder) as daemon, StateClient.connect(daemon.address) as client:
        create(client)
        assert json.loads((folder / "daemon.json").read_text()) == {"address": daemon.address, "pid": daemon.pid}
        writers = [Writer(client, index, 1) for index in range(2)]
        for writer in writers:
            writer.start()
        wait_for_first_commits(writers)
        assert daemon.stop() == 0
        for writer in writers:
            writer.join(60)
            assert writer.failure is None
    assert not (folder / "daemon.json").exists()
    with StateClient.open(folder) as embedded:
        found = committed(embedded)
        for writer in writers:
            assert writer.acknowledged <= found[writer.index] <= writer.acknowledged | writer.unknown


def test_health_and_reflection_answer(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state") as daemon, grpc.insecure_channel(daemon.listen) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "statestore.v1.Control"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = list(reflection.ServerReflectionInfo(iter([question]), timeout=10))
        services = {service.name for service in answer.list_services_response.service}
        assert {"statestore.v1.Control", "grpc.health.v1.Health"} <= services


def test_interrupt_ends_it_too(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state") as daemon:
        os.kill(daemon.pid, signal.SIGINT)
        assert daemon.wait() == 0
