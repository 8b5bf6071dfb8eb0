"""The kinds of output that a spec can name, and the frozen description of each.

A kind is one entry of ``KINDS``, as kinds of input are in ``shuffle.spec.inputs``: the key that names it in the spec,
the class that holds its keys, how their values are read, and the path of the class that implements it. The
implementation lies in a layer above and is loaded when it is used. Everything that a kind can *do* is in the
implementation (``shuffle.reducer.outputs.output.Output``); only what can be told from the spec alone is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shuffle.formats.secrets import Given
from shuffle.limits import MIB
from shuffle.spec.inputs import Value
from shuffle.spec.kafka_output import KafkaOutputOptions
from shuffle.support.suggest import did_you_mean
from shuffle.support.units import quoted


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """Where the rows go that reducers emit. Each kind of output has a subclass of its own."""

    kind: ClassVar[str]
    """The key of the spec that names the kind."""

    @property
    def appends_to(self) -> str | None:
        """The queue of the state store that the reducers append to, if they do."""
        return None

    @property
    def is_outside(self) -> bool:
        """Whether the rows go to a place outside of the state store: through the outbox, by way of an exporter."""
        return False

    @property
    def limits(self) -> tuple[int, int, int]:
        """For a place outside: the most rows of a batch, its most bytes, and the most milliseconds that its first row
        waits for others."""
        raise NotImplementedError(f"{self.kind} is no place outside of the state store")

    @property
    def config(self) -> Mapping[str, Any]:
        """What the implementation is created with: the keys of the spec and their values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class QueueOutputSpec(OutputSpec):
    """A queue of the state store."""

    kind: ClassVar[str] = "queue"

    queue: str
    """A queue of the state store with one partition for each reducer: reducer i appends to partition i. It must be
    there before the processor starts, and may not be its input."""

    @property
    def appends_to(self) -> str | None:
        return self.queue


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOutputSpec(OutputSpec):
    """A place outside of the state store. Rows reach it in batches, by way of the exporter."""

    batch_rows_max: int = 1_000_000
    """The most rows that are published at once. Default: 1,000,000."""
    batch_bytes_max: int = 64 * MIB
    """The most bytes that are published at once, as the rows are in memory. Default: 64 MiB."""
    batch_age_ms: int | None = None
    """The longest that the first row of a batch waits for others, in milliseconds. Rows are published sooner if there
    are as many as a batch may have. Default: 10,000; for Kafka 0."""
    batch_age_default_ms: ClassVar[int] = 10_000

    @property
    def is_outside(self) -> bool:
        return True

    @property
    def limits(self) -> tuple[int, int, int]:
        age_ms = self.batch_age_default_ms if self.batch_age_ms is None else self.batch_age_ms
        return self.batch_rows_max, self.batch_bytes_max, age_ms


@dataclass(frozen=True, slots=True)
class ParquetOutputSpec(SinkOutputSpec):
    """A folder of Parquet files."""

    kind: ClassVar[str] = "parquet"

    parquet: str
    """A folder for Parquet files, relative to that of the spec, or an address that ``pyarrow.fs`` knows, such as
    ``s3://bucket/folder``. It is created if it is not there."""
    partition_by: tuple[str, ...] = ()
    """The columns whose values become sub-folders (``day=2026-11-18/``) instead of columns of the files. Default:
    none."""
    compression: str = "zstd"
    """The compression of the files. Default: zstd."""


@dataclass(frozen=True, slots=True)
class DeltaOutputSpec(SinkOutputSpec):
    """A Delta table."""

    kind: ClassVar[str] = "delta"

    delta: str
    """A Delta table: its folder, relative to that of the spec, or an address such as ``s3://bucket/table``. It is
    created if it is not there."""
    partition_by: tuple[str, ...] = ()
    """The columns by which a table that is created is partitioned. Default: none."""
    storage_options: Mapping[str, Given] | None = None
    """The settings of the library for its storage, under its own names (``AWS_REGION``). A secret is written as
    ``{env: NAME}`` or ``{file: PATH}``. Default: none."""


