"""A simulated disk: what the engine needs of RocksDB and of segment files, with every loss that a crash may cause.

``Disk`` is the medium and outlives crashes. ``SimKeys`` and ``SimSegments`` are one process's open files on it. What
was not synced is partly, wholly or not at all there after a crash:

- writes to the ordered map survive as some prefix of the unsynced batches, each batch whole or absent, because
  RocksDB's log has checksums;
- bytes written to a segment survive as any prefix of the write, or as garbage of the same length; a removal may not
  have happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pyarrow as pa

from shuffle.errors import CorruptData, DiskFull, StoreError
from shuffle.statestore.engine.engine import VERSION_KEY

Batch = list[tuple[bytes, bytes | None]]


class Disk:
    """What is there after the power comes back."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.keys: dict[bytes, bytes] = {}
        self.files: dict[str, bytearray] = {}
        self.modified_ms: dict[str, int] = {}
        self.free_bytes = 1 << 40
        self.unsynced: list[Batch] = []
        self.unlogged: list[Batch] = []
        """Writes without the log. They are durable after a flush, and before that as far as chance will have it."""
        self.unsynced_files: dict[str, bytearray] = {}
        """The files as processes see them, where that differs from what is durable."""
        self.removed: dict[str, bytearray] = {}
        self.set_aside: dict[str, bytearray] = {}
        self.acknowledged = 0
        """What the marker of the store says. A crash may take it back by a little; that it does not is the harder case
        for the store, which must find everything that the marker names."""
        self.fail_next: str | None = None
        """A fault waiting for the next operation of that kind: write, sync, append, segment sync."""
        self.failed = False
        """Whether a write or a sync was made to fail since the last crash: then the store may give up."""
        self.on_durable: Callable[[], None] = lambda: None
        self.on_fault: Callable[[str], None] = lambda kind: None
        self.sync_us: Callable[[], int] = lambda: 0
        self.wait: Callable[[int], None] = lambda us: None
        self.check_alive: Callable[[], None] = lambda: None

    def copy(self, rng: Random) -> Disk:
        assert not self.unsynced
        other = Disk(rng)
        other.keys = dict(self.keys)
        other.files = {name: bytearray(data) for name, data in self.files.items()}
        other.modified_ms = dict(self.modified_ms)
        other.acknowledged = self.acknowledged
        return other

    def crash(self) -> None:
        """Decide what becomes of everything that was not synced."""
        survived = self.rng.randint(0, len(self.unsynced))
        if self.unsynced:
            self.on_fault("unsynced batches kept" if survived else "unsynced batches lost")
        for batch in self.unsynced[:survived]:
            apply(self.keys, batch)
        self.unsynced.clear()
        if self.unlogged:
            self.on_fault("unlogged writes lost")
        for batch in self.unlogged[: self.rng.randint(0, len(self.unlogged))]:
            apply(self.keys, batch)
        self.unlogged.clear()
        for name, seen in sorted(self.unsynced_files.items()):
            self._crash_file(name, seen)
        self.unsynced_files.clear()
        for name, data in sorted(self.removed.items()):
            if self.rng.random() < 0.3:
                self.on_fault("removed file came back")
                self.files[name] = data
        self.removed.clear()
        self.fail_next = None
        self.failed = False
        self.on_durable()

    def _crash_file(self, name: str, seen: bytearray) -> None:
        durable = self.files.get(name, bytearray())
        same = next((at for at, (a, b) in enumerate(zip(durable, seen, strict=False)) if a != b), None)
        if same is None:
            same = min(len(durable), len(seen))
        kept = self.rng.randint(same, max(same, len(seen)))
        torn = bytearray(seen[:kept])
        if kept < len(seen):
            self.on_fault("torn write")
            if self.rng.random() < 0.5:
                torn += bytes(self.rng.randrange(256) for _ in range(min(len(seen) - kept, 64)))
        # What was durable before and was not overwritten stays, even if the file was being made shorter.
        if len(torn) < len(durable):
            torn += durable[len(torn) :]
        self.files[name] = torn

    def take_failure(self, kind: str) -> bool:
        if self.fail_next == kind:
            self.fail_next = None
            self.failed = True
            self.on_fault(f"{kind} failed")
            return True
        return False


def apply(keys: dict[bytes, bytes], batch: Batch) -> None:
    for key, value in batch:
        if value is None:
            keys.pop(key, None)
        else:
            keys[key] = value


