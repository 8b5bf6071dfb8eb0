"""The lane's frames: small requests and responses over a plain socket.

    [ u32 bytes after these four ] [ u32 bytes of the header ] [ u32 rows ] [ header ]
    [ u32 length of each key ] [ u32 length of each value ] [ the keys ] [ the values ]

All numbers are little-endian; a length of FFFFFFFF is a null, and a count of FFFFFFFF means no rows at all. The header
is the JSON object of ``wire.messages``. When a client connects, the daemon sends ``GREETING``; then the client sends
one request at a time, and each has one response. Rows are not Arrow arrays here: for a few rows an array costs more
than the rows.

The response to a read of a queue has no rows. Its header says how many ``bytes`` of records follow the frame, as they
are stored in the segment file; to a reader that maps the file itself (``local``) it says where they are, and no bytes
follow.
"""

from __future__ import annotations

import socket
import struct

from shuffle.errors import BadInput
from shuffle.limits import KIB, MIB, TICKET_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import bytes_of
from shuffle.statestore.wire.messages import Header, Rows, decode_header, encode_header
from shuffle.statestore.wire.operations import OPERATIONS

GREETING = b"statestore lane 1\n"

REQUEST_BYTES_MAX = 256 * KIB
"""The most bytes of a request. The daemon decodes all of them in one thread, where a large one would delay the others,
so larger ones are sent over Flight."""

RESPONSE_BYTES_MAX = 1 * MIB
"""The most bytes of a response. A larger one is not sent, and the client repeats the request over Flight."""

ROWS_MAX = 1024
"""The most rows of one request: decoding a row takes half a microsecond."""

_ON_LANE = frozenset(name for name, operation in OPERATIONS.items() if operation.lane)

_HEADER_BYTES_ROOM = TICKET_BYTES_MAX + KIB
"""The bytes that are reserved in a request for its header, beside the rows."""

_HEAD = struct.Struct("<III")
_SIZE_BYTES = 4
_NULL = 0xFFFFFFFF


def local_address(name: str) -> str:
    """The address of a Unix socket in Linux's abstract namespace, which needs no file that has to be removed later.

    It is for clients on the same machine: a request and its response cost 50 microseconds of processor time over it,
    and 90 over the loopback.
    """
    return f"\0{name}"


def send_at_once(sock: socket.socket) -> None:
    """Have the kernel send small packets without delay."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_small(header: Header, rows: Rows | None) -> bool:
    """Whether a request belongs on the lane: it is quickly handled, and its rows are few and small."""
    operation = header.get("op")
    if operation not in _ON_LANE:
        return False
    if rows is None:
        return True
    keys, values = rows
    if not (isinstance(keys, list) and isinstance(values, list)) or len(keys) > ROWS_MAX:
        return False
    return bytes_of(keys) + bytes_of(values) <= REQUEST_BYTES_MAX - _HEADER_BYTES_ROOM


def encode_frame(header: Header, rows: Rows | None) -> bytes:
    encoded = encode_header(header)
    if rows is None:
        return _HEAD.pack(8 + len(encoded), len(encoded), _NULL) + encoded
    both = [*rows[0], *rows[1]]
    lengths = struct.pack(f"<{len(both)}I", *[_NULL if value is None else len(value) for value in both])
    body = b"".join([encoded, lengths, *filter(None, both)])
    return _HEAD.pack(8 + len(body), len(encoded), len(rows[0])) + body


def encode_committed(version: int) -> bytes:
    """The frame that ``encode_frame`` makes of the response to a commit without appends, made faster.

    The writer encodes one for each commit of a group while all of them wait, and nothing in it has to be escaped.
    """
    encoded = b'{"version":%d,"appended":[]}' % version
    return _HEAD.pack(8 + len(encoded), len(encoded), _NULL) + encoded


def frame_bytes(begin: bytes | bytearray) -> int | None:
    """The size of the whole frame that begins with ``begin``; None while too little of it is there to know."""
    return None if len(begin) < _SIZE_BYTES else _SIZE_BYTES + int.from_bytes(begin[:_SIZE_BYTES], "little")


def decode_frame(data: bytes, header_bytes_max: int = TICKET_BYTES_MAX) -> tuple[Header, Rows | None]:
    """The header and the rows of one whole frame; raises ``BadInput`` if ``data`` is not one."""
    if len(data) < _HEAD.size:
        raise BadInput("a frame without a head")
    _, header_bytes, count = _HEAD.unpack_from(data)
    has_rows = count != _NULL
    count = count if has_rows else 0
    lengths_at = _HEAD.size + header_bytes
    rows_at = lengths_at + 8 * count
    if rows_at > len(data):
        raise BadInput("a frame that is shorter than it says")
    header = decode_header(data[_HEAD.size : lengths_at], header_bytes_max)
    both: list[bytes | None] = []
    at = rows_at
    # A slice never goes beyond the data, so wrong lengths copy no byte twice before the end is checked.
    for length in struct.unpack_from(f"<{2 * count}I", data, lengths_at) if count else ():
        if length == _NULL:
            both.append(None)
        else:
            both.append(data[at : at + length])
            at += length
    if at != len(data):
        raise BadInput("a frame whose rows are not as long as it says")
    return header, (both[:count], both[count:]) if has_rows else None
