"""The compiled loops over rows (``kernels.c``), if the installation has them.

They are compiled when the package is built, if there is a C compiler; without one the package is built without them,
and everything works, more slowly. ``SHUFFLE_NATIVE=off`` in the environment does without them, too. Whoever has a use
for a kernel asks ``kernels()``, and has a way of its own for None.

``ctypes`` lets go of Python's lock during each call. Nothing is checked in here: callers pass addresses of memory that
they hold, of the sizes that the kernels expect.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from shuffle.errors import SpecError

VERSION = 1
"""The version of the kernels that this code calls. Another one is left over from another version of the project."""

SWITCH = "SHUFFLE_NATIVE"
"""The environment variable that turns the kernels off."""

_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int64

_SIGNATURES: dict[str, list[Any]] = {
    "hash_bytes_32": [_ADDRESS, _ADDRESS, _INT, _ADDRESS],
    "hash_bytes_64": [_ADDRESS, _ADDRESS, _INT, _ADDRESS],
    "hash_ints": [_ADDRESS, _INT, _ADDRESS],
    "hash_longs": [_ADDRESS, _INT, _ADDRESS],
    "owners": [_ADDRESS, _INT, _INT, _ADDRESS, _ADDRESS],
    "split_counts": [_ADDRESS, _INT, _INT, _ADDRESS],
    "split_rows": [_ADDRESS, _INT, ctypes.c_uint32, _ADDRESS],
    "split_fixed": [_ADDRESS, _INT, _ADDRESS, _INT, _ADDRESS],
    "split_bits": [_ADDRESS, _INT, _ADDRESS, _INT, _ADDRESS, _ADDRESS, _ADDRESS],
    "split_offsets": [_ADDRESS, _ADDRESS, _INT, _ADDRESS, _ADDRESS],
    "split_bytes": [_ADDRESS, _INT, _ADDRESS, _ADDRESS, _INT, _ADDRESS],
}
"""The arguments of each kernel. ``owners`` and ``split_…`` exist twice, for reducers in one byte and in two."""

_RETURNS_ROW = ("split_counts",)


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library with the kernels; None if there is none, or it is turned off."""
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise SpecError(f"{SWITCH} is {switch!r} in the environment, and must be on or off")
    files = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if switch == "off" or not files:
        return None
    try:
        library = ctypes.CDLL(str(files[0]))
        if library.kernels_version() != VERSION:
            return None
    except (OSError, AttributeError):  # For another machine, or another file.
        return None
    for name, arguments in _SIGNATURES.items():
        twice = name.startswith(("split_", "owners"))
        for full_name in (f"{name}_8", f"{name}_16") if twice else (name,):
            function = getattr(library, full_name)
            function.argtypes = arguments
            function.restype = _INT if name in _RETURNS_ROW else None
    return library


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where the values of ``array`` begin. ``array.ctypes.data`` is the same, and takes five times as long."""
    address: int = array.__array_interface__["data"][0]
    return address
