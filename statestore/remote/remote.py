"""The store behind a daemon: rows over the lane or Flight exchanges, everything else from its control plane."""

from __future__ import annotations

import contextlib
import json
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
from shuffle.statestore.codec.segment import split_records
from shuffle.statestore.remote.control_client import ControlClient, StoreInfo
from shuffle.statestore.remote.flight_client import Answer, NothingSent, StreamPool
from shuffle.statestore.remote.lane_client import Place, SocketPool
from shuffle.statestore.remote.read_ahead import Question, ReadAhead
from shuffle.statestore.request import CatalogueChange, CommitRequest, Committed, CreateQueue, CreateTable
from shuffle.statestore.store import SESSION_TTL_MS_DEFAULT, Member, Moment, QueueRead, Span
from shuffle.statestore.wire.announcement import served_at
from shuffle.statestore.wire.lane_frames import is_small
from shuffle.statestore.wire.messages import Header, Rows, as_values, encode_commit, pack_sections, rows_of
from shuffle.support import flight
from shuffle.support.mapped_files import map_range
from shuffle.support.vital_threads import start_vital

T = TypeVar("T")

TIMEOUT_S_DEFAULT = 30.0
"""How long a call waits for its answer, beyond any wait it asks for itself."""

BYTES_PER_S = 8 * MIB
KEYS_PER_S = 20_000
"""A large question may take longer: what it brings is sent, looked up, written and synced at least this fast. Keys that
are in nobody's cache take the store tens of microseconds each."""

CONNECT_TIMEOUT_S = 5.0

CLOSE_TIMEOUT_S = 1.0
"""Of telling the daemon that something is not needed any more; if it cannot be told, it finds out by itself."""

_NO_REVISION = 2**64 - 1
"""No group ever has this one, so a watch that names it returns at once."""


