"""Checks of a commit that need nothing of the store but the room on its disk."""

from __future__ import annotations

from shuffle.errors import DiskFull, ShuffleError, StoreError, TooLarge, one_line
from shuffle.limits import MIB, TRANSACTION_APPENDS_MAX, TRANSACTION_BYTES_MAX, TRANSACTION_ROWS_MAX
from shuffle.statestore.codec.arrow_bytes import nulls_in
from shuffle.statestore.engine.commit_group import CommitGroup
from shuffle.statestore.request import CommitRequest
from shuffle.support.logs import get_logger

DISK_RESERVE_BYTES = 16 * MIB
"""Commits are refused while fewer bytes than this are free, so that RocksDB itself never fails on a full disk."""

_log = get_logger("statestore")


def check_size(request: CommitRequest, group: CommitGroup) -> int:
    """Returns the bytes of a commit; raises if they are too many, or if the disk has no room for them."""
    size_bytes = request.size_bytes()
    rows = sum(len(write.keys) for write in request.writes)
    if size_bytes > TRANSACTION_BYTES_MAX or rows > TRANSACTION_ROWS_MAX:
        raise TooLarge(
            f"the transaction has {rows} rows and {size_bytes} bytes; at most {TRANSACTION_ROWS_MAX} rows and "
            f"{TRANSACTION_BYTES_MAX} bytes are taken: split it",
            rows=rows,
            bytes=size_bytes,
        )
    if len(request.appends) > TRANSACTION_APPENDS_MAX:
        raise TooLarge(
            f"the transaction has {len(request.appends)} appends; at most {TRANSACTION_APPENDS_MAX} are taken: "
            "append more rows at a time, or split it",
            appends=len(request.appends),
        )
    # Removing rows must stay possible on a full disk, since it frees space.
    grows = size_bytes > 0 and not all(nulls_in(write.values) == len(write.values) for write in request.writes)
    if grows or request.appends:
        check_room(group.room_bytes, group.size_bytes + size_bytes)
    return size_bytes


def check_room(room_bytes: int, size_bytes: int) -> None:
    """Raises ``DiskFull`` if ``size_bytes`` more could fill the disk, on which ``room_bytes`` are free."""
    # RocksDB needs the space twice: in its log, and for the flushed file.
    if room_bytes < 2 * size_bytes:
        raise DiskFull(
            f"less than {DISK_RESERVE_BYTES // MIB} MiB would be left on the disk of the state store: nothing was "
            "written; free some room and try again"
        )


def refusal_of(error: Exception) -> ShuffleError:
    """The result of a commit that could not be prepared."""
    if isinstance(error, ShuffleError):
        return error
    # The checks cover everything that can be wrong with a commit, so this is a mistake in the store: it is logged.
    _log.error("a commit was refused because of a mistake in the store", error=error)
    return StoreError(f"the state store cannot take this commit ({one_line(error)}): nothing was written")
