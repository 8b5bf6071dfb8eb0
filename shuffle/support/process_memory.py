"""What a worker process does before it imports anything large: it stays small, and quiet.

Called first thing by ``python -m mapper``, ``reducer`` and ``statestore``, and by the command ``shuffle``. Nothing here
changes a result.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

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

    It looks only once, and finds none here. When user code imports pandas, pyarrow is made to look again: it would
    take a Series for any sequence otherwise, and read it by its labels.
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
    sys.meta_path.insert(0, _PandasAfterAll())


class _NoPandas(MetaPathFinder):
    """While it is asked, there is no pandas."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("not now", name=fullname)


class _PandasAfterAll(MetaPathFinder):
    """Finds pandas where the others find it, and tells pyarrow once it is loaded."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != "pandas":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        return spec


class _Telling(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import pyarrow as pa

        pa.array([0]).to_pandas()

    def __getattr__(self, name: str) -> object:
        """Whatever else it is asked for: its files, its source."""
        return getattr(self._loader, name)
