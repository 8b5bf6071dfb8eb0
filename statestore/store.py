"""What a state store is, as its clients see it: one small Protocol, with two implementations.

``LocalStore`` has RocksDB and the segment files in this process; ``RemoteStore`` talks to a daemon that has. Another
database that keeps an ordered map of bytes and transactions over it can become a third. Everything typed (schemas,
Arrow tables, read-your-writes) is above this line, in ``client`` and ``transaction``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from shuffle.statestore.codec.arrow_bytes import Binary
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.request import CatalogueChange, CommitRequest, Committed

SESSION_TTL_MS_DEFAULT = 10_000
"""How long a store keeps what a client holds there after it was heard of last, unless the client says otherwise."""

STAGED_TTL_MS_DEFAULT = 3_600_000
"""How long staged rows wait to be published: long enough for a failed driver to be restarted by hand."""


@dataclass(frozen=True)
class Member:
    """One member of a group, as others see it."""

    name: str
    """The name under which it has registered."""
    attributes: Mapping[str, str]
    """What it says about itself, for example its address."""


@dataclass(frozen=True, slots=True)
class ReadView:
    """A version of the store that stays readable until it is released."""

    view_id: int
    version: int
    session_id: int = 0
    """Of a moment that is shared between clients: the session that holds it; 0: the client's own."""


@dataclass(slots=True)
class Span:
    """Neighbouring records of one segment: the answer to a read of a queue."""

    file: str
    offset: int
    """Of the first record in the file."""
    ends: list[int]
    """Where each record ends, counted from the first one's start."""
    segment_begin: int
    """The position of the segment's row 0: records count their rows from there."""
    end: int
    """The position after the last row of the records."""

    @property
    def size_bytes(self) -> int:
        return self.ends[-1]

    def split(self, data: pa.Buffer) -> list[pa.Buffer]:
        """The records, out of the bytes that they lie in side by side."""
        return [data.slice(begin, end - begin) for begin, end in pairwise([0, *self.ends])]


@dataclass(frozen=True, slots=True)
class QueueRead:
    """Neighbouring rows of one partition of a queue, as whole batches."""

    batches: Iterable[tuple[int, pa.RecordBatch]]
    """The batches in their order, each with the position of its first row. The first may begin before the position that
    was asked for, and the last may end after the rows that were asked for. They may be decoded while they are gone
    through, which is done once."""
    end: int
    """The position after the last row of the last batch."""


class Store(Protocol):
    """The operations of a state store. Safe to call from many threads."""

    # the catalogue

    def tables(self) -> list[TableSchema]: ...

    def queues(self) -> list[QueueSchema]: ...

    def change_catalogue(self, change: CatalogueChange) -> None: ...

    # reading tables

    def open_view(self) -> ReadView: ...

    def release_view(self, view: ReadView) -> None: ...

    def abandon_view(self, view: ReadView) -> None:
        """Release it some time later. For finalisers, which may run inside any lock: takes none, asks nobody."""
        ...

    def share_view(self, ttl_ms: int) -> ReadView:
        """A moment that any client may read at, held by the store until nobody has renewed it for ``ttl_ms``."""
        ...

    def renew_view(self, view: ReadView) -> None: ...

    def get(self, view: ReadView | None, table_id: int, keys: Binary) -> Binary:
        """The value of each key, null where there is none, in the form of ``keys``; at ``moment``, or as of now."""
        ...

    def get_and_hold(self, table_id: int, keys: Binary) -> tuple[ReadView, Binary]:
        """``open_moment`` and ``get`` in one step: how most transactions begin."""
        ...

    def scan(
        self, view: ReadView | None, table_id: int, begin: bytes, end: bytes | None, rows_max: int, reverse: bool
    ) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """The next keys and values of a range. Fewer than ``rows_max`` only at its end or at a limit of bytes."""
        ...

    # writing

    def commit(self, request: CommitRequest, view: ReadView | None = None) -> Committed:
        """Durable when it returns; ``moment``, where the transaction read, is released whatever the outcome."""
        ...

    def stage(self, queue_id: int, payloads: Sequence[pa.Buffer], ttl_ms: int) -> str: ...

    def discard(self, staged_id: str) -> None: ...

    # reading queues

    def bounds(self, queue_id: int) -> list[tuple[int, int]]: ...

    def read(
        self, queue: QueueSchema, partition: int, begin: int, max_rows: int, max_bytes: int, wait_ms: int
    ) -> QueueRead | None:
        """Rows from the position ``begin`` on; None when none came within ``wait_ms``."""
        ...

    # leases

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> int: ...

    def renew(self, lease_id: int) -> None: ...

    def leave(self, lease_id: int) -> None: ...

    def members(self, group: str) -> tuple[int, list[Member]]:
        """The group's revision and its members."""
        ...

    def watch(self, group: str, revision: int, wait_ms: int) -> tuple[int, list[Member]]: ...

    def groups(self) -> list[str]: ...

    # the rest

    def stats(self) -> dict[str, Any]: ...

    @property
    def address(self) -> str: ...

    @property
    def folder(self) -> Path | None:
        """The store's folder, when its files can be read from this process."""
        ...

    def close(self) -> None: ...
