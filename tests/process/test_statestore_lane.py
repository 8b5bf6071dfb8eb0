"""The lane of the daemon: what is no question harms nobody, and an answer that never came is told from none asked."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import (
    BadInput,
    CommitUnknown,
    CorruptData,
    OutOfRange,
    StoreUnavailable,
    TooLarge,
    UnknownTable,
    from_wire,
)
from shuffle.statestore import StateClient
from shuffle.statestore.codec.segment import decode_batch, split_records
from shuffle.statestore.codec.small_batch import SMALL_BATCH_ROWS_MAX
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.engine.queue_reads import RECORDS_MAX
from shuffle.statestore.remote import lane_client
from shuffle.statestore.wire.lane_frames import GREETING, REQUEST_BYTES_MAX, decode_frame, encode_frame, local_address
from shuffle.statestore.wire.messages import Header, rows_of
from shuffle.statestore.wire.proto import control_pb2 as pb
from shuffle.statestore.wire.proto import control_pb2_grpc
from tests.daemons import StoreProcess, wait_until
from tests.waiting import pause

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
    assert isinstance(error_of(talker.ask((REQUEST_BYTES_MAX + 1).to_bytes(4, "little"))), TooLarge)
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


def large_question(client: StateClient) -> bytes:
    """One whose answer is nearly as large as an answer of the lane may be, and larger than a socket has room for."""
    client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.binary())]))
    for n in range(SMALL_BATCH_ROWS_MAX):
        put(client, n, bytes(60_000))
    table = Table(next(schema for schema in client.tables() if schema.name == "t"))
    keys = table.encode_keys(numbers(*range(SMALL_BATCH_ROWS_MAX)))[1]
    return encode_frame({"op": "get", "table": table.table_id}, rows_of(keys, None))


HUNGRY = """
import socket, sys
question, local_name = bytes.fromhex(sys.argv[1]), sys.argv[2]
made = []
for _ in range(32):
    made.append(socket.socket(socket.AF_UNIX))
    made[-1].connect(chr(0) + local_name)
    made[-1].recv(100)
print(flush=True)
while True:
    for one in made:
        one.sendall(question)
    for one in made:
        left = int.from_bytes(one.recv(4, socket.MSG_WAITALL), "little")
        while left:
            left -= len(one.recv(min(left, 65536)))
"""
"""A client that asks and asks, and is in the middle of an answer whenever it is killed."""


def test_clients_killed_in_the_middle_of_large_answers_take_nobody_with_them(tmp_path: Path) -> None:
    """The lane's thread once died when it met the end of such a client while it sent the rest of an answer."""
    chance = random.Random(1)
    with StoreProcess(tmp_path / "state") as daemon, StateClient.connect(daemon.address) as client:
        arguments = [large_question(client).hex(), info(daemon).lane_local_name]
        for _ in range(40):
            hungry = subprocess.Popen([sys.executable, "-S", "-E", "-c", HUNGRY, *arguments], stdout=subprocess.PIPE)
            assert hungry.stdout is not None
            hungry.stdout.readline()
            time.sleep(chance.random() * 0.05)  # It asks meanwhile.
            hungry.kill()
            hungry.communicate()
            with StateClient.connect(daemon.address, timeout_s=5.0) as other:
                put(other, 1)
        wait_until(lambda: open_sockets(daemon.pid) < 40, "the daemon closes what its clients left")
        assert "store-lane" in client.stats()["threads"]


def open_sockets(pid: int) -> int:
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # Closed meanwhile.
            found += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return found


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


@pytest.mark.parametrize("by", ["address", "folder"])
def test_answer_that_never_came_is_unknown_and_a_daemon_that_was_not_asked_is_unavailable(
    tmp_path: Path, by: str
) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(StoreProcess(tmp_path / "state"))
        found = StateClient.open(daemon.path, 1.0) if by == "folder" else StateClient.connect(daemon.address, 1.0)
        client = stack.enter_context(found)
        client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.binary())]))
        put(client, 1)
        pause(daemon.pid)
        try:
            begin_s = time.monotonic()
            with pytest.raises(CommitUnknown):
                put(client, 2)
            assert time.monotonic() - begin_s < 10, "it waits as long as it was told to"
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        wait_until(lambda: client.lookup("t", numbers(2)).num_rows == 1, "what was asked is done all the same")
        daemon.kill()
        # The connection is closed at the other end, which shows before anything is sent on it.
        threading.Event().wait(0.1)
        with pytest.raises(StoreUnavailable, match=r"reached \(.*refused.*nothing was committed") as caught:
            put(client, 3)
        causes, cause = [], caught.value.__cause__
        while cause is not None:
            causes.append(type(cause).__name__)
            cause = cause.__cause__
        assert "NothingSent" in causes, "the error says what it came from"
        assert len(causes) > 1


