"""Opening a store: nothing is written before it is clear that the database is this store's, and reaches far enough.

The database is looked at without being changed. It has to reach the version that the folder's marker says was
acknowledged: what is missing before it was lost or damaged, what is torn behind it was never acknowledged. A store that
is refused is left as it was found, byte by byte, so that a backup or an expert can still make something of it.

A new store gets FORMAT, database and marker in this order, and the folder of an earlier version gets its marker before
its FORMAT; so wherever a crash stops that, the next opening goes on.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass

from shuffle.errors import CorruptData, ShuffleError
from shuffle.statestore.engine.engine import STORE_ID_KEY, VERSION_KEY, Engine
from shuffle.statestore.local.marker import FILE as MARKER_FILE
from shuffle.statestore.local.marker import Marker
from shuffle.statestore.local.rocks import Rocks, has_database, look
from shuffle.statestore.local.segment_files import SegmentDisk
from shuffle.statestore.local.store_folder import PRIVATE_FOLDER, StoreFolder
from shuffle.support.logs import get_logger

FORMAT_WITH_MARKER = 2

_log = get_logger("shuffle.statestore.local.opening")


@dataclass(frozen=True, slots=True)
class _Found:
    """What the database holds, as far as its log can be read."""

    exists: bool = False
    version: int = 0
    store_id: bytes | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an open store, beside its folder."""

    rocks: Rocks
    marker: Marker
    disk: SegmentDisk
    engine: Engine

    def close(self) -> None:
        self.disk.close()
        self.rocks.close()
        with contextlib.suppress(ShuffleError):
            self.marker.sync()
        self.marker.close()


def open_parts(folder: StoreFolder, now_ms: int) -> Opened:
    """Everything of the store in this folder, which is made if there is none yet."""
    rocks, marker = open_database(folder)
    try:
        disk = SegmentDisk(folder.segments)
        engine = Engine(rocks, disk, now_ms)
    except BaseException:
        rocks.close()
        marker.close()
        raise
    for name in engine.set_aside:
        _log.warning("a file that this store knows nothing about was set aside", file=name, folder=str(folder.path))
    return Opened(rocks, marker, disk, engine)


def open_database(folder: StoreFolder) -> tuple[Rocks, Marker]:
    """The database of the folder and its marker; both are made if the store is new."""
    marker = Marker.found(folder.path)
    try:
        found = _look(folder)
        _check(folder, found, marker)
        if not folder.format:
            folder.set_format()
        for part in (folder.rocks, folder.segments):
            part.mkdir(PRIVATE_FOLDER, exist_ok=True)
        rocks = Rocks(folder.rocks, create=not found.exists)
    except BaseException:
        if marker is not None:
            marker.close()
        raise
    try:
        store_id = found.store_id or (marker.store_id if marker is not None else uuid.uuid4().bytes)
        if found.store_id is None:
            rocks.write([([STORE_ID_KEY], [store_id])])
            rocks.sync()
        if marker is None:
            marker = Marker.make(folder.path, store_id, found.version)
        folder.set_format()
    except BaseException:
        rocks.close()
        raise
    return rocks, marker


def _look(folder: StoreFolder) -> _Found:
    if not has_database(folder.rocks):
        return _Found()
    version, store_id = look(folder.rocks, [VERSION_KEY, STORE_ID_KEY])
    return _Found(True, int(version) if version is not None else 0, store_id)


def _check(folder: StoreFolder, found: _Found, marker: Marker | None) -> None:
    """Raises unless the database is this store's and holds all that was acknowledged."""
    acknowledged = marker.version if marker is not None else 0
    if not found.version and (folder.has_segments or acknowledged):
        state = "empty" if found.exists else "missing"
        raise _damaged(folder, f"its database is {state}, but there are segments or acknowledged commits", 0, marker)
    if marker is None:
        if folder.format >= FORMAT_WITH_MARKER and found.version:
            raise _damaged(folder, f"its file {MARKER_FILE} is missing", found.version)
        return
    if found.store_id != marker.store_id and (found.version or found.store_id is not None):
        theirs = found.store_id.hex() if found.store_id is not None else "none"
        raise _damaged(
            folder,
            f"its database is of another store (id {theirs}, not {marker.store_id.hex()})",
            found.version,
            marker,
        )
    if found.version < acknowledged:
        what = f"its database reaches version {found.version}, but version {acknowledged} was acknowledged"
        raise _damaged(folder, what, found.version, marker)


def _damaged(folder: StoreFolder, what: str, version: int, marker: Marker | None = None) -> CorruptData:
    return CorruptData(
        f"the state store {folder.path} is damaged, or not whole: {what}; nothing was changed, restore the whole "
        "folder from a backup",
        folder=str(folder.path),
        version=version,
        acknowledged=marker.version if marker is not None else None,
    )
