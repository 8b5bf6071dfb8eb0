"""The clients of the state store's benchmark: processes with a few threads each, every thread a client of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from shuffle.statestore import StateClient

START_TIMEOUT_S = 60.0
RESPONSE_TIMEOUT_S = 60.0
ROWS_PREPARED = 64

SMALL_TABLE = "small"
SMALL_KEY = pa.schema([("name", pa.string())])
SMALL_VALUE = pa.schema([("value", pa.int64())])


def small_row(name: str, value: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array([name]), pa.array([value], pa.int64())], schema=_SMALL_ROW)


_SMALL_ROW = pa.schema([*SMALL_KEY, *SMALL_VALUE])


def _commit_until(client: StateClient, rows: list[pa.RecordBatch], deadline: float, took_s: list[float]) -> None:
    """Transactions of one row each, one after the other; each is durable before the next begins."""
    number = 0
    begin = time.monotonic()
    while begin < deadline:
        with client.transaction() as tx:
            tx.write(SMALL_TABLE, rows[number % len(rows)])
            tx.commit()
        end = time.monotonic()
        took_s.append(end - begin)
        begin, number = end, number + 1


def _run_clients(address: str, process: int, threads: int, pipe: Connection) -> None:
    """Send ``ready``; then, for each number of seconds that is received, run for that time and send the latencies."""
    with ExitStack() as stack:
        clients = [stack.enter_context(StateClient.connect(address)) for _ in range(threads)]
        names = [f"client-{process}-{thread}" for thread in range(threads)]
        rows = [[small_row(f"{name}-{number}", number) for number in range(ROWS_PREPARED)] for name in names]
        pipe.send("ready")
        while (seconds := pipe.recv()) is not None:
            took_s: list[list[float]] = [[] for _ in clients]
            deadline = time.monotonic() + seconds
            running = [
                threading.Thread(target=_commit_until, args=(client, rows[index], deadline, took_s[index]))
                for index, client in enumerate(clients)
            ]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            pipe.send([took for each in took_s for took in each])


class Clients:
    """Processes that commit on command."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, seconds: float) -> list[float]:
        """Let all clients commit for ``seconds``; returns the time of each transaction in seconds."""
        for pipe in self._pipes:
            pipe.send(seconds)
        return [took for pipe in self._pipes for took in _receive(pipe, seconds + RESPONSE_TIMEOUT_S)]


@contextmanager
def clients(address: str, processes: int, threads: int) -> Iterator[Clients]:
    """``processes`` times ``threads`` clients, connected and ready."""
    spawn = get_context("spawn")  # Flight does not survive a fork
    started = []
    try:
        for index in range(processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_run_clients, args=(address, index, threads, theirs), daemon=True)
            process.start()
            started.append((process, ours))
        for _, pipe in started:
            _receive(pipe, START_TIMEOUT_S)
        yield Clients([pipe for _, pipe in started])
    finally:
        for process, pipe in started:
            if process.is_alive():
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a client process of the benchmark did not answer in {timeout_s:.0f} s")
    return pipe.recv()
