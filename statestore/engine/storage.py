"""What the engine needs of RocksDB and of a disk.

``rocks`` and ``segment_files`` implement it; the simulation of the tests has its own implementations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from shuffle.errors import StoreUnavailable
from shuffle.statestore.request import Pairs


class KeyView(Protocol):
    """A snapshot of all keys."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def scan(self, begin: bytes, end: bytes | None, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]: ...


class ClosedView:
    """The view of a store that was closed."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        raise StoreUnavailable("the state store is closed")

    def scan(self, begin: bytes, end: bytes | None, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        raise StoreUnavailable("the state store is closed")


class KeyValues(Protocol):
    """An ordered map on disk: what the engine needs of RocksDB."""

    def view(self) -> KeyView: ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of the keys now, including writes that are not yet synced."""
        ...

    def write(self, puts: Sequence[Pairs], cleared: Sequence[tuple[bytes, bytes]] = ()) -> int:
        """Remove the ranges ``cleared`` (begin included, end excluded), then apply ``puts`` in order, in one batch."""
        ...

    def sync(self) -> None: ...

    def write_unlogged(self, puts: Sequence[Pairs]) -> None:
        """Apply ``puts``, which a crash may undo, in any part, until the next ``flush`` has returned."""
        ...

    def flush(self) -> None:
        """Make every write so far durable, those without a log too."""
        ...

    def unflushed_bytes(self) -> int:
        """The bytes that are only in the log so far: they need the same space again when they are flushed."""
        ...

    def statistics(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Segments(Protocol):
    """Segment files: what the engine needs of a disk."""

    written_bytes: int

    def names(self) -> Iterator[str]: ...

    def size(self, name: str) -> int: ...

    def modified_ms(self, name: str) -> int: ...

    def create(self, name: str, header: bytes) -> None: ...

    def append(self, name: str, offset: int, parts: Sequence[bytes | memoryview]) -> int: ...

    def sync(self, name: str) -> None: ...

    def truncate(self, name: str, size_bytes: int) -> None: ...

    def map(self, name: str, size_bytes: int) -> pa.Buffer: ...

    def close_file(self, name: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def set_aside(self, name: str) -> None:
        """Move a file that does not belong to the store out of the way, without changing its content."""
        ...

    def free_bytes(self) -> int: ...

    def close(self) -> None: ...
