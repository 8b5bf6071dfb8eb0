"""The options of ``kafka`` in a spec: what may be written there, and the frozen objects that it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shuffle.errors import BadInput
from shuffle.formats.column_types import column_type
from shuffle.formats.opening import FORMATS, FormatOptions, RegistryOptions
from shuffle.formats.secrets import Given, secret_mistake
from shuffle.support.suggest import did_you_mean

Note = Callable[[str, str], None]
"""Notes a mistake: the path of the key below ``kafka``, and what is wrong there."""

METADATA = ("key", "headers", "timestamp", "topic", "partition", "offset")
TOPICS_MAX = 1_000
FIXED = (
    *("enable.auto.commit", "enable.auto.offset.store", "isolation.level", "auto.offset.reset", "enable.partition.eof"),
    *("check.crcs", "group.instance.id", "partition.assignment.strategy", "transactional.id"),
)
"""Properties of the client that are not the user's: reading exactly once depends on them."""

_SECRETS = re.compile(r"password|secret|ssl\.key\.pem|oauthbearer\.config|sasl\.jaas", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KafkaInputOptions:
    """Topics of Kafka."""

    topics: tuple[str, ...] = ()
    """A topic, or a list of topics. There is one mapper for each of their partitions."""
    pattern: str | None = None
    """A regular expression instead of ``topics``: all topics whose whole names it matches."""
    properties: Mapping[str, Given] = field(default_factory=dict)
    """The client's own settings under their own names: ``bootstrap.servers``, ``security.protocol``, ``sasl.*``,
    ``ssl.*``. A secret is written as ``{env: NAME}`` or ``{file: PATH}``."""
    group: str | None = None
    """The consumer group to which progress is told, for monitoring. Default: the name of the processor."""
    start: Any = "earliest"
    """Where a processor without state begins: ``earliest``, ``latest``, ``{timestamp: 2026-01-31T00:00:00Z}`` or
    ``{offsets: {0: 17}}``. Default: earliest."""
    metadata: tuple[str, ...] = ()
    """What rows have beside the columns of the value: ``key``, ``headers``, ``timestamp``, ``topic``, ``partition``,
    ``offset``, as columns ``_key`` and so on. The format ``raw`` has them all."""
    fast_path: bool = True
    """Whether batches of records may be read as a whole, without the client, where that is possible. Default: true."""
    value: FormatOptions = field(default_factory=FormatOptions)


def input_options(given: Any, note: Note) -> KafkaInputOptions | None:
    """The options of an input; None after noting mistakes."""
    if not isinstance(given, Mapping):
        note("", "a mapping with topics, properties, format and so on is needed here")
        return None
    known = ("topics", "pattern", "properties", "group", "start", "metadata", "fast_path", *FORMAT_KEYS)
    checked = _Checked(given, known, note)
    topics = _topics(checked)
    pattern = checked.text("pattern")
    if (pattern is None) == (not topics) and not checked.mistaken:
        checked.wrong("topics", "give either topics or a pattern" + (", not both" if topics else ""))
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, RecursionError) as error:
            checked.wrong("pattern", f"is no regular expression: {error}")
    made = KafkaInputOptions(
        topics,
        pattern,
        kafka_properties(checked),
        checked.text("group"),
        _start(checked, topics),
        _metadata(checked),
        _flag(checked, "fast_path", True),
        format_options(checked),
    )
    return None if checked.mistaken else made


class _Checked:
    """A mapping of a spec while it is checked."""

    def __init__(self, given: Mapping[str, Any], known: tuple[str, ...], note: Note) -> None:
        self.given = given
        self._note = note
        self.mistaken = False
        for key in given:
            if key not in known:
                hint = did_you_mean(str(key), list(known), f"; known here: {', '.join(known)}")
                self.wrong(str(key), f"unknown key{hint}")

    def wrong(self, path: str, what: str) -> None:
        self.mistaken = True
        self._note(path, what)

    def text(self, key: str) -> str | None:
        value = self.given.get(key)
        if key in self.given and (not isinstance(value, str) or not value):
            self.wrong(key, "a text is needed here")
            return None
        return value


