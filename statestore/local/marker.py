"""The marker of a store's folder: which store it is, and up to which version its commits were acknowledged.

It is one record in the file ``STORE``:

    8 B magic · 16 B store id · 8 B version · 8 B checksum (xxh3) of what is before it

The store id is random, made with the store, and is a key of its database too, so that a database and a folder which do
not belong together are recognised. The version is written after the log of a group was synced and before any of its
commits is acknowledged, so it never exceeds what is durable; a database with a lower version has lost acknowledged
commits.

It is not synced with every group. A record that was written survives the death of the process in any case; only a power
cut can undo it, back to the record of the last ``sync``. The very first one is synced, so that a version of 0 means
that nothing was ever acknowledged. The record lies within one sector of the disk, which is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash

from shuffle.errors import CorruptData, StoreError, StoreNotWritable

FILE = "STORE"
PRIVATE_FILE = 0o600
"""The permissions of the store's files: only the user who runs the store may read them, others use the daemon."""

_MAGIC = b"SHUFSTO\x01"
_RECORD = struct.Struct("<8s16sQ")
_RECORD_BYTES = _RECORD.size + 8


class Marker:
    """The open marker of one folder. Only one thread writes it."""

    def __init__(self, folder: Path, store_id: bytes, version: int) -> None:
        self.path = folder / FILE
        self.store_id = store_id
        self.version = version
        self.written_bytes = 0
        self.syncs = 0
        self._changed = False
        with _as_store_error(self.path):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    @staticmethod
    def create(folder: Path, store_id: bytes, version: int) -> Marker:
        """Create the marker of a folder that has none; it is durable when this returns."""
        write_whole(folder / FILE, _encoded(store_id, version))
        return Marker(folder, store_id, version)

    @staticmethod
    def load(folder: Path) -> Marker | None:
        """The marker of ``folder``, or None if it has none; raises ``CorruptData`` when it is damaged."""
        path = folder / FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreNotWritable(f"{path}: {error.strerror}", folder=str(folder)) from None
        if len(data) == _RECORD_BYTES:
            magic, store_id, version = _RECORD.unpack_from(data)
            if magic == _MAGIC and data == _encoded(store_id, version):
                return Marker(folder, store_id, version)
        raise CorruptData(
            f"{path} is damaged: nobody knows what the state store has acknowledged; nothing was changed, restore the "
            "whole folder from a backup",
            file=str(path),
            folder=str(folder),
        )

    def acknowledge(self, version: int) -> None:
        """Note that every commit up to ``version`` is durable, before it is acknowledged."""
        first = not self.version
        try:
            self.written_bytes += os.pwrite(self._descriptor, _encoded(self.store_id, version), 0)
        except OSError as error:
            raise _not_written(self.path, error) from None
        self.version = version
        self._changed = True
        if first:
            self.sync()

    def sync(self) -> None:
        """Sync the record if it was written since the last sync, so that it survives a power cut."""
        if self._changed:
            with _as_store_error(self.path):
                os.fdatasync(self._descriptor)
            self.syncs += 1
            self._changed = False

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file atomically: after a crash it has the old or the new content; when this returns, the new."""
    written = path.with_name(path.name + ".new")
    with _as_store_error(path):
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        written.replace(path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encoded(store_id: bytes, version: int) -> bytes:
    record = _RECORD.pack(_MAGIC, store_id, version)
    return record + xxhash.xxh3_64_intdigest(record).to_bytes(8, "little")


@contextlib.contextmanager
def _as_store_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _not_written(path, error) from None


def _not_written(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be written: {error.strerror}", file=str(path))
