"""Nobody locks the others out of the store: what only takes places, or stops in the middle, is bounded or ended.

The time-outs are made short in the process that is tried, from outside, before its own ``main`` begins.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shuffle.errors import StoreUnavailable
from shuffle.statestore import StateClient
from shuffle.statestore.remote.control_client import ControlClient
from shuffle.statestore.server.control_server import WATCHES_MAX
from shuffle.statestore.server.lane_connections import CONNECTIONS_MAX, CONNECTIONS_PER_PEER_MAX
from shuffle.statestore.wire.lane_frames import GREETING, encode_frame, local_address
from shuffle.statestore.wire.proto import control_pb2 as pb
from shuffle.statestore.wire.proto import control_pb2_grpc
from tests.daemons import StoreProcess, wait_until
from tests.process.test_statestore_lane import Talker, info, large_question, numbers, open_sockets, put

NUMBERS = pa.schema([("n", pa.int64())])
WATCHES = 300
WAIT_MS = 50_000

HURRIED = {
    "shuffle.statestore.server.lane_connections.FRAME_S_MAX": 1.0,
    "shuffle.statestore.server.lane_connections.TAKE_S_MAX": 1.0,
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("bounds") / "state", changed=HURRIED) as running:
        yield running
        assert running.stop() == 0


def health_of(daemon: StoreProcess) -> int:
    with grpc.insecure_channel(daemon.listen) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status)


# --- the control plane ---


def test_waiting_watches_leave_room_for_everybody_else(daemon: StoreProcess) -> None:
    with ExitStack() as stack:
        control = ControlClient(daemon.address)
        stack.callback(control.close)
        lease = int(control.call("Register", 10, group="w", member="m", attributes={}, ttl_ms=600_000)["lease_id"])
        revision = int(control.call("Members", 10, group="w")["revision"])
        channel = stack.enter_context(grpc.insecure_channel(daemon.listen))
        stub: Any = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        request = pb.WatchRequest(group="w", revision=revision, wait_ms=WAIT_MS)
        waiting = [stub.Watch.future(request, timeout=2 * WAIT_MS / 1000) for _ in range(WATCHES)]
        wait_until(
            lambda: sum(call.done() for call in waiting) == WATCHES - WATCHES_MAX,
            "those that may not wait are answered at once",
        )
        began_s = time.monotonic()
        assert health_of(daemon) == health_pb2.HealthCheckResponse.SERVING
        assert control.call("Groups", 10)["groups"] == ["w"]
        with StateClient.connect(daemon.address) as client:
            client.create_queue("meanwhile", schema=NUMBERS, partitions=1).append(0, numbers(1))
        assert time.monotonic() - began_s < WAIT_MS / 2000
        control.call("Leave", 10, lease_id=lease)
        for call in waiting:
            assert call.result().revision in (0, revision)


def test_health_is_answered_while_every_thread_of_the_control_plane_waits(tmp_path: Path) -> None:
    changed = {
        "shuffle.statestore.server.control_server.CONTROL_THREADS": 4,
        "shuffle.statestore.server.control_server.WATCHES_MAX": 100,
    }
    with StoreProcess(tmp_path / "state", changed=changed) as daemon:
        with grpc.insecure_channel(daemon.listen) as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
            request = pb.WatchRequest(group="w", revision=0, wait_ms=WAIT_MS)
            waiting = [stub.Watch.future(request, timeout=WAIT_MS / 1000) for _ in range(20)]
            wait_until(lambda: fails(lambda: stub.Groups(pb.GroupsRequest(), timeout=0.2)), "no thread is left")
            assert health_of(daemon) == health_pb2.HealthCheckResponse.SERVING
            for call in waiting:
                call.cancel()


def fails(ask: Any) -> bool:
    try:
        ask()
    except grpc.RpcError:
        return True
    return False


# --- the lane ---


def connected(daemon: StoreProcess, near: bool, count: int) -> list[socket.socket]:
    """Connections on which nothing is asked."""
    found, made = info(daemon), []
    host, _, port = found.lane_address.removeprefix("tcp://").rpartition(":")
    for _ in range(count):
        if near:
            made.append(socket.socket(socket.AF_UNIX))
            made[-1].connect(local_address(found.lane_local_name))
        else:
            made.append(socket.create_connection((host, int(port)), 10))
        made[-1].settimeout(10)
        made[-1].recv(len(GREETING))
    return made


@pytest.mark.parametrize("near", [False, True])
def test_idle_connections_lock_nobody_out(daemon: StoreProcess, near: bool) -> None:
    with ExitStack() as stack:
        busy = stack.enter_context(StateClient.connect(daemon.address, local_files=not near))
        queue = busy.create_queue(f"busy-{near}", schema=NUMBERS, partitions=1)
        for sock in connected(daemon, near, CONNECTIONS_MAX + 50):
            stack.callback(sock.close)
        for local_files in (True, False):
            with StateClient.connect(daemon.address, local_files=local_files) as client:
                client.queue(f"busy-{near}").append(0, numbers(1))
                assert client.queue(f"busy-{near}").read(0, 0)[0].num_rows > 0
        queue.append(0, numbers(2))
        assert open_sockets(daemon.pid) < CONNECTIONS_MAX + 50
    wait_until(lambda: open_sockets(daemon.pid) < 40, "and what they left is closed")


def test_one_peer_cannot_have_all_connections_and_those_in_use_are_left_alone(daemon: StoreProcess) -> None:
    with ExitStack() as stack, StateClient.connect(daemon.address, local_files=False) as client:
        queue_id = client.create_queue("polled", schema=NUMBERS, partitions=1).queue_id
        poll = {"op": "read", "queue": queue_id, "partition": 0, "begin": 0, "rows": 1, "bytes": 1, "local": True}
        polling = connected(daemon, True, CONNECTIONS_PER_PEER_MAX)
        for sock in polling:
            stack.callback(sock.close)
            sock.sendall(encode_frame({**poll, "wait_ms": WAIT_MS}, None))
        wait_until(lambda: refused(daemon), "this process has all that it may have")
        other = Talker(daemon)  # Over TCP, so it is another peer.
        assert other.ask(encode_frame({"op": "bounds", "queue": queue_id}, None)) == {"bounds": [[0, 0]]}
        stack.callback(other.close)
        client.queue("polled").append(0, numbers(1))
        for sock in polling:
            assert sock.recv(4), "it was waiting all the time, and is answered now"


def refused(daemon: StoreProcess) -> bool:
    """Whether one more connection of this process is hung up on; if not, it is one more that is idle."""
    [sock] = connected(daemon, True, 1)
    with sock:
        sock.settimeout(0.1)
        try:
            return sock.recv(1) == b""
        except TimeoutError:
            return False


@pytest.mark.parametrize("near", [False, True])
def test_half_a_question_is_not_kept_for_ever(daemon: StoreProcess, near: bool) -> None:
    talker, idle = Talker(daemon, near), Talker(daemon, near)
    question = encode_frame({"op": "bounds", "queue": 1}, None)
    began_s = time.monotonic()
    talker.sock.sendall(question[:7])
    assert talker.answer() is None
    assert 1.0 <= time.monotonic() - began_s < 8
    assert idle.ask(question) is not None, "one that is only idle is left alone while there is room"
    idle.sock.sendall(question[:7])
    time.sleep(0.2)
    idle.sock.sendall(question[7:])
    assert idle.answer() is not None, "and a question may come in parts"
    talker.close()
    idle.close()


def test_client_that_does_not_take_its_answer_is_hung_up_on(daemon: StoreProcess) -> None:
    with StateClient.connect(daemon.address) as client:
        question = large_question(client)
        queue = client.create_queue("rows", schema=pa.schema([("v", pa.binary())]), partitions=1)
        for _ in range(4):
            queue.append(0, pa.table({"v": [bytes(1 << 20)] * 8}))
        rows = {"op": "read", "queue": queue.queue_id, "partition": 0, "begin": 0, "rows": 1000, "bytes": 1 << 26}
        before = open_sockets(daemon.pid)
        slow = [Talker(daemon, True) for _ in range(2)]
        for talker, asked in zip(slow, (question, encode_frame({**rows, "wait_ms": 0}, None)), strict=True):
            talker.sock.sendall(asked)
        taking = Talker(daemon, True)
        taking.sock.sendall(encode_frame({**rows, "wait_ms": 0}, None))
        taken, deadline_s = 0, time.monotonic() + 2.5
        while time.monotonic() < deadline_s:  # Slowly, but longer than one may take nothing at all.
            taken += len(taking.sock.recv(1 << 16))
            time.sleep(0.1)
        wait_until(lambda: open_sockets(daemon.pid) <= before + 1, "those that take nothing are hung up on")
        while taken < 32 << 20:
            piece = taking.sock.recv(1 << 20)
            assert piece, "the one that takes its answer slowly gets all of it"
            taken += len(piece)
        put(client, 1)
        for talker in (*slow, taking):
            talker.close()


# --- Flight ---


def test_streams_beyond_the_bound_are_refused_and_nothing_was_done(tmp_path: Path) -> None:
    with (
        StoreProcess(tmp_path / "state", changed={"shuffle.statestore.server.flight_server.STREAMS_MAX": 2}) as daemon,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(StateClient.connect(daemon.address)) for _ in range(3)]
        clients[0].create_table("t", key=NUMBERS, value=pa.schema([("v", pa.int64())]))
        rows = pa.table({"n": range(1000), "v": range(1000)})

        def write(client: StateClient) -> None:
            with client.transaction() as tx:
                tx.write("t", rows)
                tx.commit()

        for client in clients[:2]:
            write(client)
        with pytest.raises(StoreUnavailable, match=r"no more than 2 streams.*nothing was committed"):
            write(clients[2])
        put_small = clients[2].transaction()
        put_small.write("t", rows.slice(0, 1))
        put_small.commit()
        clients[0].close()
        wait_until(lambda: works(lambda: write(clients[2])), "there is a place again")


def works(act: Any) -> bool:
    try:
        act()
    except StoreUnavailable:
        return False
    return True
