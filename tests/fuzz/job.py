"""A small real job on the attacked store: two mappers, two reducers, a producer; and its expected result."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa

from shuffle.errors import ShuffleError
from shuffle.statestore import StateClient
from tests.daemons import environment

SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
PARTITIONS = 2
REDUCERS = 2
BATCH_ROWS = 200
PERIOD_S = 0.25
"""Between two appends: the job is to run all the time, not to take the processor from the attack."""

QUEUE, TABLE, PROCESSOR = "job_input", "job_counts", "job"

CODE = """
import numpy as np
from shuffle import AggregateReducer, Count, HashMapper, Mapper, PartitionedRowset, Reducer

class ByUser(HashMapper):
    key = ["user"]

class CountUsers(AggregateReducer):
    table = "job_counts"
    key = ["user"]
    aggregates = {"count": Count()}

class Spread(Mapper):
    def map(self, rows):
        return PartitionedRowset(rows, rows["n"].to_numpy() % self.spec.reducer_count)

class Nothing(Reducer):
    def reduce(self, rows):
        return None
"""


class Worker:
    """A mapper or a reducer as a process."""

    def __init__(self, folder: Path, module: str, spec: Path, index: int) -> None:
        self.name = f"{spec.stem} {module} {index}"
        self._log = folder / f"{spec.stem}-{module}-{index}.log"
        variables = environment()
        variables["PYTHONPATH"] += f"{os.pathsep}{folder}"
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(spec), "--index", str(index)],
                stdout=output,
                stderr=output,
                cwd=folder,
                env=variables,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def died(self) -> str | None:
        """How it ended, if it did."""
        code = self.process.poll()
        return None if code is None else f"{self.name} ended with {code}: {self.tail()}"

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-3:])[-500:]

    def stop(self) -> None:
        """In order, so that it is listed no longer; by force if it takes too long."""
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


class Job:
    """The job and its producer. Rows are appended under sequence numbers, so that a broken answer doubles nothing."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._address = address
        self._stop = threading.Event()
        self.workers: list[Worker] = []
        self.expected: Counter[str] = Counter()
        self._sequence = 0
        self.failures: list[str] = []
        self._spec = folder / "job.yaml"
        self._thread: threading.Thread | None = None

    @staticmethod
    def prepare(client: StateClient) -> None:
        client.create_queue(QUEUE, schema=SCHEMA, partitions=PARTITIONS, if_not_exists=True)

    def start(self) -> None:
        self._spec.write_text(
            f"processor: {PROCESSOR}\nstate: {self._address}\ninput: {{queue: {QUEUE}}}\nlease_ttl_ms: 3000\n"
            'mapper: {class: "fuzz_job:ByUser", trim_period: 200ms}\n'
            f'reducer: {{class: "fuzz_job:CountUsers", count: {REDUCERS}}}\n'
        )
        for module, count in (("mapper", PARTITIONS), ("reducer", REDUCERS)):
            self.workers += [Worker(self._folder, module, self._spec, index) for index in range(count)]
        self._thread = threading.Thread(target=self._produce, name="producer", daemon=True)
        self._thread.start()

    def replace_dead(self) -> None:
        """A worker that died is started again, as a supervisor would."""
        for place, worker in enumerate(self.workers):
            if worker.died() is not None:
                module, index = worker.name.split()[1:]
                self.workers[place] = Worker(self._folder, module, self._spec, int(index))

    def _produce(self) -> None:
        client: StateClient | None = None
        while not self._stop.wait(PERIOD_S):
            try:
                client = client or StateClient.connect(self._address, timeout_s=10)
                self._append(client)
            except ShuffleError:
                client = None  # The store is being restarted; the same rows are sent again.
        if client is not None:
            client.close()

    def _append(self, client: StateClient) -> None:
        begin = self._sequence * BATCH_ROWS
        users = [f"user-{n % 97}" for n in range(begin, begin + BATCH_ROWS)]
        rows = pa.table({"user": users, "n": list(range(begin, begin + BATCH_ROWS))}, schema=SCHEMA)
        queue = client.queue(QUEUE)
        for partition in range(PARTITIONS):
            queue.append(partition, rows, producer="fuzz", sequence=self._sequence)
        self._sequence += 1
        for user in users:
            self.expected[user] += PARTITIONS

    def rows(self) -> int:
        return self.expected.total()

    def counted(self, client: StateClient) -> Counter[str]:
        if TABLE not in {table.name for table in client.tables()}:
            return Counter()
        found = client.scan(TABLE).read_all().to_pylist()
        return Counter({row["user"]: row["count"] for row in found})

    def finish(self, client: StateClient, wait_s: float) -> str | None:
        """Stop producing, wait until everything is counted; what is wrong with the result, if anything is."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)
        deadline_s = time.monotonic() + wait_s
        counted = self.counted(client)
        while counted != self.expected and time.monotonic() < deadline_s:
            if counted.total() > self.expected.total():
                break
            time.sleep(0.1)
            counted = self.counted(client)
        if counted == self.expected:
            return None
        return f"the job counted {counted.total()} rows, and {self.expected.total()} were appended"

    def close(self) -> None:
        self._stop.set()
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