@dataclass(frozen=True, slots=True)
class IcebergOutputSpec(SinkOutputSpec):
    """An Iceberg table."""

    kind: ClassVar[str] = "iceberg"

    iceberg: str
    """An Iceberg table, as ``namespace.table``. It is created if it is not there."""
    catalog: Mapping[str, Given] | None = None
    """The settings of the catalog, under the names of ``pyiceberg`` (``type``, ``uri``, ``warehouse``), and the
    ``name`` of the catalog, which is ``default`` unless given. A secret is written as ``{env: NAME}`` or ``{file:
    PATH}``. Default: the library's own file of settings."""


@dataclass(frozen=True, slots=True)
class KafkaOutputSpec(SinkOutputSpec):
    """A topic of Kafka."""

    kind: ClassVar[str] = "kafka"

    kafka: KafkaOutputOptions
    """A topic of Kafka: a mapping of its own, see below. Rows are published at once, without a ``batch_age``, unless
    one is given."""
    batch_age_default_ms: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class OutputKind:
    """One kind of output."""

    spec: type[OutputSpec]
    """The description; its first field is the key that names the kind."""
    implementation: str
    """The subclass of ``Output``, as ``module:Class``."""
    values: Mapping[str, Value]
    """What each key of this kind takes, by the name of the field."""
    sink: str | None = None
    """The subclass of ``Sink`` for a place outside of the state store, as ``module:Class``. It is imported by the
    exporter only, since it may need a large library."""


OUTBOX = "shuffle.reducer.outputs.outbox:OutboxOutput"
"""The implementation of every place outside of the state store: reducers only append to the outbox."""

_BATCHES: Mapping[str, Value] = {"batch_rows_max": "count", "batch_bytes_max": "size", "batch_age_ms": "duration"}

KINDS: dict[str, OutputKind] = {
    "queue": OutputKind(QueueOutputSpec, "shuffle.reducer.outputs.queue:QueueOutput", {"queue": "queue name"}),
    "kafka": OutputKind(
        KafkaOutputSpec, OUTBOX, {"kafka": "kafka output", **_BATCHES}, "shuffle.reducer.outputs.kafka:KafkaSink"
    ),
    "parquet": OutputKind(
        ParquetOutputSpec,
        OUTBOX,
        {"parquet": "place", "partition_by": "names", "compression": ("zstd", "snappy", "lz4", "none"), **_BATCHES},
        "shuffle.reducer.outputs.parquet:ParquetSink",
    ),
    "delta": OutputKind(
        DeltaOutputSpec,
        OUTBOX,
        {"delta": "place", "partition_by": "names", "storage_options": "storage options", **_BATCHES},
        "shuffle.reducer.outputs.delta:DeltaSink",
    ),
    "iceberg": OutputKind(
        IcebergOutputSpec,
        OUTBOX,
        {"iceberg": "table name", "catalog": "storage options", **_BATCHES},
        "shuffle.reducer.outputs.iceberg:IcebergSink",
    ),
}
"""By the key that names each in the spec."""

IS_INPUT = "is also the input: what is emitted would be read again, and the input never drained; emit to another queue"


def kind_named(keys: Sequence[str]) -> OutputKind:
    """The one kind that the keys of a section name; ``ValueError`` says what is wrong if they do not name one."""
    known = f"the kinds of output are {', '.join(KINDS)}"
    named = [key for key in dict.fromkeys(keys) if key in KINDS]
    if len(named) == 1:
        return KINDS[named[0]]
    if named:
        raise ValueError(f"names {' and '.join(named)}: give only one of them")
    if not keys:
        raise ValueError(f"a mapping that names a kind of output is needed here, such as {{queue: NAME}}; {known}")
    raise ValueError(f"{quoted(keys[0])} is none: {known}{did_you_mean(keys[0], KINDS)}")
