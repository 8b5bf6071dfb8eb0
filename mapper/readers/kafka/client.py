"""The client of Kafka: the settings it gets, what is asked of a cluster, and what its errors mean to us.

Only this module and the reader import ``confluent_kafka``. Errors are of three kinds: what passes by itself (no broker
can be reached, a leader is being elected) is ``ServiceUnavailable``, and is waited for; what only a person can mend
(wrong password, no right to read) is ``SpecError``; everything else is a plain ``ShuffleError``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # It re-exports these without saying so.
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from shuffle.errors import ServiceUnavailable, ShuffleError, SpecError
from shuffle.formats.secrets import Given, resolved
from shuffle.mapper.readers.kafka.positions import Partition, shown

CALL_S_MAX = 10.0
"""The most seconds for one question to the cluster."""

DEFAULTS: Mapping[str, str | int | bool] = {
    # Otherwise a consumer that has filled its queue pauses for a second now and then.
    "fetch.queue.backoff.ms": 5,
    # The client's default, 64 MiB, is for one consumer in a process, and there may be many mappers.
    "queued.max.messages.kbytes": 32 * 1024,
    "socket.keepalive.enable": True,
    "reconnect.backoff.max.ms": 2_000,
    # Its own lines on stderr would be taken for the last words of the process; errors come as errors.
    "log_level": 2,
}
"""Settings that a spec may change."""

FIXED: Mapping[str, str | int | bool] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    # Anything else would jump over records that are gone, without a word.
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "check.crcs": True,
}
"""Settings on which exactly-once depends. A spec that sets them is refused."""

_TEMPORARY = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._RESOLVE,
    KafkaError._WAIT_COORD,
    KafkaError._NOENT,  # No leader is known of a partition.
    KafkaError._DESTROY,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
}
_REFUSED = {
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.ILLEGAL_SASL_STATE,
    KafkaError.SECURITY_DISABLED,
}
UNKNOWN = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_ID,
}
"""The topic, or the partition, is not there, or not any more."""


def typed(error: KafkaError, doing: str) -> ShuffleError:
    """What an error of the client is to us."""
    text = f"Kafka: {doing}: {error.str()} ({error.name()})"
    if error.code() in _REFUSED:
        return SpecError(f"{text}; look at the properties of the input, and at the rights of its user")
    if error.code() in _TEMPORARY or error.retriable():
        return ServiceUnavailable(f"{text}; waiting for it")
    return ShuffleError(text)


def settings_of(properties: Mapping[str, Given], folder: Path) -> dict[str, str | int | bool]:
    """The client's settings of ``properties``, with secrets in place. They are given to the client and nobody else."""
    found: dict[str, str | int | bool] = dict(DEFAULTS)
    found |= {name: resolved(value, folder, f"properties.{name}") for name, value in properties.items()}
    return found


class Topic(NamedTuple):
    """A topic as it is now."""

    topic_id: bytes
    partitions: int


