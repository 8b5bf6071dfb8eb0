"""Every error a user of this project can meet, in one place.

    ShuffleError
    ├── SpecError                  a spec (or a class it names) that cannot run; found before anything starts
    ├── BadInput                   the caller's mistake; nothing was changed
    │   ├── SchemaMismatch         a column that is missing, superfluous or of another type
    │   ├── UnknownTable           no table or queue of that name
    │   ├── TableExists            created twice, with different schemas
    │   ├── NullKey                a null (or a missing value) where a key column must have one
    │   ├── TooLarge               a key, value, batch, transaction or ticket over its limit
    │   ├── ConstraintViolated     a written row breaks a CHECK of its table
    │   ├── WrongVersion           a GetRows request of another version of the protocol
    │   ├── SequenceError          a producer's sequence number too far in the past to be recognised
    │   └── OutOfRange             a queue position that was trimmed, or lies after the end; a number out of bounds
    ├── CommitConflict             something the transaction read has changed: nothing was written, try again
    ├── CommitUnknown              the response was lost: read the state again, never repeat the commit blindly
    ├── StoreError
    │   ├── StoreUnavailable       cannot be reached, or did not answer in time
    │   │   └── TooBusy            it serves as many as it can at a time: nothing was done, try again later
    │   ├── StoreLocked            another process has the folder open and serves nobody
    │   ├── FormatTooNew           written by a newer version of this project
    │   ├── StoreNotWritable       the folder cannot be created or written
    │   ├── DiskFull               no room; nothing was acknowledged, reads go on
    │   └── CorruptData            a checksum that does not match, with the file and the offset
    ├── ServiceUnavailable         a broker or a schema registry cannot be reached now: it is waited for
    ├── Expired                    a snapshot, session, lease or staged append whose time is over
    ├── StaleMapper                the request names another instance of this mapper: discovery was stale
    ├── StaleGeneration            the request is of another generation of the processor than the mapper
    ├── RowsGone                   rows below what the window can still serve
    ├── NotServed                  rows called committed that the mapper never served, and the store knows nothing of it
    ├── FalseClaim                 rows dropped because a request called them committed; the store says they are not
    ├── ExportError
    │   ├── PublishUnknown         rows may or may not be outside: the sink's position decides, never a repetition
    │   ├── SinkRefused            the place does not take the rows, or does not let this exporter in
    │   └── PositionLost           sink and outbox do not fit together: going on would lose or double rows
    ├── SplitBrain                 another instance of this worker has moved the persisted state
    ├── Outgrown                   the processor has more mappers than this worker knows of
    ├── ThreadDied                 a thread that others depend on has ended: the process must be started again
    └── UserCodeError              an exception in the user's map or reduce, with the positions it stopped at

Over the wire an error is its code, its message and its fields; never a traceback. ``to_wire`` and ``from_wire`` are
the only codec for that.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

_BY_CODE: dict[str, type[ShuffleError]] = {}


class ShuffleError(Exception):
    """The root of the tree. ``fields`` says what the error is about: table, column, row, file, offset, …"""

    code: ClassVar[str] = "internal"
    """The short name of this type of error, for programs and on the wire."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        """What happened, where, and what to do, in plain words."""
        self.fields = {name: value for name, value in fields.items() if value is not None}
        """What the error is about, by name; each is also an attribute: ``error.table``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _BY_CODE[cls.code] = cls

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (to_wire(self),)


class SpecError(ShuffleError):
    """A spec, or a class that it names, cannot run; nothing was started. The message names the file, line and key of
    each mistake: mend them."""

    code = "spec"


class BadInput(ShuffleError):
    """The caller's mistake; nothing was changed. The message says what was wrong, and what would be right."""

    code = "bad_input"


class SchemaMismatch(BadInput):
    """A column is missing, superfluous or of another type than declared. Cast the rows, or create another table."""

    code = "schema_mismatch"


class UnknownTable(BadInput):
    """There is no table or queue of that name; it may have been dropped. ``shuffle state ls`` lists them."""

    code = "unknown_table"


class TableExists(BadInput):
    """The name is taken. Take another one, or ``if_not_exists=True`` where a table with the same columns will do."""

    code = "table_exists"


class NullKey(BadInput):
    """A key column has a null. Leave such rows out, or give them a value."""

    code = "null_key"


class TooLarge(BadInput):
    """A key, value, batch, transaction or ticket is over its limit. Split it; the limits are listed below."""

    code = "too_large"


class ConstraintViolated(BadInput):
    """A written row breaks a CHECK of its table; the message names the constraint and shows the row."""

    code = "constraint_violated"


class WrongVersion(BadInput):
    """A reducer and a mapper speak different versions of GetRows. Nothing was changed. Install the same version of this
    project everywhere, and start both again."""

    code = "wrong_version"


class SequenceError(BadInput):
    """A producer's sequence number is too far in the past to tell whether it was appended. Count upwards."""

    code = "sequence"


class OutOfRange(BadInput):
    """A queue position that was trimmed, or lies after the end. ``Queue.bounds`` says what can be read."""

    code = "out_of_range"


