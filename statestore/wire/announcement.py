"""How clients on the same machine find the daemon of a folder: it leaves its address there, in ``daemon.json``."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

FILE = "daemon.json"


def announce(folder: Path, address: str, mode: int) -> None:
    """Leave the daemon's address in ``folder``, in a file with the permissions ``mode``, whole or not at all."""
    written = folder / f"{FILE}.new"
    written.touch(mode)
    written.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    written.replace(folder / FILE)


def withdraw(folder: Path) -> None:
    """The daemon ends. An announcement that is gone already is no mistake."""
    with contextlib.suppress(FileNotFoundError):
        (folder / FILE).unlink()


def served_at(folder: Path) -> str | None:
    """The address that a daemon left in the folder. It may be gone by now."""
    try:
        found = json.loads((folder / FILE).read_text())
        return str(found["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