class RemoteStore:
    """A ``Store`` at ``grpc://host:port``. Reconnects by itself; nothing but commits is ever left unknown."""

    def __init__(
        self,
        address: str,
        timeout_s: float | None = None,
        local_files: bool = True,
        session_ttl_ms: int = SESSION_TTL_MS_DEFAULT,
    ) -> None:
        """``session_ttl_ms``: how long the daemon keeps the snapshots and transactions of a client that died."""
        self._target = _target(address)
        self._address = f"grpc://{self._target}"
        self._timeout_s = TIMEOUT_S_DEFAULT if timeout_s is None else timeout_s
        self._control = ControlClient(self._address)
        self._info: StoreInfo | None = None
        self._local_files = local_files
        self._abandoned: deque[Moment] = deque()
        self._read_ahead = ReadAhead(self._read_wire)
        self._maps_files = False
        """Whether the daemon's files can be read from here."""
        self._session_ttl_ms = session_ttl_ms
        self._session_id = 0
        self._session_lock = threading.Lock()
        self._closed = threading.Event()
        self._failed: ThreadDied | None = None
        """A thread that this client depends on is dead. The process is its user's, so every call says so instead."""
        self._streams = StreamPool(self._connect, self._address, self._fail)
        self._sockets = SocketPool(self._lane_place, self._address)
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
        """A Flight client for the daemon as it is now: after a restart its data plane has another port."""
        return flight.connect(f"grpc://{self._own_host(self._refresh_info().flight_address)}")

    def _lane_place(self) -> Place:
        info = self._refresh_info()
        host, _, port = self._own_host(info.lane_address).rpartition(":")
        if not port.isdigit():
            raise StoreUnavailable(f"the state store at {self._address} is of another version", address=self._address)
        # Only where this very daemon was reached directly: whoever came through a proxy goes on through it.
        return Place(host.strip("[]"), int(port), info.lane_local_name if self._maps_files else "")

    def _own_host(self, address: str) -> str:
        """``host:port`` of ``scheme://host:port``; where the host is left out, it is the one this client uses."""
        found = address.partition("://")[2]
        return self._target.rpartition(":")[0] + found if found.startswith(":") else found

    def _fail(self, error: ThreadDied) -> None:
        self._failed = error

    def _call(self, method: str, **fields: Any) -> dict[str, Any]:
        if self._failed is not None:
            raise self._failed
        return self._control.call(method, self._timeout_s, **fields)

    def _ask(self, header: Header, rows: Rows | None = None, wait_ms: int = 0) -> Answer:
        """A question that may be asked twice: once more when the daemon went away, since it may be back."""
        timeout_s = self._timeout_s + _work_s(rows) + wait_ms / 1000
        return self._twice(lambda: self._ask_once(header, rows, timeout_s))

    def _twice(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except (NothingSent, StoreUnavailable):
            try:
                return ask()
            except NothingSent as error:
                raise StoreUnavailable(str(error), address=self._address) from error

    def _ask_once(self, header: Header, rows: Rows | None, timeout_s: float) -> Answer:
        if self._failed is not None:
            raise self._failed
        if not is_small(header, rows):
            return self._streams.ask(header, rows, timeout_s)
        answer, found = self._sockets.ask(header, rows, timeout_s)
        if "elsewhere" not in answer:
            return answer, found
        # Too large an answer for the lane. What it opened is there, and need not be opened again.
        again = {**header, "hold": False, "moment": answer.get("moment", header.get("moment"))}
        more, found = self._streams.ask(again, rows, timeout_s)
        return {**answer, **more}, found

    # --- the session: what makes moments end with this client ---

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
                self.release_moment(self._abandoned.popleft())
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

    def _ask_in_session(self, header: Header, rows: Rows | None = None, moment: Moment | None = None) -> Answer:
        if moment is not None and moment.session_id:
            return self._ask({**header, "session": moment.session_id}, rows)
        session_id = self._session()
        try:
            return self._ask({**header, "session": session_id}, rows)
        except Expired:
            # The daemon does not know the session any more. What it held is gone, but a new moment can be had.
            self._forget_session(session_id)
            if header.get("moment") is not None:
                raise
            return self._ask({**header, "session": self._session()}, rows)

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

    def open_moment(self) -> Moment:
        answer, _ = self._ask_in_session({"op": "open"})
        return Moment(answer["moment"], answer["version"])

    def share_moment(self, ttl_ms: int) -> Moment:
        # A session of its own: it must live on when this process ends.
        session_id = self._open_session(ttl_ms)
        answer, _ = self._ask({"op": "open", "session": session_id})
        return Moment(answer["moment"], answer["version"], session_id)

    def renew_moment(self, moment: Moment) -> None:
        self._call("RenewSession", session_id=moment.session_id or self._session())

    def abandon_moment(self, moment: Moment) -> None:
        self._abandoned.append(moment)

    def release_moment(self, moment: Moment) -> None:
        if moment.session_id:
            with contextlib.suppress(ShuffleError):
                self._control.call("CloseSession", CLOSE_TIMEOUT_S, session_id=moment.session_id)
            return
        if self._closed.is_set() or not self._session_id:
            return
        # If the daemon cannot be told, the end of the session tells it.
        with contextlib.suppress(ShuffleError):
            self._ask({"op": "release", "session": self._session_id, "moment": moment.moment_id})

    def get(self, moment: Moment | None, table_id: int, keys: Binary) -> Binary:
        header = {"op": "get", "table": table_id}
        if moment is None:
            return _rows(self._ask(header, rows_of(keys, None)))[1]
        answer = self._ask_in_session({**header, "moment": moment.moment_id}, rows_of(keys, None), moment)
        return _rows(answer)[1]

    def get_and_hold(self, table_id: int, keys: Binary) -> tuple[Moment, Binary]:
        answer = self._ask_in_session({"op": "get", "table": table_id, "hold": True}, rows_of(keys, None))
        return Moment(answer[0]["moment"], answer[0]["version"]), _rows(answer)[1]

    def scan(
        self, moment: Moment | None, table_id: int, begin: bytes, end: bytes | None, rows_max: int, reverse: bool
    ) -> Rows:
        header: Header = {"op": "scan", "table": table_id, "rows": rows_max, "reverse": reverse}
        bounds = [begin], [end]
        if moment is None:
            return _rows(self._ask(header, bounds))
        return _rows(self._ask_in_session({**header, "moment": moment.moment_id}, bounds, moment))

    # --- writing ---

    def commit(self, request: CommitRequest, moment: Moment | None = None) -> Committed:
        sections, rows = pack_sections(*encode_commit(request))
        header: Header = {"op": "commit", "sections": sections}
        if request.reads is not None:
            header["version"] = request.reads.version
        if moment is not None:
            header |= {"session": self._session_id, "moment": moment.moment_id}
        timeout_s = self._timeout_s + _work_s(rows)
        try:
            try:
                answer, _ = self._ask_once(header, rows, timeout_s)
            except NothingSent:
                # As good as not asked, and another connection may be better; no commit is ever asked twice otherwise.
                answer, _ = self._ask_once(header, rows, timeout_s)
        except NothingSent as error:
            raise StoreUnavailable(f"{error}: nothing was committed", address=self._address) from error
        except StoreUnavailable as error:
            raise CommitUnknown(f"{error.message}: the commit may or may not have happened; read the state") from error
        return Committed(answer["version"], tuple((begin, end) for begin, end in answer["appended"]))

    def stage(self, queue_id: int, payloads: Sequence[pa.Buffer], ttl_ms: int) -> str:
        rows = rows_of(None, as_values(payloads))
        answer, _ = self._ask({"op": "stage", "queue": queue_id, "ttl_ms": ttl_ms}, rows)
        return str(answer["staged"])

    def discard(self, staged_id: str) -> None:
        self._ask({"op": "discard", "staged": staged_id})

    # --- reading queues ---

    def bounds(self, queue_id: int) -> list[tuple[int, int]]:
        answer, _ = self._ask({"op": "bounds", "queue": queue_id})
        return [(begin, end) for begin, end in answer["bounds"]]

    def read(
        self, queue_id: int, partition: int, begin: int, max_rows: int, max_bytes: int, wait_ms: int
    ) -> QueueRead | None:
        question = Question(queue_id, partition, begin, max_rows, max_bytes)
        wait_ms = min(wait_ms, WAIT_MS_MAX)
        if self._maps_files:
            found = self._read_mapped(question, wait_ms)
            if found is not None or self._maps_files:
                return found
        return self._read_ahead.read(question, wait_ms)

    def _read_wire(
        self, question: Question, wait_ms: int, on_end: Callable[[int], None] | None = None
    ) -> QueueRead | None:
        header, timeout_s = _read_header(question, wait_ms), self._timeout_s + wait_ms / 1000

        def on_header(answer: Header) -> None:
            if on_end is not None:
                on_end(answer["end"])

        answer, data = self._twice(lambda: self._sockets.ask_bytes(header, timeout_s, on_header))
        if data is None:
            return None
        file, offset = answer["file"], answer["offset"]
        return QueueRead(file, offset, split_records(data, file, offset), answer["segment"], answer["end"])

    def _read_mapped(self, question: Question, wait_ms: int) -> QueueRead | None:
        """The records from the segment file itself: the daemon only says where they are."""
        answer, _ = self._ask({**_read_header(question, wait_ms), "local": True}, wait_ms=wait_ms)
        if answer["file"] is None:
            return None
        span = Span(answer["file"], answer["offset"], answer["ends"], answer["segment"], answer["end"])
        try:
            records = span.split(map_range(Path(span.file), span.offset, span.size_bytes))
        except OSError:
            # Trimmed a moment ago, or not this machine's folder after all: from now on rows come over the wire.
            self._maps_files = False
            return None
        return QueueRead(span.file, span.offset, records, span.segment_begin, span.end)

    # --- leases ---

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> int:
        given = {"group": group, "member": member, "attributes": dict(attributes), "ttl_ms": ttl_ms}
        return int(self._call("Register", **given)["lease_id"])

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
        found: dict[str, Any] = json.loads(self._call("Stats")["stats_json"])
        return found

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
        self._streams.close()
        self._sockets.close()
        self._control.close()


def _work_s(rows: Rows | None) -> float:
    """How much longer the answer may take for what the question brings with it."""
    return 0.0 if rows is None else len(rows[0]) / KEYS_PER_S + sum(map(bytes_of, rows)) / BYTES_PER_S


def _target(address: str) -> str:
    target = address.removeprefix("grpc://")
    host, _, port = target.rpartition(":")
    if "://" in target or not host or not port.isdigit():
        raise BadInput(f"not the address of a state store: {address!r}; it looks like grpc://host:port")
    return target


def _read_header(question: Question, wait_ms: int) -> Header:
    return {
        "op": "read",
        "queue": question.queue_id,
        "partition": question.partition,
        "begin": question.begin,
        "rows": question.max_rows,
        "bytes": question.max_bytes,
        "wait_ms": wait_ms,
    }


def _rows(answer: Answer) -> Rows:
    if answer[1] is None:
        raise StoreUnavailable("the state store answered without the rows it was asked for")
    return answer[1]


def _members(reply: dict[str, Any]) -> tuple[int, list[Member]]:
    return int(reply["revision"]), [Member(member["name"], member["attributes"]) for member in reply["members"]]
