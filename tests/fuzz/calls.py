"""Raw calls over gRPC, with full control over every byte: messages that Flight's own client would never send."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.fuzz.arrow import proto_fields
from tests.fuzz.findings import Outcome, Problem

FLIGHT = "/arrow.flight.protocol.FlightService/"

SUSPICIOUS = ("internal", "commit_unknown", "store_unavailable", "store")
"""Codes of ours after which it is looked whether everything still works."""

WATCH_PERIOD_S = 0.25

_EXCEPTION = re.compile(rb"Exception (calling|iterating)|Python exception|\b[A-Z]\w+(Error|Exception)\b")

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclass(slots=True)
class Reply:
    """The messages that came back, and how the call ended: an empty code is a call that goes on."""

    messages: list[bytes] = field(default_factory=list)
    code: str = ""
    told: bytes = b""
    """The details of a failure with all trailers."""

    @property
    def all_bytes(self) -> bytes:
        return b"\n".join([*self.messages, self.told])

    @property
    def is_ours(self) -> bool:
        """Whether a failure without a typed error comes out of our code: an exception, by its name or gRPC's words.

        What Arrow and gRPC refuse before our code sees it has a sentence of theirs, and no more.
        """
        return self.code in ("UNKNOWN", "INTERNAL") and _EXCEPTION.search(self.told) is not None

    def typed_error(self) -> tuple[str, str] | None:
        """Code and message of the typed error in it, if there is one."""
        begin = self.told.find(b'{"code":')
        if begin < 0:
            return None
        try:
            found, _ = json.JSONDecoder().raw_decode(self.told[begin:].decode("utf-8", "replace"))
            return str(found["code"]), str(found["message"])
        except (ValueError, KeyError):
            return None


def channel_to(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address.removeprefix("grpc://"), options=_OPTIONS)


def _as_is(data: bytes) -> bytes:
    return data


def _ended(error: grpc.RpcError, messages: list[bytes]) -> Reply:
    trailers = [str(value) if isinstance(value, str) else repr(value) for _, value in error.trailing_metadata() or ()]
    told = "\n".join([error.details() or "", *trailers]).encode("utf-8", "replace")
    return Reply(messages, error.code().name, told)


def unary(channel: grpc.Channel, method: str, data: bytes, timeout_s: float) -> Reply:
    call = channel.unary_unary(method, _as_is, _as_is)
    try:
        return Reply([call(data, timeout=timeout_s)], "OK")
    except grpc.RpcError as error:
        return _ended(error, [])


def answers(channel: grpc.Channel, method: str, data: bytes, timeout_s: float, take_max: int | None = None) -> Reply:
    """A call with one question and many answers; after ``take_max`` of them it is cancelled."""
    call = channel.unary_stream(method, _as_is, _as_is)(data, timeout=timeout_s)
    messages: list[bytes] = []
    try:
        for message in call:
            messages.append(message)
            if take_max is not None and len(messages) >= take_max:
                call.cancel()
                return Reply(messages, "LEFT")
        return Reply(messages, "OK")
    except grpc.RpcError as error:
        return _ended(error, messages)


class _Watchdog:
    """Cancels calls that wait for too long: gRPC bounds a stream as a whole, and not the wait for one message."""

    def __init__(self) -> None:
        self._waiting: dict[Any, float] = {}
        self._late: set[Any] = set()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, call: Any, wait_s: float) -> Iterator[Callable[[], bool]]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        self._waiting[call] = time.monotonic() + wait_s
        try:
            yield lambda: call in self._late
        finally:
            self._waiting.pop(call, None)
            self._late.discard(call)

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_PERIOD_S)
            now = time.monotonic()
            for call, deadline_s in list(self._waiting.items()):
                if now > deadline_s:
                    self._late.add(call)
                    call.cancel()


_WATCHDOG = _Watchdog()


class Exchange:
    """A stream both ways: messages are sent when asked to, answers are taken one by one, each in bounded time."""

    def __init__(self, channel: grpc.Channel, method: str, answer_s_max: float) -> None:
        self._sending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answer_s_max = answer_s_max
        self._call: Any = channel.stream_stream(method, _as_is, _as_is)(self._outgoing())

    def _outgoing(self) -> Iterator[bytes]:
        while (data := self._sending.get()) is not None:
            yield data

    def send(self, data: bytes) -> None:
        self._sending.put(data)

    def receive(self) -> Reply:
        """The next message; with a code if there is none and the stream is over."""
        with _WATCHDOG.watching(self._call, self._answer_s_max) as is_late:
            try:
                return Reply([next(self._call)])
            except StopIteration:
                return Reply([], "OK")
            except grpc.RpcError as error:
                return Reply([], "DEADLINE_EXCEEDED") if is_late() else _ended(error, [])

    def end(self, abruptly: bool = False) -> None:
        if abruptly:
            self._call.cancel()
        self._sending.put(None)

    def drained(self) -> Reply:
        """End it in order, and everything that still comes."""
        self._sending.put(None)
        messages: list[bytes] = []
        while True:
            reply = self.receive()
            messages += reply.messages
            if reply.code:
                return Reply(messages, reply.code, reply.told)


def refused(reply: Reply, problems: list[Problem], shown: str, may_wait: bool, timeout_s: float) -> Outcome:
    """What a call that failed means: a typed error, one of gRPC's or Arrow's own, or one that must not be."""
    error = reply.typed_error()
    if error is not None:
        code, message = error
        if code == "internal":
            problems.append(Problem("untyped", message[:200]))
        return Outcome(code, problems, code in SUSPICIOUS, shown)
    if reply.code == "DEADLINE_EXCEEDED":
        if may_wait:
            return Outcome("left", problems, False, shown)
        return Outcome(reply.code, [*problems, Problem("hang", f"no answer within {timeout_s:g} s")], True, shown)
    if reply.is_ours and not problems:
        problems.append(Problem("untyped", f"{reply.code}: {reply.told[:200]!r}"))
    return Outcome(reply.code, problems, reply.code == "UNAVAILABLE", shown)


def parts_of(message: bytes) -> tuple[bytes, bytes, bytes]:
    """Header, metadata and body of a ``FlightData``."""
    fields = proto_fields(message)
    return fields.get(2, b""), fields.get(3, b""), fields.get(1000, b"")
