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
    │   ├── SequenceError          a producer's sequence number too far in the past to be recognised
    │   └── OutOfRange             a queue position that was trimmed, or lies after the end
    ├── CommitConflict             something the transaction read has changed: nothing was written, try again
    ├── CommitUnknown              the answer was lost: read the state again, never repeat the commit blindly
    ├── StoreError
    │   ├── StoreUnavailable       cannot be reached, or did not answer in time
    │   ├── StoreLocked            another process has the folder open and serves nobody
    │   ├── FormatTooNew           written by a newer version of this project
    │   ├── StoreNotWritable       the folder cannot be created or written
    │   ├── DiskFull               no room; nothing was acknowledged, reads go on
    │   └── CorruptData            a checksum that does not match, with the file and the offset
    ├── Expired                    a snapshot, session, lease or staged append whose time is over
    ├── StaleMapper                the request names another instance of this mapper: discovery was stale
    ├── RowsGone                   rows below what the window can still serve
    ├── SplitBrain                 another instance of this worker has moved the persisted state
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

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = {name: value for name, value in fields.items() if value is not None}

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
    code = "spec"


class BadInput(ShuffleError):
    code = "bad_input"


class SchemaMismatch(BadInput):
    code = "schema_mismatch"


class UnknownTable(BadInput):
    code = "unknown_table"


class TableExists(BadInput):
    code = "table_exists"


class NullKey(BadInput):
    code = "null_key"


class TooLarge(BadInput):
    code = "too_large"


class ConstraintViolated(BadInput):
    code = "constraint_violated"


class SequenceError(BadInput):
    code = "sequence"


class OutOfRange(BadInput):
    code = "out_of_range"


class CommitConflict(ShuffleError):
    code = "conflict"


class CommitUnknown(ShuffleError):
    code = "commit_unknown"


class StoreError(ShuffleError):
    code = "store"


class StoreUnavailable(StoreError):
    code = "store_unavailable"


class StoreLocked(StoreError):
    code = "store_locked"


class FormatTooNew(StoreError):
    code = "format_too_new"


class StoreNotWritable(StoreError):
    code = "store_not_writable"


class DiskFull(StoreError):
    code = "disk_full"


class CorruptData(StoreError):
    code = "corrupt_data"


class Expired(ShuffleError):
    code = "expired"


class StaleMapper(ShuffleError):
    code = "stale_mapper"


class RowsGone(ShuffleError):
    code = "rows_gone"


class SplitBrain(ShuffleError):
    code = "split_brain"


class UserCodeError(ShuffleError):
    code = "user_code"


_BY_CODE[ShuffleError.code] = ShuffleError


def to_wire(error: ShuffleError) -> str:
    """The text under which an error travels: one JSON object, kept short enough for a gRPC status message."""
    return json.dumps({"code": error.code, "message": error.message, "fields": error.fields}, default=str)


def from_wire(text: str) -> ShuffleError:
    """The typed error behind ``text``; a code this version does not know becomes a plain ``ShuffleError``."""
    try:
        parsed = json.loads(text)
        kind = _BY_CODE.get(parsed["code"], ShuffleError)
        return kind(parsed["message"], **parsed["fields"])
    except (ValueError, KeyError, TypeError):
        return ShuffleError(text)
