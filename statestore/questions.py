"""What the daemon answers to questions about rows, whichever way they came (``service``: Flight, ``lane``: sockets)."""

from __future__ import annotations

from collections.abc import Callable

from shuffle.errors import BadInput, CommitConflict, ShuffleError, StoreUnavailable, to_wire
from statestore.buffers import listed
from statestore.group import Span
from statestore.held import Held
from statestore.local import LocalStore
from statestore.request import CommitRequest, Committed
from statestore.store import Moment
from statestore.wire import Header, Rows, as_buffers, decode_commit, rows_of, unpack_sections

SCAN_ROWS_MAX = 1_000_000

Answer = tuple[Header, Rows | None]


class Questions:
    """One method for each operation. Safe to use from many threads."""

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
        handler = self._handlers.get(header.get("op", ""))
        if handler is None:
            raise BadInput(f"unknown operation {header.get('op')!r}")
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
        if isinstance(error, KeyError | TypeError | ValueError):
            return BadInput(f"not a question this store understands: {error!r}")
        # The client gets a sentence, not a traceback.
        return ShuffleError(f"{type(error).__name__}: {error}")

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
        [begin], [end] = (listed(column) for column in _given(rows))
        rows_max = min(max(int(header["rows"]), 1), SCAN_ROWS_MAX)
        return {}, self._store.scan(
            self._moment(header), header["table"], begin, end, rows_max, bool(header["reverse"])
        )

    # --- writing ---

    def _commit(self, header: Header, rows: Rows | None) -> Answer:
        return self.committed(self._store.commit(*self.commit_of(header, rows))), None

    def commit_of(self, header: Header, rows: Rows | None) -> tuple[CommitRequest, Moment | None]:
        """The commit that is asked for, and the moment it read at, which its client holds no longer."""
        request = decode_commit(header.get("version"), *unpack_sections(header["sections"], rows))
        if header.get("moment") is None:
            return request, None
        moment = self._held.take(header["session"], header["moment"])
        if moment is None:
            raise CommitConflict(
                "the transaction cannot commit: its client was silent too long; nothing was written, run it again"
            )
        return request, moment

    @staticmethod
    def committed(answer: Committed) -> Header:
        return {"version": answer.version, "appended": answer.appended}

    def _stage(self, header: Header, rows: Rows | None) -> Answer:
        payloads = as_buffers(_given(rows)[1])
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
