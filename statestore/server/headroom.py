"""The check that the machine lets the daemon have the address space and the threads that it needs to start.

Where the address space is limited (``ulimit -v``) or the number of threads is (``ulimit -u``, a container), gRPC and
Arrow wait for ever for a thread that cannot be started, or end the process without one of our messages. So both are
allocated first as a test, and released.
"""

from __future__ import annotations

import mmap
import threading

from shuffle.errors import StoreError
from shuffle.limits import MIB

START_BYTES = 2048 * MIB
"""The bytes of address space that the daemon takes when it starts, on top of its code: stacks of threads and arenas of
the allocators. It uses about a twentieth of that as memory."""

START_THREADS = 32
"""The number of threads that the daemon, RocksDB, Arrow and gRPC start, with some to spare."""


def check_headroom() -> None:
    """Raise ``StoreError`` unless the daemon can have its address space and its threads."""
    release = threading.Event()
    started: list[threading.Thread] = []
    try:
        # It can be neither read nor written, so it takes no memory: only addresses.
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
