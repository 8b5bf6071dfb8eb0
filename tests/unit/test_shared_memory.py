"""Rows between two processes of one machine: what is put is taken, whole or not at all; the rest goes over the wire."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import BadInput, StaleMapper
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.mapping import cut
from shuffle.mapper.serve import HostedMapper, MapperServer
from shuffle.mapper.shared_core import SHARED_BYTES_MAX, SHARED_OF_WINDOW, WRITER_BYTES_MIN, SharedCore
from shuffle.messages import GetRows, SharedRows, Tail
from shuffle.reducer.connections import ClientPool
from shuffle.reducer.exchange import RowStream, validate_offsets
from shuffle.reducer.fetch import Connections
from shuffle.support import flight, shared_memory
from shuffle.support.shared_memory import BYTES_MIN, MemoryHandle, MemoryReader, MemoryWriter, NotShared
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(shared_memory.machine() is None, reason="memory cannot be shared like this here")

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])
ROWS = 100_000


def batch(begin: int, count: int) -> pa.RecordBatch:
    numbers = range(begin, begin + count)
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array([f"row {n}" for n in numbers])], schema=SCHEMA)


@pytest.fixture
def memory() -> Iterator[MemoryWriter]:
    made = MemoryWriter(1 << 20)
    yield made
    made.close()


def put(memory: MemoryWriter, *batches: pa.RecordBatch) -> MemoryHandle:
    note = memory.put(batches)
    assert note is not None
    return note


def test_batches_are_taken_as_they_were_put_and_outlive_the_next_ones(memory: MemoryWriter) -> None:
    reader = MemoryReader()
    whole = batch(0, 1000)
    first = reader.take(put(memory, whole, whole.slice(10, 5)))
    second = reader.take(put(memory, batch(5000, 2000)))
    assert [rows.to_pylist() for rows in first] == [whole.to_pylist(), whole.slice(10, 5).to_pylist()]
    assert second[0].equals(batch(5000, 2000))
    reader.close()
    reader.close()
    assert first[0].equals(whole)


def test_what_does_not_fit_is_not_put(memory: MemoryWriter) -> None:
    assert memory.put([batch(0, 200_000)]) is None
    many = [batch(n, 1) for n in range(9_000)]
    assert sum(one.nbytes for one in many) < memory.bytes_max
    assert memory.put(many) is None, "the rows fit, and what Arrow writes around them does not"
    assert MemoryReader().take(put(memory, batch(0, 3)))[0].num_rows == 3


def test_another_process_takes_them(memory: MemoryWriter) -> None:
    note = put(memory, batch(7, 3))
    code = f"from shuffle.support.shared_memory import *; print(MemoryReader().take({note!r})[0].column(0).to_pylist())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[7, 8, 9]"


@pytest.mark.parametrize(
    "wrong",
    [{"inode": 1}, {"fd": 9999}, {"pid": 2**22 + 1}, {"size_bytes": 1 << 40}, {"size_bytes": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_note_about_something_else_is_told_apart(memory: MemoryWriter, wrong: dict[str, int]) -> None:
    note = put(memory, batch(0, 3))
    with pytest.raises(NotShared):
        MemoryReader().take(replace(note, **wrong))


def test_nothing_is_left_open(memory: MemoryWriter) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        other = MemoryWriter(1 << 20)
        MemoryReader().take(put(other, batch(0, 3)))
        other.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_note_survives_its_codec_and_nonsense_does_not() -> None:
    first, last = Tail(ShuffleIndex(5), ShuffleIndex(5), more=True), Tail(ShuffleIndex(6), ShuffleIndex(9), -7, 3)
    rows = SharedRows(MemoryHandle(1, 2, 3, 4), (first, last))
    assert SharedRows.decode(rows.encode()) == rows
    whole = rows.encode()
    for nonsense in (b"@", b"@[1,2]", whole[:-1], whole + b"#", b"#" + whole[1:], whole.replace(b"#", b"%", 1)):
        with pytest.raises(BadInput):
            SharedRows.decode(nonsense)


# ---- by way of GetRows ----------------------------------------------------------------------------------------------


class Served:
    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        core = MapperCore(Guid("g"), MapperIndex(0), 1, memory_bytes)
        shared = SharedCore(core, 1)
        rows = pa.Table.from_batches([batch(0, ROWS)])
        shared.ingest(None, ROWS, Token(b"t"), MappedBatch(SCHEMA, ROWS, cut(rows, np.zeros(ROWS, np.int64), 1)))
        self.core = core
        self.server = MapperServer([HostedMapper.of(shared)])
        self.client = flight.connect(self.server.address)

    def stream(self, share_memory: bool = True) -> RowStream:
        return RowStream(self.client, "mapper 0", share_memory)

    def close(self) -> None:
        self.client.close()
        assert self.server.close()


@pytest.fixture
def mapper() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[MemoryHandle]:
    """Every note that an inbox was given."""
    notes: list[MemoryHandle] = []
    original = MemoryReader.take

    def take(self: MemoryReader, note: MemoryHandle) -> list[pa.RecordBatch]:
        notes.append(note)
        return original(self, note)

    monkeypatch.setattr(MemoryReader, "take", take)
    return notes


def numbers(stream: RowStream, rows_max: int = 40_000) -> list[int]:
    """All rows of the mapper, by as many answers as it takes; each must end where it says."""
    found: list[int] = []
    while len(found) < ROWS:
        cursor = ShuffleIndex(len(found) - 1)
        request = GetRows(Guid("g"), ReducerIndex(0), ShuffleIndex(-1), cursor, rows_max, 16 << 20)
        answer = stream.get_rows(request, 10)
        assert answer.batches
        for rows, last in answer.batches:
            found.extend(rows.column(0).to_pylist())
            assert last == found[-1]
    return found


def test_large_answers_come_through_memory(mapper: Served, taken: list[MemoryHandle]) -> None:
    stream = mapper.stream()
    assert numbers(stream) == list(range(ROWS))
    assert len({(note.pid, note.fd, note.inode) for note in taken}) == 1
    assert len(taken) == 3
    stream.close()


def test_mappers_of_one_process_have_memory_of_their_own_each(taken: list[MemoryHandle]) -> None:
    cores = [MapperCore(Guid(f"g{index}"), MapperIndex(index), 1, 1 << 30) for index in range(2)]
    shared = [SharedCore(core, 1) for core in cores]
    for one, begin in zip(shared, (0, ROWS), strict=True):
        rows = pa.Table.from_batches([batch(begin, ROWS)])
        one.ingest(None, ROWS, Token(b"t"), MappedBatch(SCHEMA, ROWS, cut(rows, np.zeros(ROWS, np.int64), 1)))
    server = MapperServer([HostedMapper.of(one) for one in shared])
    clients = ClientPool()
    connections = [Connections(clients=clients) for _ in cores]
    found = []
    for core, own in zip(cores, connections, strict=True):
        request = GetRows(core.guid, ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(-1), 40_000, 16 << 20)
        answer = own.stream_to(server.address, "mapper").get_rows(request, 10)
        found.append(answer.batches[0][0].column(0)[0].as_py())
    assert found == [0, ROWS], "each is asked for its own rows"
    assert connections[0].to(server.address) is connections[1].to(server.address), "over one connection"
    assert len({(note.pid, note.fd, note.inode) for note in taken}) == 2
    assert [core.reserved_bytes > 0 for core in cores] == [True, True]
    stale = GetRows(Guid("gone"), ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(-1), 1, 1)
    with pytest.raises(StaleMapper, match="g0 of mapper 0, g1 of mapper 1"):
        connections[0].stream_to(server.address, "mapper").get_rows(stale, 10)
    for own in connections:
        own.close()
    assert server.close()


def test_small_answers_and_those_of_other_machines_come_over_the_wire(
    mapper: Served, taken: list[MemoryHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = mapper.stream()
    assert numbers(stream, rows_max=BYTES_MIN // 40) == list(range(ROWS))
    unwilling = mapper.stream(share_memory=False)
    assert numbers(unwilling) == list(range(ROWS))
    monkeypatch.setattr("shuffle.reducer.exchange.machine", lambda: "another")
    stranger = mapper.stream()
    assert numbers(stranger) == list(range(ROWS))
    assert taken == []
    for one in (stream, unwilling, stranger):
        one.close()


def test_memory_that_cannot_be_opened_costs_one_question(mapper: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refused(note: MemoryHandle) -> None:
        tried.append(note)
        raise PermissionError("not yours")

    monkeypatch.setattr(shared_memory, "_open", refused)
    stream = mapper.stream()
    assert numbers(stream) == list(range(ROWS))
    assert len(tried) == 1
    stream.close()


def test_memory_that_cannot_be_had_is_done_without(
    mapper: Served, taken: list[MemoryHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refused(name: str, flags: int) -> int:
        tried.append(name)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(shared_memory.os, "memfd_create", refused)
    stream = mapper.stream()
    assert numbers(stream) == list(range(ROWS))
    assert taken == []
    assert len(tried) == 1, "for each exchange"
    stream.close()


def test_more_exchanges_than_reducers_get_no_memory(mapper: Served, taken: list[MemoryHandle]) -> None:
    first, second = mapper.stream(), mapper.stream()
    assert numbers(first) == list(range(ROWS))
    assert len(taken) == 3
    assert numbers(second) == list(range(ROWS))
    assert len(taken) == 3, "the first one holds it"
    assert mapper.core.reserved_bytes == SHARED_BYTES_MAX, "and the window has so much less"
    first.close()
    second.close()
    wait_until(lambda: mapper.core.reserved_bytes == 0)


def test_small_window_has_little_memory_to_share(taken: list[MemoryHandle]) -> None:
    served = Served(memory_bytes=SHARED_OF_WINDOW * WRITER_BYTES_MIN)
    stream = served.stream()
    assert numbers(stream, rows_max=ROWS) == list(range(ROWS))
    assert len(taken) >= 2, "answers are cut to what fits"
    stream.close()
    served.close()
    taken.clear()
    smaller = Served(memory_bytes=SHARED_OF_WINDOW * WRITER_BYTES_MIN - SHARED_OF_WINDOW)
    stream = smaller.stream()
    assert numbers(stream, rows_max=ROWS) == list(range(ROWS))
    assert taken == []
    stream.close()
    smaller.close()


def test_memory_that_could_be_cut_while_it_is_read_is_not_taken() -> None:
    """The kernel ends a process that reads memory which was cut off after it was mapped."""
    fd = os.memfd_create("not-sealed")
    try:
        os.ftruncate(fd, 4096)
        note = MemoryHandle(os.getpid(), fd, os.fstat(fd).st_ino, 100)
        with pytest.raises(NotShared, match="could be cut"):
            MemoryReader().take(note)
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_answer_whose_offsets_fall_is_refused(kind: pa.DataType) -> None:
    offsets = np.array([0, 4, 8, 12], np.int32)
    column = pa.Array.from_buffers(kind, 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"abcdefghijkl")])
    batch = pa.record_batch([column, pa.array([1, 2, 3])], names=["text", "number"])
    validate_offsets(batch)
    validate_offsets(batch.slice(1))
    offsets[1] = 1_000_000
    with pytest.raises(pa.ArrowInvalid):
        validate_offsets(batch)


def test_answer_whose_dictionary_has_no_such_entry_is_refused() -> None:
    indices = np.array([0, 1], np.int32)
    column = pa.DictionaryArray.from_arrays(pa.array(indices), ["a", "b"], safe=False)
    lying = pa.DictionaryArray.from_arrays(pa.array(np.array([0, 77], np.int32)), ["a", "b"], safe=False)
    validate_offsets(pa.record_batch([column], names=["word"]))
    with pytest.raises(pa.ArrowInvalid):
        validate_offsets(pa.record_batch([lying], names=["word"]))