class CommitConflict(ShuffleError):
    """Something that the transaction read has changed: nothing was written. Run the transaction again."""

    code = "conflict"


class CommitUnknown(ShuffleError):
    """The response to a commit was lost. Read the state again to learn what became of it; never repeat it blindly."""

    code = "commit_unknown"


class StoreError(ShuffleError):
    """The store cannot do its work. The errors below say why."""

    code = "store"


class StoreUnavailable(StoreError):
    """The store cannot be reached, or did not answer in time. Is it running, and at this address? Then try again."""

    code = "store_unavailable"


class TooBusy(StoreUnavailable):
    """As many clients, requests or waits as the server allows are there already. Nothing was done: try again later."""

    code = "too_busy"


class StoreLocked(StoreError):
    """Another process has the folder open and serves nobody. End it, or let it serve with ``shuffle statestore``."""

    code = "store_locked"


class FormatTooNew(StoreError):
    """The folder was written by a newer version of this project. Use that version."""

    code = "format_too_new"


class StoreNotWritable(StoreError):
    """The folder cannot be created or written. Look at its owner and rights, and at how the disk is mounted."""

    code = "store_not_writable"


class DiskFull(StoreError):
    """There is no room; nothing was acknowledged, and reads go on. Free some room."""

    code = "disk_full"


class CorruptData(StoreError):
    """What is stored cannot be right: a checksum does not match. The message names the file and the offset."""

    code = "corrupt_data"


class ServiceUnavailable(ShuffleError):
    """A service outside of this project that an input or an output needs, a Kafka broker or a schema registry, cannot
    be reached or does not answer in time. Workers wait for it and go on by themselves: see that it runs."""

    code = "service_unavailable"


class Expired(ShuffleError):
    """A snapshot, session, lease or staged append whose time is over. Begin again with a new one."""

    code = "expired"


class StaleMapper(ShuffleError):
    """A request named another instance of this mapper than the one that runs now. Reducers look the mapper up again by
    themselves."""

    code = "stale_mapper"


class StaleGeneration(ShuffleError):
    """A request was made for another generation of the processor than the mapper serves. Nothing was changed. The
    reducer reads its state again by itself; if it goes on, one of them was started from an old spec: start it again."""

    code = "stale_generation"


class RowsGone(ShuffleError):
    """Rows were requested below what a mapper can still serve: all reducers had committed them, and the mapper has
    dropped them."""

    code = "rows_gone"


class NotServed(ShuffleError):
    """A reducer's request said that it has committed rows which the mapper never served, and the store does not say so
    either. The mapper has dropped nothing; the reducer reads its state again."""

    code = "not_served"


class FalseClaim(ShuffleError):
    """A mapper had dropped rows because a request called them committed, and the store says that they are not. It
    starts again from its persisted state, and serves them again. Find out who sends such requests."""

    code = "false_claim"


class ExportError(ShuffleError):
    """An exporter cannot carry rows out of the store. The errors below say why."""

    code = "export"


class PublishUnknown(ExportError):
    """The connection ended while rows were being published. The exporter opens the sink again and asks for its position
    by itself; it never publishes them again blindly."""

    code = "publish_unknown"


class SinkRefused(ExportError):
    """The place that an output names does not take the rows, or does not let the exporter in. Nothing was published.
    The message says what it did not like: mend that, the exporter goes on from there."""

    code = "sink_refused"


class PositionLost(ExportError):
    """The position that a sink keeps does not fit the outbox: one of them was deleted, replaced or restored. Nothing
    was published, since going on would lose rows or publish them twice. The message says what to do."""

    code = "position_lost"


class SplitBrain(ShuffleError):
    """Another instance of this worker has moved the persisted state. The worker starts again from there by itself."""

    code = "split_brain"


class Outgrown(ShuffleError):
    """The processor has got more mappers than this reducer knows of, and another instance of the reducer has seen them.
    The reducer begins again with all of them by itself."""

    code = "outgrown"


class ThreadDied(ShuffleError):
    """A thread that others depend on has died, so its process ends, or cannot be used any more. Start it again."""

    code = "thread_died"


class UserCodeError(ShuffleError):
    """An exception in your ``map`` or ``reduce``, with its traceback and the positions at which it stopped."""

    code = "user_code"


_BY_CODE[ShuffleError.code] = ShuffleError


def to_wire(error: ShuffleError) -> str:
    """An error as it is sent over the wire: one JSON object, kept short enough for a gRPC status message."""
    return json.dumps({"code": error.code, "message": error.message, "fields": error.fields}, default=str)


def one_line(error: BaseException) -> str:
    """An unexpected error as it is reported to another process: its type and its text, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def from_wire(text: str) -> ShuffleError:
    """The typed error behind ``text``; a code this version does not know becomes a plain ``ShuffleError``."""
    try:
        parsed = json.loads(text)
        error_type = _BY_CODE.get(parsed["code"], ShuffleError)
        return error_type(parsed["message"], **parsed["fields"])
    except (ValueError, KeyError, TypeError):
        return ShuffleError(text)
