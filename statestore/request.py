"""A commit request as it reaches the store: what the transaction read, and the changes that it makes.

Keys and values are encoded (``keys``, ``values``): the store compares and keeps bytes, and only looks inside a value
where a table has constraints. Keys include their table's prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput, SequenceError
from shuffle.limits import NAME_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import Binary, bytes_of, to_list
from shuffle.statestore.codec.row_block import BlockBody
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.codec.segment import validate_payload
from shuffle.statestore.key_range import KeyRange

Pairs = tuple[Sequence[bytes], Sequence[bytes | None]]
"""Keys and the value of each; None deletes the row."""


@dataclass(slots=True)
class ReadSet:
    """The keys and ranges that a transaction read, and at which version. Validated when it commits."""

    version: int
    keys: list[Binary] = field(default_factory=list)
    ranges: list[KeyRange] = field(default_factory=list)


@dataclass(slots=True)
class TableWrite:
    """Rows of one table: keys, and values of which null means delete."""

    table_id: int
    keys: Binary
    values: Binary
    size_bytes: int = field(init=False)
    is_checked: bool = False
    """True once the keys and values were checked to be rows of the table."""
    body: BlockBody | None = None
    """The rows as they are stored in a changelog, if they were encoded already."""

    def __post_init__(self) -> None:
        self.size_bytes = bytes_of(self.keys) + bytes_of(self.values)

    @property
    def pairs(self) -> Pairs:
        return to_list(self.keys), to_list(self.values)


@dataclass(slots=True)
class Precondition:
    """Rows that must be in a table, byte for byte, when the transaction commits; null: no row may have that key."""

    table_id: int
    keys: Binary
    values: Binary


@dataclass(slots=True)
class Append:
    """Rows for one partition of a queue, as Arrow IPC messages: the bytes that the segment will hold."""

    queue_id: int
    partition: int
    payloads: list[pa.Buffer]
    producer: str | None = None
    sequence: int | None = None
    rows: list[int] | None = None
    """The number of rows of each payload, once all of them were validated; None before."""

    def count_rows(self, queue: QueueSchema, not_null: Sequence[int]) -> list[int]:
        """The number of rows of each payload, after a full validation, which is done once."""
        if self.rows is None:
            self.rows = validate_payloads(self.payloads, queue, not_null)
        return self.rows


@dataclass(slots=True)
class Publish:
    """Rows staged earlier become the next rows of a partition."""

    queue_id: int
    partition: int
    staged_id: str


@dataclass(slots=True)
class Trim:
    """Rows of a partition below ``index`` are not needed any more."""

    queue_id: int
    partition: int
    index: int


@dataclass(slots=True)
class CreateTable:
    schema: TableSchema
    if_not_exists: bool = False


@dataclass(slots=True)
class CreateQueue:
    schema: QueueSchema
    if_not_exists: bool = False


@dataclass(slots=True)
class Drop:
    kind: str
    """What is dropped: ``table`` or ``queue``."""
    name: str


CatalogueChange = CreateTable | CreateQueue | Drop


@dataclass(slots=True)
class CommitRequest:
    """One transaction. Its parts take effect together or not at all."""

    reads: ReadSet | None = None
    writes: list[TableWrite] = field(default_factory=list)
    appends: list[Append | Publish] = field(default_factory=list)
    trims: list[Trim] = field(default_factory=list)
    catalogue: CatalogueChange | None = None
    preconditions: list[Precondition] = field(default_factory=list)
    replacement: Any = None
    """A new log of a table (``engine.table_logs.LogReplacement``), by which the store itself keeps its logs short."""

    @property
    def stands_alone(self) -> bool:
        """Whether no other commit may be in the same group."""
        return self.catalogue is not None or self.replacement is not None

    def size_bytes(self) -> int:
        size_bytes = 0
        for write in self.writes:
            size_bytes += write.size_bytes
        for append in self.appends:
            if isinstance(append, Append):
                size_bytes += sum(payload.size for payload in append.payloads)
        return size_bytes

    @property
    def is_empty(self) -> bool:
        return not (self.writes or self.appends or self.trims or self.catalogue or self.replacement)


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a commit that is durable."""

    version: int
    """The version of the store that this commit has made."""
    appended: tuple[tuple[int, int], ...] = ()
    """For each append, in order: the positions of its rows, from ``begin`` up to and without ``end``."""


# --- checks that do not need the store ---


def validate_payloads(payloads: Sequence[pa.Buffer], queue: QueueSchema, not_null: Sequence[int]) -> list[int]:
    """Validates payloads as batches of the queue and returns the number of rows of each."""
    try:
        return [validate_payload(payload, queue.schema, not_null) for payload in payloads]
    except BadInput as error:
        raise type(error)(f"queue {queue.name!r}: {error.message}", queue=queue.name, **error.fields) from None


SEQUENCE_MIN, SEQUENCE_MAX = -(2**63), 2**63 - 1


def check_published_once(appends: Sequence[Append | Publish]) -> None:
    ids = [append.staged_id for append in appends if isinstance(append, Publish)]
    if len(ids) != len(set(ids)):
        raise BadInput("a transaction publishes the same staged rows twice")


def check_producer(append: Append, queue: str) -> None:
    if append.producer is None and append.sequence is None:
        return
    if not isinstance(append.producer, str) or not 0 < len(append.producer.encode()) <= NAME_BYTES_MAX:
        raise BadInput(f"queue {queue!r}: a producer has a name of 1 to {NAME_BYTES_MAX} bytes", queue=queue)
    if not isinstance(append.sequence, int) or not SEQUENCE_MIN <= append.sequence <= SEQUENCE_MAX:
        raise BadInput(
            f"queue {queue!r}, producer {append.producer!r}: {append.sequence!r} is not a sequence number of 64 bits",
            queue=queue,
            producer=append.producer,
        )


def check_sequences(appends: Sequence[Append | Publish]) -> None:
    """A producer's appends in one transaction are in the order of their sequence numbers."""
    last: dict[tuple[int, int, str], int] = {}
    for append in appends:
        if isinstance(append, Publish) or append.producer is None or append.sequence is None:
            continue
        producer = append.queue_id, append.partition, append.producer
        if append.sequence < last.get(producer, append.sequence):
            raise SequenceError(
                f"producer {append.producer!r} is at sequence {last[producer]}; {append.sequence} comes after it in "
                "the same transaction",
                producer=append.producer,
                sequence=append.sequence,
            )
        last[producer] = append.sequence
