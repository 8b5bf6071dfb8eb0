"""Stands in for ``shuffle.support.flight``: the same names, over the simulated network.

Errors of handlers reach the caller typed, through their wire form; broken and silent connections become
``StoreUnavailable``, as the real module's ``raise_typed`` has it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from shuffle.errors import ShuffleError, StoreUnavailable
from tests.sim import kernel
from tests.sim.network import Call, Network, NoAnswer, NotReached

R = TypeVar("R")

FlightError = ShuffleError
CALL_TIMEOUT_S = 30.0

network: Network | None = None
"""Of the world that runs now."""

observe_answer: Callable[[Any, Any, Any], None] = lambda service, ticket, answer: None  # noqa: E731
"""The checkers' eye on GetRows."""


@dataclass
class Ticket:
    ticket: bytes


@dataclass
class Chunk:
    data: Any
    app_metadata: bytes | None


@dataclass
class GeneratorStream:
    schema: Any
    batches: Iterator[Any]


@dataclass
class Result:
    body: Any


@dataclass
class Action:
    type: str
    body: bytes


@dataclass
class FlightDescriptor:
    command: bytes

    @staticmethod
    def for_command(command: bytes) -> FlightDescriptor:
        return FlightDescriptor(command)


class _Context:
    def __init__(self, call: Call) -> None:
        self._call = call

    def is_cancelled(self) -> bool:
        return self._call.given_up


class FlightServerBase:
    def __init__(self, where: str) -> None:
        assert network is not None
        process = kernel.current().process
        self.port = process.port
        self.sim_process = process
        self._where = f"grpc://127.0.0.1:{self.port}"
        network.listen(self._where, process, self)

    def shutdown(self) -> None:
        assert network is not None
        network.close(self._where, self.sim_process)


class _Reader:
    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def cancel(self) -> None:
        self._chunks = []


class _Client:
    def __init__(self, address: str) -> None:
        self._address = address
        self._closed = False

    def do_get(self, ticket: Ticket, options: float) -> _Reader:
        assert network is not None

        def serve(server: Any, call: Call) -> list[Chunk]:
            stream = server.do_get(_Context(call), ticket)
            chunks = [Chunk(batch, metadata) for batch, metadata in stream.batches]
            observe_answer(server, ticket, chunks)
            return chunks

        try:
            return _Reader(network.call(self._address, "get_rows", serve, options))
        except (NotReached, NoAnswer) as error:
            raise StoreUnavailable(str(error), address=self._address) from None

    def do_exchange(self, descriptor: FlightDescriptor, options: float) -> tuple[_Exchange, _Exchange]:
        exchange = _Exchange(self._address, descriptor, options)
        return exchange, exchange

    def close(self) -> None:
        self._closed = True


class _Exchange:
    """Both ends of the client's side of an exchange. Each question is a message of its own, and so is its answer."""

    def __init__(self, address: str, descriptor: FlightDescriptor, timeout_s: float) -> None:
        self._address = address
        self._descriptor = descriptor
        self._deadline_us = kernel.current().process.world.now_us + int(timeout_s * kernel.US_PER_S)
        self._question: bytes | None = None
        self._chunks: list[Chunk] = []
        self._over = False

    def begin(self, schema: Any) -> None: ...

    def write_metadata(self, question: bytes) -> None:
        assert self._question is None
        self._question = question

    def read_chunk(self) -> Chunk:
        if not self._chunks:
            self._chunks = self._ask()
        return self._chunks.pop(0)

    def _ask(self) -> list[Chunk]:
        assert network is not None
        question, self._question = self._question, None
        if question is None or self._over:
            raise StopIteration

        def serve(server: Any, call: Call) -> tuple[list[Chunk], bool]:
            served = _Served(question)
            server.do_exchange(_Context(call), self._descriptor, served, served)
            for ticket, answered in served.answers(question):
                observe_answer(server, ticket, answered)
            return served.chunks, not served.asked_again

        left_s = (self._deadline_us - kernel.current().process.world.now_us) / kernel.US_PER_S
        try:
            chunks, self._over = network.call(self._address, "get_rows", serve, max(left_s, 0.001))
        except (NotReached, NoAnswer) as error:
            raise StoreUnavailable(str(error), address=self._address) from None
        return chunks

    def cancel(self) -> None:
        self._over = True

    def close(self) -> None:
        self._over = True


class _Served:
    """The server's ends of an exchange, for one question."""

    def __init__(self, question: bytes) -> None:
        self._question: bytes | None = question
        self.asked_again = False
        """Whether the handler would have taken another question."""
        self.chunks: list[Chunk] = []

    def answers(self, question: bytes) -> Iterator[tuple[Ticket, list[Chunk]]]:
        """Each request of the question and what was answered to it, unless that is an error, or the end of the
        stream."""
        head = (self.chunks[0].app_metadata or b"") if self.chunks else b"!"
        if head.startswith((b"{", b"!")):
            return
        if not question.startswith(b"["):
            yield Ticket(question), self.chunks
            return
        messages = importlib.import_module("shuffle.messages_many")
        following = iter(self.chunks[1:])
        for request, answer in zip(json.loads(question), messages.ManyHead.decode(head).answers, strict=True):
            if isinstance(answer, messages.PairAnswer) and answer.tails:
                alone = [Chunk(None, tail.encode()) for tail in answer.tails]
                chunks = [next(following) for _ in answer.tails] if answer.has_rows else alone
                yield Ticket(json.dumps(request).encode()), chunks

    def read_chunk(self) -> Chunk:
        question, self._question = self._question, None
        if question is None:
            self.asked_again = True
            raise StopIteration
        return Chunk(None, question)

    def begin(self, schema: Any) -> None: ...

    def write_metadata(self, metadata: bytes) -> None:
        self.chunks.append(Chunk(None, metadata))

    def write_with_metadata(self, batch: Any, metadata: bytes) -> None:
        self.chunks.append(Chunk(batch, metadata))


def connect(address: str) -> _Client:
    return _Client(address)


def call_options(timeout_s: float = CALL_TIMEOUT_S) -> float:
    return timeout_s


@contextmanager
def typed_errors(who: str) -> Iterator[None]:
    yield


def check_schema(reader: Any, wanted: Any) -> None: ...


def read_chunk(reader: Any) -> Any:
    return reader.read_chunk()


def shutdown(server: FlightServerBase, timeout_s: float = 5.0, is_idle: Callable[[], bool] = lambda: False) -> bool:
    server.shutdown()
    return True


def location(listen: str) -> str:
    return listen
