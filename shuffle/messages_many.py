"""The codec of one message for many pairs: requests of several reducers to several mappers, and their response.

Where a process hosts several reducers or mappers, one exchange between two processes carries the requests of all their
pairs (``reducer/link``). A request is a JSON list of tickets of ``GetRows``. The response begins with one message
without rows, whose ``app_metadata`` is a ``ManyHead``: an answer to each ticket, in their order. Batches follow in the
same order, each with its tail, unless the head says where in shared memory they are.

An answer is one of these, and begins with a byte that says which:

- ``#``: a tail. There are no rows, though the mapper has waited for them.
- ``-``: a tail, too. There are no rows at the moment, and the wait was ended because there was an answer to another.
- ``*``: rows. How many batches, where they are in shared memory, and the tail of each.
- ``?``: the request has to be made by itself: the mapper needs the store for it, and the others would have to wait.
- ``{``: a typed error. It is about this pair only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shuffle.errors import BadInput, ShuffleError, TooLarge, from_wire, to_wire
from shuffle.limits import TICKET_BYTES_MAX
from shuffle.messages import TAIL, TAIL_BYTES, GetRows, Tail
from shuffle.support.fields import UINT32_MAX, UINT64_MAX, check_items, number, parse_json
from shuffle.support.shared_memory import MemoryHandle

MANY = b"["
MANY_HEAD = b"&"
"""The first bytes of a message with many requests, and of the message with which their response begins."""

PAIRS_MAX = 64
"""The most requests in one message: a few microseconds each before the first of them is answered, and all of them are
not larger than a ticket may be."""

EARLY, ROWS, ALONE, ERROR = b"-", b"*", b"?", b"{"
"""The first byte of an answer that is not a tail alone."""

_HEAD = struct.Struct("<cIIIQQ")
_HEAD_FIELDS = (
    number("answers", PAIRS_MAX),
    number("pid", UINT32_MAX),
    number("fd", UINT32_MAX),
    number("inode", UINT64_MAX),
    number("bytes"),
)
_ROWS = struct.Struct("<cIQQ")
_ROWS_FIELDS = (number("batches", UINT32_MAX, low=1), number("begin"), number("end"))
_ERROR = struct.Struct("<cI")


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """The answer to one of many requests, without its rows."""

    tails: tuple[Tail, ...] = ()
    """The tail of each batch or, if there are no rows, the one tail; empty if the request has to be made alone."""
    has_rows: bool = False
    is_early: bool = False
    """Whether there are no rows, but the mapper has not waited for them as long as it was asked to."""
    begin_byte: int = 0
    end_byte: int = 0
    """Where the rows are in shared memory, if they are."""

    def encode(self) -> bytes:
        if self.has_rows:
            head = _ROWS.pack(ROWS, len(self.tails), self.begin_byte, self.end_byte)
            return head + b"".join(tail.encode() for tail in self.tails)
        if not self.tails:
            return ALONE
        encoded = self.tails[0].encode()
        return EARLY + encoded[1:] if self.is_early else encoded


@dataclass(frozen=True, slots=True)
class ManyHead:
    """The head of a response to many requests: an answer to each, and the memory that rows are in, if they are not
    sent behind it."""

    answers: Sequence[PairAnswer | ShuffleError]
    handle: MemoryHandle | None = None

    def encode(self) -> bytes:
        handle = self.handle or MemoryHandle(0, 0, 0, 0)
        head = _HEAD.pack(MANY_HEAD, len(self.answers), handle.pid, handle.fd, handle.inode, handle.size_bytes)
        return head + b"".join(map(_encode, self.answers))

    @staticmethod
    def decode(metadata: bytes) -> ManyHead:
        try:
            fields = _HEAD.unpack_from(metadata)
            check_items("the head of a response to many requests", _HEAD_FIELDS, fields[1:])
            answers: list[PairAnswer | ShuffleError] = []
            at = _HEAD.size
            for _ in range(fields[1]):
                answer, at = _decode(metadata, at)
                answers.append(answer)
        except struct.error:
            raise BadInput("the head of a response to many requests is cut off") from None
        if at != len(metadata) or not metadata.startswith(MANY_HEAD):
            raise BadInput("not the head of a response to many requests")
        return ManyHead(answers, MemoryHandle(*fields[2:]) if fields[2] else None)


def _encode(answer: PairAnswer | ShuffleError) -> bytes:
    if not isinstance(answer, ShuffleError):
        return answer.encode()
    wire = to_wire(answer).encode()
    return _ERROR.pack(ERROR, len(wire)) + wire


def _decode(metadata: bytes, at: int) -> tuple[PairAnswer | ShuffleError, int]:
    """The answer that begins at a byte of the head, and where the next one does."""
    kind = metadata[at : at + 1]
    if kind == TAIL:
        return PairAnswer(_tails(metadata, at, 1)), at + TAIL_BYTES
    if kind == EARLY:
        tail = Tail.decode(TAIL + metadata[at + 1 : at + TAIL_BYTES])
        return PairAnswer((tail,), is_early=True), at + TAIL_BYTES
    if kind == ALONE:
        return PairAnswer(), at + 1
    if kind == ERROR:
        _, size = _ERROR.unpack_from(metadata, at)
        begin = at + _ERROR.size
        return from_wire(metadata[begin : begin + size].decode("utf-8", "replace")), begin + size
    if kind != ROWS:
        raise BadInput("the head of a response to many requests has an answer that is none")
    _, count, begin, end = _ROWS.unpack_from(metadata, at)
    check_items("an answer with rows", _ROWS_FIELDS, (count, begin, end))
    at += _ROWS.size
    return PairAnswer(_tails(metadata, at, count), True, False, begin, end), at + count * TAIL_BYTES


def _tails(metadata: bytes, at: int, count: int) -> tuple[Tail, ...]:
    if at + count * TAIL_BYTES > len(metadata):
        raise BadInput("the head of a response to many requests is cut off")
    ends = range(at + TAIL_BYTES, at + (count + 1) * TAIL_BYTES, TAIL_BYTES)
    return tuple(Tail.decode(metadata[end - TAIL_BYTES : end]) for end in ends)


def encode_many(requests: Iterable[GetRows], **changed: object) -> bytes:
    """A message of these requests, with the same fields ``changed`` in each."""
    return b"[%b]" % b",".join(request.encode(**changed) for request in requests)


def decode_many(message: bytes) -> list[GetRows]:
    """The requests of a message. One that is not valid makes the whole message so: they all have the same sender."""
    if len(message) > TICKET_BYTES_MAX:
        raise TooLarge(f"the requests have {len(message)} bytes, more than {TICKET_BYTES_MAX}", limit=TICKET_BYTES_MAX)
    try:
        parsed = parse_json(message)
    except ValueError as error:
        raise BadInput(f"not a list of GetRows tickets: {error}") from None
    if not isinstance(parsed, list) or not 1 <= len(parsed) <= PAIRS_MAX:
        raise BadInput(f"not a list of 1 to {PAIRS_MAX} GetRows tickets")
    return [GetRows.of_fields(ticket) for ticket in parsed]