def _topics(checked: _Checked) -> tuple[str, ...]:
    value = checked.given.get("topics", [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > TOPICS_MAX:
        checked.wrong("topics", f"a topic, or a list of up to {TOPICS_MAX} topics, is needed here")
        return ()
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name):
            checked.wrong("topics", f"{name[:80]!r} is no name of a topic")
    if len(set(names)) != len(names):
        checked.wrong("topics", "a topic is named twice")
    return tuple(sorted(names))


def kafka_properties(checked: _Checked) -> Mapping[str, Given]:
    """The settings of the client: names and values, of which some are elsewhere."""
    value = checked.given.get("properties")
    if not isinstance(value, Mapping):
        checked.wrong("properties", "a mapping with bootstrap.servers is needed here")
        return {}
    if "bootstrap.servers" not in value:
        checked.wrong("properties", "bootstrap.servers is missing: the addresses of the brokers")
    for name, one in value.items():
        place = f"properties.{name}"
        if not isinstance(name, str):
            checked.wrong("properties", f"{name!r} is no name of a setting")
        elif name == "group.id":
            checked.wrong(place, "is the key `group` of the input here")
        elif name in FIXED:
            checked.wrong(place, "cannot be set: that no row is lost or read twice depends on it")
        elif mistake := secret_mistake(one):
            checked.wrong(place, mistake)
        elif _SECRETS.search(name) and not isinstance(one, Mapping):
            checked.wrong(place, "is a secret: write where it is, {env: NAME} or {file: PATH}")
    return dict(value)


def _start(checked: _Checked, topics: tuple[str, ...]) -> Any:
    value = checked.given.get("start", "earliest")
    if value in ("earliest", "latest"):
        return value
    if isinstance(value, Mapping) and len(value) == 1:
        if "timestamp" in value:
            return {"timestamp": _timestamp_ms(checked, value["timestamp"])}
        if "offsets" in value:
            return {"offsets": _offsets(checked, value["offsets"], topics)}
    checked.wrong("start", "is neither earliest, latest, {timestamp: …} nor {offsets: …}")
    return "earliest"


def _timestamp_ms(checked: _Checked, value: Any) -> int:
    """Milliseconds since 1970, or a time as in ISO 8601; one without a zone is in UTC."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if not isinstance(value, datetime):
        checked.wrong("start.timestamp", "is neither a time such as 2026-01-31T00:00:00Z nor milliseconds since 1970")
        return 0
    return int((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1000)


def _offsets(checked: _Checked, value: Any, topics: tuple[str, ...]) -> Mapping[str, Mapping[int, int]]:
    """Offsets by topic and partition. With one topic its name may be left out."""
    if isinstance(value, Mapping) and all(isinstance(key, int) for key in value) and len(topics) == 1:
        value = {topics[0]: value}
    fits = isinstance(value, Mapping) and all(
        isinstance(topic, str)
        and isinstance(of, Mapping)
        and all(isinstance(number, int) and isinstance(offset, int) and offset >= 0 for number, offset in of.items())
        for topic, of in value.items()
    )
    if not fits:
        checked.wrong("start.offsets", "is no mapping such as {0: 17, 1: 4}, or {TOPIC: {0: 17}} for several topics")
        return {}
    if topics:
        for topic in set(value) - set(topics):
            checked.wrong("start.offsets", f"{topic!r} is none of the topics")
    return {str(topic): dict(of) for topic, of in value.items()}


def _flag(checked: _Checked, key: str, default: bool) -> bool:
    value = checked.given.get(key, default)
    if not isinstance(value, bool):
        checked.wrong(key, "is neither true nor false")
        return default
    return value


def _metadata(checked: _Checked) -> tuple[str, ...]:
    value = checked.given.get("metadata", [])
    if not isinstance(value, list) or not set(value) <= set(METADATA) or len(set(value)) != len(value):
        checked.wrong("metadata", f"is no list of some of {', '.join(METADATA)}")
        return ()
    if value and checked.given.get("format", "raw") == "raw":
        checked.wrong("metadata", "is for other formats; raw has all of them")
    return tuple(value)


# Formats -------------------------------------------------------------------------------------------------------------

FORMAT_KEYS = ("format", "schema", "schema_file", "message", "schema_registry")
"""The keys of a format, which the options of an input and of an output have beside their own."""

_WITH_SCHEMA = ("json", "arrow")
_WITH_FILE = ("avro", "protobuf")


def format_options(checked: _Checked) -> FormatOptions:
    name = checked.given.get("format", "raw")
    if name not in FORMATS:
        checked.wrong("format", f"{name!r} is none of {', '.join(FORMATS)}{did_you_mean(str(name), FORMATS)}")
        return FormatOptions()
    schema = _schema(checked, name)
    schema_file, message = checked.text("schema_file"), checked.text("message")
    registry = _registry(checked)
    if name in _WITH_FILE:
        if schema_file is None and (registry is None or registry.subject is None):
            checked.wrong("format", f"{name} needs schema_file, or a subject and a version in schema_registry")
    else:
        for key in ("schema_file", "schema_registry"):
            if key in checked.given:
                checked.wrong(key, f"is for {' and '.join(_WITH_FILE)}")
    if message is not None and name != "protobuf":
        checked.wrong("message", "is for protobuf")
    return FormatOptions(name, schema, schema_file, message, registry)


def _schema(checked: _Checked, name: str) -> Mapping[str, str]:
    value = checked.given.get("schema")
    if name not in _WITH_SCHEMA:
        if value is not None:
            checked.wrong("schema", f"is for {' and '.join(_WITH_SCHEMA)}")
        return {}
    if not isinstance(value, Mapping) or not value:
        checked.wrong("schema", f"the columns and their types are needed with {name}: {{user: string, n: int64}}")
        return {}
    for column, kind in value.items():
        if not isinstance(column, str) or not isinstance(kind, str):
            checked.wrong("schema", f"{column!r}: {kind!r} is no column with the name of its type")
            continue
        try:
            column_type(kind)
        except BadInput as error:
            checked.wrong(f"schema.{column}", error.message)
    return dict(value)


def _registry(checked: _Checked) -> RegistryOptions | None:
    value = checked.given.get("schema_registry")
    if value is None:
        return None
    if isinstance(value, str):
        value = {"url": value}
    known = ("url", "user", "password", "subject", "version")
    if not isinstance(value, Mapping) or not set(value) <= set(known) or not isinstance(value.get("url"), str):
        checked.wrong("schema_registry", f"is no mapping with the keys {', '.join(known)}; url must be given")
        return None
    for key in ("user", "password"):
        if key in value and (mistake := secret_mistake(value[key])):
            checked.wrong(f"schema_registry.{key}", mistake)
    if "password" in value and not isinstance(value["password"], Mapping):
        checked.wrong("schema_registry.password", "is a secret: write where it is, {env: NAME} or {file: PATH}")
    subject, version = value.get("subject"), value.get("version")
    if (subject is None) != (version is None):
        checked.wrong("schema_registry", "subject and version go together")
    if subject is not None and not isinstance(subject, str):
        checked.wrong("schema_registry.subject", "a text is needed here")
    if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 1):
        checked.wrong("schema_registry.version", "a number from 1 on: what is the latest changes, the columns may not")
    return RegistryOptions(value["url"], value.get("user"), value.get("password"), subject, version)
