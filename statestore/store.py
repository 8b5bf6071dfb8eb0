"""The interface of a state store for its clients: one small Protocol, with two implementations.

``LocalStore`` has RocksDB and the segment files in this process; ``RemoteStore`` talks to a daemon that has them.
Another database with an ordered map of bytes and transactions over it can become a third. Everything typed (schemas,
Arrow tables, read-your-writes) is above this interface, in ``client`` and ``transaction``.
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
"""The time in milliseconds for which a store keeps a client's session after its last sign of life, unless the client
asks for another one."""

STAGED_TTL_MS_DEFAULT = 3_600_000
"""The time in milliseconds for which staged rows wait to be published: enough to restart a failed driver by hand."""


@dataclass(frozen=True)
class Member:
    """One member of a group, as others see it."""

    name: str
    """The name under which the member has registered."""
    attributes: Mapping[str, str]
    """What the member says about itself, for example its address."""


@dataclass(frozen=True, slots=True)
class ReadView:
    """A version of the store that stays readable until it is released."""

    view_id: int
    """The id that the store has given to the view."""
    version: int
    """The version of the store that the view shows."""
    session_id: int = 0
    """The session that holds a view shared between clients; 0 for a view of this client alone."""


@dataclass(slots=True)
class Span:
    """Neighbouring records of one segment: the result of a read of a queue."""

    file: str
    """The name of the segment file."""
    offset: int
    """The offset of the first record in the file."""
    ends: list[int]
    """The end of each record, in bytes from the start of the first one."""
    segment_begin: int
    """The position of the segment's row 0: records count their rows from there."""
    end: int
    """The position after the last row of the records."""

    @property
    def size_bytes(self) -> int:
        return self.ends[-1]

    def split(self, data: pa.Buffer) -> list[pa.Buffer]:
        """Cuts ``data``, the bytes of all the records, into single records."""
        return [data.slice(begin, end - begin) for begin, end in pairwise([0, *self.ends])]


@dataclass(frozen=True, slots=True)
class QueueRead:
    """Neighbouring rows of one partition of a queue, as whole batches."""

    batches: Iterable[tuple[int, pa.RecordBatch]]
    """The batches in their order, each with the position of its first row. The first may begin before the requested
    position, and the last may end after the requested rows. They may be decoded during the iteration, so iterate over
    them once."""
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
        """Release it some time later. For finalisers, which may run inside any lock: takes no lock, sends nothing."""
        ...

    def share_view(self, ttl_ms: int) -> ReadView:
        """A read view for any client, which the store keeps until nobody has renewed it for ``ttl_ms``."""
        ...

    def renew_view(self, view: ReadView) -> None: ...

    def get(self, view: ReadView | None, table_id: int, keys: Binary) -> Binary:
        """The value of each key in ``view``, or as of now; null where there is none. A list if ``keys`` is a list."""
        ...

    def open_view_and_get(self, table_id: int, keys: Binary) -> tuple[ReadView, Binary]:
        """``open_view`` and ``get`` in one request: most transactions begin like this."""
        ...

    def scan(
        self, view: ReadView | None, table_id: int, begin: bytes, end: bytes | None, rows_max: int, reverse: bool
    ) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """The next keys and values of a range; fewer than ``rows_max`` only at its end or at a limit of bytes."""
        ...

    # writing

    def commit(self, request: CommitRequest, view: ReadView | None = None) -> Committed:
        """Durable when it returns; ``view``, in which the transaction read, is released whatever the outcome."""
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
