"""From a topic to a table, beside Spark's own source for Kafka: the count of ``perf.compare`` over JSON. A part of
``perf.kafka``.

A topic with two partitions has the activity logs as JSON, 115 bytes each. Counted are the lines of every user and
cluster, and their latest time is kept, exactly once: here by mappers that read the topic and reducers that keep a table
(what ``shuffle run`` starts), there by ``readStream.format("kafka")``, ``from_json``, ``groupBy`` and Spark's RocksDB
state. Both read what is committed, parse the same three columns, and have the broker on the same cores. They take
turns; a result is compared with an independent count before its time counts. ``count_cpu_vs_spark`` is the processor
time of a row over Spark's, the broker's not counted: it says more where others use the machine at the same time.

Clocks are those of ``perf.compare``: here from the first commit that is seen to the last one, there from the end of the
first micro-batch to the end of the last. ``written_per_byte`` is what this project's processes write to storage for a
byte that they read, until there is nothing more to write. The broker's own writes are not counted.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common import report
from perf.common.progress import Buckets, forget, watched
from perf.common.questions import ACTIVITY
from perf.common.workload_files import Input, in_turn
from perf.parts import kafka_topics
from perf.yardsticks import compare_others
from perf.yardsticks.compare_others import SparkProcess
from perf.yardsticks.compare_systems import MAPPERS, NAME, REDUCERS, Base, Run
from perf.yardsticks.compare_usage import Meter
from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.examples.local import LocalSystem
from shuffle.examples.workload import Workload
from tools.jars import JarList, NoJars
from tools.kafka import Broker

TOPIC = "logs"
SCHEMA = {"timestamp": "int64", "cluster": "string", "user": "string"}
SPARK_COLUMNS = "timestamp LONG, cluster STRING, user STRING"
SPARK = "Spark"
SPARK_JARS = JarList(
    "Spark's source for Kafka", "spark-kafka", Path(compare_others.__file__).with_name("spark_kafka_jars.txt")
)
SPARK_BATCH_ROWS = 500_000
"""The rows of a micro-batch of Spark, which takes it a second or two."""
FILL_ROWS = 50_000
LIMITS = {"count_vs_spark": ">= 4"}


@dataclass(frozen=True)
class Filled:
    """The topic, and what is expected of its records."""

    broker: Broker
    input: Input
    buckets: Buckets


def filled(broker: Broker, folder: Path, records: int) -> Filled:
    workload = Workload(with_user_share=1.0)
    buckets = Buckets(MAPPERS, REDUCERS, ACTIVITY.key)
    parts = []
    kafka_topics.create(broker.address, TOPIC, MAPPERS)
    for partition, rows in in_turn(workload, records, MAPPERS, FILL_ROWS):
        buckets.add(partition, rows)
        parts.append(ACTIVITY.oracle_part(rows))
        kafka_topics.fill(broker.address, TOPIC, [(partition, kafka_topics.log_lines(rows))])
    size_bytes = records * kafka_topics.RECORD_BYTES
    expected = ACTIVITY.oracle_sum(parts)
    given = Input(ACTIVITY, workload, records, MAPPERS, FILL_ROWS, size_bytes, expected, folder)
    return Filled(broker, given, buckets.close())


class Ours(Base):
    """This project: one store for all runs, and for each run new mappers and reducers."""

    def __init__(self, topic: Filled, folder: Path, stack: ExitStack) -> None:
        super().__init__(topic.input)
        self._topic = topic
        self._system = stack.enter_context(LocalSystem(folder))
        self._state = stack.enter_context(self._system.connect())
        self._runs = 0
        self.written_bytes: list[int] = []
        """Of each run, without what the broker has written meanwhile."""

    def count(self) -> Run:
        self._runs += 1
        name, question, broker = f"run-{self._runs}", self._input.question, self._topic.broker
        roots = [self._system.store_pid]
        before_bytes = processes.tree_written_bytes(broker.pid)
        with Meter(lambda: roots) as meter:
            seen = watched(
                self._system, self._state, self._spec(name), self._topic.buckets, lambda run: roots.append(run.pid)
            )
            meter.wait_until_nothing_is_written()
        self.written_bytes.append(meter.written_bytes - processes.tree_written_bytes(broker.pid) + before_bytes)
        question.check(self._input.expected, self._state.scan(question.table).read_all(), NAME)
        forget(self._state, name, None, question.table)
        return self._run(meter, seen.begin_s, seen.end_s, seen.rows, seen.started_s, NAME)

    def _spec(self, name: str) -> dict[str, Any]:
        properties = {"bootstrap.servers": self._topic.broker.address}
        return {
            "processor": name,
            "input": {"kafka": {"topics": TOPIC, "format": "json", "schema": SCHEMA, "properties": properties}},
            "mapper": {"class": self._input.question.mapper, "memory": "128MiB"},
            "reducer": {"class": self._input.question.reducer, "count": REDUCERS},
            "metrics": False,
        }


class Spark(compare_others.Spark):
    """Spark alone, which reads the topic."""

    def __init__(self, topic: Filled, folder: Path, stack: ExitStack, jars: Path) -> None:
        super().__init__(topic.input, folder, SparkProcess("spark_kafka", folder, stack, str(jars)), None)
        self._address = topic.broker.address

    def _source(self) -> dict[str, Any]:
        return {
            "address": self._address,
            "topic": TOPIC,
            "columns": SPARK_COLUMNS,
            "rows_per_batch": SPARK_BATCH_ROWS,
        }


def measure(broker: Broker, folder: Path, records: int, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """The bars of this part, and the details."""
    details: dict[str, Any] = {"records": records}
    with ExitStack() as stack:
        topic = filled(broker, folder, records)
        ours = Ours(topic, folder, stack)
        counts = {NAME: ours.count}
        try:
            counts[SPARK] = Spark(topic, folder, stack, SPARK_JARS.fetched()).count
            details["spark_source"] = ", ".join(jar.file_name for jar in SPARK_JARS.wanted())
        except NoJars as error:
            details["spark_source"] = f"Spark is left out: {error}"
            print(details["spark_source"], file=sys.stderr)
        runs: dict[str, list[Run]] = {name: [] for name in counts}
        for turn in range(rounds + 1):
            for name, count in counts.items():
                run = count()
                if turn:  # The first turn warms up.
                    runs[name].append(run)
    rates = {name: report.median(run.rows_per_s for run in of) for name, of in runs.items()}
    bars = {"written_per_byte": report.median(ours.written_bytes[1:]) / topic.input.size_bytes}
    if SPARK in rates:
        cpu_us = {name: described(of)["cpu_us_per_row"] for name, of in runs.items()}
        compared = {
            "count_vs_spark": rates[NAME] / rates[SPARK],
            "count_cpu_vs_spark": cpu_us[NAME] / cpu_us[SPARK],
        }
        bars = {**compared, **bars}
    return bars, {**details, **{name: described(of) for name, of in runs.items()}}


def described(runs: list[Run]) -> dict[str, Any]:
    if not runs:
        raise ShuffleError("there is nothing to compare without rounds")
    return {
        **{f"rows_per_s_{key}": value for key, value in report.spread([run.rows_per_s for run in runs]).items()},
        "cpu_us_per_row": report.median(1e6 * run.cpu_s / run.rows for run in runs),
        "memory_peak_mb": max(run.memory_peak_bytes for run in runs) / 1e6,
        "start_up_s": report.median(run.start_up_s for run in runs),
    }