@pytest.mark.parametrize("local_files", [False, True])
def test_connections_that_the_daemon_closes_under_its_clients_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_files: bool
) -> None:
    """There is room for one, so that each of the two clients always finds its own closed by the other's."""
    if not local_files:
        # A question sent on a TCP connection that was closed already seems to be sent, so clients look first.
        monkeypatch.setattr(lane_client, "_IDLE_S", 0.0)
    changed = {"shuffle.statestore.server.lane_connections.CONNECTIONS_MAX": 1}
    with StoreProcess(tmp_path / "state", changed=changed) as daemon, ExitStack() as stack:
        clients = [stack.enter_context(StateClient.connect(daemon.address, local_files=local_files)) for _ in range(2)]
        clients[0].create_table("t", key=NUMBERS, value=pa.schema([("v", pa.binary())]))
        for n in range(50):
            for client in clients:
                put(client, n)
        assert clients[0].lookup("t", numbers(*range(50))).num_rows == 50


def test_a_busy_machine_is_not_taken_for_one_without_a_store(tmp_path: Path) -> None:
    """Connecting was given a tenth of a second once, which a machine that starts many processes may well need."""

    def relay(server: socket.socket, port: int) -> None:
        near, _ = server.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            time.sleep(0.5)
            ends = {near: far, far: near}
            while True:
                for one in select.select(list(ends), [], [])[0]:
                    data = one.recv(1 << 16)
                    if not data:
                        return
                    ends[one].sendall(data)

    with StoreProcess(tmp_path / "state") as daemon, socket.create_server(("127.0.0.1", 0)) as server:
        slow = threading.Thread(target=relay, args=(server, int(daemon.listen.rpartition(":")[2])), daemon=True)
        slow.start()
        with StateClient.connect(f"grpc://127.0.0.1:{server.getsockname()[1]}") as client:
            client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.binary())]))
            put(client, 1)
        slow.join(10)


def test_a_large_question_is_waited_for_longer_than_a_small_one(tmp_path: Path) -> None:
    """A worker's lookup of very many keys once took longer than its patience, and was asked again for ever."""
    rows = pa.table({"k": np.arange(300_000), "v": np.arange(300_000)})
    with StoreProcess(tmp_path / "state") as daemon, StateClient.connect(daemon.address) as client:
        client.create_table("t", key=pa.schema([("k", pa.int64())]), value=pa.schema([("v", pa.int64())]))
        with StateClient.connect(daemon.address, timeout_s=0.1) as impatient:
            begin_s = time.monotonic()
            with impatient.transaction() as tx:
                assert tx.lookup("t", rows.select(["k"])).num_rows == 0
                tx.write("t", rows)
                tx.commit()
            assert impatient.lookup("t", rows.select(["k"])).num_rows == rows.num_rows
            assert time.monotonic() - begin_s > 0.3, "or nothing was proved: take more rows"


# --- rows of queues, which the daemon sends from its files ---

ROW_BYTES = 100_000
BLOBS = pa.schema([("n", pa.int64()), ("v", pa.binary())])


def blobs(begin: int, end: int) -> pa.Table:
    chance = random.Random(begin)
    values = [chance.randbytes(ROW_BYTES) for _ in range(begin, end)]
    return pa.table({"n": pa.array(range(begin, end), pa.int64()), "v": pa.array(values, pa.binary())})


def open_segments(pid: int) -> int:
    links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return sum(os.path.exists(link) and os.readlink(link).endswith(".seg") for link in links)


def read_question(queue_id: int, **more: int) -> bytes:
    asked = {"op": "read", "queue": queue_id, "partition": 0, "begin": 0, "rows": 1000, "bytes": 1 << 26, "wait_ms": 0}
    return encode_frame({**asked, **more}, None)


@pytest.mark.parametrize("near", [False, True])
def test_reader_that_stops_taking_its_rows_holds_up_nobody_and_gets_them_all(daemon: StoreProcess, near: bool) -> None:
    with StateClient.connect(daemon.address, local_files=False) as client:
        queue = client.create_queue(f"large-{near}", schema=BLOBS, partitions=1)
        written = [blobs(at, at + 50) for at in range(0, 300, 50)]
        for rows in written:
            queue.append(0, rows)
        before = open_segments(daemon.pid)  # those that are being filled
        stuck = [Talker(daemon, near) for _ in range(8)]  # more than there are threads to send with
        for talker in stuck:
            talker.sock.sendall(read_question(queue.queue_id))
        wait_until(lambda: open_segments(daemon.pid) >= before + len(stuck), "they are being sent to")
        put(client, 7)
        found, position = queue.read(0, 0, max_bytes=1 << 26)
        assert (found, position) == (pa.concat_tables(written), 300)
        for talker in stuck[1:]:
            talker.close()
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
            data += stuck[0].sock.recv(16)
        whole = 4 + int.from_bytes(data[:4], "little")
        header, _ = decode_frame(data[:whole])
        records = data[whole:]
        while len(records) < header["bytes"]:
            records += stuck[0].sock.recv(1 << 20)
        parts = split_records(pa.py_buffer(records), header["file"], header["offset"])
        batches = [decode_batch(part, BLOBS, header["file"], header["offset"])[1] for part in parts]
        assert pa.Table.from_batches(batches) == pa.concat_tables(written)
        answer = stuck[0].ask(encode_frame({"op": "bounds", "queue": queue.queue_id}, None))
        assert answer == {"bounds": [[0, 300]]}
        stuck[0].close()
        wait_until(lambda: open_segments(daemon.pid) <= before, "the daemon closes the files of those who hung up")


