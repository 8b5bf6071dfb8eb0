"""The lane of the daemon: what is no question harms nobody, and an answer that never came is told from none asked."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pyarrow as pa
import pytest

from shuffle.errors import BadInput, CommitUnknown, StoreUnavailable, TooLarge, UnknownTable, from_wire
from statestore import StateClient
from statestore.lane_frames import GREETING, QUESTION_BYTES_MAX, decode_frame, encode_frame, local_address
from statestore.proto import control_pb2 as pb
from statestore.proto import control_pb2_grpc
from statestore.wire import Header
from tests.daemons import StoreProcess, wait_until

NUMBERS = pa.schema([("n", pa.int64())])
WAIT_MS = 20_000


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def info(daemon: StoreProcess) -> pb.InfoReply:
    with grpc.insecure_channel(daemon.listen) as channel:
        stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        return stub.Info(pb.InfoRequest(), timeout=10)  # type: ignore[no-any-return]


class Talker:
    """Somebody on the lane who may say anything."""

    def __init__(self, daemon: StoreProcess, near: bool = False) -> None:
        found = info(daemon)
        if near:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(10)
            self.sock.connect(local_address(found.lane_local_name))
        else:
            host, _, port = found.lane_address.removeprefix("tcp://").rpartition(":")
            self.sock = socket.create_connection((host, int(port)), 10)
        assert self.sock.recv(len(GREETING)) == GREETING

    def answer(self) -> Header | None:
        """None when the daemon hung up."""
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
            try:
                piece = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not piece:
                return None
            data += piece
        return decode_frame(data)[0]

    def ask(self, data: bytes) -> Header | None:
        self.sock.sendall(data)
        return self.answer()

    def close(self) -> None:
        self.sock.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("lane") / "state") as running:
        with StateClient.connect(running.address) as client:
            client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.binary())]))
            client.create_queue("q", schema=NUMBERS, partitions=1)
        yield running
        assert running.stop() == 0


def put(client: StateClient, n: int, value: bytes = b"") -> None:
    with client.transaction() as tx:
        tx.write("t", pa.table({"n": [n], "v": [value]}))
        tx.commit()


def error_of(answer: Header | None) -> Exception | None:
    return None if answer is None else from_wire(answer["error"])


@pytest.mark.parametrize("near", [False, True])
def test_garbage_is_refused_or_hung_up_on_and_the_daemon_goes_on(daemon: StoreProcess, near: bool) -> None:
    chance = random.Random(7)
    whole = encode_frame({"op": "bounds", "queue": 1}, None)
    for case in range(60):
        talker = Talker(daemon, near)
        data = bytearray(chance.randbytes(chance.randrange(1, 200)) if case % 2 else whole)
        if case % 2 == 0:
            data[chance.randrange(4, len(data))] ^= chance.randrange(1, 256)
        data[:4] = (len(data) - 4).to_bytes(4, "little") if len(data) >= 4 else data[:4]
        if len(data) >= 4:
            answer = talker.ask(bytes(data))
            assert answer is None or "error" in answer or "bounds" in answer
        talker.close()
    with StateClient.connect(daemon.address) as client:
        put(client, 1)


def test_refused_question_leaves_the_connection_in_use(daemon: StoreProcess) -> None:
    talker = Talker(daemon)
    for bad in (
        encode_frame({"op": "explode"}, None),
        encode_frame({"op": "scan", "table": 1, "rows": 1, "reverse": False}, ([b""], [None])),
        encode_frame({"op": "get", "table": 1}, None),
        encode_frame({"op": "commit"}, None),
        encode_frame({"op": "commit", "sections": [["write", 1, 5]]}, None),
        encode_frame({"op": "commit", "sections": [["write", "x", 1]]}, ([b"k"], [b"v"])),
        encode_frame({"op": "read", "local": True}, None),
        encode_frame({"op": "open", "session": 5}, None),
        struct.pack("<III", 10, 2, 0xFFFFFFFF) + b"[]",
        struct.pack("<III", 10, 2, 7) + b"{}",
    ):
        answer = talker.ask(bad)
        assert answer is not None
        assert "error" in answer, bad
    assert isinstance(error_of(talker.ask(encode_frame({"op": "bounds", "queue": 99}, None))), UnknownTable)
    talker.close()


def test_question_that_is_too_large_is_refused_before_it_is_read(daemon: StoreProcess) -> None:
    talker = Talker(daemon)
    assert isinstance(error_of(talker.ask((QUESTION_BYTES_MAX + 1).to_bytes(4, "little"))), TooLarge)
    assert talker.answer() is None
    talker.close()


def test_two_questions_at_once_are_refused(daemon: StoreProcess) -> None:
    talker = Talker(daemon)
    question = encode_frame({"op": "bounds", "queue": 2}, None)
    assert isinstance(error_of(talker.ask(question + question)), BadInput)
    assert talker.answer() is None
    talker.close()


def test_client_that_hangs_up_in_a_question_or_before_its_answer_is_forgotten(daemon: StoreProcess) -> None:
    with StateClient.connect(daemon.address) as client:
        queue_id = client.queue("q").queue_id
        poll = {"op": "read", "queue": queue_id, "partition": 0, "begin": 0, "rows": 1, "bytes": 1, "local": True}
        commit = encode_frame({"op": "commit", "sections": [["trim", queue_id, 0, 0]]}, None)
        for _ in range(30):
            for last_words in (commit, commit[:7], encode_frame({**poll, "wait_ms": WAIT_MS}, None)):
                talker = Talker(daemon)
                talker.sock.sendall(last_words)
                talker.close()
        put(client, 2)
        client.queue("q").append(0, numbers(1))
        wait_until(lambda: open_sockets(daemon.pid) < 40, "the daemon closes what its clients left")


def open_sockets(pid: int) -> int:
    found = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    return sum(one.startswith("socket:") for one in found)


def test_large_values_come_another_way(daemon: StoreProcess) -> None:
    with StateClient.connect(daemon.address) as client:
        for n in range(100, 104):
            put(client, n, bytes([n]) * (1 << 20))
        with client.transaction() as tx:
            found = tx.lookup("t", numbers(*range(100, 104)))
            assert [value[:1] for value in found["v"].to_pylist()] == [bytes([n]) for n in range(100, 104)]
            tx.write("t", pa.table({"n": [100], "v": [b"small"]}))
            tx.commit()
        assert client.lookup("t", numbers(100))["v"].to_pylist() == [b"small"]
        assert client.stats()["total"]["open_moments"] == 0


def test_long_poll_ends_when_its_queue_is_dropped(daemon: StoreProcess) -> None:
    with StateClient.connect(daemon.address) as client, StateClient.connect(daemon.address) as other:
        queue = client.create_queue("short-lived", schema=NUMBERS, partitions=2)
        outcome: list[BaseException] = []

        def poll() -> None:
            try:
                queue.read(1, 0, wait_ms=WAIT_MS)
            except UnknownTable as error:
                outcome.append(error)

        waiting = threading.Thread(target=poll)
        waiting.start()
        wait_until(lambda: open_sockets(daemon.pid) > 0, "it polls")
        other.drop_queue("short-lived")
        waiting.join(WAIT_MS / 2000)
        assert not waiting.is_alive()
        assert len(outcome) == 1


def test_answer_that_never_came_is_unknown_and_a_daemon_that_was_not_asked_is_unavailable(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state") as daemon, StateClient.connect(daemon.address, timeout_s=1.0) as client:
        client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.binary())]))
        put(client, 1)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(CommitUnknown):
                put(client, 2)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        wait_until(lambda: client.lookup("t", numbers(2)).num_rows == 1, "what was asked is done all the same")
        daemon.kill()
        # The connection is closed at the other end, which shows before anything is sent on it.
        threading.Event().wait(0.1)
        with pytest.raises(StoreUnavailable, match="nothing was committed"):
            put(client, 3)
