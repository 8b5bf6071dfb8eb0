"""How long does a row take from topic to topic? A part of ``perf.kafka``.

Log lines as JSON, 115 bytes each, come at a paced 1,000 a second, ten at a time, to a topic with two partitions. The
job counts them in a table and publishes the number of each to another topic, through the outbox and the exporter:
exactly once from end to end. The clock of a row runs from the producer's report that the record is delivered (with
``acks=all``) to its receipt by a ``read_committed`` consumer. Producer and consumer are threads of this process, and
have the broker and the processor's processes on the same cores. Every row counts, and must arrive once.

``written_per_byte_paced`` is what the processor's processes write to storage for a byte that they read, at this pace:
small commits, each synced by itself, and the outbox. The broker's own writes are not counted.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from perf.common import report
from perf.parts import kafka_topics
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.local import LocalSystem
from shuffle.examples.workload import Workload

PROCESSOR = "topic-to-topic"
FROM, TO = "paced", "numbers"
PARTITIONS = 2
REDUCERS = 2
ROWS_PER_APPEND = 10
WARM_S = 3.0
START_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 30.0
POLL_S = 0.05
SCHEMA = {"number": "int64", "timestamp": "int64", "cluster": "string", "user": "string"}
LIMITS = {"p99_ms": "<= 150"}


class Ends:
    """The producer of one topic and the consumer of the other, and when each row was seen by them, by its number."""

    def __init__(self, address: str) -> None:
        self.delivered_ns: dict[int, int] = {}
        self.received_ns: dict[int, int] = {}
        self.received = 0
        """How many records came, those that came twice too."""
        self._error: KafkaError | None = None
        self._producer = Producer({"bootstrap.servers": address, "acks": "all"})
        consumer = {"bootstrap.servers": address, "group.id": "receipt", "isolation.level": "read_committed"}
        self._consumer = Consumer({**consumer, "enable.auto.commit": False, "auto.offset.reset": "error"})
        self._consumer.assign([TopicPartition(TO, partition, 0) for partition in range(PARTITIONS)])
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._report, self._receive)]

    def __enter__(self) -> Ends:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._consumer.close()

    def append(self, partition: int, numbers: Sequence[int], values: Sequence[bytes]) -> None:
        for number, value in zip(numbers, values, strict=True):
            self._producer.produce(FROM, value, partition=partition, on_delivery=partial(self._delivered, number))

    def _delivered(self, number: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._error = error
        self.delivered_ns[number] = time.monotonic_ns()

    def _report(self) -> None:
        while not self._stopping.is_set():
            self._producer.poll(POLL_S)

    def _receive(self) -> None:
        while not self._stopping.is_set():
            message = self._consumer.poll(POLL_S)
            if message is None:
                continue
            received_ns = time.monotonic_ns()
            if message.error() is not None:
                self._error = message.error()
                return
            self.received += 1
            self.received_ns[json.loads(message.value() or b"")["number"]] = received_ns

    def check(self) -> None:
        if self._error is not None:
            raise ShuffleError(f"the producer or the consumer failed: {KafkaException(self._error)}")


class Paced:
    """A running processor, and the paced input."""

    def __init__(self, system: LocalSystem, controller: subprocess.Popen[bytes], ends: Ends, rows_per_s: int) -> None:
        self._system, self._controller, self._ends = system, controller, ends
        self._period_s = ROWS_PER_APPEND / rows_per_s
        self.appends = 0

    @property
    def rows(self) -> int:
        return self.appends * ROWS_PER_APPEND

    def run(self, seconds: float) -> range:
        """Append for so long; returns the numbers of the rows. They are made before the clock starts."""
        count = int(seconds / self._period_s)
        numbers = range(self.rows, self.rows + count * ROWS_PER_APPEND)
        lines = Workload(with_user_share=1.0).rows(numbers.start, numbers.stop)
        values = kafka_topics.log_lines(lines, pa.array(numbers))
        begin_s = time.monotonic()
        for append in range(count):
            time.sleep(max(0.0, begin_s + append * self._period_s - time.monotonic()))
            some = slice(append * ROWS_PER_APPEND, (append + 1) * ROWS_PER_APPEND)
            self._ends.append(self.appends % PARTITIONS, numbers[some], values[some])
            self.appends += 1
        return numbers

    def wait_until_all_came(self, timeout_s: float) -> None:
        self._wait(lambda: len(self._ends.received_ns) >= self.rows, timeout_s)
        if self._ends.received != self.rows:
            raise ShuffleError(f"{self.rows} rows were appended and {self._ends.received} came")

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            self._ends.check()
            if self._controller.poll() is not None or time.monotonic() > deadline_s:
                missing = self.rows - len(self._ends.received_ns)
                raise ShuffleError(
                    f"{missing} of {self.rows} rows have not come:\n{self._system.log_tail(PROCESSOR, 30)}"
                )
            time.sleep(POLL_S)

    def written_bytes(self) -> int:
        return sum(map(processes.tree_written_bytes, (self._system.store_pid, self._controller.pid)))


def spec(address: str) -> dict[str, Any]:
    properties = {"bootstrap.servers": address}
    return {
        "processor": PROCESSOR,
        "input": {"kafka": {"topics": FROM, "format": "json", "schema": SCHEMA, "properties": properties}},
        "mapper": {"class": "perf.common.jobs:NumberedLines"},
        "reducer": {"class": "perf.common.jobs:CountAndPublish", "count": REDUCERS},
        "output": {"kafka": {"topic": TO, "properties": properties}},
        "metrics": False,
    }


def measure(address: str, folder: Path, rows_per_s: int, seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    """The bars of this part, and the details."""
    for topic in (FROM, TO):
        kafka_topics.create(address, topic, PARTITIONS)
    with ExitStack() as stack:
        system = stack.enter_context(LocalSystem(folder))
        ends = stack.enter_context(Ends(address))
        controller = system.run(system.write_spec(spec(address)), "--no-check")
        paced = Paced(system, controller, ends, rows_per_s)
        paced.run(WARM_S)
        paced.wait_until_all_came(START_TIMEOUT_S)
        paced.run(WARM_S)
        before_bytes = paced.written_bytes()
        numbers = paced.run(seconds)
        written_bytes = paced.written_bytes() - before_bytes
        paced.wait_until_all_came(DRAIN_TIMEOUT_S)
    took_ms = np.array([ends.received_ns[number] - ends.delivered_ns[number] for number in numbers]) / 1e6
    found = report.percentiles(took_ms)
    bars = {
        "p99_ms": found["p99"],
        "written_per_byte_paced": written_bytes / (len(numbers) * kafka_topics.RECORD_BYTES),
    }
    details = {"p50_ms": found["p50"], "p90_ms": found["p90"], "max_ms": float(took_ms.max()), "rows": len(numbers)}
    return bars, {**details, "rows_per_s": rows_per_s}
