"""Opening a store: nothing is written before it is clear that the database is this store's and is complete.

The database is first read without being changed. It has to reach the version that the folder's marker says was
acknowledged: commits that are missing up to that version were lost or damaged, and a torn end of the log after it was
never acknowledged. The files of a store that is refused stay byte for byte as they are, so that it can still be
repaired, or restored from a backup.

A new store gets FORMAT, database and marker in this order, and the folder of an earlier version gets its marker before
its FORMAT; so wherever a crash interrupts this, the next opening continues.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass

from shuffle.errors import CorruptData, ShuffleError
from shuffle.statestore.engine.engine import STORE_ID_KEY, VERSION_KEY, Engine
from shuffle.statestore.engine.row_log import Guard
from shuffle.statestore.local.marker import FILE as MARKER_FILE
from shuffle.statestore.local.marker import Marker
from shuffle.statestore.local.rocks import Rocks, has_database, read_closed
from shuffle.statestore.local.segment_files import SegmentDisk
from shuffle.statestore.local.store_folder import PRIVATE_FOLDER, StoreFolder
from shuffle.support.logs import get_logger

FORMAT_WITH_MARKER = 2
"""The first format of a store's folder that has a marker."""

_log = get_logger("shuffle.statestore.local.opening")


@dataclass(frozen=True, slots=True)
class _DatabaseState:
    """The version and the store id that the database holds, as far as its log can be read."""

    exists: bool = False
    version: int = 0
    store_id: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoreParts:
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


def open_parts(folder: StoreFolder, now_ms: int, guard: Guard, hash_seed: int) -> StoreParts:
    """Open all parts of the store in this folder, or create them if there is no store yet.

    ``guard`` and ``hash_seed`` are those of ``Engine``.
    """
    rocks, marker = open_database(folder)
    try:
        disk = SegmentDisk(folder.segments)
        engine = Engine(rocks, disk, now_ms, guard=guard, hash_seed=hash_seed)
    except BaseException:
        rocks.close()
        marker.close()
        raise
    for name in engine.set_aside:
        _log.warning("a file that this store knows nothing about was set aside", file=name, folder=str(folder.path))
    return StoreParts(rocks, marker, disk, engine)


def open_database(folder: StoreFolder) -> tuple[Rocks, Marker]:
    """Open the database of the folder and its marker; both are created if the store is new."""
    marker = Marker.load(folder.path)
    try:
        state = _read_state(folder)
        _check(folder, state, marker)
        if not folder.format:
            folder.set_format()
        for part in (folder.rocks, folder.segments):
            part.mkdir(PRIVATE_FOLDER, exist_ok=True)
        rocks = Rocks(folder.rocks, create=not state.exists)
    except BaseException:
        if marker is not None:
            marker.close()
        raise
    try:
        store_id = state.store_id or (marker.store_id if marker is not None else uuid.uuid4().bytes)
        if state.store_id is None:
            rocks.write([([STORE_ID_KEY], [store_id])])
            rocks.sync()
        if marker is None:
            marker = Marker.create(folder.path, store_id, state.version)
        folder.set_format()
    except BaseException:
        rocks.close()
        raise
    return rocks, marker


def _read_state(folder: StoreFolder) -> _DatabaseState:
    if not has_database(folder.rocks):
        return _DatabaseState()
    version, store_id = read_closed(folder.rocks, [VERSION_KEY, STORE_ID_KEY])
    return _DatabaseState(True, int(version) if version is not None else 0, store_id)


def _check(folder: StoreFolder, state: _DatabaseState, marker: Marker | None) -> None:
    """Raise ``CorruptData`` unless the database is this store's and holds all commits that were acknowledged."""
    acknowledged = marker.version if marker is not None else 0
    if not state.version and (folder.has_segments or acknowledged):
        problem = "empty" if state.exists else "missing"
        raise _damaged(folder, f"its database is {problem}, but there are segments or acknowledged commits", 0, marker)
    if marker is None:
        if folder.format >= FORMAT_WITH_MARKER and state.version:
            raise _damaged(folder, f"its file {MARKER_FILE} is missing", state.version)
        return
    if state.store_id != marker.store_id and (state.version or state.store_id is not None):
        theirs = state.store_id.hex() if state.store_id is not None else "none"
        raise _damaged(
            folder,
            f"its database is of another store (id {theirs}, not {marker.store_id.hex()})",
            state.version,
            marker,
        )
    if state.version < acknowledged:
        what = f"its database reaches version {state.version}, but version {acknowledged} was acknowledged"
        raise _damaged(folder, what, state.version, marker)


def _damaged(folder: StoreFolder, what: str, version: int, marker: Marker | None = None) -> CorruptData:
    return CorruptData(
        f"the state store {folder.path} is damaged, or not whole: {what}; nothing was changed, restore the whole "
        "folder from a backup",
        folder=str(folder.path),
        version=version,
        acknowledged=marker.version if marker is not None else None,
    )
