"""Fetch, the one request of Kafka's protocol that the fast path makes itself: its bytes, and those of the response.

Version 11 is understood by every broker from 2.3 on. Nothing in here opens a connection.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

FETCH, VERSION = 1, 11
CLIENT_ID = b"shuffle"
READ_COMMITTED = 1


class BadResponse(Exception):
    """What came is not a response to what was asked."""


class FetchResponse(NamedTuple):
    """The part of a response that is about the one partition that was asked for."""

    error_code: int
    last_stable_offset: int
    aborted: tuple[tuple[int, int], ...]
    """Of transactions that were aborted: producer, and first offset."""
    records: memoryview


def fetch_request(
    correlation: int, topic: str, partition: int, offset: int, leader_epoch: int, wait_ms: int, bytes_max: int
) -> bytes:
    name = topic.encode()
    body = struct.pack(">hhih", FETCH, VERSION, correlation, len(CLIENT_ID)) + CLIENT_ID
    # No replica; wait; at least one byte; at most; isolation; no session.
    body += struct.pack(">iiiibii", -1, wait_ms, 1, bytes_max, READ_COMMITTED, 0, -1)
    body += struct.pack(">ih", 1, len(name)) + name
    body += struct.pack(">iiiqqi", 1, partition, leader_epoch, offset, -1, bytes_max)
    body += struct.pack(">ih", 0, 0)  # Nothing to forget; no rack.
    return struct.pack(">i", len(body)) + body


def parse_response(data: memoryview, correlation: int, topic: str, partition: int) -> FetchResponse:
    """The response without its length; ``BadResponse`` if it is not one to this request."""
    try:
        return _parse(data, correlation, topic, partition)
    except struct.error:
        raise BadResponse("the response ends too early") from None


def _parse(data: memoryview, correlation: int, topic: str, partition: int) -> FetchResponse:
    found, _throttle_ms, error_code, _session, topics = struct.unpack_from(">iihii", data)
    if found != correlation:
        raise BadResponse("a response to another request")
    if error_code:
        return FetchResponse(error_code, -1, (), data[:0])
    at = struct.calcsize(">iihii")
    (length,) = struct.unpack_from(">h", data, at)
    name = bytes(data[at + 2 : at + 2 + length])
    at += 2 + length
    partitions, number, error_code, _high, stable, _start, aborted_count = struct.unpack_from(">iihqqqi", data, at)
    if topics != 1 or partitions != 1 or number != partition or name != topic.encode():
        raise BadResponse("a response about another partition")
    at += struct.calcsize(">iihqqqi")
    count = max(0, aborted_count)
    if count * 16 > len(data) - at:
        raise BadResponse("more aborted transactions than there are bytes")
    numbers = struct.unpack_from(f">{2 * count}q", data, at)
    at += 16 * count
    _replica, size = struct.unpack_from(">ii", data, at)
    at += 8
    size = max(0, size)
    if size > len(data) - at:
        raise BadResponse("more records than there are bytes")
    aborted = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    return FetchResponse(error_code, stable, aborted, data[at : at + size])
