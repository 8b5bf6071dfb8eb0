"""The folder of a store: who may open it, which format it has, and which daemon serves it.

LOCK          held by the process that has the store open
FORMAT        the version of everything below
STORE         the id of the store, and the version it has acknowledged (``marker``)
rocks/        RocksDB: tables, positions, catalogue
segments/     the rows of queues, and the changelogs of tables
set_aside/    files found in segments/ that this store knows nothing about
daemon.json   the address of the daemon that serves this folder, while it does

Only the user who runs the store may read the folder: other users go through the daemon.
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

FORMAT = 3
"""The format version that this code writes. Code that knows only an older one must not open the folder: format 1 had no
marker, so a missing database would not be noticed, and format 2 had no changelogs of tables, so that the rows in them
would be missing."""

PRIVATE_FOLDER = 0o700
"""The permissions of the store's folders: only the user who runs the store may enter them."""

_PARTS = {"LOCK", "FORMAT", "STORE", "rocks", "segments", "set_aside", announcement.FILE, "logs"}
"""The names that the folder of a store may contain; ``logs`` holds the logs of the processes of a job."""

_log = get_logger("shuffle.statestore.local.store_folder")


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/|(file):")


def scheme_of(text: str) -> str | None:
    """The scheme of an address; None for the path of a folder."""
    match = _SCHEME.match(text)
    return (match[1] or match[2]) if match is not None else None


def folder_path(folder: str | os.PathLike[str]) -> Path:
    """``folder`` as an absolute path; ``BadInput`` for an address, which would become a folder named ``http:``."""
    text = os.fspath(folder)
    if scheme_of(text) is not None:
        raise BadInput(
            f"{text!r} is an address, and a folder is needed here; a store that is served is reached with "
            "StateClient.connect('grpc://host:port')",
            folder=text,
        )
    return Path(text).absolute()


class StoreFolder:
    """An open folder, locked by this process until ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = self._open_lock_file()
        try:
            self._take_lock()
            self.format = self._read_format()
            """The format version of the folder; 0 for a new one, until ``set_format``."""
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
        """Mark the folder as having the format that this code writes."""
        if self.format != FORMAT:
            write_whole(self.path / "FORMAT", b"%d\n" % FORMAT)
            self.format = FORMAT

    def announce(self, address: str) -> None:
        """Write the daemon's address, atomically, to where ``StateClient.open`` looks for it."""
        announcement.announce(self.path, address, PRIVATE_FILE)

    def withdraw(self) -> None:
        announcement.withdraw(self.path)

    def close(self) -> None:
        os.close(self._lock)

    def _open_lock_file(self) -> int:
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

    def _read_format(self) -> int:
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
        version = int(text) if re.fullmatch(rb"[0-9]{1,9}\s*", text) else 0
        if version < 1:
            raise CorruptData(f"{file} does not hold a format version: the folder is damaged", folder=str(self.path))
        if version > FORMAT:
            raise FormatTooNew(
                f"the state store {self.path} has format {version}; this version understands up to {FORMAT}: upgrade",
                folder=str(self.path),
                found=version,
            )
        return version

    def _make_private(self) -> None:
        """Let only its user into the folder, also if it was created by an earlier version or by hand."""
        # A store may have been created in a folder with other files; then only the store's own parts are made private.
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
    """Whether some process has the store in ``path`` open, as a daemon or embedded."""
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
