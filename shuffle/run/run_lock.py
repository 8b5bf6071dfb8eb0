"""One run of a processor at a time: a second ``shuffle run`` is refused, with the pid of the first.

Two controllers would start two instances of every worker. Their rows would still be counted once, but the instances
would take turns in stopping each other, and a store that the first has started would end with it.

Where the store's folder is on this machine, the run locks a file in it. The kernel releases the lock however the
process ends, so nothing has to be cleaned up after ``kill -9``. In a store elsewhere the run holds a lease, which names
its machine; after ``kill -9`` the lease expires, and the next run waits for that.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shuffle.discovery import Membership
from shuffle.errors import BadInput
from shuffle.ids import new_guid
from shuffle.spec.config import ProcessorSpec
from shuffle.statestore.wire.announcement import served_at
from shuffle.support.slow_wait import announce_slow
from shuffle.support.vital_threads import end_process

if TYPE_CHECKING:
    from shuffle.statestore import Member, StateClient

LOOK_S = 0.1
"""Seconds between two checks whether the lease of another run has ended."""
LEASE_SLACK_S = 1.0
"""Seconds that are waited beyond the time to live of a lease, for a store that responds slowly."""


def logs_of(folder: Path, processor: str) -> Path:
    """The folder of the logs of a processor, in the folder of its store; the lock file is in it, too."""
    return folder / "logs" / processor


@contextmanager
def hold_run_lock(spec: ProcessorSpec, say: Callable[[str], None]) -> Iterator[None]:
    """Raises ``BadInput`` if this processor is running; refuses other runs during the block."""
    with ExitStack() as stack:
        if spec.state_folder is not None:
            stack.enter_context(_locked(spec, spec.state_folder))
        else:
            with announce_slow(f"the state store at {spec.state} to answer", say):
                client = stack.enter_context(spec.open_state())
            folder = client.store.folder
            if folder is not None and served_at(folder) == client.address and os.access(folder, os.W_OK):
                stack.enter_context(_locked(spec, folder))
            else:
                stack.enter_context(_leased(spec, client, say))
        yield


@contextmanager
def _locked(spec: ProcessorSpec, folder: Path) -> Iterator[None]:
    path = logs_of(folder, spec.processor) / "controller.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(f"{spec.at('state')}: {path.parent} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _refused(spec, os.pread(lock, 20, 0).decode(errors="replace").strip()) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d" % os.getpid(), 0)
        yield
    finally:
        os.close(lock)


def _refused(spec: ProcessorSpec, pid: str, host: str | None = None) -> BadInput:
    where = f"pid {pid or 'unknown'}" + (f" on {host}" if host else "")
    return BadInput(
        f"{spec.path}: the processor {spec.processor!r} is already running, {where}; `shuffle status` shows how it is"
        " doing; stop it first to run it from here",
        processor=spec.processor,
        pid=pid,
    )


# Leases in a store elsewhere -----------------------------------------------------------------------------------------


def controllers_group(processor: str) -> str:
    return f"{processor}/controllers"


@contextmanager
def _leased(spec: ProcessorSpec, client: StateClient, say: Callable[[str], None]) -> Iterator[None]:
    group, guid = controllers_group(spec.processor), new_guid()
    _wait_for_others(spec, client, say)
    attributes = {"pid": str(os.getpid()), "host": socket.gethostname()}
    with Membership(client, group, guid, attributes, spec.lease_ttl_ms, end_process):
        # A run that was started at the same time sees this one, too: rather none of the two starts than both.
        for other in client.leases.members(group):
            if other.name != guid and not _is_dead(other):
                raise _refused(spec, other.attributes.get("pid", ""), other.attributes.get("host"))
        yield


def _wait_for_others(spec: ProcessorSpec, client: StateClient, say: Callable[[str], None]) -> None:
    """Waits until no other run is registered. Raises ``BadInput`` at once if the other run lives on this machine."""
    group = controllers_group(spec.processor)
    wait_s = spec.lease_ttl_ms / 1000 + LEASE_SLACK_S
    deadline_s = time.monotonic() + wait_s
    announced = False
    while others := [member for member in client.leases.members(group) if not _is_dead(member)]:
        pid, host = others[0].attributes.get("pid", ""), others[0].attributes.get("host", "")
        if host == socket.gethostname() or time.monotonic() > deadline_s:
            raise _refused(spec, pid, host)
        if not announced:
            say(f"pid {pid} on {host} runs {spec.processor}, or was killed: waiting for its lease ({wait_s:.0f} s)")
            announced = True
        time.sleep(LOOK_S)


def _is_dead(member: Member) -> bool:
    """Whether the run was on this machine and its process has ended."""
    if member.attributes.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(member.attributes["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return True
    except PermissionError:
        return False
    return False
