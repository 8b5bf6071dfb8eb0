"""A store and mappers that listen on all addresses and tell others one: that one is written and answered everywhere.

Most addresses advertised here are others of the loopback network than the usual 127.0.0.1, so that nothing comes out
right by chance.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.discovery import arrange_mappers
from shuffle.durable.tables import mappers_group
from shuffle.ids import MapperIndex
from shuffle.statestore import StateClient
from shuffle.statestore.remote.control_client import ControlClient
from shuffle.statestore.wire.announcement import served_at
from shuffle.support import flight
from shuffle.support.endpoint import Endpoint
from tests.daemons import ROOT, StoreProcess, run_store, wait_until

STORE_HOST = "127.0.0.2"
MAPPER_HOST = "127.0.0.3"
ROWS = pa.table({"user": ["ada", "bob", "eve"], "n": pa.array([1, 2, 3], pa.int64())})

SPEC = """
processor: job
state: {state}
input: {{queue: logs}}
metrics: false
mapper: {{class: "advertise_job:ByUser", listen: "0.0.0.0:0", advertise: {advertise}}}
reducer: {{class: "advertise_job:Fold", count: 1}}
"""
JOB = """
from shuffle import HashMapper, Reducer

class ByUser(HashMapper):
    key = ["user"]

class Fold(Reducer):
    def reduce(self, rows):
        return None
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path / "store", "0.0.0.0:0", options=["--advertise", STORE_HOST]) as process:
        yield process


def told_by(address: str) -> tuple[str, str]:
    """The hosts of the data plane and of the lane, as the store at ``address`` answers them."""
    info = ControlClient(address).info(10.0)
    hosts = [told.partition("://")[2].rpartition(":")[0] for told in (info.flight_address, info.lane_address)]
    return hosts[0], hosts[1]


def test_store_writes_and_answers_what_it_advertises(store: StoreProcess) -> None:
    endpoint = Endpoint.parse(store.address)
    assert endpoint.host == STORE_HOST
    assert served_at(store.path) == store.address
    for host in ("127.0.0.1", STORE_HOST):  # It listens on all, and says the same to everybody.
        assert told_by(str(Endpoint(host, endpoint.port))) == (STORE_HOST, STORE_HOST)


@pytest.mark.parametrize("by_folder", [True, False], ids=["by its folder", "by another address"])
def test_store_is_used_over_what_it_advertises(store: StoreProcess, by_folder: bool) -> None:
    other = str(Endpoint("127.0.0.1", Endpoint.parse(store.address).port))
    with StateClient.open(store.path) if by_folder else StateClient.connect(other) as client:
        assert client.address == (store.address if by_folder else other)
        queue = client.create_queue("logs", schema=ROWS.schema, partitions=1)
        queue.append(0, ROWS)
        assert queue.read(0, 0, max_rows=10)[0].num_rows == 3


def test_store_may_advertise_another_port(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "store", "127.0.0.1:0", options=["--advertise", "store.example.org:7070"]) as process:
        assert process.address == served_at(process.path) == "grpc://store.example.org:7070"


def test_store_without_advertise_leaves_the_host_to_its_clients(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "store", "0.0.0.0:0") as process:
        assert Endpoint.parse(process.address).host == "127.0.0.1"
        assert told_by(process.address) == ("", "")
        with StateClient.connect(str(Endpoint(STORE_HOST, Endpoint.parse(process.address).port))) as client:
            client.create_queue("logs", schema=ROWS.schema, partitions=1).append(0, ROWS)


def test_store_refuses_what_nobody_can_reach(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "statestore", "--path", str(tmp_path / "store"), "--advertise", "0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 1
    assert "error: cannot advertise '0.0.0.0': it stands for all addresses of a machine" in ended.stderr
    assert "error: cannot listen on nowhere: write it as host:port" in run_store(tmp_path / "store", "nowhere").stderr
    assert not (tmp_path / "store").exists()


# ---- mappers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_spec", [True, False], ids=["by the spec", "by the option"])
def test_mapper_is_listed_and_reached_where_it_advertises(store: StoreProcess, tmp_path: Path, by_spec: bool) -> None:
    (tmp_path / "advertise_job.py").write_text(JOB)
    # The option comes before the spec.
    spec = SPEC.format(state=store.address, advertise=MAPPER_HOST if by_spec else "elsewhere.example.org")
    (tmp_path / "job.yaml").write_text(spec)
    command = [sys.executable, "-m", "mapper", str(tmp_path / "job.yaml"), "--index", "0"]
    command += [] if by_spec else ["--advertise", MAPPER_HOST]
    group = mappers_group("job")
    with StateClient.connect(store.address) as client, (tmp_path / "mapper.log").open("wb") as log:
        client.create_queue("logs", schema=ROWS.schema, partitions=1).append(0, ROWS)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        mapper = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
        try:
            wait_until(lambda: bool(client.leases.members(group)) or mapper.poll() is not None, "the mapper is listed")
            assert mapper.poll() is None, (tmp_path / "mapper.log").read_text()
            listed = arrange_mappers(client.leases.members(group))[MapperIndex(0)][0]
            assert Endpoint.parse(listed.address).host == MAPPER_HOST
            status = flight.do_action(flight.connect(listed.address), "status", who=listed.address, timeout_s=10.0)
            assert listed.guid.encode() in status
        finally:
            mapper.kill()
            mapper.wait(10)
