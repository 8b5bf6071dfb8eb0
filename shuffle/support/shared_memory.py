"""Rows for a process on the same machine: through memory that both see, with only a handle of it on the wire.

A socket copies rows four times between two processes of one machine; this copies them twice, and half of what it costs
to shuffle rows was the socket. A ``MemoryWriter`` has an anonymous memory file (a ``memfd``). It is used again for
every response of one exchange, so its pages are warm; the ``MemoryReader`` of the other side opens it by way of
``/proc``, and copies what is in it before the next request. It needs no cleaning up: the kernel frees it with the last
process that has it open.

Both sides must run on one machine (``machine`` says which) and for one user. Where that is not so, or a system has no
``memfd`` or no ``/proc``, rows go over the wire, which always works. A reader that cannot open the memory raises
``NotShared``, and the request is made again without an offer of shared memory.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from shuffle.limits import KIB
from shuffle.support.logs import get_logger

BYTES_MIN = 256 * KIB
"""The least bytes of a response that is sent through shared memory. Fewer are as quick over the wire."""

_SLACK_BYTES = 256 * KIB
"""The bytes by which the shared memory is larger than the rows it is for: room for what Arrow writes around them."""

_log = get_logger(__name__)


class NotShared(Exception):
    """The memory that a handle names cannot be opened here."""


@functools.cache
def machine() -> str | None:
    """An id that the processes of one user on this machine have in common, and no others; None where memory cannot be
    shared like this."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.getuid()}"
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Where shared rows are: in a file that a process has open."""

    pid: int
    """The id of the process that has the file open."""
    fd: int
    """The file descriptor in that process."""
    inode: int
    """The inode that the file must have; with another one it is not the file that was meant."""
    size_bytes: int
    """The number of bytes at the begin of the file that are used."""


class MemoryWriter:
    """Shared memory that holds the rows of one response at a time."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.is_refused = False
        """Whether the memory could not be created: the system does not allow it, or has no files or memory left."""
        self._fd = -1
        self._inode = 0
        self._memory: mmap.mmap | None = None

    def put(self, batches: Sequence[pa.RecordBatch]) -> MemoryHandle | None:
        """Write the batches over the previous ones; None if they do not fit. Nobody may read the previous ones any
        more."""
        written = self.put_many([batches])
        return None if written is None else written[0]

    def put_many(self, parts: Sequence[Sequence[pa.RecordBatch]]) -> tuple[MemoryHandle, list[tuple[int, int]]] | None:
        """The same for several parts that can be taken apart from each other: also the first byte of each, and the one
        behind its last."""
        if sum(batch.nbytes for batches in parts for batch in batches) > self.bytes_max:
            return None
        if self._memory is None:
            self._open()
        if self.is_refused:
            return None
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(self._memory))
        places: list[tuple[int, int]] = []
        try:
            for batches in parts:
                begin = sink.tell()
                with pa.ipc.new_stream(sink, batches[0].schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                places.append((begin, sink.tell()))
            return MemoryHandle(os.getpid(), self._fd, self._inode, sink.tell()), places
        except (pa.ArrowException, OSError):  # What Arrow writes around the rows does not fit into the slack.
            return None

    def _open(self) -> None:
        try:
            self._fd = os.memfd_create("shuffle-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, self.bytes_max + _SLACK_BYTES)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._inode = os.fstat(self._fd).st_ino
            self._memory = mmap.mmap(self._fd, 0)
        except OSError as error:
            _log.info("rows for reducers on this machine go over the wire", reason=str(error))
            self.close()
            self.is_refused = True

    def close(self) -> None:
        self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemoryReader:
    """Reads what a ``MemoryWriter`` has written. Keeps the last memory open, since the next handle most likely names
    the same one."""

    def __init__(self) -> None:
        self._opened: tuple[int, int, int] | None = None
        self._memory: mmap.mmap | None = None

    def take(self, handle: MemoryHandle, begin: int = 0, end: int | None = None) -> list[pa.RecordBatch]:
        """A copy of the batches that ``handle`` names, or of those between two bytes."""
        memory = self._mapped(handle)
        end = handle.size_bytes if end is None else end
        if not 0 <= begin < end <= min(handle.size_bytes, len(memory)):
            raise NotShared(f"process {handle.pid} tells of bytes {begin} to {end} in shared memory of {len(memory)}")
        own = pa.allocate_buffer(end - begin)
        np.copyto(np.frombuffer(own, np.uint8), np.frombuffer(memory, np.uint8, end - begin, begin))
        return list(pa.ipc.open_stream(own))

    def _mapped(self, handle: MemoryHandle) -> mmap.mmap:
        requested = handle.pid, handle.fd, handle.inode
        if self._memory is None or requested != self._opened:
            self.close()
            try:
                self._memory = _open(handle)
            except (OSError, ValueError) as error:
                raise NotShared(f"the shared memory of process {handle.pid} cannot be opened: {error}") from None
            self._opened = requested
        return self._memory

    def close(self) -> None:
        self._opened = self._memory = None


def _open(handle: MemoryHandle) -> mmap.mmap:
    # Another process may have that pid by now, or in this container, and any file may be open under that descriptor.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", flags)
    try:
        if os.fstat(fd).st_ino != handle.inode:
            raise NotShared(f"file {handle.fd} of process {handle.pid} is another one")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            # A process that reads mapped memory behind the end of its file is killed by the kernel.
            raise NotShared(f"the shared memory of process {handle.pid} could be cut while it is read")
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
