"""Whether the machine lets the daemon have what it needs to start.

Where an address space is limited (``ulimit -v``) or the number of threads is (``ulimit -u``, a container), gRPC and
Arrow wait for ever for a thread that cannot be started, or end the process without a word of ours. So both are asked
for first, and given back.
"""

from __future__ import annotations

import mmap
import threading

from shuffle.errors import StoreError
from shuffle.limits import MIB

START_BYTES = 2048 * MIB
"""Address space that the daemon takes when it starts, on top of its code: stacks of threads and arenas of the
allocators. Of memory it is about a twentieth."""

START_THREADS = 32
"""Threads that the daemon, RocksDB, Arrow and gRPC start, with some to spare."""


def check_headroom() -> None:
    """Raises unless the daemon can be given its address space and its threads."""
    release = threading.Event()
    started: list[threading.Thread] = []
    try:
        # Not to be read or written, so no memory is behind it: only addresses.
        with mmap.mmap(-1, START_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0):
            for _ in range(START_THREADS):
                thread = threading.Thread(target=release.wait, daemon=True)
                thread.start()
                started.append(thread)
    except (OSError, MemoryError, RuntimeError) as error:
        raise StoreError(
            f"the state store cannot start: it is not given {START_BYTES // MIB} MiB of address space and "
            f"{START_THREADS} threads ({error}); raise the limits of this process, see `ulimit -v` and `ulimit -u`"
        ) from None
    finally:
        release.set()
        for thread in started:
            thread.join()
