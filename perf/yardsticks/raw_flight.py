"""The yardstick of the shuffle: Arrow Flight alone, streaming the rows of the buckets between processes.

One server process for each mapper holds the mapper's bucket batches in memory; one client process for each reducer
reads its bucket of all servers at once. The result is the throughput of the network path on this machine.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from shuffle.examples.workload import SCHEMA, Workload
from shuffle.partition import hash_partition, split_by_partition
from shuffle.support import flight

START_TIMEOUT_S = 60.0
STREAM_TIMEOUT_S = 120.0
RESIDENT_ROWS_MAX = 1_000_000
"""The most rows that a server holds. It streams them repeatedly, so memory does not limit the length of the run."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The rows that one server holds: the first rows of a partition, in one batch for each bucket and read."""

    workload: Workload
    partition: int
    rows: int
    batch_rows: int
    buckets: int
    key: tuple[str, ...] = ("user", "cluster")


def bucket_batches(stream: Stream) -> list[list[pa.RecordBatch]]:
    """The rows as a mapper hands them out: each read split into one batch for each bucket."""
    found: list[list[pa.RecordBatch]] = [[] for _ in range(stream.buckets)]
    for rows in stream.workload.batches(stream.rows, stream.batch_rows, stream.partition):
        partitioned = hash_partition(rows, by=list(stream.key), reducers=stream.buckets)
        parts = split_by_partition(partitioned.rows, partitioned.partition_indexes, stream.buckets)
        for batches, (batch, _) in zip(found, parts, strict=True):
            if batch is not None:
                batches.append(batch)
    return found


class RawServer(flight.FlightServerBase):
    """Streams a bucket's batches, as often as the ticket says. Arrow streams a table without calling Python."""

    def __init__(self, stream: Stream) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._tables = [pa.Table.from_batches(batches, SCHEMA) for batches in bucket_batches(stream)]

    def do_get(self, context: Any, ticket: Any) -> Any:
        request = json.loads(ticket.ticket)
        table = self._tables[request["bucket"]]
        return flight.RecordBatchStream(pa.concat_tables([table] * request["times"]))


def _serve(stream: Stream, pipe: Connection) -> None:
    server = RawServer(stream)
    pipe.send(f"grpc://127.0.0.1:{server.port}")
    pipe.recv()
    flight.shutdown(server)


def get(client: Any, bucket: int, times: int = 1) -> int:
    """Read one DoGet to its end; returns the bytes received."""
    ticket = flight.Ticket(json.dumps({"bucket": bucket, "times": times}).encode())
    bytes_read = 0
    with flight.typed_errors("the raw Flight server"):
        for chunk in client.do_get(ticket, flight.call_options(STREAM_TIMEOUT_S)):
            bytes_read += chunk.data.nbytes
    return bytes_read


def _drain(addresses: Sequence[str], bucket: int, times: int, pipe: Connection) -> None:
    clients = [flight.connect(address) for address in addresses]
    for client in clients:
        get(client, bucket)  # connections and memory pools are warm when the clock starts
    pipe.send("ready")
    pipe.recv()
    totals = [0] * len(clients)

    def read(index: int) -> None:
        totals[index] = get(clients[index], bucket, times)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(sum(totals))


def _receive(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a process of the raw Flight measurement did not answer in {timeout_s:.0f} s")
    return pipe.recv()


@contextmanager
def servers(streams: Sequence[Stream]) -> Iterator[list[str]]:
    """Start one server process for each stream; yields their addresses."""
    spawn = get_context("spawn")  # Flight does not survive a fork
    started = []
    try:
        for stream in streams:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(stream, theirs), daemon=True)
            process.start()
            started.append((process, ours))
        yield [_receive(pipe, START_TIMEOUT_S) for _, pipe in started]
    finally:
        for process, pipe in started:
            pipe.send("stop")
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def bytes_per_s(workload: Workload, mappers: int, reducers: int, rows: int, batch_rows: int) -> float:
    """Stream ``rows`` rows from ``mappers`` server processes to ``reducers`` client processes; returns bytes per
    second."""
    spawn = get_context("spawn")
    resident = min(rows // mappers, RESIDENT_ROWS_MAX)
    times = max(1, round(rows / mappers / resident))
    streams = [Stream(workload, partition, resident, batch_rows, reducers) for partition in range(mappers)]
    with servers(streams) as addresses:
        clients = []
        for bucket in range(reducers):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_drain, args=(addresses, bucket, times, theirs), daemon=True)
            process.start()
            clients.append((process, ours))
        try:
            for _, pipe in clients:
                _receive(pipe, START_TIMEOUT_S)
            begin = time.monotonic()
            for _, pipe in clients:
                pipe.send("go")
            total = sum(_receive(pipe, STREAM_TIMEOUT_S) for _, pipe in clients)
            return float(total / (time.monotonic() - begin))
        finally:
            for process, _ in clients:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()
