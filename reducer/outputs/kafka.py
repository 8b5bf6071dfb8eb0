"""A topic of Kafka as a sink: rows and the position of the outbox in one transaction of Kafka.

The position is kept as the committed offset of a consumer group of our own, ``GROUP-exporter-I``, for partition 0 of
the topic: ``send_offsets_to_transaction`` makes it a part of the transaction, so that rows and position become visible
together or not at all. The number means nothing to Kafka; tools show it as the offset of that group.

``open`` calls ``init_transactions`` with a transactional id of the same name: the broker ends what a predecessor had
open, and refuses whatever it sends from then on. A transaction is never left open by us for longer than one batch; one
of a killed exporter ends with the next ``open``, or after ``transaction.timeout.ms``.

Consumers must read with ``isolation.level=read_committed``. Only this module, and it only in the exporter's process,
imports the client for producing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Producer, TopicPartition

from shuffle.errors import (
    BadInput,
    PublishUnknown,
    ServiceUnavailable,
    ShuffleError,
    SinkRefused,
    SpecError,
    SplitBrain,
)
from shuffle.formats.base import Format
from shuffle.formats.opening import open_format
from shuffle.formats.secrets import resolved
from shuffle.partition.key_group import key_groups
from shuffle.reducer.outputs.sink import Sink, SinkPlace
from shuffle.spec.kafka_output import KafkaOutputOptions

CALL_S_MAX = 30.0
"""The most seconds of one call of the client that waits for the broker."""
POLL_S = 0.1
"""Seconds to wait when the client's queue of records is full."""
BATCH_ROWS = 5_000
"""The records that are handed to the client at once."""

DEFAULTS: dict[str, str | int | bool] = {
    # Paid by transactions in quick succession, while the one before is still being finished.
    "retry.backoff.ms": 5,
    "linger.ms": 5,
    "transaction.timeout.ms": 60_000,
    "socket.keepalive.enable": True,
    "reconnect.backoff.max.ms": 2_000,
    # With "rebootstrap", its default, librdkafka gives up the brokers that it knows while none of them answers. It may
    # then wait for ever for the one that coordinated the group, whatever the timeout of the call (its issue 5511).
    "metadata.recovery.strategy": "none",
    # Its own lines on stderr would be taken for the last words of the process; errors come as errors.
    "log_level": 2,
}
"""Settings that a spec may change."""

FIXED: dict[str, str | int | bool] = {"enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random"}
"""Settings of the producer on which exactly-once, and where a key lives, depend."""

# With read_committed the broker answers with a settled position only, and not with one that a commit is just replacing.
CONSUMER: dict[str, str | int | bool] = {"enable.auto.commit": False, "isolation.level": "read_committed"}

_FENCED = {
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
}
_REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
}


