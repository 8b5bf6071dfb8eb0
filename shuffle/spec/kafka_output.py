"""The options of ``output: {kafka: …}`` in a spec: what may be written there, and the frozen object that it becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shuffle.formats.opening import FormatOptions
from shuffle.formats.secrets import Given
from shuffle.spec.kafka import FORMAT_KEYS, Note, _Checked, format_options, kafka_properties
from shuffle.support.suggest import did_you_mean

PARTITIONINGS = ("murmur2", "xxhash64")
PRODUCER_FIXED = ("acks", "request.required.acks", "enable.idempotence", "partitioner")
"""Properties of the client that are not the user's: publishing exactly once depends on them."""
OF_THE_ROWS = ("json", "arrow")
"""Formats that need no schema here: the columns are those of the rows that are emitted."""


@dataclass(frozen=True, slots=True)
class KafkaOutputOptions:
    """A topic of Kafka."""

    topic: str
    """The topic. It must exist."""
    properties: Mapping[str, Given] = field(default_factory=dict)
    """The client's own settings under their own names: ``bootstrap.servers``, ``security.protocol``, ``sasl.*``,
    ``ssl.*``, ``compression.type``. A secret is written as ``{env: NAME}`` or ``{file: PATH}``."""
    group: str | None = None
    """The name under which the exporter is known to the brokers: its consumer groups, which hold the positions, and its
    transactional ids are ``GROUP-exporter-I``. Default: the name of the processor."""
    key: tuple[str, ...] = ()
    """The columns of the record's key. One column of texts or bytes is the key as it is; otherwise the key is a JSON
    object of the columns. Default: records have no key."""
    columns: tuple[str, ...] = ()
    """The columns of the value. Default: all columns of the rows."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the records: the name of each, and the column that has its value. Default: none."""
    partitioning: str = "murmur2"
    """The partition of a record with a key: by Kafka's own hash of the key, as its Java clients do (``murmur2``), or
    by the hash with which rows go to reducers and Spark's ``xxhash64``, of the columns of the key (``xxhash64``).
    Without a key, the client chooses. Default: murmur2."""
    value: FormatOptions = field(default_factory=FormatOptions)


def output_options(given: Any, note: Note) -> KafkaOutputOptions | None:
    """The options of an output; None after noting mistakes."""
    if not isinstance(given, Mapping):
        note("", "a mapping with topic, properties, format and so on is needed here")
        return None
    known = ("topic", "properties", "group", "key", "columns", "headers", "partitioning", *FORMAT_KEYS)
    checked = _Checked(given, known, note)
    topic = checked.text("topic")
    if topic is None and "topic" not in given:
        checked.wrong("topic", "is missing")
    elif topic is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic):
        checked.wrong("topic", f"{topic[:80]!r} is no name of a topic")
    properties = kafka_properties(checked)
    for name in PRODUCER_FIXED:
        if name in properties:
            checked.wrong(f"properties.{name}", "cannot be set: that no row is lost or doubled depends on it")
    partitioning = given.get("partitioning", PARTITIONINGS[0])
    if partitioning not in PARTITIONINGS:
        words = ", ".join(PARTITIONINGS)
        hint = did_you_mean(str(partitioning), PARTITIONINGS)
        checked.wrong("partitioning", f"{partitioning!r} is none of {words}{hint}")
    made = KafkaOutputOptions(
        topic or "",
        properties,
        checked.text("group"),
        _columns(checked, "key"),
        _columns(checked, "columns"),
        _headers(checked),
        partitioning,
        _format(checked),
    )
    if partitioning == "xxhash64" and not made.key:
        checked.wrong("partitioning", "xxhash64 is of the columns of the key: name them with key")
    return None if checked.mistaken else made


def _columns(checked: _Checked, key: str) -> tuple[str, ...]:
    value = checked.given.get(key, [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(one, str) and one for one in names):
        checked.wrong(key, "a column, or a list of columns, is needed here")
        return ()
    return tuple(dict.fromkeys(names))


def _headers(checked: _Checked) -> Mapping[str, str]:
    value = checked.given.get("headers", {})
    texts = isinstance(value, Mapping) and all(isinstance(one, str) for pair in value.items() for one in pair)
    if not texts:
        checked.wrong("headers", "a mapping of names to columns is needed here: {trace: trace_id}")
        return {}
    return dict(value)


def _format(checked: _Checked) -> FormatOptions:
    name = checked.given.get("format", "json")
    if name not in OF_THE_ROWS:
        return format_options(checked)
    for key in FORMAT_KEYS[1:]:
        if key in checked.given:
            checked.wrong(key, f"is not needed with {name}: the columns are those of the rows that are emitted")
    return FormatOptions(name)
