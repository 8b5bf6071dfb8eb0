"""What the daemon answers to questions about rows, whichever way they came (``service``: Flight, ``lane``: sockets)."""

from __future__ import annotations

from collections.abc import Callable

from shuffle.errors import BadInput, CommitConflict, ShuffleError, StoreUnavailable, one_line, to_wire
from shuffle.statestore.codec.arrow_bytes import listed, nulls_in
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.request import CommitRequest, Committed
from shuffle.statestore.server.session_registry import Held
from shuffle.statestore.store import Moment, Span
from shuffle.statestore.wire.messages import Header, Rows, as_buffers, decode_commit, rows_of, unpack_sections
from shuffle.support.logs import get_logger

Answer = tuple[Header, Rows | None]

_log = get_logger("statestore")


class Questions:
    """One method for each operation. Safe to use from many threads.

    The fields of a header are what ``operations`` says they are: whoever takes a question in has checked it.
    """

    def __init__(self, store: LocalStore, held: Held) -> None:
        self._store = store
        self._held = held
        self._handlers: dict[str, Callable[[Header, Rows | None], Answer]] = {
            "get": self._get,
            "scan": self._scan,
            "open": self._open,
            "release": self._release,
            "commit": self._commit,
            "stage": self._stage,
            "discard": self._discard,
            "bounds": self._bounds,
        }

    def answer(self, header: Header, rows: Rows | None) -> Answer:
        handler = self._handlers.get(header["op"])
        if handler is None:
            raise BadInput(f"the operation {header['op']!r} is asked over the lane")
        return handler(header, rows)

    def failed(self, error: Exception) -> Header:
        """An error is an answer like any other, so that the connection survives it."""
        return {"error": to_wire(self._typed(error))}

    def _typed(self, error: Exception) -> ShuffleError:
        if self._store.closed:
            # Whatever went wrong did so because the files were being closed under it.
            return StoreUnavailable("the state store is shutting down")
        if isinstance(error, ShuffleError):
            return error
        _log.error("a question could not be answered", error=error)
        # The client gets a sentence, not a traceback.
        return ShuffleError(one_line(error))

    # --- reading tables ---

    def _moment(self, header: Header) -> Moment | None:
        return None if header.get("moment") is None else self._held.held(header["session"], header["moment"])

    def _open(self, header: Header, rows: Rows | None) -> Answer:
        moment = self._store.open_moment()
        self._held.hold(header["session"], moment)
        return {"moment": moment.moment_id, "version": moment.version}, None

    def _release(self, header: Header, rows: Rows | None) -> Answer:
        moment = self._held.take(header["session"], header["moment"])
        if moment is not None:
            self._store.release_moment(moment)
        return {}, None

    def _get(self, header: Header, rows: Rows | None) -> Answer:
        keys = _given(rows)[0]
        if not header.get("hold"):
            return {}, rows_of(None, self._store.get(self._moment(header), header["table"], keys))
        moment, values = self._store.get_and_hold(header["table"], keys)
        self._held.hold(header["session"], moment)
        return {"moment": moment.moment_id, "version": moment.version}, rows_of(None, values)

    def _scan(self, header: Header, rows: Rows | None) -> Answer:
        begins, ends = (listed(column) for column in _given(rows))
        if len(begins) != 1 or begins[0] is None:
            raise BadInput(f"a scan is asked with one row, its begin and its end, not with {len(begins)} rows")
        bounds = begins[0], ends[0]
        return {}, self._store.scan(
            self._moment(header), header["table"], *bounds, header["rows"], bool(header.get("reverse"))
        )

    # --- writing ---

    def _commit(self, header: Header, rows: Rows | None) -> Answer:
        return self.committed(self._store.commit(*self.commit_of(header, rows))), None

    def commit_of(self, header: Header, rows: Rows | None) -> tuple[CommitRequest, Moment | None]:
        """The commit that is asked for, and the moment it read at, which its client holds no longer."""
        request = decode_commit(header.get("version"), *unpack_sections(header.get("sections"), rows))
        moment = self._taken(header)
        try:
            self._store.look_into(request)
        except BaseException:
            if moment is not None:
                self._store.release_moment(moment)
            raise
        return request, moment

    def _taken(self, header: Header) -> Moment | None:
        if header.get("moment") is None:
            return None
        moment = self._held.take(header["session"], header["moment"])
        if moment is None:
            raise CommitConflict(
                "the transaction cannot commit: its client was silent too long; nothing was written, run it again"
            )
        return moment

    @staticmethod
    def committed(answer: Committed) -> Header:
        return {"version": answer.version, "appended": answer.appended}

    def _stage(self, header: Header, rows: Rows | None) -> Answer:
        values = _given(rows)[1]
        if nulls_in(values):
            raise BadInput("a null among the rows to stage")
        payloads = as_buffers(values)
        return {"staged": self._store.stage(header["queue"], payloads, header["ttl_ms"])}, None

    def _discard(self, header: Header, rows: Rows | None) -> Answer:
        self._store.discard(header["staged"])
        return {}, None

    # --- reading queues ---

    def _bounds(self, header: Header, rows: Rows | None) -> Answer:
        return {"bounds": self._store.bounds(header["queue"])}, None

    def located(self, span: Span | None) -> Header:
        """For a client that maps the file itself: nothing is copied, not even over the loopback."""
        if span is None:
            return {"file": None}
        file = str(self._store.segment_path(span.file))
        place = {"file": file, "offset": span.offset, "segment": span.segment_begin, "end": span.end}
        return {**place, "ends": span.ends}


def _given(rows: Rows | None) -> Rows:
    if rows is None:
        raise BadInput("a question without the rows it is about")
    return rows
