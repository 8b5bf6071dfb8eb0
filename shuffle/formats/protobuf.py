"""The format ``protobuf``: one message in each value, alone or behind the prefix of a schema registry.

The columns are the fields of one message type, by ``ptars``, which decodes and encodes whole batches. Protobuf fits
messages of older and newer schemas by itself, by the numbers of fields, so one schema is enough for all values: that of
the spec, which is a set of descriptors (``protoc --include_imports --descriptor_set_out=orders.desc orders.proto``), or
a version of a subject of the registry.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import ptars
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from shuffle.errors import BadInput
from shuffle.formats import framing
from shuffle.formats.base import (
    BadValue,
    CannotDecode,
    Decoded,
    Format,
    check_columns,
    decode_in_halves,
    short,
    without_prefix,
)

CONFIG = ptars.PtarsConfig(enum_repr="string", timestamp_unit="us", time_unit="us", duration_unit="us")


def descriptors_of_set(content: bytes) -> list[FileDescriptorProto]:
    """The files of a set of descriptors, as protoc writes it."""
    try:
        return list(FileDescriptorSet.FromString(content).file)
    except DecodeError:
        raise BadInput(
            "this is no set of descriptors, as made by protoc --include_imports --descriptor_set_out=FILE NAME.proto"
        ) from None


def descriptor_of_registry(text: str) -> list[FileDescriptorProto]:
    """The one file that a registry returns in the form ``serialized``."""
    try:
        return [FileDescriptorProto.FromString(base64.b64decode(text, validate=True))]
    except (ValueError, DecodeError):
        raise BadInput("the schema registry returned no descriptor of a protobuf file") from None


class ProtobufFormat(Format):
    """Messages of one type. ``framed`` says that values have the prefix of a registry; ``schema_id`` goes into the
    prefix of encoded rows."""

    def __init__(
        self,
        files: list[FileDescriptorProto],
        message: str | None,
        framed: bool = False,
        schema_id: int | None = None,
    ) -> None:
        descriptor = _find(files, message)
        self._handler = ptars.HandlerPool([descriptor.file], CONFIG).get_for_message(descriptor)
        self.schema = ptars.get_schema(descriptor, CONFIG)
        self._framed = framed
        self._schema_id = schema_id
        self._indexes = _place(descriptor)

    def decode(self, values: pa.Array) -> Decoded:
        if not self._framed:
            return decode_in_halves(values, self._attempt, self.schema, self._why)
        split = framing.split(values)
        good, bodies, bad = self._without_indexes(split)
        found = decode_in_halves(bodies, self._attempt, self.schema, self._why)
        bad += [BadValue(int(good[one.index]), one.reason) for one in found.bad]
        if not bad:
            return found
        return Decoded(found.rows, sorted(bad), good if found.values is None else good[found.values])

    def _without_indexes(
        self, split: framing.Framed
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], pa.Array, list[BadValue]]:
        """Takes off the list of indexes as well. It is the same for all messages of a type, so it is compared as a
        whole; a value with another one is looked at alone."""
        expected = framing.encode_indexes(self._indexes)
        fits = pc.starts_with(split.bodies, expected).to_numpy(zero_copy_only=False).astype(bool)
        if fits.all():
            return split.good, without_prefix(split.bodies, len(expected)), split.bad
        bad = list(split.bad)
        for at in np.flatnonzero(~fits).tolist():
            try:
                indexes, _ = framing.decode_indexes(split.bodies[at].as_py())
                why = f"it is another message of its file ({indexes}) than the spec names ({self._indexes})"
            except ValueError as error:
                why = f"its prefix is damaged: {error}"
            bad.append(BadValue(int(split.good[at]), why))
        kept = split.bodies.filter(pa.array(fits))
        return split.good[fits], without_prefix(kept, len(expected)), bad

    def _attempt(self, values: pa.Array) -> pa.Table:
        try:
            return pa.Table.from_batches([self._handler.array_to_record_batch(values)]).cast(self.schema)
        except ValueError as error:  # Arrow's errors are ValueErrors, too.
            raise CannotDecode(short(error)) from error

    def _why(self, values: pa.Array) -> str:
        try:
            self._handler.array_to_record_batch(values)
        except ValueError as error:
            return short(error)
        return "it is no message of the type that the spec names"

    def encode(self, rows: pa.Table) -> pa.Array:
        rows = check_columns(rows, self.schema, "the message type").combine_chunks()
        if not rows.num_rows:
            return pa.array([], pa.binary())
        try:
            values = self._handler.record_batch_to_array(rows.to_batches()[0])
        except ValueError as error:
            raise BadInput(f"the rows cannot be written as protobuf: {short(error)}") from None
        if not self._framed:
            return values
        if self._schema_id is None:
            raise BadInput(
                "to write with a schema registry, name a subject and a version: its id goes before each value"
            )
        return framing.framed(values, framing.prefix(self._schema_id, self._indexes))


def _find(files: list[FileDescriptorProto], message: str | None) -> Any:
    pool = descriptor_pool.DescriptorPool()
    try:
        for file in files:
            for name in file.dependency:
                if name.startswith("google/protobuf/") and name not in {one.name for one in files}:
                    pool.AddSerializedFile(_well_known(name))
            pool.AddSerializedFile(file.SerializeToString())
    except (TypeError, KeyError) as error:
        raise BadInput(f"a file that the message needs is missing or damaged: {short(error)}") from None
    if message is None:
        own = files[-1]
        if len(own.message_type) != 1:
            names = ", ".join(one.name for one in own.message_type)
            raise BadInput(f"{own.name} has several messages ({names}): name one with `message`")
        message = f"{own.package}.{own.message_type[0].name}".lstrip(".")
    try:
        return pool.FindMessageTypeByName(message)
    except KeyError:
        raise BadInput(f"there is no message {message!r} in the protobuf schema") from None


def _well_known(name: str) -> bytes:
    import importlib

    importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    return bytes(descriptor_pool.Default().FindFileByName(name).serialized_pb)


def _place(descriptor: Any) -> list[int]:
    """Where a message's type is in its file: the index of each type around it, the outermost first."""
    place = []
    while descriptor is not None:
        around = descriptor.containing_type
        siblings = around.nested_types if around is not None else list(descriptor.file.message_types_by_name.values())
        place.append([one.full_name for one in siblings].index(descriptor.full_name))
        descriptor = around
    return place[::-1]
