"""Tokens of partitions of Kafka, and which partition is which mapper's. Nothing in here talks to a broker."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shuffle.errors import BadInput, SpecError
from shuffle.ids import Token

NO_EPOCH = -1
_FORM = struct.Struct(">B16sqi")
_VERSION = 1

PARTITIONS_SHOWN_MAX = 5
"""The most partitions that an error text names."""


class Position(NamedTuple):
    """Where a reader stands in its partition: what a token says."""

    topic_id: bytes
    """The 16 bytes that tell a topic from one of the same name that was made after it was deleted."""
    offset: int
    """The offset of the next record."""
    leader_epoch: int = NO_EPOCH
    """The epoch of the leader that the record before was read from, for the detection of a log that was cut off."""


def encode(position: Position) -> Token:
    return Token(_FORM.pack(_VERSION, *position))


def decode(token: Token) -> Position:
    try:
        version, topic_id, offset, epoch = _FORM.unpack(token)
    except struct.error:
        version = 0
    if version != _VERSION:
        raise BadInput("the token is not a position in a topic of Kafka: was the input of the processor changed?")
    return Position(topic_id, offset, epoch)


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.number}]"


class Numbering(NamedTuple):
    """The partitions in the order of their mappers. What was numbered once keeps its number for ever: new partitions
    come after all others, whichever topic they are of."""

    partitions: tuple[Partition, ...]
    first_count: int
    """How many there were when the processor was first started. ``start`` is for those; a partition that came later
    is read from its first record on."""

    @staticmethod
    def parse(text: str) -> Numbering:
        found = json.loads(text)
        return Numbering(tuple(Partition(str(topic), int(number)) for topic, number in found["names"]), found["first"])

    def text(self) -> str:
        return json.dumps({"first": self.first_count, "names": [list(one) for one in self.partitions]})


def numbered(known: Numbering | None, found: Iterable[Partition]) -> Numbering:
    """``known``, with what is new in ``found`` behind it. ``SpecError`` if a partition is missing."""
    there = set(found)
    if known is None:
        return Numbering(tuple(sorted(there)), len(there))
    missing = [one for one in known.partitions if one not in there]
    if missing:
        raise SpecError(
            f"{shown(missing)} {'are' if len(missing) > 1 else 'is'} not there any more, and this processor has read "
            "there: a topic was deleted, or made anew with fewer partitions. Bring it back, or give the processor "
            "another name, so that it begins with an empty state"
        )
    new = sorted(there.difference(known.partitions))
    return Numbering((*known.partitions, *new), known.first_count)


def shown(partitions: Sequence[object]) -> str:
    """Partitions in an error text: a few of them, and how many more there are."""
    named = ", ".join(str(one) for one in partitions[:PARTITIONS_SHOWN_MAX])
    more = len(partitions) - PARTITIONS_SHOWN_MAX
    return f"{named} and {more} more" if more > 0 else named


def made_anew(partition: Partition) -> SpecError:
    return SpecError(
        f"the topic {partition.topic!r} is not the one that this processor has read: it was deleted and made anew, and "
        "its records have other numbers now. Give the processor another name, so that it begins with an empty state"
    )


def gone(partition: Partition, position: int, earliest: int, end: int) -> str:
    """The error text for offsets that retention, or somebody, has deleted before they were read."""
    if position > end:
        return (
            f"{partition}: the next record to read is {position}, and the topic ends at {end}: records that were read "
            "are gone from the end of it, as after an unclean election of a leader"
        )
    return (
        f"{partition}: the records with offsets {position} to {earliest - 1} are gone before they were read "
        f"(retention, or DeleteRecords); the first one left is {earliest}. They cannot be had back here: give the "
        f"processor another name, and with `start: earliest` it would begin at {earliest} with an empty state; or "
        "bring the records back"
    )


def check_offsets(
    tokens: Mapping[Partition, Position], ids: Mapping[str, bytes], bounds: Mapping[Partition, tuple[int, int]]
) -> None:
    """Refuse to go on from ``tokens`` if a topic is another one now, or records that are still to be read are gone."""
    lost = []
    for partition, position in tokens.items():
        if partition.topic in ids and ids[partition.topic] != position.topic_id:
            raise made_anew(partition)
        if partition in bounds:
            earliest, end = bounds[partition]
            if not earliest <= position.offset <= end:
                lost.append(gone(partition, position.offset, earliest, end))
    if lost:
        raise SpecError(lost[0] if len(lost) == 1 else f"{lost[0]} (and so for {len(lost) - 1} more partitions)")
