"""The store's engine on a real database and real files that fail on demand, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from shuffle.errors import DiskFull, ShuffleError, StoreError
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.codec.segment import decode_batch
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.engine.engine import Engine
from shuffle.statestore.local.rocks import Rocks
from shuffle.statestore.local.segment_files import SegmentDisk
from shuffle.statestore.request import Append, CommitRequest, Committed, CreateQueue, CreateTable, TableWrite

NUMBERS = pa.schema([("n", pa.int64())])


class FaultyDisk(SegmentDisk):
    """A real folder whose writes fail on demand."""

    failing: str | None = None
    free: int | None = None

    def create(self, name: str, header: bytes) -> None:
        super().create(name, header)
        self._fail("create")

    def append(self, name: str, offset: int, parts: Sequence[bytes | memoryview]) -> int:
        written = super().append(name, offset, parts)
        if offset:
            self._fail("append")
        return written

    def sync(self, name: str) -> None:
        super().sync(name)
        self._fail("sync")

    def free_bytes(self) -> int:
        return super().free_bytes() if self.free is None else self.free

    def _fail(self, step: str) -> None:
        if self.failing == step:
            raise DiskFull(f"no room at {step}")


class FaultyRocks(Rocks):
    failing: str | None = None

    def write(self, puts: Any, cleared: Any = ()) -> int:
        if self.failing == "write":
            raise StoreError("failed before the write")
        return super().write(puts, cleared)

    def sync(self) -> None:
        super().sync()
        if self.failing == "sync":
            raise StoreError("failed after the sync")


class Store:
    """An engine on a folder, driven by hand: one group at a time."""

    def __init__(self, folder: Path, now_ms: int = 0) -> None:
        self.folder = folder
        self.disk = FaultyDisk(folder / "segments")
        self.rocks = FaultyRocks(folder / "rocks")
        self.engine = Engine(self.rocks, self.disk, now_ms)
        self.oldest_version = 0
        self.closed = False

    def group(self, *requests: CommitRequest) -> list[Committed | ShuffleError]:
        group = self.engine.prepare(requests, self.oldest_version)
        self.engine.persist(group)
        self.engine.remove_files(self.engine.apply(group))
        return group.results

    def commit(self, request: CommitRequest) -> Committed:
        [result] = self.group(request)
        if isinstance(result, ShuffleError):
            raise result
        return result

    def create(self) -> tuple[Table, int]:
        value = pa.schema([("v", pa.int64())])
        self.commit(CommitRequest(catalogue=CreateTable(TableSchema("t", NUMBERS, value, {"positive": "v > 0"}))))
        self.commit(CommitRequest(catalogue=CreateQueue(QueueSchema("q", NUMBERS, 2))))
        return self.table(), self.engine.catalogue.queue_named("q").schema.queue_id  # type: ignore[union-attr]

    def table(self) -> Table:
        """Without its constraints, so that breaking them reaches the engine."""
        schema = self.engine.catalogue.table_named("t").schema  # type: ignore[union-attr]
        return Table(replace(schema, constraints={}))

    def rows(self) -> dict[int, int]:
        table = self.table()
        pairs = list(self.rocks.view().scan(*table.range(None, None, None)))
        keys, values = pa.array([k for k, _ in pairs], pa.binary()), pa.array([v for _, v in pairs], pa.binary())
        rows = table.decode_rows(keys, values)
        return dict(zip(rows["n"].to_pylist(), rows["v"].to_pylist(), strict=True))

    def queued(self, queue_id: int, partition: int, begin: int = 0) -> list[int]:
        numbers: list[int] = []
        while (span := self.engine.locate(queue_id, partition, begin, 1000, 1 << 20)) is not None:
            mapped = self.disk.map(span.file, span.offset + span.size_bytes)
            start = 0
            for end in span.ends:
                record = mapped.slice(span.offset + start, end - start)
                head, batch = decode_batch(record, NUMBERS, span.file, span.offset + start)
                numbers += batch.slice(max(begin - span.segment_begin - head.first_row, 0))["n"].to_pylist()
                begin = span.segment_begin + head.first_row + head.rows
                start = end
        return numbers

    def stage(self, queue_id: int, staged_id: str, *numbers: int, ttl_ms: int = 1000, now_ms: int = 0) -> None:
        payloads = [(len(numbers), payload(*numbers))] if numbers else []
        header = self.engine.catalogue.queue(queue_id).header
        self.engine.staged.add(staged_id, queue_id, header, payloads, ttl_ms, now_ms)

    def files(self) -> list[str]:
        return list(self.disk.names())

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.disk.close()
            self.rocks.close()

    def reopened(self, now_ms: int = 0) -> Store:
        self.close()
        return Store(self.folder, now_ms)


def payload(*numbers: int) -> pa.Buffer:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())}).serialize()


def append(queue_id: int, partition: int, *numbers: int) -> CommitRequest:
    return CommitRequest(appends=[Append(queue_id, partition, [payload(*numbers)])])


def write(table: Table, values: dict[int, int]) -> TableWrite:
    return TableWrite(table.table_id, *table.encode_rows(pa.table({"n": list(values), "v": list(values.values())})))


def key(table: Table, *numbers: int) -> pa.BinaryArray:
    return table.encode_keys(pa.table({"n": pa.array(numbers, pa.int64())}))[1]
