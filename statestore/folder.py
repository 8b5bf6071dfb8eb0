"""The folder of a store: who may open it, which format it has, and who serves it.

LOCK          held by the process that has the store open
FORMAT        the version of everything below
rocks/        RocksDB: tables, positions, catalogue
segments/     the rows of queues
daemon.json   the address of the daemon that serves this folder, while it does
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from shuffle.errors import FormatTooNew, StoreError, StoreLocked, StoreNotWritable

FORMAT = 1


class StoreFolder:
    """An opened folder; ``close`` gives it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreNotWritable(
                f"the state store folder {path} cannot be written: {error.strerror}; choose another folder or change "
                "its permissions",
                folder=str(path),
            ) from None
        try:
            self._take_lock()
            self._check_format()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def rocks(self) -> Path:
        return self.path / "rocks"

    @property
    def segments(self) -> Path:
        return self.path / "segments"

    def announce(self, address: str) -> None:
        """Leave the daemon's address for ``StateClient.open``, whole or not at all."""
        written = self.path / "daemon.json.new"
        written.write_text(json.dumps({"address": address, "pid": os.getpid()}))
        written.replace(self.path / "daemon.json")

    def withdraw(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / "daemon.json").unlink()

    def close(self) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 20, 0).decode(errors="replace").strip() or "unknown"
            raise StoreLocked(
                f"the state store {self.path} is open in another process (pid {holder}); stop it, or connect to the "
                "daemon that serves it",
                folder=str(self.path),
                pid=holder,
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d" % os.getpid(), 0)

    def _check_format(self) -> None:
        file = self.path / "FORMAT"
        try:
            if not file.exists():
                if self.rocks.exists():
                    raise StoreError(f"{self.path} has a database but no FORMAT file: it is not a state store")
                file.write_text(f"{FORMAT}\n")
                return
            found = int(file.read_text())
        except ValueError:
            raise StoreError(f"{file} does not hold a format version: the folder is damaged") from None
        except OSError as error:
            raise StoreNotWritable(f"{file}: {error.strerror}", folder=str(self.path)) from None
        if found > FORMAT:
            raise FormatTooNew(
                f"the state store {self.path} has format {found}; this version understands up to {FORMAT}: upgrade",
                folder=str(self.path),
                found=found,
            )


def served_at(path: Path) -> str | None:
    """The address that a daemon left in the folder. It may be gone by now."""
    try:
        found = json.loads((path / "daemon.json").read_text())
        return str(found["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
