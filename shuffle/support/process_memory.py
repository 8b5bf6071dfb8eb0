"""Settings that keep the memory of a process small. They are made before anything large is imported.

They are called first by ``python -m mapper``, ``reducer`` and ``statestore``, and by the command ``shuffle``. None of
them changes a result.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def keep_small() -> None:
    """Keeps pandas from being imported until user code does, and switches off a warning of Acero."""
    _leave_pandas_out()
    # Rows that came over Flight may be unaligned, since they stay where gRPC has put them. Every processor this runs on
    # can read them there, and Acero's warning would be printed for every batch.
    os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "ignore")


def share_freed() -> None:
    """Makes all threads allocate from one pool, so that memory that one has freed serves any other. To be called before
    Arrow is used.

    A worker's rows are allocated by the thread that receives or maps them, copied by those that serve, and freed by the
    one that handles their commit. An allocator with a pool for each thread, as Arrow's own is, and the C library's by
    default, then keeps several times the memory limit. The allocations are large and few, so threads hardly contend.
    """
    if _mallopt(_M_ARENA_MAX, 1):
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def keep_freed(spare_bytes: int) -> None:
    """Lets this process keep up to ``spare_bytes`` of freed memory for the rows that come next.

    A worker allocates and frees whole batches, and an allocator that returns such large pieces to the system as soon as
    they are free has to get them again page by page: that was a third of the time of partitioning rows, and a good part
    of receiving them. gRPC allocates with malloc, as numpy does, and Arrow after ``share_freed``. A mapper that is full
    still returns everything (``mapper/ingest``).
    """
    if _mallopt(_M_TRIM_THRESHOLD, spare_bytes):
        # Set as well, since the first call fixes it at 128 KiB; malloc accepts at most 32 MiB.
        _mallopt(_M_MMAP_THRESHOLD, min(spare_bytes, 32 << 20))


def _mallopt(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (OSError, AttributeError):
        return False  # Another C library, which has no mallopt.


def _leave_pandas_out() -> None:
    """Hides pandas while pyarrow looks for it.

    If pandas is installed, pyarrow imports it as soon as it makes an array: 50 MB and 0.3 s for nothing. It looks only
    once, and finds none here. When user code imports pandas, pyarrow is made to look again: otherwise it would take a
    Series for any sequence, and read it by its labels.
    """
    if "pandas" in sys.modules:
        return
    finder = _HidePandas()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow as pa

        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, _FindPandas())


class _HidePandas(MetaPathFinder):
    """While it is on ``sys.meta_path``, an import of pandas fails as if it were not installed."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("not now", name=fullname)


class _FindPandas(MetaPathFinder):
    """Finds pandas where the other finders find it, and makes pyarrow look for it again once it is loaded."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != "pandas":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _PandasLoader(spec.loader)
        return spec


class _PandasLoader(Loader):
    """Loads pandas with its own loader, then makes pyarrow notice it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import pyarrow as pa

        pa.array([0]).to_pandas()

    def __getattr__(self, name: str) -> object:
        """Any other attribute of the loader: its files, its source."""
        return getattr(self._loader, name)
