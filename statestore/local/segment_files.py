"""Segment files on a real disk: appending, syncing, mapping and removing them. It knows names and bytes, not rows."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from shuffle.errors import CorruptData, DiskFull, StoreError, StoreNotWritable
from shuffle.statestore.local.marker import PRIVATE_FILE, sync_folder
from shuffle.statestore.local.store_folder import PRIVATE_FOLDER
from shuffle.support.mapped_files import map_range

_PARTS_MAX = 512
"""The most buffers of one ``pwritev``; the kernel takes at most 1,024."""

OPEN_FILES_MAX = 128
"""The number of segments that are kept open for the next append: those that were appended to last. Opening one again
costs ten microseconds, and the sync that follows a hundred times as much."""


class SegmentDisk:
    """The folder of segment files. Only one thread at a time appends to a segment; any may map what was committed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        """The file descriptors of the segments that are open and not in use, in the order of their last use."""
        self._lock = threading.Lock()
        self._aside = folder.parent / "set_aside"
        self.written_bytes = 0
        folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self._folder / name

    def map(self, name: str, size_bytes: int, offset: int = 0) -> pa.Buffer:
        """Map ``size_bytes`` of a segment from ``offset`` on; see ``map_range``."""
        path = self.path(name)
        try:
            return map_range(path, offset, size_bytes)
        except FileNotFoundError:
            raise CorruptData(f"{path}: the file is missing, but its rows were acknowledged", file=str(path)) from None

    def names(self) -> Iterator[str]:
        with os.scandir(self._folder) as entries:
            yield from sorted(entry.name for entry in entries if entry.is_file())

    def size(self, name: str) -> int:
        return self.path(name).stat().st_size

    def modified_ms(self, name: str) -> int:
        return self.path(name).stat().st_mtime_ns // 1_000_000

    def create(self, name: str, header: bytes) -> None:
        """Create a segment with its header; its name is durable when this returns, its contents after ``sync``."""
        with _as_store_error(name):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._keep(name, os.open(self.path(name), flags, PRIVATE_FILE))
            self.append(name, 0, [header])
            sync_folder(self._folder)

    def append(self, name: str, offset: int, parts: Sequence[bytes | memoryview]) -> int:
        """Write ``parts`` at ``offset``, which is where the committed bytes end. Returns the bytes written.

        Bytes that an earlier attempt left after the offset are overwritten, and cut off if this attempt fails.
        """
        written = 0
        with self._opened(name) as descriptor, _as_store_error(name):
            try:
                for at in range(0, len(parts), _PARTS_MAX):
                    written += self._write_all(descriptor, offset + written, parts[at : at + _PARTS_MAX])
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, offset)
                raise
        self.written_bytes += written
        return written

    @staticmethod
    def _write_all(descriptor: int, offset: int, parts: Sequence[bytes | memoryview]) -> int:
        total = sum(len(part) for part in parts)
        done = os.pwritev(descriptor, parts, offset)
        if done < total:
            rest = memoryview(b"".join(parts))
            while done < total:
                done += os.pwrite(descriptor, rest[done:], offset + done)
        return total

    def sync(self, name: str) -> None:
        with self._opened(name) as descriptor, _as_store_error(name):
            os.fdatasync(descriptor)

    def truncate(self, name: str, size_bytes: int) -> None:
        with self._opened(name) as descriptor:
            os.ftruncate(descriptor, size_bytes)

    def close_file(self, name: str) -> None:
        """Close a segment that gets no more appends; it can still be mapped."""
        with self._lock:
            descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        self.close_file(name)
        with contextlib.suppress(FileNotFoundError):
            self.path(name).unlink()

    def set_aside(self, name: str) -> None:
        """Move a file to the folder ``set_aside`` beside this one; a file that has the same name there stays."""
        with _as_store_error(name):
            self._aside.mkdir(PRIVATE_FOLDER, exist_ok=True)
            target = self._aside / name
            copy = 0
            while target.exists():
                copy += 1
                target = self._aside / f"{name}.{copy}"
            self.path(name).rename(target)

    def free_bytes(self) -> int:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        for name in list(self._descriptors):
            self.close_file(name)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """The descriptor of a segment's file. While it is in use it is not among those that may be closed."""
        with self._lock:
            descriptor = self._descriptors.pop(name, None)
        if descriptor is None:
            descriptor = os.open(self.path(name), os.O_RDWR | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            self._keep(name, descriptor)

    def _keep(self, name: str, descriptor: int) -> None:
        with self._lock:
            self._descriptors[name] = descriptor
            oldest = next(iter(self._descriptors)) if len(self._descriptors) > OPEN_FILES_MAX else None
            unused = None if oldest is None else self._descriptors.pop(oldest)
        if unused is not None:
            os.close(unused)


@contextlib.contextmanager
def _as_store_error(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no space left for the segment {name}: nothing was acknowledged, free some room") from None
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StoreNotWritable(f"the segment {name} cannot be written: {error.strerror}", file=name) from None
        raise StoreError(f"the segment {name} cannot be written: {error}", file=name) from None
