"""Topics for ``perf.kafka``: making them, filling them, and the records of JSON that they are filled with."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # It re-exports without saying so.

from shuffle.errors import ShuffleError

RECORD_BYTES = 115
"""The size of every value."""
CALL_S_MAX = 30.0
FLUSH_S_MAX = 120.0


def create(address: str, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=1)])[topic].result(CALL_S_MAX)


def fill(address: str, topic: str, parts: Iterable[tuple[int, Iterable[bytes]]]) -> None:
    """Write values to partitions, in this order within each."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 20, "batch.size": 1_000_000, "acks": 1})
    for partition, values in parts:
        for value in values:
            while True:
                try:
                    producer.produce(topic, value, partition=partition)
                    break
                except BufferError:
                    producer.poll(0.1)
    if producer.flush(FLUSH_S_MAX):
        raise ShuffleError("the broker did not take all records")


def log_lines(rows: pa.Table, numbers: pa.Array | None = None) -> list[bytes]:
    """The activity logs as JSON, each of ``RECORD_BYTES`` bytes: the message is cut where it does not fit.

    Times are numbers, microseconds since 1970: what a system makes of a text is not what is asked here. With
    ``numbers`` every record has a number, too.
    """
    parts = [] if numbers is None else ['"number":', numbers.cast(pa.string()), ","]
    parts += ['"timestamp":', rows["timestamp"].cast(pa.int64()).cast(pa.string())]
    for name in ("cluster", "user", "message"):
        parts += [f',"{name}":"', rows[name], '"']
    # The quotation mark behind the message is cut off with its end, and comes again.
    text = pc.binary_join_element_wise("{", *parts, "")
    if (pc.min(pc.binary_length(text)).as_py() or RECORD_BYTES) < RECORD_BYTES:
        raise ShuffleError("a log line is too short for a record")
    cut = pc.utf8_slice_codeunits(text, 0, RECORD_BYTES - 2)
    values: list[bytes] = pc.binary_join_element_wise(cut, '"}', "").cast(pa.binary()).to_pylist()
    return values
