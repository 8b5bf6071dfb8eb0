"""The handlers of the operations of the data plane, the same for both transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from shuffle.errors import (
    BadInput,
    CommitConflict,
    CorruptData,
    ShuffleError,
    StoreUnavailable,
    one_line,
    to_wire,
)
from shuffle.limits import MIB
from shuffle.statestore.codec.arrow_bytes import nulls_in, to_list
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.request import CommitRequest, Committed
from shuffle.statestore.server.metrics import StoreMetrics
from shuffle.statestore.server.session_registry import SessionRegistry
from shuffle.statestore.store import ReadView, Span
from shuffle.statestore.wire.messages import (
    Header,
    Rows,
    as_buffers,
    as_value,
    decode_commit,
    rows_of,
    unpack_sections,
)
from shuffle.support.logs import get_logger
from shuffle.support.mapped_files import map_range, read_range

Response = tuple[Header, Rows | None]
"""The header and the rows of a response."""

READ_BYTES_MAX = 16 * MIB
"""The most bytes of records in a response that this process copies to memory; a single larger record is still sent."""

WAITING_READS_MAX = 256
"""The most reads over Flight that may wait for rows at once, each in a thread of its own (the lane's need none)."""

CROWDED_WAIT_MS = 100
"""The milliseconds that one more read waits. Its client then sends it again, and its thread is free for others."""

_CANCEL_CHECK_MS = 500
"""The milliseconds after which a read that waits for rows checks again that its client still waits."""

_log = get_logger("statestore")


def _never() -> bool:
    return False


class Request(NamedTuple):
    """One request. Its receiver has checked the fields of its header against ``wire.operations``."""

    header: Header
    rows: Rows | None
    is_cancelled: Callable[[], bool] = _never
    """Returns whether the client has stopped waiting for the response."""


class Handlers:
    """One method for each operation. Safe to use from many threads."""

    def __init__(self, store: LocalStore, sessions: SessionRegistry, metrics: StoreMetrics) -> None:
        self._store = store
        self._sessions = sessions
        self._metrics = metrics
        self._waiting_reads = threading.BoundedSemaphore(WAITING_READS_MAX)
        self.operations: dict[str, Callable[[Request], Response]] = {
            "get": self._get,
            "scan": self._scan,
            "open": self._open,
            "release": self._release,
            "commit": self._commit,
            "stage": self._stage,
            "discard": self._discard,
            "bounds": self._bounds,
            "read": self._read,
        }
        """The method of each operation; a test compares them with the declared ``OPERATIONS``."""

    def handle(self, request: Request) -> Response:
        return self.operations[request.header["op"]](request)

    def error_header(self, error: Exception) -> Header:
        """The response for ``error``. It is a response like any other, so that the connection stays open."""
        return {"error": to_wire(self._typed(error))}

    def _typed(self, error: Exception) -> ShuffleError:
        if self._store.closed:
            # The request failed because the store's files are being closed.
            return StoreUnavailable("the state store is shutting down")
        if isinstance(error, ShuffleError):
            return error
        _log.error("a request could not be handled", error=error)
        # The client gets a sentence, not a traceback.
        return ShuffleError(one_line(error))

    # --- reading tables ---

    def _view(self, header: Header) -> ReadView | None:
        return None if header.get("view") is None else self._sessions.held(header["session"], header["view"])

    def _open(self, request: Request) -> Response:
        view = self._store.open_view()
        self._sessions.hold(request.header["session"], view)
        return {"view": view.view_id, "version": view.version}, None

    def _release(self, request: Request) -> Response:
        view = self._sessions.take(request.header["session"], request.header["view"])
        if view is not None:
            self._store.release_view(view)
        return {}, None

    def _get(self, request: Request) -> Response:
        header, keys = request.header, _require_rows(request.rows)[0]
        self._metrics.lookup_keys.inc(len(keys))
        if not header.get("hold"):
            return {}, rows_of(None, self._store.get(self._view(header), header["table"], keys))
        view, values = self._store.open_view_and_get(header["table"], keys)
        self._sessions.hold(header["session"], view)
        return {"view": view.view_id, "version": view.version}, rows_of(None, values)

    def _scan(self, request: Request) -> Response:
        header = request.header
        begins, ends = (to_list(column) for column in _require_rows(request.rows))
        if len(begins) != 1 or begins[0] is None:
            raise BadInput(f"a scan is asked with one row, its begin and its end, not with {len(begins)} rows")
        bounds = begins[0], ends[0]
        pairs = self._store.scan(
            self._view(header), header["table"], *bounds, header["rows"], bool(header.get("reverse"))
        )
        self._metrics.scanned_rows.inc(len(pairs[0]))
        return {}, pairs

    # --- writing ---

    def _commit(self, request: Request) -> Response:
        return self.committed_header(self._store.commit(*self.take_commit(request.header, request.rows))), None

    def take_commit(self, header: Header, rows: Rows | None) -> tuple[CommitRequest, ReadView | None]:
        """The commit of a request, checked, and the read view of its transaction, which leaves the client's session."""
        request = decode_commit(header.get("version"), *unpack_sections(header.get("sections"), rows))
        view = self._take_view(header)
        try:
            self._store.check_commit_rows(request)
        except BaseException:
            if view is not None:
                self._store.release_view(view)
            raise
        return request, view

    def _take_view(self, header: Header) -> ReadView | None:
        if header.get("view") is None:
            return None
        view = self._sessions.take(header["session"], header["view"])
        if view is None:
            raise CommitConflict(
                "the transaction cannot commit: its client was silent too long; nothing was written, run it again"
            )
        return view

    @staticmethod
    def committed_header(outcome: Committed) -> Header:
        """The response to a commit that is durable."""
        return {"version": outcome.version, "appended": outcome.appended}

    def _stage(self, request: Request) -> Response:
        values = _require_rows(request.rows)[1]
        if nulls_in(values):
            raise BadInput("a null among the rows to stage")
        payloads = as_buffers(values)
        return {"staged": self._store.stage(request.header["queue"], payloads, request.header["ttl_ms"])}, None

    def _discard(self, request: Request) -> Response:
        self._store.discard(request.header["staged"])
        return {}, None

    # --- reading queues ---

    def _bounds(self, request: Request) -> Response:
        return {"bounds": self._store.bounds(request.header["queue"])}, None

    def _read(self, request: Request) -> Response:
        """Wait for rows in the caller's thread, and copy them: Flight must not send from a mapped file that may be cut.

        The lane does neither; it uses ``location_header`` and ``map_records``.
        """
        header = request.header
        local = bool(header.get("local"))
        max_bytes = header["bytes"] if local else min(header["bytes"], READ_BYTES_MAX)
        span = self._wait_for_rows(request, max_bytes)
        if span is None or local:
            return self.location_header(header, span), None
        return self.records_header(header, span), rows_of(None, as_value(self._records(header, span, read_range)))

    def _wait_for_rows(self, request: Request, max_bytes: int) -> Span | None:
        header = request.header
        requested = header["queue"], header["partition"], header["begin"], header["rows"], max_bytes
        span = self._store.locate(*requested, 0)
        if span is not None or not header["wait_ms"]:
            return span
        may_wait = self._waiting_reads.acquire(blocking=False)
        try:
            wait_ms = header["wait_ms"] if may_wait else min(header["wait_ms"], CROWDED_WAIT_MS)
            deadline = time.monotonic() + wait_ms / 1000
            while span is None and not (self._store.closed or request.is_cancelled()):
                left_ms = int((deadline - time.monotonic()) * 1000)
                if left_ms <= 0:
                    break
                span = self._store.locate(*requested, min(left_ms, _CANCEL_CHECK_MS))
            return span
        finally:
            if may_wait:
                self._waiting_reads.release()

    def location_header(self, header: Header, span: Span | None) -> Header:
        """The response to a client that maps the file itself: no records are sent, not even over the loopback."""
        if span is None:
            return {"file": None}
        self._count_read(header, span)
        return {**self._location_of(span), "ends": span.ends}

    def records_header(self, header: Header, span: Span) -> Header:
        """The header of a response that is followed by the records themselves."""
        self._count_read(header, span)
        return {**self._location_of(span), "bytes": span.size_bytes}

    def map_records(self, header: Header, span: Span) -> pa.Buffer:
        """The records of ``span``, mapped. The mapping stays valid when the file is removed."""
        return self._records(header, span, map_range)

    def _records(self, header: Header, span: Span, get: Callable[[Path, int, int], pa.Buffer]) -> pa.Buffer:
        path = self._store.segment_path(span.file)
        try:
            data = get(path, span.offset, span.size_bytes)
        except FileNotFoundError:
            raise self._store.missing_file_error(path, header["queue"], header["partition"], header["begin"]) from None
        if data.size < span.size_bytes:
            end = span.offset + data.size
            raise CorruptData(
                f"{path}: {end} bytes, but {span.offset + span.size_bytes} were acknowledged: the file was cut",
                file=str(path),
                offset=end,
            )
        return data

    def _location_of(self, span: Span) -> Header:
        file = str(self._store.segment_path(span.file))
        return {"file": file, "offset": span.offset, "segment": span.segment_begin, "end": span.end}

    def _count_read(self, header: Header, span: Span) -> None:
        self._metrics.count_read(min(span.end - header["begin"], header["rows"]), span.size_bytes)


def _require_rows(rows: Rows | None) -> Rows:
    if rows is None:
        raise BadInput("a request without the rows it is about")
    return rows