class KafkaSink(Sink):
    keeps_position = True

    def __init__(self, place: SinkPlace) -> None:
        options: KafkaOutputOptions = place.config["kafka"]
        self._options = options
        self._schema = place.schema
        self._section = place.section
        self._check_columns()
        self._value_columns = list(options.columns or place.schema.names)
        self._format = _format_of(options, pa.schema([place.schema.field(name) for name in self._value_columns]), place)
        self._name = f"{options.group or place.processor}{place.queue_mark}-exporter-{place.partition}"
        self._settings = {
            name: resolved(value, place.folder, f"properties.{name}") for name, value in options.properties.items()
        }
        self._position_key = TopicPartition(options.topic, 0)
        self._producer: Any = None
        self._consumer: Any = None
        self._position = 0
        self._delivery_error: KafkaError | None = None

    def _check_columns(self) -> None:
        named = {
            "key": self._options.key,
            "columns": self._options.columns,
            "headers": tuple(self._options.headers.values()),
        }
        for key, columns in named.items():
            missing = [name for name in columns if name not in self._schema.names]
            if missing:
                raise SpecError(
                    f"{self._section}.kafka.{key}: {', '.join(missing)}: the rows have the columns "
                    f"{', '.join(self._schema.names)}",
                    field=f"{self._section}.kafka.{key}",
                )

    @property
    def identity(self) -> str:
        return f"kafka topic {self._options.topic}, {self._name}"

    # -- start --------------------------------------------------------------------------------------------------------

    def open(self) -> int | None:
        """1. Fence predecessors and end what they had open. 2. Ask for the position, which is settled then."""
        self.close()
        self._delivery_error = None
        settings = {**DEFAULTS, **self._settings}
        self._producer = _made(self._section, lambda: Producer({**settings, **FIXED, "transactional.id": self._name}))
        # It reads nothing; the position belongs to its group.
        self._consumer = _made(self._section, lambda: Consumer({**settings, **CONSUMER, "group.id": self._name}))
        with self._errors("opening the transactional producer", ServiceUnavailable):
            self._producer.init_transactions(CALL_S_MAX)  # 1
        with self._errors("reading the position", ServiceUnavailable):
            [found] = self._consumer.committed([self._position_key], timeout=CALL_S_MAX)  # 2
            if found.error is not None:
                raise KafkaException(found.error)
        self._check_topic()
        self._position = 0 if found.offset == OFFSET_INVALID else int(found.offset)
        return None if found.offset == OFFSET_INVALID else self._position

    def _check_topic(self) -> None:
        with self._errors("asking for the topic", ServiceUnavailable):
            topic = self._producer.list_topics(self._options.topic, timeout=CALL_S_MAX).topics[self._options.topic]
            if topic.error is not None:
                raise KafkaException(topic.error)
        self._partitions = len(topic.partitions)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def publish(self, rows: pa.Table, begin: int, end: int) -> None:
        """1. Begin. 2. Records. 3. The position. 4. Commit: from here on only the broker knows what became of it."""
        with self._errors("writing to the topic", ServiceUnavailable):
            self._producer.begin_transaction()  # 1
            self._produce(rows)  # 2
            offsets = [TopicPartition(self._options.topic, 0, end)]
            metadata = self._consumer.consumer_group_metadata()
            self._producer.send_offsets_to_transaction(offsets, metadata, CALL_S_MAX)  # 3
        with self._errors("committing the transaction", PublishUnknown):
            self._producer.commit_transaction(CALL_S_MAX)  # 4
        self._position = end

    def keep_alive(self) -> None:
        """Brokers forget the offsets of a group that has not committed any for a week."""
        self.publish(self._schema.empty_table(), self._position, self._position)

    def _produce(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        try:
            values = self._format.encode(rows.select(self._value_columns)).to_pylist()
        except BadInput as error:
            raise SinkRefused(f"{self.identity}: {error.message}") from error
        if self._format.is_batched:
            # One record has all rows, so what is one row's own cannot be told.
            self._send([{"value": value} for value in values])
            return
        records: list[dict[str, Any]] = [{"value": value} for value in values]
        for name, column in self._columns(rows):
            for record, one in zip(records, column, strict=True):
                record[name] = one
        for first in range(0, len(records), BATCH_ROWS):
            self._send(records[first : first + BATCH_ROWS])

    def _columns(self, rows: pa.Table) -> Iterator[tuple[str, Sequence[Any]]]:
        """What records have beside their value, a column at a time."""
        options = self._options
        if options.key:
            yield "key", _key_bytes(rows, options.key)
        if options.partitioning == "xxhash64":
            yield "partition", _partitions(rows, options.key, self._partitions)
        if options.headers:
            texts = [_bytes_of(rows[column]) for column in options.headers.values()]
            names = list(options.headers)
            yield "headers", [list(zip(names, row, strict=True)) for row in zip(*texts, strict=True)]

    def _send(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            while True:
                try:
                    self._producer.produce(self._options.topic, on_delivery=self._delivered, **record)
                    break
                except BufferError:
                    self._producer.poll(POLL_S)
        self._producer.poll(0)
        if self._delivery_error is not None:
            raise KafkaException(self._delivery_error)

    def _delivered(self, error: KafkaError | None, message: object) -> None:
        if error is not None and self._delivery_error is None and error.code() != KafkaError._PURGE_QUEUE:
            self._delivery_error = error

    # -- the end, and errors ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """An open transaction is left to the broker: aborting it here could take as long as the broker is away."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with contextlib.suppress(Exception):
                consumer.close()
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(Exception):
                producer.purge()
                producer.abort_transaction(1.0)
            del producer

    @contextlib.contextmanager
    def _errors(self, doing: str, otherwise: type[ShuffleError]) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            # What made the broker refuse a record says more than that the transaction cannot be committed.
            raise self._typed(self._delivery_error or error.args[0], error.args[0], doing, otherwise) from None

    def _typed(self, error: KafkaError, raised: KafkaError, doing: str, otherwise: type[ShuffleError]) -> ShuffleError:
        text = f"{self.identity}: {doing}: {error.str()} ({error.name()})"
        if {error.code(), raised.code()} & _FENCED:
            return SplitBrain(f"{text}: another instance of the exporter has taken over")
        if error.code() in _REFUSED:
            return SinkRefused(f"{text}; look at the topic, the rows and the properties of the output")
        return otherwise(f"{text}; the exporter tries again")


def _format_of(options: KafkaOutputOptions, schema: pa.Schema, place: SinkPlace) -> Format:
    """The format of the values. ``json`` and ``arrow`` have the columns of the rows themselves."""
    try:
        if options.value.format == "json":
            from shuffle.formats.json_objects import JsonFormat

            return JsonFormat(schema)
        if options.value.format == "arrow":
            from shuffle.formats.plain import ArrowFormat

            return ArrowFormat(schema)
    except BadInput as error:
        raise SpecError(f"{place.section}.kafka.format: {error.message}") from None
    return open_format(options.value, place.folder)


def _key_bytes(rows: pa.Table, columns: Sequence[str]) -> Sequence[Any]:
    if len(columns) == 1 and _is_text(rows[columns[0]].type):
        return _bytes_of(rows[columns[0]])
    from shuffle.formats.json_objects import JsonFormat

    picked = rows.select(list(columns))
    return JsonFormat(picked.schema).encode(picked).to_pylist()  # type: ignore[no-any-return]


def _partitions(rows: pa.Table, columns: Sequence[str], count: int) -> Sequence[int]:
    found: np.ndarray[Any, Any] = np.asarray(key_groups(rows, list(columns), count))
    return found.tolist()  # type: ignore[no-any-return]


def _is_text(kind: pa.DataType) -> bool:
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in texts)


def _bytes_of(column: pa.ChunkedArray) -> Sequence[Any]:
    if not _is_text(column.type):
        column = pc.cast(column, pa.string())
    return pc.cast(column, pa.binary()).to_pylist()  # type: ignore[no-any-return]


def _made(section: str, make: Callable[[], Any]) -> Any:
    """A client; ``SpecError`` if it refuses its settings, without the values, which may be secrets."""
    try:
        return make()
    except (KafkaException, ValueError, TypeError) as error:
        what = error.args[0] if error.args else None
        name = what.name() if isinstance(what, KafkaError) else type(error).__name__
        raise SpecError(f"{section}.kafka.properties: the client refuses its settings ({name})") from None
