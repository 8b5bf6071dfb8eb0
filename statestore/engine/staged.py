"""Staged appends: rows written ahead of time under an id, waiting for the transaction that makes them visible.

Each is a segment file of its own, so that publishing it adopts the file and writes no row a second time. The name of
the file has the id of its queue and its time to live in milliseconds; after that time the file is removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from shuffle.errors import BadInput, CorruptData, DiskFull, Expired, TooLarge
from shuffle.limits import STAGED_TTL_MS_MAX
from shuffle.statestore.codec.segment import RecordIndex, decode_head, encode_record
from shuffle.statestore.engine.storage import Segments

STAGED_MAX = 20_000
"""The most staged appends that may wait at once. Each is a file; a batch of 300 GB from Spark has half as many."""

STAGED_DISK_DIVISOR = 2
"""All staged appends together may take the free space of the disk divided by this number; the space that they take
already counts as free."""

_NAME = re.compile(r"staged-(\d+)-([0-9a-f]+)-(\d+)\.seg")


@dataclass(slots=True)
class StagedAppend:
    name: str
    queue_id: int
    rows: int
    size_bytes: int
    index: RecordIndex
    expires_ms: int


class StagedFiles:
    """The staged appends of a store, by their ids."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._waiting: dict[str, StagedAppend] = {}
        self._taken: dict[str, StagedAppend] = {}

    def add(
        self,
        staged_id: str,
        queue_id: int,
        header: bytes,
        payloads: Sequence[tuple[int, pa.Buffer]],
        ttl_ms: int,
        now_ms: int,
    ) -> None:
        """Write and sync the rows under ``staged_id``. ``payloads`` are (rows, Arrow IPC message)."""
        self._check_room(sum(payload.size for _, payload in payloads), ttl_ms)
        name = f"staged-{queue_id}-{staged_id}-{ttl_ms}.seg"
        index = RecordIndex(len(header))
        rows = 0
        parts: list[bytes | memoryview] = []
        for count, payload in payloads:
            record = encode_record(rows, count, payload)
            parts.extend(record)
            index.add(rows, sum(len(part) for part in record))
            rows += count
        try:
            self._segments.create(name, header)
            self._segments.append(name, len(header), parts)
            self._segments.sync(name)
        except BaseException:
            self._segments.remove(name)
            raise
        self._segments.close_file(name)
        self._waiting[staged_id] = StagedAppend(name, queue_id, rows, index.size_bytes, index, now_ms + ttl_ms)

    def _check_room(self, size_bytes: int, ttl_ms: int) -> None:
        if not 0 < ttl_ms <= STAGED_TTL_MS_MAX:
            raise BadInput(f"staged rows wait 1 ms to {STAGED_TTL_MS_MAX} ms to be published, not {ttl_ms}")
        if len(self) >= STAGED_MAX:
            raise TooLarge(f"{STAGED_MAX} staged appends wait to be published: publish or discard some first")
        # A copy, since rows are staged by other threads meanwhile.
        staged_bytes = sum(staged.size_bytes for staged in list(self._waiting.values()))
        if size_bytes + staged_bytes > (self._segments.free_bytes() + staged_bytes) // STAGED_DISK_DIVISOR:
            raise DiskFull(
                f"staged rows that wait to be published have {staged_bytes} bytes, and may have half of what the disk "
                "has left: nothing was written; publish or discard some first"
            )

    def recover(self, name: str, now_ms: int) -> bool:
        """Take over a file when the store is opened; True if it is a staged append that may still be published."""
        match = _NAME.fullmatch(name)
        if match is None:
            return False
        ttl_ms = int(match.group(3))
        expires_ms = self._segments.modified_ms(name) + ttl_ms
        size_bytes = self._segments.size(name)
        if expires_ms <= now_ms:
            return False
        try:
            data = memoryview(self._segments.map(name, size_bytes))
            index = RecordIndex.load(data, size_bytes, name)
            last = decode_head(data, index.offset(len(index) - 1), name) if len(index) else None
        except CorruptData:
            # Cut off while it was being written, so it was never acknowledged.
            return False
        rows = 0 if last is None else last.first_row + last.rows
        staged = StagedAppend(name, int(match.group(1)), rows, size_bytes, index, min(expires_ms, now_ms + ttl_ms))
        self._waiting[match.group(2)] = staged
        return True

    def get(self, staged_id: str, queue_id: int) -> StagedAppend:
        staged = self._waiting.get(staged_id)
        if staged is None or staged.queue_id != queue_id:
            raise Expired(
                f"no rows are staged under {staged_id!r} for this queue: they were published already, or their time "
                "was over",
                staged_id=staged_id,
            )
        return staged

    def take(self, staged_id: str) -> StagedAppend:
        """Reserve staged rows for the group that is being written: no other commit can publish them meanwhile."""
        staged = self._taken[staged_id] = self._waiting.pop(staged_id)
        return staged

    def give_back(self, staged_id: str) -> None:
        """Undo ``take``: the group was not written."""
        self._waiting[staged_id] = self._taken.pop(staged_id)

    def forget(self, staged_id: str) -> None:
        """Forget staged rows that have been published: they are part of their queue now."""
        del self._taken[staged_id]

    def collect(self, now_ms: int) -> list[str]:
        """Forget what nobody published in time; returns the files to remove."""
        # A copy, since rows are staged by other threads meanwhile.
        waiting = list(self._waiting.items())
        expired = [staged_id for staged_id, staged in waiting if staged.expires_ms <= now_ms]
        return [self._waiting.pop(staged_id).name for staged_id in expired]

    def expire(self, staged_id: str) -> None:
        """Let staged rows expire now, since their client has discarded them: the next ``collect`` removes them."""
        staged = self._waiting.get(staged_id)
        if staged is not None:
            staged.expires_ms = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken)
