"""Ranges of files as buffers: mapped into this process, or copied."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import pyarrow as pa

from shuffle.errors import CorruptData


def map_range(path: Path | str, offset: int, size_bytes: int) -> pa.Buffer:
    """Bytes of a file, mapped and not copied; fewer than requested if the file is shorter.

    They stay valid after the file is removed, and count as memory of this process only as long as the buffer lives,
    which is why a range is mapped for each read and not the file once.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptData(f"{path}: not a file", file=str(path))
        size_bytes = min(size_bytes, status.st_size - offset)
        if size_bytes <= 0:
            return pa.py_buffer(b"")
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(descriptor, skipped + size_bytes, prot=mmap.PROT_READ, offset=offset - skipped)
    finally:
        os.close(descriptor)
    return pa.py_buffer(mapped).slice(skipped, size_bytes)


def read_range(path: Path, offset: int, size_bytes: int) -> pa.Buffer:
    """Bytes of a file, copied; fewer than requested if the file is shorter.

    Use it for bytes that a library reads in this process: if a page of a mapping cannot be read, because the file was
    truncated or the disk fails, the process is killed there.
    """
    buffer = pa.allocate_buffer(size_bytes)
    view, at = memoryview(buffer).cast("B"), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while at < size_bytes and (count := os.preadv(descriptor, [view[at:]], offset + at)):
            at += count
    finally:
        os.close(descriptor)
    return buffer.slice(0, at)