class SimView:
    """All keys at one moment."""

    def __init__(self, keys: dict[bytes, bytes]) -> None:
        self._keys = keys

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._keys.get(key) for key in keys]

    def scan(self, begin: bytes, end: bytes | None, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        for key in sorted(self._keys, reverse=reverse):
            if begin <= key and (end is None or key < end):
                yield key, self._keys[key]


class SimKeys:
    """An ordered map on ``disk``."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._keys = dict(disk.keys)
        self._view: SimView | None = None

    def view(self) -> SimView:
        self._disk.check_alive()
        if self._view is None:
            self._view = SimView(dict(self._keys))
        return self._view

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._disk.check_alive()
        return [self._keys.get(key) for key in keys]

    def write(
        self,
        puts: Sequence[tuple[Sequence[bytes], Sequence[bytes | None]]],
        cleared: Sequence[tuple[bytes, bytes]] = (),
    ) -> int:
        disk = self._disk
        disk.check_alive()
        if disk.take_failure("write"):
            raise StoreError("RocksDB: IO error: no reason given")
        batch: Batch = [(key, None) for begin, end in cleared for key in self._keys if begin <= key < end]
        batch += [pair for keys, values in puts for pair in zip(keys, values, strict=True)]
        disk.unsynced.append(batch)
        apply(self._keys, batch)
        self._view = None
        return sum(len(key) + len(value or b"") for key, value in batch)

    def sync(self) -> None:
        disk = self._disk
        disk.check_alive()
        count = len(disk.unsynced)
        disk.wait(disk.sync_us())
        if disk.take_failure("sync"):
            raise StoreError("RocksDB: IO error: sync failed")
        for batch in disk.unsynced[:count]:
            apply(disk.keys, batch)
        del disk.unsynced[:count]
        disk.on_durable()

    def write_unlogged(self, puts: Sequence[tuple[Sequence[bytes], Sequence[bytes | None]]]) -> None:
        self._disk.check_alive()
        batch: Batch = [pair for keys, values in puts for pair in zip(keys, values, strict=True)]
        self._disk.unlogged.append(batch)
        apply(self._keys, batch)
        self._view = None

    def flush(self) -> None:
        disk = self._disk
        disk.check_alive()
        count = len(disk.unlogged)
        disk.wait(disk.sync_us())
        for batch in disk.unlogged[:count]:
            apply(disk.keys, batch)
        del disk.unlogged[:count]
        disk.on_durable()

    def unflushed_bytes(self) -> int:
        return 0

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class SimSegments:
    """Segment files on ``disk``."""

    def __init__(self, disk: Disk, now_ms: Callable[[], int] = lambda: 0) -> None:
        self._disk = disk
        self._now_ms = now_ms
        self.written_bytes = 0

    def _seen(self, name: str) -> bytearray:
        found = self._disk.unsynced_files.get(name)
        if found is None:
            found = self._disk.files.get(name)
        if found is None:
            raise FileNotFoundError(name)
        return found

    def names(self) -> Iterator[str]:
        yield from sorted(self._disk.files.keys() | self._disk.unsynced_files.keys())

    def path(self, name: str) -> str:
        return name

    def size(self, name: str) -> int:
        return len(self._seen(name))

    def modified_ms(self, name: str) -> int:
        self._seen(name)
        return self._disk.modified_ms.get(name, 0)

    def create(self, name: str, header: bytes) -> None:
        self._disk.check_alive()
        self._disk.removed.pop(name, None)
        self._disk.files[name] = bytearray()
        self._disk.unsynced_files[name] = bytearray()
        self.append(name, 0, [header])

    def append(self, name: str, offset: int, parts: Sequence[bytes | memoryview]) -> int:
        disk = self._disk
        disk.check_alive()
        data = b"".join(parts)
        before = self._seen(name)
        seen = disk.unsynced_files[name] = bytearray(before)
        if disk.take_failure("append"):
            seen[offset:] = data[: disk.rng.randint(0, len(data))]
            del seen[offset:]
            raise DiskFull(f"no space left for the segment {name}: nothing was acknowledged, free some room")
        seen[offset : offset + len(data)] = data
        disk.modified_ms[name] = self._now_ms()
        self.written_bytes += len(data)
        return len(data)

    def sync(self, name: str) -> None:
        disk = self._disk
        disk.check_alive()
        disk.wait(disk.sync_us())
        if disk.take_failure("segment sync"):
            raise StoreError(f"the segment {name} cannot be written: input/output error", file=name)
        seen = disk.unsynced_files.pop(name, None)
        if seen is not None:
            disk.files[name] = seen

    def truncate(self, name: str, size_bytes: int) -> None:
        self._disk.check_alive()
        del self._seen(name)[size_bytes:]

    def map(self, name: str, size_bytes: int, offset: int = 0) -> pa.Buffer:
        try:
            return self.map_range(name, offset, size_bytes)
        except FileNotFoundError:
            raise CorruptData(f"{name}: there is no such segment", file=name) from None

    def map_range(self, name: str, offset: int, size_bytes: int) -> pa.Buffer:
        self._disk.check_alive()
        return pa.py_buffer(bytes(self._seen(name)[offset : offset + size_bytes]))

    def close_file(self, name: str) -> None: ...

    def forget(self, name: str) -> None: ...

    def remove(self, name: str) -> None:
        disk = self._disk
        disk.check_alive()
        disk.unsynced_files.pop(name, None)
        data = disk.files.pop(name, None)
        if data is not None:
            disk.removed[name] = data

    def set_aside(self, name: str) -> None:
        disk = self._disk
        disk.check_alive()
        disk.set_aside[name] = self._seen(name)
        disk.unsynced_files.pop(name, None)
        disk.files.pop(name, None)

    def free_bytes(self) -> int:
        if not self._disk.free_bytes:
            self._disk.on_fault("disk full")
        return self._disk.free_bytes

    def close(self) -> None: ...


class SimMarker:
    """The marker of the store on ``disk``. A database that falls short of it is refused, as by the real one."""

    store_id = bytes(16)

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.written_bytes = self.syncs = 0
        reached = int(disk.keys.get(VERSION_KEY, b"0"))
        if reached < disk.acknowledged:
            raise CorruptData(f"version {reached} is reached, but {disk.acknowledged} was acknowledged")

    def acknowledge(self, version: int) -> None:
        self._disk.check_alive()
        self._disk.acknowledged = version

    def sync(self) -> None: ...

    def close(self) -> None: ...


def sim_folder(*args: Any) -> Any:
    """In place of the folder of a store: nothing to lock, nothing to announce."""
    from types import SimpleNamespace

    return SimpleNamespace(path="sim", rocks="rocks", segments="segments", close=lambda: None)
