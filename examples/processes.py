"""What the kernel counts of processes: their children, the bytes they wrote, their processor time and their memory.

Bytes written are the kernel's: ``write_bytes`` of ``/proc/<pid>/io`` counts what a process sends to storage. When a
parent waits for a dead child, Linux adds the child's counters to the parent's; so the sum over a process and its living
descendants misses nothing, not even what was written by workers that were killed on the way.
"""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def process_tree(root_pid: int) -> list[int]:
    """``root_pid`` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            parent = _parent_of(int(entry))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry))
    found = [root_pid]
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, ()))
    return found


def _parent_of(pid: int) -> int | None:
    stat = _stat_fields(pid)
    return None if stat is None else int(stat[1])


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` after the name (which may hold spaces); None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def written_bytes(pid: int) -> int:
    """Bytes this process, and those of its children it has waited for, caused to be written to storage."""
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    return int(fields["write_bytes"])


def tree_written_bytes(root_pid: int) -> int:
    """The bytes that a process and all its descendants, dead ones included, caused to be written to storage."""
    return sum(written_bytes(pid) for pid in process_tree(root_pid))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of its children it has waited for."""
    stat = _stat_fields(pid)
    return 0.0 if stat is None else sum(int(ticks) for ticks in stat[11:15]) / _TICKS_PER_S


def own_cpu_seconds(pid: int) -> float:
    """User and system time of a process without its children; 0 when it is gone."""
    stat = _stat_fields(pid)
    return 0.0 if stat is None else sum(int(ticks) for ticks in stat[11:13]) / _TICKS_PER_S


def rss_bytes(pid: int) -> int:
    """The resident memory of a process in bytes; 0 when it is gone."""
    return status_bytes(pid, "VmRSS")


def rss_peak_bytes(pid: int) -> int:
    """The peak of the resident memory of a process in bytes; 0 when it is gone."""
    return status_bytes(pid, "VmHWM")


def status_bytes(pid: int, name: str) -> int:
    """One of the sizes of ``/proc/<pid>/status``, by its name there; 0 when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
