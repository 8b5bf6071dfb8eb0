"""The messages of the store and their fields, as data: the type and the bounds of each.

Every message is checked once against one of these tables when the store receives it, before other code uses it: the
header of a request of the data plane (``OPERATIONS``), the sections of a commit (``SECTIONS``), a request of the
control plane (``CONTROL``). A client checks what it receives against ``OPERATIONS`` too. ``docs/protocol.md`` documents
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shuffle.errors import BadInput
from shuffle.limits import (
    BATCH_BYTES_MAX,
    MIB,
    NAME_BYTES_MAX,
    STAGED_TTL_MS_MAX,
    WAIT_MS_MAX,
)
from shuffle.support.fields import (
    INT64_MIN,
    UINT32_MAX,
    UINT64_MAX,
    Checker,
    Field,
    flag,
    number,
    shown,
    text,
)

SCAN_ROWS_MAX = 1_000_000
"""The most rows of one response to a scan."""

SCHEMA_BYTES_MAX = 2 * MIB
"""The most bytes of the description of a table or a queue: enough for a thousand columns with names of 255 bytes and a
type each."""

_TABLE, _QUEUE, _PARTITION = number("table", UINT32_MAX), number("queue", UINT32_MAX), number("partition", UINT32_MAX)
_SESSION, _VIEW = number("session", UINT64_MAX), number("view", needs="session")
_HELD_SESSION = number("session", UINT64_MAX, optional=True)
_HELD_VIEW = number("view", optional=True, needs="session")
_ROWS = number("rows", UINT32_MAX)
_STAGED = Field("staged", str, 32, 32, pattern=re.compile("[0-9a-f]{32}"))


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the data plane: the fields of its messages, and the transports they may use.

    Every operation can be sent over Flight. The daemon has a handler for each (``server.handlers``), and
    ``docs/protocol.md`` has a line for each; a test checks that none is missing.
    """

    request: tuple[Field, ...]
    """The fields of the request's header, beside ``op``."""
    response: tuple[Field, ...] = ()
    """The fields of the header of a response that is no error."""
    lane: bool = False
    """Whether a small request of this operation may be sent over the lane, where all requests share one thread."""


_OPENED = (number("view"), number("version"))

OPERATIONS: dict[str, Operation] = {
    "get": Operation(
        (_TABLE, _HELD_SESSION, _HELD_VIEW, flag("hold", needs="session")),
        (number("view", optional=True, needs="version"), number("version", optional=True), flag("elsewhere")),
        lane=True,
    ),
    "scan": Operation(
        (_TABLE, _HELD_SESSION, _HELD_VIEW, number("rows", SCAN_ROWS_MAX, low=1), flag("reverse")),
    ),
    "open": Operation((_SESSION,), _OPENED, lane=True),
    "release": Operation((_SESSION, _VIEW), lane=True),
    "commit": Operation(
        (number("version", optional=True), _HELD_SESSION, _HELD_VIEW, Field("sections", list, optional=True)),
        (number("version"), Field("appended", list)),
        lane=True,
    ),
    "stage": Operation((_QUEUE, number("ttl_ms", STAGED_TTL_MS_MAX, low=1)), (text("staged"),)),
    "discard": Operation((_STAGED,), lane=True),
    "bounds": Operation((_QUEUE,), (Field("bounds", list),), lane=True),
    "read": Operation(
        (
            _QUEUE,
            _PARTITION,
            number("begin"),
            number("rows", low=1),
            number("bytes", low=1),
            number("wait_ms", WAIT_MS_MAX),
            flag("local"),
        ),
        (
            text("file", high=16 * NAME_BYTES_MAX, optional=True, needs="offset"),
            number("offset", optional=True),
            number("segment", optional=True),
            number("end", optional=True),
            number("bytes", 2 * BATCH_BYTES_MAX, optional=True, needs="end"),
            Field("ends", list, optional=True, needs="end"),
        ),
        lane=True,
    ),
}
"""All operations of the data plane, by the name in the field ``op``."""

SECTIONS: dict[str, tuple[Field, ...]] = {
    "read": (_ROWS,),
    "range": (_ROWS,),
    "expect": (_TABLE, _ROWS),
    "write": (_TABLE, _ROWS),
    "append": (
        _QUEUE,
        _PARTITION,
        _ROWS,
        text("producer", optional=True),
        number("sequence", low=INT64_MIN, optional=True),
    ),
    "publish": (_QUEUE, _PARTITION, _STAGED),
    "trim": (_QUEUE, _PARTITION, number("index")),
}
"""The fields of each kind of section of a commit, which follow the name of the kind."""

_SCHEMA = text("schema_json", high=SCHEMA_BYTES_MAX)
_GROUP, _LEASE, _SESSION_ID = text("group"), number("lease_id", UINT64_MAX), number("session_id", UINT64_MAX)
_TTL = number("ttl_ms", UINT32_MAX)
"""The time to live of a lease or a session. Each has narrower bounds, which its own error names."""

CONTROL: dict[str, tuple[Field, ...]] = {
    "Info": (),
    "ListTables": (),
    "ListQueues": (),
    "CreateTable": (_SCHEMA,),
    "CreateQueue": (_SCHEMA,),
    "Drop": (text("kind"), text("name")),
    "OpenSession": (_TTL,),
    "RenewSession": (_SESSION_ID,),
    "CloseSession": (_SESSION_ID,),
    "Register": (_GROUP, text("member"), _TTL),
    "Renew": (_LEASE,),
    "Leave": (_LEASE,),
    "Members": (_GROUP,),
    "Watch": (_GROUP, number("revision", UINT64_MAX), number("wait_ms", WAIT_MS_MAX)),
    "Groups": (),
    "Stats": (),
}
"""The requests of the control plane, by method. Protobuf ensures that the fields exist and have their types."""


_REQUEST_CHECKS = {name: Checker(f"the request {name!r}", one.request) for name, one in OPERATIONS.items()}
_RESPONSE_CHECKS = {name: Checker(f"the response to {name!r}", one.response) for name, one in OPERATIONS.items()}
_SECTION_CHECKS = {kind: Checker(f"the section {kind!r} of a commit", fields) for kind, fields in SECTIONS.items()}


def check_request(header: Mapping[str, Any]) -> None:
    """Raise ``BadInput`` unless this is the header of a request whose fields are all as they are declared."""
    operation = header.get("op")
    checker = _REQUEST_CHECKS.get(operation) if isinstance(operation, str) else None
    if checker is None:
        raise BadInput(f"unknown operation {shown(operation)}: client and store are of different versions")
    checker.check(header)


def check_section(kind: str, *fields: Any) -> None:
    """Raise ``BadInput`` unless these are the fields of a section ``kind`` of a commit."""
    _SECTION_CHECKS[kind].check_items(fields)


def check_response(operation: str, header: Mapping[str, Any]) -> None:
    """Raise ``BadInput`` unless this is the header of a response to ``operation``, or of an error."""
    error = header.get("error")
    if error is None:
        _RESPONSE_CHECKS[operation].check(header)
    elif not isinstance(error, str):
        raise BadInput(f"the response to {operation!r}: an error that is none")
