"""The options of a format, as they are in a spec, and the format that they describe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shuffle.errors import BadInput, SpecError
from shuffle.formats.base import Format
from shuffle.formats.column_types import schema_of
from shuffle.formats.secrets import Given, resolved
from shuffle.limits import MIB

if TYPE_CHECKING:
    from shuffle.formats.registry import SchemaRegistry

FORMATS = ("json", "avro", "protobuf", "arrow", "raw")
SCHEMA_BYTES_MAX = 4 * MIB


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """A schema registry."""

    url: str
    """The address of the schema registry."""
    user: Given | None = None
    """The user name, if the registry wants one: a text, or ``{env: NAME}`` or ``{file: PATH}``."""
    password: Given | None = None
    """The password, as ``{env: NAME}`` or ``{file: PATH}``."""
    subject: str | None = None
    """The subject whose ``version`` has the columns, unless ``schema_file`` has them."""
    version: int | None = None
    """The version of ``subject``: a number, and not "latest", since the columns may not change under the state."""


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """The format of the values of messages."""

    format: str = "raw"
    """The format of values: ``json``, ``avro``, ``protobuf``, ``arrow`` or ``raw``. Default: raw."""
    schema: Mapping[str, str] = field(default_factory=dict)
    """The columns and their types, for ``json`` and ``arrow``: for example ``{user: string, amount: int64}``."""
    schema_file: str | None = None
    """A file with the schema, relative to the folder of the spec: JSON for ``avro``, a set of descriptors for
    ``protobuf``."""
    message: str | None = None
    """The message type of ``protobuf``, with its package. Default: the only one of the schema."""
    schema_registry: RegistryOptions | None = None
    """The schema registry of ``avro`` or ``protobuf``; values then have its prefix of five bytes."""


def open_format(options: FormatOptions, folder: Path) -> Format:
    """The format; ``SpecError`` if its schema cannot be had or used. Libraries are imported only for their format."""
    try:
        return _open(options, folder)
    except BadInput as error:
        raise SpecError(error.message) from None


def _open(options: FormatOptions, folder: Path) -> Format:
    if options.format == "json":
        from shuffle.formats.json_objects import JsonFormat

        return JsonFormat(schema_of(options.schema))
    if options.format == "avro":
        from shuffle.formats.avro import AvroFormat

        registry = _registry(options.schema_registry, folder)
        text, schema_id = _schema_text(options, folder, registry)
        return AvroFormat(text, registry, schema_id)
    if options.format == "protobuf":
        return _open_protobuf(options, folder)
    from shuffle.formats.plain import ArrowFormat, RawFormat

    return ArrowFormat(schema_of(options.schema)) if options.format == "arrow" else RawFormat()


def _open_protobuf(options: FormatOptions, folder: Path) -> Format:
    from shuffle.formats.protobuf import ProtobufFormat, descriptor_of_registry, descriptors_of_set

    registry = _registry(options.schema_registry, folder)
    schema_id: int | None = None
    registered = None
    if registry is not None and options.schema_registry is not None and options.schema_registry.subject is not None:
        assert options.schema_registry.version is not None
        registered = registry.by_version(options.schema_registry.subject, options.schema_registry.version, "serialized")
        schema_id = registered.schema_id
    if options.schema_file is not None:
        files = descriptors_of_set(_file(options.schema_file, folder))
    elif registered is not None:
        files = descriptor_of_registry(registered.text)
    else:
        raise SpecError("the format protobuf needs schema_file, or a subject and a version of schema_registry")
    return ProtobufFormat(files, options.message, registry is not None, schema_id)


def _schema_text(options: FormatOptions, folder: Path, registry: SchemaRegistry | None) -> tuple[str, int | None]:
    """The schema of the spec, and its id in the registry if that is known."""
    given = options.schema_registry
    registered = None
    if registry is not None and given is not None and given.subject is not None:
        assert given.version is not None
        registered = registry.by_version(given.subject, given.version)
    if options.schema_file is not None:
        text = _file(options.schema_file, folder).decode(errors="replace")
        return text, None if registered is None else registered.schema_id
    if registered is None:
        raise SpecError("the format avro needs schema_file, or a subject and a version of schema_registry")
    return registered.text, registered.schema_id


def _registry(given: RegistryOptions | None, folder: Path) -> SchemaRegistry | None:
    if given is None:
        return None
    from shuffle.formats.registry import SchemaRegistry

    user = None if given.user is None else resolved(given.user, folder, "schema_registry.user")
    password = None if given.password is None else resolved(given.password, folder, "schema_registry.password")
    return SchemaRegistry(given.url, user, password)


def _file(name: str, folder: Path) -> bytes:
    path = folder / Path(name).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(SCHEMA_BYTES_MAX + 1)
    except OSError as error:
        raise SpecError(f"schema_file: {path} cannot be read: {error.strerror}") from None
    if len(content) > SCHEMA_BYTES_MAX:
        raise SpecError(f"schema_file: {path} has over {SCHEMA_BYTES_MAX} bytes")
    return content


def describe_format(options: FormatOptions, folder: Path) -> str:
    """What may not change under a state: the format and its columns, not where a registry is. One line of JSON."""
    given = options.schema_registry
    said = {
        "format": options.format,
        "schema": dict(options.schema) or None,
        "schema_file": _digest(options.schema_file, folder),
        "message": options.message,
        "subject": None if given is None else given.subject,
        "version": None if given is None else given.version,
    }
    return json.dumps({name: value for name, value in said.items() if value is not None}, sort_keys=False)


def _digest(name: str | None, folder: Path) -> str | None:
    import hashlib  # Mappers of other inputs load this module, too.

    return None if name is None else "sha256:" + hashlib.sha256(_file(name, folder)).hexdigest()[:32]
