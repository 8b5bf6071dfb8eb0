"""Making topics, writing to them in the ways that matter, and reading them as a consumer elsewhere would."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

CALL_S_MAX = 30.0

Headers = list[tuple[str, bytes | None]]


class Topics:
    """The topics of one broker."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.admin = AdminClient({"bootstrap.servers": address})

    def create(self, name: str = "", partitions: int = 1, **config: str) -> str:
        """A new topic. Dots in names of settings are written as underscores: ``cleanup_policy="compact"``."""
        name = name or f"topic-{uuid.uuid4().hex[:12]}"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=settings)
        self.admin.create_topics([topic])[name].result(CALL_S_MAX)
        return name

    def delete(self, name: str) -> None:
        self.admin.delete_topics([name], operation_timeout=CALL_S_MAX)[name].result(CALL_S_MAX)

    def grow(self, name: str, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(name, partitions)])[name].result(CALL_S_MAX)

    def delete_records(self, name: str, partition: int, before: int) -> None:
        place = TopicPartition(name, partition, before)
        for done in self.admin.delete_records([place]).values():
            done.result(CALL_S_MAX)

    def write(
        self,
        name: str,
        values: Iterable[bytes | None],
        partition: int = 0,
        keys: Iterable[bytes | None] | None = None,
        headers: Headers | None = None,
        **config: Any,
    ) -> None:
        """Plain records, each of which is at the broker when this returns."""
        producer = Producer({"bootstrap.servers": self.address, "linger.ms": 5, **_dotted(config)})
        values = list(values)
        for key, value in zip(keys or [None] * len(values), values, strict=True):
            _produce(producer, name, value, key, partition, headers)
        assert producer.flush(CALL_S_MAX) == 0

    def write_in_transaction(self, name: str, values: Iterable[bytes], partition: int = 0, commit: bool = True) -> None:
        producer = self.transaction(name, values, partition)
        (producer.commit_transaction if commit else producer.abort_transaction)(CALL_S_MAX)

    def transaction(
        self, name: str, values: Iterable[bytes], partition: int = 0, transactional_id: str = ""
    ) -> Producer:
        """A producer whose transaction is open, with its records at the broker."""
        config = {"bootstrap.servers": self.address, "transactional.id": transactional_id or uuid.uuid4().hex}
        producer = Producer(config)
        producer.init_transactions(CALL_S_MAX)
        producer.begin_transaction()
        for value in values:
            _produce(producer, name, value, None, partition, None)
        assert producer.flush(CALL_S_MAX) == 0
        return producer

    def end(self, name: str, partition: int = 0) -> int:
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "tests"})
        try:
            _, end = consumer.get_watermark_offsets(TopicPartition(name, partition), timeout=CALL_S_MAX)
            return int(end)
        finally:
            consumer.close()

    def read(self, name: str, partition: int = 0) -> list[Message]:
        """Everything that is committed now, as a consumer elsewhere sees it."""
        config = {
            "bootstrap.servers": self.address,
            "group.id": "tests",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
        consumer = Consumer(config)
        consumer.assign([TopicPartition(name, partition, 0)])
        found: list[Message] = []
        try:
            while True:
                message = consumer.poll(CALL_S_MAX)
                assert message is not None, f"nothing of {name} within {CALL_S_MAX:g} s"
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    return found
                else:
                    raise KafkaException(error)
        finally:
            consumer.close()


def _dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "."): value for key, value in config.items()}


def _produce(
    producer: Producer, topic: str, value: bytes | None, key: bytes | None, partition: int, headers: Headers | None
) -> None:
    while True:
        try:
            producer.produce(topic, value=value, key=key, partition=partition, headers=headers)
            return
        except BufferError:
            producer.poll(0.1)
