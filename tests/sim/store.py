"""The state store as a process of the simulation, and the client's end of the wire to it.

The process runs the product's ``LocalStore`` (engine, writer, leases) and ``SessionRegistry`` on the simulated disk.
``SimStore`` is what ``RemoteStore`` is in the real world: it turns calls into messages, and lost answers into the
errors that ``RemoteStore`` raises for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import shuffle.statestore.local.local
import shuffle.statestore.local.opening
from shuffle.errors import CommitConflict, CommitUnknown, Expired, ShuffleError, StoreUnavailable
from shuffle.statestore.codec.arrow_bytes import Binary
from shuffle.statestore.codec.schema import QueueSchema
from shuffle.statestore.request import CatalogueChange, CommitRequest, Committed
from shuffle.statestore.server.session_registry import SessionRegistry
from shuffle.statestore.store import Member, QueueRead, ReadView
from tests.sim import kernel
from tests.sim.disk import Disk, SimKeys, SimMarker, SimSegments, sim_folder
from tests.sim.kernel import Process, World
from tests.sim.network import Network, NoAnswer, NotReached

ADDRESS = "grpc://store:1"
TIMEOUT_S = 1.0
SESSION_TTL_MS = 1_800

Service = tuple[shuffle.statestore.local.local.LocalStore, SessionRegistry]


class StoreHost:
    """Where the store runs: starts it, and starts it again after a crash or when it says that it must be."""

    def __init__(self, world: World, network: Network, disk: Disk) -> None:
        self.world = world
        self.network = network
        self.disk = disk
        self.process: Process | None = None
        self.store: shuffle.statestore.local.local.LocalStore | None = None
        self.on_commit: Callable[[CommitRequest, Committed], None] = lambda request, committed: None
        self.wall_offset_us = 0
        self.starts = 0

    def start(self) -> None:
        if self.process is not None and self.process.alive:
            return
        self.starts += 1
        process = self.process = Process(self.world, f"store#{self.starts}")
        process.wall_offset_us = self.wall_offset_us
        self._wire_disk(process)
        process.spawn("main", lambda: self._main(process))

    def _wire_disk(self, process: Process) -> None:
        def check_alive() -> None:
            if not process.alive:
                raise kernel.Killed

        self.disk.check_alive = check_alive
        self.disk.wait = lambda us: kernel.park(us / kernel.US_PER_S) if self.world.current is not None else None

    def _main(self, process: Process) -> None:
        local: Any = shuffle.statestore.local.local
        opening: Any = shuffle.statestore.local.opening
        local.StoreFolder = sim_folder
        opening.open_database = lambda folder: (SimKeys(self.disk), SimMarker(self.disk))
        segments = SimSegments(self.disk, lambda: self.world.now_us // 1000)
        opening.SegmentDisk = lambda folder: segments
        local.map_range = segments.map_range
        self.store = store = shuffle.statestore.local.local.LocalStore("sim")
        held = SessionRegistry(store)
        self.network.listen(ADDRESS, process, (store, held))
        while store.failure is None:
            kernel.sleep(0.25)
        if not self.disk.failed:
            raise AssertionError(f"the store failed by itself: {store.failure}")
        # As the daemon does: what is on the disk is known only after opening it again.
        self.world.mark("store restarted itself after a failed write")
        self.world.at(self.world.now_us, lambda _: self.crash(100_000))

    def crash(self, down_us: int) -> None:
        """The machine loses power; the store comes back after ``down_us``."""
        if self.process is None or not self.process.alive:
            return
        self.process.kill()
        self.store = None
        self.disk.crash()
        self.world.at(self.world.now_us + down_us, lambda _: self.start())


class SimStore:
    """A ``Store`` of one process."""

    def __init__(self, host: StoreHost, process: Process) -> None:
        self._host = host
        self._network = host.network
        self._process = process
        self._session_id = 0
        self._renewing = False
        self.distort: Callable[[str, tuple[int, list[Member]]], tuple[int, list[Member]]] = lambda group, found: found
        """What faults make of the answers of discovery."""

    # the wire

    def _ask(self, label: str, handler: Callable[[Any, SessionRegistry], Any], wait_ms: int = 0) -> Any:
        def serve(service: Service, call: Any) -> Any:
            return handler(*service)

        try:
            return self._network.call(ADDRESS, label, serve, TIMEOUT_S + wait_ms / 1000)
        except (NotReached, NoAnswer) as error:
            raise StoreUnavailable(str(error), address=ADDRESS) from None

    def _session(self) -> int:
        if not self._session_id:
            self._session_id = self._ask("open_session", lambda store, held: held.open_session(SESSION_TTL_MS))
            if not self._renewing:
                self._renewing = True
                self._process.spawn("renew-session", self._renew)
        return self._session_id

    def _renew(self) -> None:
        while True:
            kernel.sleep(SESSION_TTL_MS / 3000)
            session_id = self._session_id
            if not session_id:
                continue
            try:
                self._renew_once(session_id)
            except Expired:
                self._forget(session_id)
            except ShuffleError:
                continue

    def _renew_once(self, session_id: int) -> None:
        self._ask("renew_session", lambda store, held: held.renew_session(session_id))

    def _forget(self, session_id: int) -> None:
        if self._session_id == session_id:
            self._session_id = 0

    def _in_session(
        self, label: str, handler: Callable[[Any, SessionRegistry, int], Any], view: ReadView | None
    ) -> Any:
        session_id = self._session()
        try:
            return self._ask(label, lambda store, held: handler(store, held, session_id))
        except Expired:
            self._host.world.mark("session expired")
            self._forget(session_id)
            if view is not None:
                raise
            again = self._session()
            return self._ask(label, lambda store, held: handler(store, held, again))

    # the catalogue

    def tables(self) -> list[Any]:
        return self._ask("tables", lambda store, held: store.tables())  # type: ignore[no-any-return]

    def queues(self) -> list[Any]:
        return self._ask("queues", lambda store, held: store.queues())  # type: ignore[no-any-return]

    def change_catalogue(self, change: CatalogueChange) -> None:
        self._ask("catalogue", lambda store, held: store.change_catalogue(change))

    # reading tables

    def open_view(self) -> ReadView:
        def handler(store: Any, held: SessionRegistry, session_id: int) -> ReadView:
            view = store.open_view()
            held.hold(session_id, view)
            return view  # type: ignore[no-any-return]

        return self._in_session("open_moment", handler, None)  # type: ignore[no-any-return]

    def abandon_view(self, view: ReadView) -> None:
        self.release_view(view)

    def release_view(self, view: ReadView) -> None:
        # Called from destructors too, so it must not wait: a message without an answer.
        if kernel.maybe_world() is not self._host.world or not self._process.alive or not self._session_id:
            return
        session_id = self._session_id

        def handler(service: Service, call: Any) -> None:
            store, held = service
            taken = held.take(session_id, view.view_id)
            if taken is not None:
                store.release_view(taken)

        self._network.post(ADDRESS, "release", handler, self._process)

    def share_view(self, ttl_ms: int) -> ReadView:
        raise NotImplementedError("the simulated jobs share no snapshots")

    def renew_view(self, view: ReadView) -> None:
        raise NotImplementedError("the simulated jobs share no snapshots")

    def get(self, view: ReadView | None, table_id: int, keys: Binary) -> Binary:
        if view is None:
            return self._ask("get", lambda store, held: store.get(None, table_id, keys))

        def handler(store: Any, held: SessionRegistry, session_id: int) -> Binary:
            return store.get(held.held(session_id, view.view_id), table_id, keys)

        return self._in_session("get_at", handler, view)

    def open_view_and_get(self, table_id: int, keys: Binary) -> tuple[ReadView, Binary]:
        def handler(store: Any, held: SessionRegistry, session_id: int) -> tuple[ReadView, Binary]:
            view, values = store.open_view_and_get(table_id, keys)
            held.hold(session_id, view)
            return view, values

        return self._in_session("open_view_and_get", handler, None)  # type: ignore[no-any-return]

    def scan(
        self, view: ReadView | None, table_id: int, begin: bytes, end: bytes | None, rows_max: int, reverse: bool
    ) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        if view is None:
            return self._ask(  # type: ignore[no-any-return]
                "scan", lambda store, held: store.scan(None, table_id, begin, end, rows_max, reverse)
            )

        def handler(store: Any, held: SessionRegistry, session_id: int) -> tuple[pa.BinaryArray, pa.BinaryArray]:
            at = held.held(session_id, view.view_id)
            return store.scan(at, table_id, begin, end, rows_max, reverse)  # type: ignore[no-any-return]

        return self._in_session("scan_at", handler, view)  # type: ignore[no-any-return]

    # writing

    def commit(self, request: CommitRequest, view: ReadView | None = None) -> Committed:
        session_id = self._session_id

        def serve(service: Service, call: Any) -> Committed:
            store, held = service
            taken = None
            if view is not None:
                taken = held.take(session_id, view.view_id)
                if taken is None:
                    raise Expired("the transaction is over: its client was silent too long; nothing was written")
            committed = store.commit(request, taken)
            self._host.on_commit(request, committed)
            return committed

        world = self._host.world
        try:
            return self._network.call(ADDRESS, "commit", serve, TIMEOUT_S)  # type: ignore[no-any-return]
        except NotReached as error:
            raise StoreUnavailable(f"{error}: nothing was committed", address=ADDRESS) from None
        except NoAnswer as error:
            world.mark("commit unknown")
            raise CommitUnknown(f"{error}: the commit may or may not have happened; read the state") from None
        except Expired as error:
            world.mark("commit refused, its session was over")
            raise CommitConflict(f"the transaction cannot commit: {error.message}; run it again") from None

    def stage(self, queue_id: int, payloads: Sequence[pa.Buffer], ttl_ms: int) -> str:
        return self._ask("stage", lambda store, held: store.stage(queue_id, payloads, ttl_ms))  # type: ignore[no-any-return]

    def discard(self, staged_id: str) -> None:
        self._ask("discard", lambda store, held: store.discard(staged_id))

    # reading queues

    def bounds(self, queue_id: int) -> list[tuple[int, int]]:
        return self._ask("bounds", lambda store, held: store.bounds(queue_id))  # type: ignore[no-any-return]

    def read(
        self, queue: QueueSchema, partition: int, begin: int, max_rows: int, max_bytes: int, wait_ms: int
    ) -> QueueRead | None:
        return self._ask(  # type: ignore[no-any-return]
            "read",
            lambda store, held: store.read(queue, partition, begin, max_rows, max_bytes, wait_ms),
            wait_ms,
        )

    # leases

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> int:
        return self._ask(  # type: ignore[no-any-return]
            "register", lambda store, held: store.register(group, member, attributes, ttl_ms)
        )

    def renew(self, lease_id: int) -> None:
        self._ask("renew", lambda store, held: store.renew(lease_id))

    def leave(self, lease_id: int) -> None:
        self._ask("leave", lambda store, held: store.leave(lease_id))

    def members(self, group: str) -> tuple[int, list[Member]]:
        return self.distort(group, self._ask("members", lambda store, held: store.members(group)))

    def watch(self, group: str, revision: int, wait_ms: int) -> tuple[int, list[Member]]:
        found = self._ask("watch", lambda store, held: store.watch(group, max(revision, 0), wait_ms), wait_ms)
        return self.distort(group, found)

    def groups(self) -> list[str]:
        return self._ask("groups", lambda store, held: store.groups())  # type: ignore[no-any-return]

    # the rest

    def stats(self) -> dict[str, Any]:
        return {}

    @property
    def address(self) -> str:
        return ADDRESS

    @property
    def folder(self) -> Path | None:
        return None

    def close(self) -> None: ...
