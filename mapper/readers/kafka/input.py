"""Topics of Kafka as an input: which partitions there are, where they begin and end, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shuffle.errors import ServiceUnavailable, SpecError
from shuffle.formats.base import Format
from shuffle.formats.opening import describe_format, open_format
from shuffle.ids import Token
from shuffle.mapper.reader import Input, PartitionReader
from shuffle.mapper.readers.kafka.client import Cluster, Topic, settings_of
from shuffle.mapper.readers.kafka.columns import Records
from shuffle.mapper.readers.kafka.positions import (
    NO_EPOCH,
    Numbering,
    Partition,
    Position,
    check_offsets,
    decode,
    encode,
    numbered,
    shown,
)
from shuffle.mapper.readers.kafka.reader import KafkaReader
from shuffle.spec.kafka import KafkaInputOptions

if TYPE_CHECKING:
    from shuffle.statestore import StateClient


class KafkaInput(Input):
    """Topics of Kafka. Nothing in them is ever deleted by this project."""

    def __init__(self, config: Mapping[str, Any], state: StateClient, folder: Path) -> None:
        super().__init__(config, state, folder)
        self._options: KafkaInputOptions = config["kafka"]
        self._settings = settings_of(self._options.properties, folder)
        self._opened_cluster: Cluster | None = None
        self._opened_format: Format | None = None

    @property
    def _cluster(self) -> Cluster:
        if self._opened_cluster is None:
            self._opened_cluster = Cluster(self._settings)
        return self._opened_cluster

    # Partitions

    def _topics(self) -> dict[str, Topic]:
        names: Sequence[str] = self._options.topics
        if self._options.pattern is not None:
            names = self._cluster.matching(self._options.pattern)
            if not names:
                raise SpecError(f"no topic has a name that the pattern {self._options.pattern!r} matches")
        return self._cluster.topics(names)

    def _known(self) -> Numbering | None:
        return Numbering.parse(self.known_partitions) if self.known_partitions is not None else None

    def _numbering(self) -> Numbering:
        """The partitions in the order of their mappers. What is known is enough while no broker can be reached."""
        known = self._known()
        try:
            topics = self._topics()
        except ServiceUnavailable:
            if known is None:
                raise
            return known
        found = [Partition(name, number) for name, topic in topics.items() for number in range(topic.partitions)]
        return numbered(known, found)

    def partition_count(self) -> int:
        return len(self._numbering().partitions)

    def partitions(self) -> str | None:
        return self._numbering().text()

    def _partition(self, index: int) -> Partition:
        known = self._known()
        if known is not None and index < len(known.partitions):
            return known.partitions[index]
        return self._numbering().partitions[index]

    def open(self, partition: int) -> PartitionReader:
        place = self._partition(partition)
        if self._opened_format is None and self._options.value.format != "raw":
            self._opened_format = open_format(self._options.value, self.folder)
        records = Records(place, self._opened_format, self._options.metadata)
        return KafkaReader(
            place,
            self._settings,
            self._group,
            self._cluster,
            records,
            lambda: self._start(partition, place),
            self._options.fast_path and self._is_plaintext(),
        )

    def _is_plaintext(self) -> bool:
        return str(self._settings.get("security.protocol", "plaintext")).lower() == "plaintext"

    @property
    def _group(self) -> str:
        return self._options.group or self.processor or "shuffle"

    def describe(self) -> str:
        said: dict[str, Any] = {"topics": list(self._options.topics)}
        if self._options.pattern is not None:
            said = {"pattern": self._options.pattern}
        said["value"] = json.loads(describe_format(self._options.value, self.folder))
        if self._options.metadata:
            said["metadata"] = sorted(self._options.metadata)
        return f"kafka {json.dumps(said)}"

    # Where reading begins

    def _start(self, index: int, place: Partition) -> Position:
        topic = self._cluster.topics([place.topic])[place.topic]
        return Position(topic.topic_id, self._start_offset(index, place), NO_EPOCH)

    def _start_offset(self, index: int, place: Partition) -> int:
        known = self._known()
        start = self._options.start
        if known is not None and index >= known.first_count:
            start = "earliest"  # The partition is younger than the processor: none of its records was there before.
        earliest = self._cluster.earliest([place])[place]
        if start == "earliest":
            return earliest
        end = self._cluster.ends([place])[place]
        if start == "latest":
            return end
        if "timestamp" in start:
            found = self._cluster.at_time([place], start["timestamp"])[place]
            return end if found < 0 else found
        wanted = start["offsets"].get(place.topic, {}).get(place.number, earliest)
        if not earliest <= wanted <= end:
            raise SpecError(
                f"start: {place} has offsets from {earliest} to {end}, and it is to be read from {wanted}",
                offset=wanted,
            )
        return int(wanted)

    def check_start(self, started: Callable[[], Mapping[int, Token]]) -> None:
        """Refuse topics whose rows would get other numbers when they are read again, and rows that are gone."""
        topics = self._topics()
        compacted = [name for name, policy in self._cluster.cleanup_policies(topics).items() if "compact" in policy]
        if compacted:
            raise SpecError(
                f"the topic {shown(compacted)} is compacted (cleanup.policy): when its records are read again after a "
                "crash, some are missing, and all behind them would be taken for others. Let a job copy it to a topic "
                "with cleanup.policy=delete, or read that topic's source"
            )
        numbering = self._numbering()
        bounds = self._bounds(numbering.partitions)
        tokens = started()  # After the look at the topics: what was there then may be gone now, not the other way.
        positions = {
            numbering.partitions[index]: decode(token)
            for index, token in tokens.items()
            if token and index < len(numbering.partitions)
        }
        check_offsets(positions, {name: topic.topic_id for name, topic in topics.items()}, bounds)

    def _bounds(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
        ends = self._cluster.ends(partitions)
        earliest = self._cluster.earliest(partitions)
        return {one: (earliest[one], max(ends[one], earliest[one])) for one in partitions}

    # Where it ends

    def ends(self) -> Mapping[int, Token] | None:
        partitions = self._numbering().partitions
        topics = self._cluster.topics({one.topic for one in partitions})
        offsets = self._cluster.ends(partitions)
        return {
            index: encode(Position(topics[one.topic].topic_id, offsets[one])) for index, one in enumerate(partitions)
        }

    def reached(self, partition: int, token: Token, end: Token | None) -> bool:
        if end is None:
            return super().reached(partition, token, end)
        place = self._partition(partition)
        offset = decode(token).offset if token else self._cluster.earliest([place])[place]
        return offset >= decode(end).offset

    def rows_left(self, tokens: Mapping[int, Token]) -> Mapping[int, int]:
        """The offsets that are left, some of which are markers or of aborted transactions: no fewer than the rows."""
        try:
            partitions = self._numbering().partitions
            bounds = self._bounds(partitions)
        except (ServiceUnavailable, SpecError):
            return {}
        found = {}
        for index, one in enumerate(partitions):
            earliest, end = bounds[one]
            token = tokens.get(index)
            found[index] = max(0, end - (decode(token).offset if token else earliest))
        return found

    def close(self) -> None:
        if self._opened_format is not None:
            self._opened_format.close()
        self._opened_cluster = None
