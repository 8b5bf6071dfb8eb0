"""Discovery of workers: each keeps a lease in the group of its role, and reducers watch the group of the mappers.

Discovery is allowed to be stale: a mapper that has died stays listed until its lease ends, and one that lives may be
missing for a short time after the store was restarted. Nothing that must be exact depends on it; the guid in every
request is what protects against talking to the wrong instance.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from shuffle.durable.tables import mappers_group
from shuffle.errors import Expired, ShuffleError
from shuffle.ids import Guid, MapperIndex
from shuffle.support.logs import get_logger
from shuffle.support.retry import Backoff
from shuffle.support.vital_threads import OnDeath, start_vital

if TYPE_CHECKING:
    from shuffle.statestore import Lease, Member, StateClient

RETRY_MS = 100
"""Milliseconds before the first retry after the store could not be reached; the wait doubles with each."""
RETRY_MS_MAX = 2_000
"""The longest wait between retries, in milliseconds."""
WATCH_WAIT_MS = 1_000
"""Milliseconds of one long poll of the watcher, for which ``close`` may have to wait."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MapperAddress:
    """One registered instance of a mapper."""

    guid: Guid
    """The name of the instance."""
    address: str
    """The address (``grpc://host:port``) on which the instance serves reducers."""


class Membership:
    """Keeps a worker registered for as long as it lives, across restarts of the store.

    ``lost`` is set while the registration is known or presumed to be gone: the lease expired (this process was paused
    for too long), or the store has not responded for a whole time to live. ``on_death`` is called if the thread that
    renews the lease dies (``vital_threads``).
    """

    def __init__(
        self,
        client: StateClient,
        group: str,
        member: str,
        attributes: Mapping[str, str],
        ttl_ms: int,
        on_death: OnDeath,
    ) -> None:
        self.lost = threading.Event()
        self._client = client
        self._group = group
        self._member = member
        # Tells which of two instances with the same index is the younger one; see ``arrange_mappers``.
        self._attributes = {"since_ns": str(time.time_ns()), **attributes}
        self._ttl_ms = ttl_ms
        self._lease: Lease | None = None
        self._renewed_s = time.monotonic()
        self._stopping = threading.Event()
        self._on_death = on_death
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Membership:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Registers before it returns, so that others see this worker from then on; renews in the background."""
        self._step()
        self._thread = start_vital(self._run, f"membership-{self._group}", self._on_death)

    def close(self) -> None:
        """Leaves the group if the store can be reached; otherwise the lease expires by itself."""
        self._stopping.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=self._ttl_ms / 1000)
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                lease.leave()
            except ShuffleError as error:
                _log.info("lease not given back", group=self._group, error=error)

    def _run(self) -> None:
        wait_s = self._ttl_ms / 3000
        while not self._stopping.wait(wait_s):
            wait_s = self._ttl_ms / 3000 if self._step() else min(self._ttl_ms / 3000, RETRY_MS_MAX / 1000)

    def _step(self) -> bool:
        """Renews the lease or registers again. Returns whether the store has the worker listed now."""
        try:
            if self._lease is not None:
                self._lease.renew()
            else:
                self._lease = self._client.leases.register(self._group, self._member, self._attributes, self._ttl_ms)
        except Expired:
            _log.warning("lease expired, registering again", group=self._group, member=self._member)
            self.lost.set()
            self._lease = None
            return self._step_again()
        except ShuffleError as error:
            # A store that was restarted may have forgotten the lease, so do not count on renewing it.
            self._lease = None
            if time.monotonic() - self._renewed_s > self._ttl_ms / 1000:
                self.lost.set()
            _log.warning("lease not renewed", group=self._group, member=self._member, error=error)
            return False
        self._renewed_s = time.monotonic()
        self.lost.clear()
        return True

    def _step_again(self) -> bool:
        try:
            self._lease = self._client.leases.register(self._group, self._member, self._attributes, self._ttl_ms)
        except ShuffleError as error:
            _log.warning("not registered", group=self._group, member=self._member, error=error)
            return False
        self._renewed_s = time.monotonic()
        self.lost.clear()
        return True


def arrange_mappers(members: Iterable[Member]) -> dict[MapperIndex, list[MapperAddress]]:
    """The registered mappers by index, the youngest instance first, since of two that one is likely to be alive."""
    registered: dict[MapperIndex, list[tuple[int, MapperAddress]]] = {}
    for member in members:
        try:
            index = MapperIndex(int(member.attributes["index"]))
            address = MapperAddress(Guid(member.name), member.attributes["address"])
            since_ns = int(member.attributes.get("since_ns", "0"))
        except (KeyError, ValueError):
            continue  # Written by another version of this project: it is of no use here, and no reason to fail.
        registered.setdefault(index, []).append((since_ns, address))
    return {
        index: [address for _, address in sorted(entries, key=lambda entry: -entry[0])]
        for index, entries in sorted(registered.items())
    }


class MapperDirectory:
    """The mappers of one processor, kept up to date by a thread that watches their lease group.

    ``on_death`` is called if that thread dies (``vital_threads``).
    """

    def __init__(self, client: StateClient, processor: str, on_death: OnDeath, wait_ms: int = WATCH_WAIT_MS) -> None:
        self.processor = processor
        self._client = client
        self._group = mappers_group(processor)
        self._wait_ms = wait_ms
        self._changed = threading.Condition()
        self._changes = 0
        self._mappers: dict[MapperIndex, list[MapperAddress]] = {}
        self._closing = threading.Event()
        self._thread = start_vital(self._run, f"directory-{processor}", on_death)

    def __enter__(self) -> MapperDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def mappers(self) -> dict[MapperIndex, list[MapperAddress]]:
        """The mappers known now, by index, the youngest registration first."""
        with self._changed:
            return dict(self._mappers)

    @property
    def changes(self) -> int:
        """The number of changes of the list so far; pass it to ``wait_for_change`` so that no change is missed."""
        with self._changed:
            return self._changes

    def wait_for_change(self, timeout_s: float, since: int | None = None) -> bool:
        """Waits until the list has changed more than ``since`` times, by default once more. Returns whether it did."""
        with self._changed:
            seen = self._changes if since is None else since
            return self._changed.wait_for(lambda: self._changes != seen or self._closing.is_set(), timeout_s)

    def wake(self) -> None:
        """Ends all waits for a change, as a change would: one of those that wait here is to stop."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=(2 * self._wait_ms + RETRY_MS_MAX) / 1000)

    def _run(self) -> None:
        revision = -1
        backoff = Backoff(RETRY_MS, RETRY_MS_MAX, jitter=0.0)
        while not self._closing.is_set():
            begun_s, seen = time.monotonic(), revision
            try:
                revision, members = self._client.leases.watch(self._group, revision, self._wait_ms)
            except ShuffleError as error:
                if not self._closing.is_set():
                    _log.warning("mappers cannot be watched", group=self._group, error=error)
                revision = -1  # A restarted store begins to count revisions anew.
                self._closing.wait(backoff.next_s())
                continue
            backoff.reset()
            self._publish(arrange_mappers(members))
            if revision == seen and time.monotonic() - begun_s < self._wait_ms / 2000:
                # The store has too many watchers to hold this long poll, so the wait is done here.
                self._closing.wait(RETRY_MS / 1000)

    def _publish(self, mappers: dict[MapperIndex, list[MapperAddress]]) -> None:
        with self._changed:
            if mappers != self._mappers:
                self._mappers = mappers
                self._changes += 1
                self._changed.notify_all()
