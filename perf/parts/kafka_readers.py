"""How fast are records read into Arrow columns, beside a bare loop of the same client? A part of ``perf.kafka``.

One topic with one partition, records of 115 bytes of JSON. Each way reads all of it, in turns, several times:

- *bare JSON*: ``consume()`` of ``confluent-kafka``, the values joined and parsed by ``polars.read_ndjson``. This is the
  best that one gets with few lines; of two sizes of batches the better one counts.
- *bare raw*: the same into an Arrow array of bytes, without parsing.
- *reader JSON* and *reader raw*: what a mapper does: ``KafkaReader.read`` and ``decode``, with the checks around them:
  errors, topic id, positions, bad records. Raw rows have all columns of a record: key, headers, time and offset, too.
- *plain reader*: the same without the fast path (``fast_path: false``), as it is with TLS or SASL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from confluent_kafka import Consumer, TopicPartition

from perf.common import report
from perf.parts import kafka_topics
from perf.parts.kafka_topics import RECORD_BYTES
from shuffle.errors import ShuffleError
from shuffle.mapper.readers.kafka.client import DEFAULTS
from shuffle.mapper.readers.kafka.input import KafkaInput
from shuffle.spec.kafka import input_options

TOPIC = "rows"
SCHEMA = {"user": "string", "cluster": "string", "amount": "int64", "price": "double"}
POLARS_SCHEMA = {"user": pl.String, "cluster": pl.String, "amount": pl.Int64, "price": pl.Float64}
BARE_SIZES = (1_000, 10_000)
BATCH_ROWS = 100_000
"""As many as ``mapper.batch_rows_max`` is by default."""
LIMITS = {"reader_ratio": ">= 1.5", "raw_ratio": ">= 2", "plain_reader_ratio": ">= 0.9"}


def record(number: int) -> bytes:
    user, cluster, price = f"user-{number % 100_000:06d}", f"cluster-{number % 40:02d}", number % 9_999 / 100
    text = f'{{"user":"{user}","cluster":"{cluster}","amount":{number},"price":{price:.2f},"note":"'
    return (text + "x" * (RECORD_BYTES - len(text) - 2) + '"}').encode()


def bare(address: str, records: int, size: int, use: Callable[[list[bytes]], int]) -> int:
    """The loop that people write; returns the rows that ``use`` has made."""
    settings: dict[str, Any] = {**DEFAULTS, "bootstrap.servers": address, "group.id": "bare"}
    consumer = Consumer({**settings, "enable.auto.commit": False, "auto.offset.reset": "error"})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    rows = seen = 0
    while seen < records:
        messages = consumer.consume(size, 1.0)
        values = [message.value() for message in messages if message.error() is None]
        seen += len(values)
        if values:
            rows += use(values)  # type: ignore[arg-type] # None of these records is without a value.
    consumer.close()
    return rows


def parse_json(values: list[bytes]) -> int:
    return pl.read_ndjson(b"\n".join(values), schema=POLARS_SCHEMA).height


def to_binary(values: list[bytes]) -> int:
    return len(pa.array(values, pa.binary()))


def reader(address: str, records: int, **options: Any) -> int:
    """What a mapper does; returns the rows that ``map`` would get."""
    mistakes: list[str] = []
    given = {"topics": TOPIC, "properties": {"bootstrap.servers": address}, **options}
    made = input_options(given, lambda path, what: mistakes.append(f"{path}: {what}"))
    if made is None:
        raise ShuffleError("; ".join(mistakes))
    client: Any = None  # This input asks the cluster, and not the store.
    opened = KafkaInput({"kafka": made}, client, Path())
    opened.processor = "perf"
    one = opened.open(0)
    one.wait_ms = 1_000
    rows, seen, token = 0, 0, one.start()
    while seen < records:
        table, token = one.read(seen, seen + BATCH_ROWS, token)
        seen += table.num_rows
        rows += one.decode(table).rows.num_rows
    one.close()
    opened.close()
    return rows


def measured(ways: dict[str, Callable[[], int]], records: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each way, and of processor time, in turns, so that what else the machine does hits all alike."""
    found: dict[str, dict[str, list[float]]] = {name: {"s": [], "cpu_s": []} for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            rows = way()
            if rows != records:
                raise ShuffleError(f"{name}: {rows} rows of {records}")
            if turn:  # The first turn warms caches up.
                found[name]["s"].append(time.perf_counter() - began_s)
                found[name]["cpu_s"].append(time.process_time() - began_cpu_s)
    return found


def ways_to_read(address: str, records: int) -> dict[str, Callable[[], int]]:
    ways: dict[str, Callable[[], int]] = {}
    for size in BARE_SIZES:
        ways[f"bare JSON, consume({size})"] = lambda size=size: bare(address, records, size, parse_json)  # type: ignore[misc]
        ways[f"bare raw, consume({size})"] = lambda size=size: bare(address, records, size, to_binary)  # type: ignore[misc]
    ways["plain reader JSON"] = lambda: reader(address, records, format="json", schema=SCHEMA, fast_path=False)
    ways["plain reader raw"] = lambda: reader(address, records, fast_path=False)
    ways["reader JSON"] = lambda: reader(address, records, format="json", schema=SCHEMA)
    ways["reader raw"] = lambda: reader(address, records)
    return ways


def measure(address: str, records: int, repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """The bars of this part, and the details."""
    kafka_topics.create(address, TOPIC)
    kafka_topics.fill(address, TOPIC, [(0, map(record, range(records)))])
    found = measured(ways_to_read(address, records), records, repeats)
    rates = {name: records / report.median(of["s"]) for name, of in found.items()}
    json_rate = max(rates[f"bare JSON, consume({size})"] for size in BARE_SIZES)
    raw_rate = max(rates[f"bare raw, consume({size})"] for size in BARE_SIZES)
    bars = {
        "reader_ratio": rates["reader JSON"] / json_rate,
        "raw_ratio": rates["reader raw"] / raw_rate,
        "plain_reader_ratio": rates["plain reader JSON"] / json_rate,
        "plain_raw_ratio": rates["plain reader raw"] / raw_rate,
    }
    details = {
        name: {
            "rows_per_s": rates[name],
            "cpu_us_per_row": report.median(of["cpu_s"]) / records * 1e6,
            **{f"seconds_{key}": value for key, value in report.spread(of["s"]).items()},
        }
        for name, of in found.items()
    }
    return bars, {"records": records, **details}
