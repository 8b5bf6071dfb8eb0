"""The one module that imports ``pyarrow.flight``: servers, clients, deadlines, and errors that cross the wire.

An error is carried in the message of a ``FlightServerError`` as the JSON of ``shuffle.errors.to_wire``. gRPC puts that
message into its trailers, whose hard limit is 16 KiB with several copies inside, so it is cut to
``WIRE_ERROR_BYTES_MAX``.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import pyarrow as pa
import pyarrow.flight as _flight

from shuffle.errors import ShuffleError, StoreUnavailable, from_wire, to_wire

Action = _flight.Action
FlightCallOptions = _flight.FlightCallOptions
FlightClient = _flight.FlightClient
FlightDescriptor = _flight.FlightDescriptor
FlightError = _flight.FlightError
FlightServerBase = _flight.FlightServerBase
FlightServerError = _flight.FlightServerError
FlightStreamReader = _flight.FlightStreamReader
GeneratorStream = _flight.GeneratorStream
RecordBatchStream = _flight.RecordBatchStream
Result = _flight.Result
Ticket = _flight.Ticket

P = ParamSpec("P")
R = TypeVar("R")

WIRE_ERROR_BYTES_MAX = 3000
"""gRPC refuses trailers of more than 16 KiB, and Flight repeats the message in them; this leaves room."""

CALL_TIMEOUT_S = 30.0
"""A call that names no deadline of its own gets this one: Flight itself would wait forever."""

_CHANNEL_OPTIONS = [
    # A daemon that comes back must be found again within a second; gRPC's own back-off goes up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels to one address share their connection otherwise, and with it its state of failure and its window.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


def connect(address: str) -> Any:
    """A Flight client for ``address`` (``grpc://host:port``). No connection is made before the first call."""
    with typed_errors(address):
        return _flight.connect(address, generic_options=_CHANNEL_OPTIONS)


def call_options(timeout_s: float = CALL_TIMEOUT_S) -> Any:
    return _flight.FlightCallOptions(timeout=timeout_s)


def as_flight_error(error: ShuffleError) -> Any:
    """What a server handler raises so that the client gets ``error`` back, with its type and fields."""
    wire = to_wire(error)
    if len(wire) > WIRE_ERROR_BYTES_MAX:
        wire = to_wire(_shortened(error))
    return FlightServerError(wire)


def _shortened(error: ShuffleError) -> ShuffleError:
    # Half of the room goes to the message. JSON escapes take up to six bytes a character, so it is cut by its encoded
    # length, not by its own.
    fields = {name: value for name, value in error.fields.items() if isinstance(value, int | float | bool)}
    for name, value in error.fields.items():
        if name not in fields and len(json.dumps(str(value))) <= 200 and len(json.dumps(fields)) < 800:
            fields[name] = value
    budget = WIRE_ERROR_BYTES_MAX // 2
    message = error.message[:budget]
    while len(json.dumps(message)) > budget:
        message = message[: len(message) * 3 // 4]
    cut = " …" if len(message) < len(error.message) else ""
    return type(error)(message + cut, **fields)


def raise_typed(error: BaseException, who: str = "the server") -> NoReturn:
    """Raise the typed error behind what a Flight call raised. ``who`` is named when nobody answered."""
    if isinstance(error, ShuffleError):
        raise error
    text = str(error)
    if isinstance(error, _flight.FlightUnavailableError):
        raise StoreUnavailable(f"cannot reach {who}: is it running?", address=who) from None
    if isinstance(error, _flight.FlightTimedOutError):
        raise StoreUnavailable(f"{who} did not answer in time", address=who) from None
    if isinstance(error, _flight.FlightCancelledError):
        raise StoreUnavailable(f"the call to {who} was cancelled", address=who) from None
    begin = text.find('{"code":')
    if begin >= 0:
        try:
            _, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            end = len(text)
        raise from_wire(text[begin:end]) from None
    # What a dying peer leaves behind has many shapes (reset streams, closed sockets); none of them is an answer.
    if isinstance(error, OSError | FlightError):
        raise StoreUnavailable(f"the call to {who} broke: {_first_line(text)}", address=who) from error
    raise ShuffleError(f"the call to {who} failed: {_first_line(text)}", address=who) from error


def _first_line(text: str) -> str:
    return text.split(". gRPC client debug context", 1)[0].splitlines()[0] if text else "no reason given"


@contextmanager
def typed_errors(who: str) -> Iterator[None]:
    """Around client calls and the reading of their streams: Flight's exceptions become typed ones."""
    try:
        yield
    except (FlightError, pa.ArrowException, OSError) as error:
        raise_typed(error, who)


def served(handler: Callable[P, R]) -> Callable[P, R]:
    """Around a server's handler: typed errors cross the wire typed, anything else as its text, never as a traceback."""

    @functools.wraps(handler)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return handler(*args, **kwargs)
        except FlightError:
            raise
        except ShuffleError as error:
            raise as_flight_error(error) from None
        except Exception as error:
            raise as_flight_error(ShuffleError(f"{type(error).__name__}: {error}")) from None

    return wrapped


def served_batches(batches: Iterator[R]) -> Iterator[R]:
    """The same for the generator behind a ``GeneratorStream``, which runs after its handler has returned."""
    try:
        yield from batches
    except FlightError:
        raise
    except ShuffleError as error:
        raise as_flight_error(error) from None
    except Exception as error:
        raise as_flight_error(ShuffleError(f"{type(error).__name__}: {error}")) from None


def do_action(
    client: Any,
    kind: str,
    body: bytes = b"",
    *,
    who: str,
    timeout_s: float = CALL_TIMEOUT_S,
) -> bytes:
    """One action with one answer."""
    with typed_errors(who):
        results = list(client.do_action(Action(kind, body), call_options(timeout_s)))
    return bytes(results[0].body.to_pybytes()) if results else b""


def shutdown(server: Any, timeout_s: float = 5.0) -> bool:
    """Stop a server, waiting at most ``timeout_s`` for calls that still run. True when all of them ended.

    ``FlightServerBase.shutdown`` waits for live calls without a bound, so it runs in a thread of its own.
    """
    thread = threading.Thread(target=server.shutdown, name="flight-shutdown", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def location(listen: str) -> str:
    """``host:port`` or ``grpc://host:port`` as a Flight location."""
    return listen if "://" in listen else f"grpc://{listen}"
