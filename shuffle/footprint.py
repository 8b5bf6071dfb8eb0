"""What a worker process does before it imports anything large: it stays small, and quiet.

Called first thing by ``python -m mapper``, ``reducer`` and ``statestore``. Nothing here changes a result.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def keep_small() -> None:
    _leave_pandas_out()
    # Rows that came over Flight lie where gRPC put them. Every processor this runs on reads them there, and Acero's
    # warning would be printed for every batch.
    os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "ignore")


def share_freed() -> None:
    """Memory that one thread has freed serves any other, and is given back whole. To be called before Arrow is used.

    A worker's rows are received by one thread or made by the one that maps, copied by those that serve, and freed by
    whoever hears of their commit. An allocator with a pool for each thread, as Arrow's own is, or as the C library's is
    unless told otherwise, keeps several times the memory limit that way. The pieces are large and few, so threads do
    not wait for each other.
    """
    if _mallopt(_M_ARENA_MAX, 1):
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def keep_freed(spare_bytes: int) -> None:
    """Up to ``spare_bytes`` that were freed stay with this process, for the rows that come next.

    What a worker holds comes and goes by the batch, and an allocator that gives such large pieces back to the system as
    soon as they are free has to get them again page by page: that was a third of the time of partitioning rows, and a
    good part of receiving them. gRPC takes its memory from malloc, as numpy does and Arrow after ``share_freed``. A
    mapper that is full still gives everything back (``mapper/ingest``).
    """
    if _mallopt(_M_TRIM_THRESHOLD, spare_bytes):
        # Named, or the first call would have fixed it at 128 KiB; more than this malloc does not accept.
        _mallopt(_M_MMAP_THRESHOLD, min(spare_bytes, 32 << 20))


def _mallopt(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (OSError, AttributeError):
        return False  # Another C library: it has its own ways.


def _leave_pandas_out() -> None:
    """pyarrow imports pandas, if it is installed, as soon as it makes an array: 50 MB and 0.3 s for nothing.

    It looks only once, and finds none here. User code is free to import pandas, and ``to_pandas`` looks again.
    """
    if "pandas" in sys.modules:
        return
    refusal = _NoPandas()
    sys.meta_path.insert(0, refusal)
    try:
        import pyarrow as pa

        pa.array([0])
    finally:
        sys.meta_path.remove(refusal)


class _NoPandas(MetaPathFinder):
    """While it is asked, there is no pandas."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("not now", name=fullname)
