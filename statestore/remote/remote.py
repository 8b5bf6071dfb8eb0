"""The store behind a daemon: rows over a ``Transport``, everything else from its control plane."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from shuffle.errors import BadInput, CommitUnknown, Expired, ShuffleError, StoreUnavailable, ThreadDied
from shuffle.limits import MIB, WAIT_MS_MAX
from shuffle.statestore.codec.arrow_bytes import Binary, bytes_of
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.remote.control_client import ControlClient, StoreInfo
from shuffle.statestore.remote.flight_client import FlightClient
from shuffle.statestore.remote.lane_client import LaneAddress, LaneClient
from shuffle.statestore.remote.read_ahead import ReadAhead
from shuffle.statestore.remote.transport import NothingSent, ReadRequest, ReadResponse, Response, Transports
from shuffle.statestore.request import CatalogueChange, CommitRequest, Committed, CreateQueue, CreateTable
from shuffle.statestore.store import SESSION_TTL_MS_DEFAULT, Member, QueueRead, ReadView, Span
from shuffle.statestore.wire.announcement import served_at
from shuffle.statestore.wire.messages import Header, Rows, as_values, encode_commit, pack_sections, rows_of
from shuffle.support import flight
from shuffle.support.endpoint import Endpoint
from shuffle.support.mapped_files import map_range
from shuffle.support.vital_threads import start_vital

T = TypeVar("T")

TIMEOUT_S_DEFAULT = 30.0
"""The seconds that a call waits for its response, beyond the wait that the request itself asks for."""

BYTES_PER_S = 8 * MIB
KEYS_PER_S = 20_000
"""The rates at which the timeout of a large request is extended: its bytes and keys are sent, looked up, written and
synced at least this fast. Keys that are in no cache take the store tens of microseconds each."""

CONNECT_TIMEOUT_S = 5.0

CLOSE_TIMEOUT_S = 1.0
"""The timeout in seconds of closing a session. If the daemon cannot be reached, the session expires by itself."""

LANE_VARIABLE = "SHUFFLE_STORE_LANE"
"""The environment variable that, set to ``off``, keeps clients from using the lane unless their caller asks for it."""

_NO_REVISION = 2**64 - 1
"""A revision that no group ever has, so that a watch which names it returns at once."""

_OFF = frozenset({"off", "false", "no", "0"})


class RemoteStore:
    """A ``Store`` at ``grpc://host:port``. Reconnects by itself; only the outcome of a commit may remain unknown."""

    def __init__(
        self,
        address: str,
        timeout_s: float | None = None,
        local_files: bool = True,
        session_ttl_ms: int = SESSION_TTL_MS_DEFAULT,
        lane: bool | None = None,
    ) -> None:
        """``session_ttl_ms`` is how long the daemon keeps the snapshots and transactions of a client that died.

        ``lane`` says whether the daemon's lane is used, where it has one; with None, ``LANE_VARIABLE`` decides.
        """
        self._endpoint = Endpoint.parse(address, "the address of a state store")
        self._address = str(self._endpoint)
        self._timeout_s = TIMEOUT_S_DEFAULT if timeout_s is None else timeout_s
        self._control = ControlClient(self._address)
        self._info: StoreInfo | None = None
        self._local_files = local_files
        self._abandoned: deque[ReadView] = deque()
        self._read_ahead = ReadAhead(self._read_wire)
        self._maps_files = False
        """Whether this process can read the daemon's segment files itself."""
        self._session_ttl_ms = session_ttl_ms
        self._session_id = 0
        self._session_lock = threading.Lock()
        self._closed = threading.Event()
        self._failed: ThreadDied | None = None
        """The error, once a thread that this client depends on is dead. The process is its user's and is not ended;
        every call raises the error instead."""
        self._lane_enabled = os.environ.get(LANE_VARIABLE, "").lower() not in _OFF if lane is None else lane
        self._transports = Transports(
            LaneClient(self._lane_address, self._address),
            FlightClient(self._connect, self._address, self._fail),
            self._lane_is_open,
        )
        self._renewer: threading.Thread | None = None
        try:
            self._refresh_info()
        except BaseException:
            self.close()
            raise

    # --- connecting ---

    def _refresh_info(self) -> StoreInfo:
        self._info = info = self._control.info(CONNECT_TIMEOUT_S)
        folder = Path(info.folder)
        # The daemon's files can be mapped only where this very daemon has announced itself in that folder.
        self._maps_files = self._local_files and served_at(folder) == self._address
        return info

    def _connect(self) -> Any:
        """Connect to the daemon's current Flight address: after a restart its data plane has another port."""
        return flight.connect(str(self._resolve(self._refresh_info().flight_address)))

    def _lane_is_open(self) -> bool:
        """Whether the daemon has a lane, by its latest ``Info``, that this client may use."""
        return self._lane_enabled and self._info is not None and bool(self._info.lane_address)

    def _lane_address(self) -> LaneAddress:
        info = self._refresh_info()
        if not info.lane_address:
            # The daemon had one before it was restarted; the next attempt of this request is sent over Flight.
            raise NothingSent(f"the state store at {self._address} has no lane any more")
        lane = self._resolve(info.lane_address)
        # The local socket is used only where this daemon was reached directly: a client of a proxy keeps using it.
        return LaneAddress(lane.host, lane.port, info.lane_local_name if self._maps_files else "")

    def _resolve(self, address: str) -> Endpoint:
        """The endpoint of an address in the daemon's ``Info``; an empty host means the host that this client uses."""
        try:
            return Endpoint.parse(address.partition("://")[2], own_host=self._endpoint.host)
        except BadInput:
            raise StoreUnavailable(
                f"the state store at {self._address} is of another version", address=self._address
            ) from None

    def _fail(self, error: ThreadDied) -> None:
        self._failed = error

    def _call(self, method: str, **fields: Any) -> dict[str, Any]:
        if self._failed is not None:
            raise self._failed
        return self._control.call(method, self._timeout_s, **fields)

    def _send(self, header: Header, rows: Rows | None = None, wait_ms: int = 0) -> Response:
        """Send an idempotent request; if the daemon was gone it is sent once more, since the daemon may be back."""
        timeout_s = self._timeout_s + _extra_timeout_s(rows) + wait_ms / 1000
        return self._with_retry(lambda: self._send_once(header, rows, timeout_s))

    def _with_retry(self, send: Callable[[], T]) -> T:
        try:
            return send()
        except (NothingSent, StoreUnavailable):
            try:
                return send()
            except NothingSent as error:
                raise StoreUnavailable(str(error), address=self._address) from error

    def _send_once(self, header: Header, rows: Rows | None, timeout_s: float) -> Response:
        if self._failed is not None:
            raise self._failed
        return self._transports.send(header, rows, timeout_s)

    # --- the session: read views are released when it ends ---

    def _session(self) -> int:
        with self._session_lock:
            if not self._session_id:
                self._session_id = self._open_session(self._session_ttl_ms)
                if self._renewer is None:
                    self._renewer = start_vital(self._renew_session, "store-session", self._fail)
            return self._session_id

    def _open_session(self, ttl_ms: int) -> int:
        return int(self._call("OpenSession", ttl_ms=ttl_ms)["session_id"])

    def _renew_session(self) -> None:
        while not self._closed.wait(self._session_ttl_ms / 3000):
            session_id = self._session_id
            if not session_id:
                continue
            while self._abandoned:
                self.release_view(self._abandoned.popleft())
            try:
                self._control.call("RenewSession", self._session_ttl_ms / 3000, session_id=session_id)
            except Expired:
                self._forget_session(session_id)
            except ShuffleError:
                continue

    def _forget_session(self, session_id: int) -> None:
        with self._session_lock:
            if self._session_id == session_id:
                self._session_id = 0

    def _send_in_session(self, header: Header, rows: Rows | None = None, view: ReadView | None = None) -> Response:
        if view is not None and view.session_id:
            return self._send({**header, "session": view.session_id}, rows)
        session_id = self._session()
        try:
            return self._send({**header, "session": session_id}, rows)
        except Expired:
            # The daemon does not know the session any more. Its read views are gone, but a new one can be opened.
            self._forget_session(session_id)
            if header.get("view") is not None:
                raise
            return self._send({**header, "session": self._session()}, rows)

    # --- the catalogue ---

    def tables(self) -> list[TableSchema]:
        return [TableSchema.from_json(text) for text in self._call("ListTables")["schema_json"]]

    def queues(self) -> list[QueueSchema]:
        return [QueueSchema.from_json(text) for text in self._call("ListQueues")["schema_json"]]

    def change_catalogue(self, change: CatalogueChange) -> None:
        if isinstance(change, CreateTable):
            self._call("CreateTable", schema_json=change.schema.to_json(), if_not_exists=change.if_not_exists)
        elif isinstance(change, CreateQueue):
            self._call("CreateQueue", schema_json=change.schema.to_json(), if_not_exists=change.if_not_exists)
        else:
            self._call("Drop", kind=change.kind, name=change.name)

    # --- reading tables ---

    def open_view(self) -> ReadView:
        response, _ = self._send_in_session({"op": "open"})
        return ReadView(response["view"], response["version"])

    def share_view(self, ttl_ms: int) -> ReadView:
        # The view gets a session of its own, which must outlive this process.
        session_id = self._open_session(ttl_ms)
        response, _ = self._send({"op": "open", "session": session_id})
        return ReadView(response["view"], response["version"], session_id)

    def renew_view(self, view: ReadView) -> None:
        self._call("RenewSession", session_id=view.session_id or self._session())

    def abandon_view(self, view: ReadView) -> None:
        self._abandoned.append(view)

    def release_view(self, view: ReadView) -> None:
        if view.session_id:
            with contextlib.suppress(ShuffleError):
                self._control.call("CloseSession", CLOSE_TIMEOUT_S, session_id=view.session_id)
            return
        if self._closed.is_set() or not self._session_id:
            return
        # If the request fails, the daemon releases the view when the session ends.
        with contextlib.suppress(ShuffleError):
            self._send({"op": "release", "session": self._session_id, "view": view.view_id})

    def get(self, view: ReadView | None, table_id: int, keys: Binary) -> Binary:
        header = {"op": "get", "table": table_id}
        if view is None:
            return _rows_of_response(self._send(header, rows_of(keys, None)))[1]
        response = self._send_in_session({**header, "view": view.view_id}, rows_of(keys, None), view)
        return _rows_of_response(response)[1]

    def open_view_and_get(self, table_id: int, keys: Binary) -> tuple[ReadView, Binary]:
        response = self._send_in_session({"op": "get", "table": table_id, "hold": True}, rows_of(keys, None))
        return ReadView(response[0]["view"], response[0]["version"]), _rows_of_response(response)[1]

    def scan(
        self, view: ReadView | None, table_id: int, begin: bytes, end: bytes | None, rows_max: int, reverse: bool
    ) -> Rows:
        header: Header = {"op": "scan", "table": table_id, "rows": rows_max, "reverse": reverse}
        bounds = [begin], [end]
        if view is None:
            return _rows_of_response(self._send(header, bounds))
        return _rows_of_response(self._send_in_session({**header, "view": view.view_id}, bounds, view))

    # --- writing ---

    def commit(self, request: CommitRequest, view: ReadView | None = None) -> Committed:
        sections, rows = pack_sections(*encode_commit(request))
        header: Header = {"op": "commit", "sections": sections}
        if request.reads is not None:
            header["version"] = request.reads.version
        if view is not None:
            header |= {"session": self._session_id, "view": view.view_id}
        timeout_s = self._timeout_s + _extra_timeout_s(rows)
        try:
            try:
                response, _ = self._send_once(header, rows, timeout_s)
            except NothingSent:
                # The daemon has not received all of it, and another connection may work. A commit is not sent
                # twice for any other reason.
                response, _ = self._send_once(header, rows, timeout_s)
        except NothingSent as error:
            raise StoreUnavailable(f"{error}: nothing was committed", address=self._address) from error
        except StoreUnavailable as error:
            raise CommitUnknown(f"{error.message}: the commit may or may not have happened; read the state") from error
        return Committed(response["version"], tuple((begin, end) for begin, end in response["appended"]))

    def stage(self, queue_id: int, payloads: Sequence[pa.Buffer], ttl_ms: int) -> str:
        rows = rows_of(None, as_values(payloads))
        response, _ = self._send({"op": "stage", "queue": queue_id, "ttl_ms": ttl_ms}, rows)
        return str(response["staged"])

    def discard(self, staged_id: str) -> None:
        self._send({"op": "discard", "staged": staged_id})

    # --- reading queues ---

    def bounds(self, queue_id: int) -> list[tuple[int, int]]:
        response, _ = self._send({"op": "bounds", "queue": queue_id})
        return [(begin, end) for begin, end in response["bounds"]]

    def read(
        self, queue: QueueSchema, partition: int, begin: int, max_rows: int, max_bytes: int, wait_ms: int
    ) -> QueueRead | None:
        response = self._read(
            ReadRequest(queue.queue_id, partition, begin, max_rows, max_bytes), min(wait_ms, WAIT_MS_MAX)
        )
        return None if response is None else response.decoded(queue.schema)

    def _read(self, request: ReadRequest, wait_ms: int) -> ReadResponse | None:
        if self._maps_files:
            response = self._read_mapped(request, wait_ms)
            if response is not None or self._maps_files:
                return response
        return self._read_ahead.read(request, wait_ms)

    def _read_wire(
        self, request: ReadRequest, wait_ms: int, on_end: Callable[[int], None] | None = None
    ) -> ReadResponse | None:
        header, timeout_s = request.header(wait_ms), self._timeout_s + wait_ms / 1000

        def on_header(response: Header) -> None:
            if on_end is not None:
                on_end(response["end"])

        if self._failed is not None:
            raise self._failed
        response, data = self._with_retry(lambda: self._transports.read(header, timeout_s, on_header))
        return None if data is None else ReadResponse.of(response, data)

    def _read_mapped(self, request: ReadRequest, wait_ms: int) -> ReadResponse | None:
        """Read the records from the segment file itself: the daemon only says where they are."""
        response, _ = self._send({**request.header(wait_ms), "local": True}, wait_ms=wait_ms)
        if response["file"] is None:
            return None
        span = Span(response["file"], response["offset"], response["ends"], response["segment"], response["end"])
        try:
            records = span.split(map_range(span.file, span.offset, span.size_bytes))
        except OSError:
            # The rows were just trimmed, or the folder is another machine's: from now on rows come over the wire.
            self._maps_files = False
            return None
        return ReadResponse(span.file, span.offset, records, span.segment_begin, span.end)

    # --- leases ---

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> int:
        fields = {"group": group, "member": member, "attributes": dict(attributes), "ttl_ms": ttl_ms}
        return int(self._call("Register", **fields)["lease_id"])

    def renew(self, lease_id: int) -> None:
        self._call("Renew", lease_id=lease_id)

    def leave(self, lease_id: int) -> None:
        self._call("Leave", lease_id=lease_id)

    def members(self, group: str) -> tuple[int, list[Member]]:
        return _members(self._call("Members", group=group))

    def watch(self, group: str, revision: int, wait_ms: int) -> tuple[int, list[Member]]:
        wait_ms = min(wait_ms, WAIT_MS_MAX)
        timeout_s = self._timeout_s + wait_ms / 1000
        known = revision if revision >= 0 else _NO_REVISION
        return _members(self._control.call("Watch", timeout_s, group=group, revision=known, wait_ms=wait_ms))

    def groups(self) -> list[str]:
        return list(self._call("Groups")["groups"])

    # --- the rest ---

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(self._call("Stats")["stats_json"])
        return stats

    @property
    def address(self) -> str:
        return self._address

    @property
    def folder(self) -> Path | None:
        return Path(self._info.folder) if self._maps_files and self._info is not None else None

    def close(self) -> None:
        if self._closed.is_set():
            return
        if self._session_id:
            with contextlib.suppress(ShuffleError):
                self._control.call("CloseSession", CLOSE_TIMEOUT_S, session_id=self._session_id)
        self._closed.set()
        self._read_ahead.close()
        self._transports.close()
        self._control.close()


def _extra_timeout_s(rows: Rows | None) -> float:
    """The seconds by which the timeout of a request is extended for its rows."""
    return 0.0 if rows is None else len(rows[0]) / KEYS_PER_S + sum(map(bytes_of, rows)) / BYTES_PER_S


def _rows_of_response(response: Response) -> Rows:
    if response[1] is None:
        raise StoreUnavailable("the state store answered without the rows it was asked for")
    return response[1]


def _members(reply: dict[str, Any]) -> tuple[int, list[Member]]:
    return int(reply["revision"]), [Member(member["name"], member["attributes"]) for member in reply["members"]]