def test_rows_trimmed_while_they_are_sent_arrive_and_are_gone_afterwards(daemon: StoreProcess) -> None:
    with StateClient.connect(daemon.address, local_files=False) as client:
        queue = client.create_queue("trimmed", schema=BLOBS, partitions=1)
        for at in range(0, 300, 50):
            queue.append(0, blobs(at, at + 50))
        [segment] = list(daemon.path.rglob(f"q{queue.queue_id}-p0-*.seg"))
        talker = Talker(daemon)
        talker.sock.sendall(read_question(queue.queue_id))
        head = talker.sock.recv(1 << 16)
        queue.trim(0, 300)
        wait_until(lambda: not segment.exists(), "the file is removed")
        received = len(head) - 4 - int.from_bytes(head[:4], "little")
        while received < 300 * ROW_BYTES:
            received += len(talker.sock.recv(1 << 20))
        talker.close()
        with pytest.raises(OutOfRange, match="trimmed"):
            queue.read(0, 0)
        assert queue.read(0, 300)[0].num_rows == 0


def test_very_many_small_records_are_read_in_parts(daemon: StoreProcess) -> None:
    rows = RECORDS_MAX * 3
    with StateClient.connect(daemon.address) as near, StateClient.connect(daemon.address, local_files=False) as far:
        queue = near.create_queue("tiny", schema=NUMBERS, partitions=1)
        with near.transaction() as tx:
            for n in range(rows):
                tx.append("tiny", 0, numbers(n))
            tx.commit()
        for client in (near, far):
            found, position = client.queue("tiny").read(0, 0)
            assert position == rows
            assert found["n"].to_pylist() == list(range(rows))
        assert queue.read(0, 0, one_answer=True)[1] == RECORDS_MAX


def test_long_poll_over_the_wire_gets_rows_when_they_come(daemon: StoreProcess) -> None:
    with StateClient.connect(daemon.address, local_files=False) as far, StateClient.connect(daemon.address) as other:
        queue = far.create_queue("awaited", schema=NUMBERS, partitions=1)
        assert queue.read(0, 0, wait_ms=1)[0].num_rows == 0
        found: list[pa.Table] = []
        waiting = threading.Thread(target=lambda: found.append(queue.read(0, 0, wait_ms=WAIT_MS)[0]))
        waiting.start()
        other.queue("awaited").append(0, numbers(1, 2, 3))
        waiting.join(WAIT_MS / 2000)
        assert [table["n"].to_pylist() for table in found] == [[1, 2, 3]]


def test_segment_that_was_cut_is_refused_over_the_wire(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state") as daemon:
        with StateClient.connect(daemon.address, local_files=False) as client:
            queue = client.create_queue("q", schema=BLOBS, partitions=1)
            queue.append(0, blobs(0, 20))
            [segment] = (tmp_path / "state").rglob("*.seg")
            os.truncate(segment, segment.stat().st_size // 2)
            with pytest.raises(CorruptData, match="cut"):
                queue.read(0, 0)
            put_elsewhere = client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.binary())]))
            assert put_elsewhere.name == "t"


def test_daemon_killed_while_it_sends_rows_is_unavailable(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state") as daemon:
        with StateClient.connect(daemon.address, local_files=False, timeout_s=2.0) as client:
            queue = client.create_queue("q", schema=BLOBS, partitions=1)
            for at in range(0, 600, 50):
                queue.append(0, blobs(at, at + 50))
            talker = Talker(daemon)
            talker.sock.sendall(read_question(queue.queue_id))
            talker.sock.recv(16)
            daemon.kill()
            received, piece = 0, b"-"
            while piece:
                try:
                    piece = talker.sock.recv(1 << 20)
                except ConnectionResetError:
                    break
                received += len(piece)
            assert received < 600 * ROW_BYTES
            talker.close()
            with pytest.raises(StoreUnavailable):
                queue.read(0, 0)
