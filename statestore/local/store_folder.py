"""The folder of a store: who may open it, which format it has, and who serves it.

LOCK          held by the process that has the store open
FORMAT        the version of everything below
STORE         which store this is, and what it has acknowledged (``marker``)
rocks/        RocksDB: tables, positions, catalogue
segments/     the rows of queues
set_aside/    files found in segments/ that this store knows nothing about
daemon.json   the address of the daemon that serves this folder, while it does

The folder is for the user who runs the store, and nobody else: others ask the daemon.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from shuffle.errors import BadInput, CorruptData, FormatTooNew, StoreError, StoreLocked, StoreNotWritable
from shuffle.statestore.local.marker import PRIVATE_FILE, write_whole
from shuffle.statestore.wire import announcement
from shuffle.support.logs import get_logger

FORMAT = 2
"""1 had no marker. Code of that time would not notice a database that is missing, so it must not open this."""

PRIVATE_FOLDER = 0o700

_PARTS = {"LOCK", "FORMAT", "STORE", "rocks", "segments", "set_aside", announcement.FILE, "logs"}
"""What there is in the folder of a store; ``logs`` are those of the processes of a job."""

_log = get_logger("shuffle.statestore.local.store_folder")


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/|(file):")


def scheme_of(text: str) -> str | None:
    """The scheme of an address; None for the path of a folder."""
    match = _SCHEME.match(text)
    return (match[1] or match[2]) if match is not None else None


def folder_path(folder: str | os.PathLike[str]) -> Path:
    """``folder`` as an absolute path; ``BadInput`` for an address, of which a folder ``http:`` would be made else."""
    text = os.fspath(folder)
    if scheme_of(text) is not None:
        raise BadInput(
            f"{text!r} is an address, and a folder is needed here; a store that is served is reached with "
            "StateClient.connect('grpc://host:port')",
            folder=text,
        )
    return Path(text).absolute()


class StoreFolder:
    """An opened folder; ``close`` gives it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = self._opened_lock()
        try:
            self._take_lock()
            self.format = self._found_format()
            """What the folder had when it was opened; 0 for a new one."""
            self._make_private()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def rocks(self) -> Path:
        return self.path / "rocks"

    @property
    def segments(self) -> Path:
        return self.path / "segments"

    @property
    def has_segments(self) -> bool:
        return next(self.segments.glob("*.seg"), None) is not None

    def set_format(self) -> None:
        """From now on the folder has the format of this version."""
        if self.format != FORMAT:
            write_whole(self.path / "FORMAT", b"%d\n" % FORMAT)
            self.format = FORMAT

    def announce(self, address: str) -> None:
        """Leave the daemon's address for ``StateClient.open``, whole or not at all."""
        announcement.announce(self.path, address, PRIVATE_FILE)

    def withdraw(self) -> None:
        announcement.withdraw(self.path)

    def close(self) -> None:
        os.close(self._lock)

    def _opened_lock(self) -> int:
        try:
            self.path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            return os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        except OSError as error:
            raise StoreNotWritable(
                f"the state store folder {self.path} cannot be written: {error.strerror}; choose another folder or "
                "change its permissions",
                folder=str(self.path),
            ) from None

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

    def _found_format(self) -> int:
        file = self.path / "FORMAT"
        try:
            text = file.read_bytes()
        except FileNotFoundError:
            if self.rocks.exists() or self.has_segments:
                raise StoreError(
                    f"{self.path} has a database or segments but no FORMAT file: it is not a state store, or a part of "
                    "one; nothing was changed",
                    folder=str(self.path),
                ) from None
            return 0
        except OSError as error:
            raise StoreNotWritable(f"{file}: {error.strerror}", folder=str(self.path)) from None
        found = int(text) if re.fullmatch(rb"[0-9]{1,9}\s*", text) else 0
        if found < 1:
            raise CorruptData(f"{file} does not hold a format version: the folder is damaged", folder=str(self.path))
        if found > FORMAT:
            raise FormatTooNew(
                f"the state store {self.path} has format {found}; this version understands up to {FORMAT}: upgrade",
                folder=str(self.path),
                found=found,
            )
        return found

    def _make_private(self) -> None:
        """Nobody but its user gets into the folder, also if it was made by an earlier version or by hand."""
        # A store may have been made in a folder of something else; only the store's own parts are private then.
        if {file.name.removesuffix(".new") for file in self.path.iterdir()} <= _PARTS:
            _tighten(self.path)
        for folder in (self.rocks, self.segments):
            if folder.exists() and not folder.is_dir():
                raise StoreNotWritable(
                    f"{folder} is a file, where the state store has a folder: move it away", folder=str(self.path)
                )
            if folder.exists():
                _tighten(folder)


def _tighten(folder: Path) -> None:
    try:
        status = folder.stat()
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            folder.chmod(PRIVATE_FOLDER)
    except OSError as error:
        _log.warning("others may read the state store", folder=str(folder), error=str(error.strerror))


def is_open(path: Path) -> bool:
    """Whether some process has the store in ``path`` open, as a daemon or for itself."""
    try:
        lock = os.open(path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