class Cluster:
    """What an input asks of a cluster, apart from records."""

    def __init__(self, settings: Mapping[str, str | int | bool]) -> None:
        # Some of a consumer's settings mean nothing to an admin client, which would complain.
        own: dict[str, Any] = dict(settings)
        for name in settings:
            if name.startswith(("fetch.", "queued.", "check.")):
                del own[name]
        self._admin = made(lambda: AdminClient(own))

    def matching(self, pattern: str) -> list[str]:
        """The names of the topics that the whole of ``pattern`` matches; Kafka's own ones never do."""
        try:
            found = self._admin.list_topics(timeout=CALL_S_MAX).topics
        except KafkaException as error:
            raise typed(error.args[0], "listing the topics") from None
        matches = re.compile(pattern).fullmatch
        return sorted(name for name in found if matches(name) and not name.startswith("__"))

    def leader(self, partition: Partition) -> tuple[str, int]:
        """The address of the broker that leads a partition."""
        try:
            found = self._admin.list_topics(partition.topic, timeout=CALL_S_MAX)
        except KafkaException as error:
            raise typed(error.args[0], f"asking for the leader of {partition}") from None
        place = found.topics[partition.topic].partitions.get(partition.number)
        broker = None if place is None else found.brokers.get(place.leader)
        if broker is None:
            raise ServiceUnavailable(f"Kafka: {partition} has no leader; waiting for one")
        return str(broker.host), int(broker.port)

    def topics(self, names: Collection[str]) -> dict[str, Topic]:
        """The topics of these names. ``SpecError`` if one is not there."""
        asked = self._asked(
            lambda: self._admin.describe_topics(TopicCollection(list(names)), request_timeout=CALL_S_MAX)
        )
        found, missing = {}, []
        for name, answer in asked.items():
            try:
                described = _answer(answer)
            except KafkaException as error:
                if error.args[0].code() not in UNKNOWN:
                    raise typed(error.args[0], f"asking for the topic {name!r}") from None
                missing.append(name)
                continue
            found[name] = Topic(_id_bytes(described.topic_id), len(described.partitions))
        if missing:
            raise SpecError(f"there is no topic {shown([repr(name) for name in missing])}")
        return found

    def cleanup_policies(self, names: Collection[str]) -> dict[str, str]:
        wanted = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        asked = self._asked(lambda: self._admin.describe_configs(wanted, request_timeout=CALL_S_MAX))
        found = {}
        for resource, answer in asked.items():
            try:
                found[resource.name] = str(_answer(answer)["cleanup.policy"].value)
            except KafkaException as error:
                raise typed(error.args[0], f"asking for the settings of the topic {resource.name!r}") from None
        return found

    def earliest(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The offset of the first record of each partition."""
        return self._offsets({one: _offset_spec("earliest") for one in partitions})

    def ends(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The offset behind the last record of each partition that a reader may see: below every open transaction."""
        return self._offsets({one: _offset_spec("latest") for one in partitions})

    def at_time(self, partitions: Iterable[Partition], timestamp_ms: int) -> dict[Partition, int]:
        """The offset of the first record of each partition that is not older; -1 if there is none."""
        return self._offsets({one: OffsetSpec.for_timestamp(timestamp_ms) for one in partitions})

    def _offsets(self, wanted: Mapping[Partition, OffsetSpec]) -> dict[Partition, int]:
        if not wanted:
            return {}
        asked = self._asked(
            lambda: self._admin.list_offsets(
                {TopicPartition(one.topic, one.number): spec for one, spec in wanted.items()},
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=CALL_S_MAX,
            )
        )
        found = {}
        for place, answer in asked.items():
            partition = Partition(place.topic, place.partition)
            try:
                found[partition] = int(_answer(answer).offset)
            except KafkaException as error:
                if error.args[0].code() in UNKNOWN:
                    raise SpecError(f"{partition} is not there any more") from None
                raise typed(error.args[0], f"asking for the offsets of {partition}") from None
        return found

    def _asked(self, ask: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        try:
            return ask()
        except (KafkaException, ValueError, TypeError) as error:
            raise ShuffleError(f"Kafka: {error}") from None


def made(make: Callable[[], Any]) -> Any:
    """A client; ``SpecError`` if it refuses its settings. Its text names the setting, and not its value."""
    try:
        return make()
    except KafkaException as error:
        what = error.args[0]
        text = what.str() if isinstance(what, KafkaError) else "the client refuses its settings"
        raise SpecError(f"properties: {_without_values(text)}") from None
    except (ValueError, TypeError):
        raise SpecError("properties: the client refuses its settings") from None


def _without_values(text: str) -> str:
    """The client quotes values in some texts: Invalid value "secret" for configuration property "x"."""
    return re.sub(r'value "[^"]*"', "value", text)


def _answer(asked: Future[Any]) -> Any:
    """What the client answers to one question. It has a time limit of its own, which comes first."""
    try:
        return asked.result(CALL_S_MAX + 5)
    except TimeoutError:
        raise ServiceUnavailable(f"Kafka: no answer within {CALL_S_MAX:g} s; waiting for it") from None


def _offset_spec(name: str) -> OffsetSpec:
    make: Any = getattr(OffsetSpec, name)  # These have no types.
    spec: OffsetSpec = make()
    return spec


def _id_bytes(topic_id: Any) -> bytes:
    most, least = int(topic_id.get_most_significant_bits()), int(topic_id.get_least_significant_bits())
    return (most % 2**64).to_bytes(8, "big") + (least % 2**64).to_bytes(8, "big")
