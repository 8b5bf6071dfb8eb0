"""The announcement of a daemon to clients on the same machine: its address, in ``daemon.json`` in its folder."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

FILE = "daemon.json"


def announce(folder: Path, address: str, mode: int) -> None:
    """Write the daemon's address to a file in ``folder`` with the permissions ``mode``, atomically."""
    written = folder / f"{FILE}.new"
    written.touch(mode)
    written.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    written.replace(folder / FILE)


def withdraw(folder: Path) -> None:
    """Remove the announcement of a daemon that ends, if it is still there."""
    with contextlib.suppress(FileNotFoundError):
        (folder / FILE).unlink()


def served_at(folder: Path) -> str | None:
    """The address that a daemon has announced in the folder, or None. The daemon may be gone by now."""
    try:
        announced = json.loads((folder / FILE).read_text())
        return str(announced["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
