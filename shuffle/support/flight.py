"""The one module that imports ``pyarrow.flight``: servers, clients, deadlines, and errors that cross the wire.

An error is carried in the message of a ``FlightServerError`` as the JSON of ``shuffle.errors.to_wire``. gRPC puts that
message into its trailers, whose hard limit is 16 KiB with several copies inside, so it is cut to
``WIRE_ERROR_BYTES_MAX``.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import pyarrow as pa
import pyarrow.flight as _flight

from shuffle.errors import BadInput, ShuffleError, StoreUnavailable, from_wire, one_line, to_wire
from shuffle.support.endpoint import Endpoint
from shuffle.support.fields import shown

Action = _flight.Action
FlightCallOptions = _flight.FlightCallOptions
FlightClient = _flight.FlightClient
FlightDescriptor = _flight.FlightDescriptor
FlightError = _flight.FlightError
FlightServerError = _flight.FlightServerError
FlightStreamReader = _flight.FlightStreamReader
RecordBatchStream = _flight.RecordBatchStream
Result = _flight.Result
Ticket = _flight.Ticket

P = ParamSpec("P")
R = TypeVar("R")

WIRE_ERROR_BYTES_MAX = 3000
"""The most bytes of an error on the wire. gRPC refuses trailers of more than 16 KiB, and Flight repeats the message in
them; this leaves room."""

CALL_TIMEOUT_S = 30.0
"""The deadline, in seconds, of a call that names none: Flight itself would wait forever."""

IDLE_S = 0.2
"""The least seconds for which a server that stops waits for its clients to end their calls."""

IDLE_CHECK_S = 0.05

_CHANNEL_OPTIONS = [
    # A daemon that comes back must be found again within a second; gRPC's own back-off goes up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name this is how long an attempt to connect may take. A machine that is busy starting processes
    # may need a second or more for it, and a call on a new channel fails with its first attempt.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise channels to one address share a connection, and with it its state of failure and its flow control.
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
    """The exception that a server handler raises so that the client gets ``error``, with its type and fields."""
    return FlightServerError(short_wire(error))


def short_wire(error: ShuffleError) -> str:
    """``to_wire`` of ``error``, shortened if necessary so that it fits the trailers of a call."""
    wire = to_wire(error)
    return wire if len(wire) <= WIRE_ERROR_BYTES_MAX else to_wire(_shortened(error))


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


def sent_error(error: BaseException) -> ShuffleError | None:
    """The typed error that a server has sent, if the exception of a Flight call carries one."""
    text = str(error)
    begin = text.find('{"code":')
    if begin < 0:
        return None
    try:
        _, end = json.JSONDecoder().raw_decode(text, begin)
    except ValueError:
        end = len(text)
    return from_wire(text[begin:end])


def raise_typed(error: BaseException, who: str = "the server") -> NoReturn:
    """Raises the typed error behind the exception of a Flight call. ``who`` names the peer if it did not respond."""
    if isinstance(error, ShuffleError):
        raise error
    text = str(error)
    if isinstance(error, _flight.FlightUnavailableError):
        raise StoreUnavailable(f"cannot reach {who}: is it running? ({_root_cause(text)})", address=who) from error
    if isinstance(error, _flight.FlightTimedOutError):
        raise StoreUnavailable(f"{who} did not answer in time", address=who) from error
    if isinstance(error, _flight.FlightCancelledError):
        raise StoreUnavailable(f"the call to {who} was cancelled", address=who) from error
    if (sent := sent_error(error)) is not None:
        raise sent from None
    # A peer that dies causes errors of many types (reset streams, closed sockets); none of them is a response.
    if isinstance(error, OSError | FlightError):
        raise StoreUnavailable(f"the call to {who} broke: {_first_line(text)}", address=who) from error
    raise ShuffleError(f"the call to {who} failed: {_first_line(text)}", address=who) from error


def _first_line(text: str) -> str:
    return text.split(". gRPC client debug context", 1)[0].splitlines()[0] if text else "no reason given"


def message_of(error: BaseException) -> str:
    """The message of a Flight error, without the prefix and the debug context that Flight adds."""
    return str(error).split(". gRPC client debug context", 1)[0].rpartition("with message: ")[2]


def _root_cause(text: str) -> str:
    """The reason why a connection failed: gRPC puts it at the end of its text, after the errors that it caused."""
    return _first_line(text).rpartition(": ")[2]


@contextmanager
def typed_errors(who: str) -> Iterator[None]:
    """Turns Flight's exceptions into typed ones, around client calls and the reading of their streams."""
    try:
        yield
    except (FlightError, pa.ArrowException, OSError) as error:
        raise_typed(error, who)


# --- servers: their exceptions cross the wire typed, or as one line, and never as a traceback ---


def read_chunk(reader: Any) -> Any:
    """The next message that a client has sent on an exchange. Raises ``StopIteration`` at its end."""
    with _understood():
        return reader.read_chunk()


@contextmanager
def _understood() -> Iterator[None]:
    """Raises ``BadInput`` where Arrow cannot read what a client has sent, or where the client left before it sent
    anything. Arrow raises exceptions of many types for that, none of which is an error of this server."""
    try:
        yield
    except (StopIteration, FlightError):
        raise
    except (pa.ArrowException, OSError, EOFError, UnicodeError, SystemError) as error:
        raise BadInput(f"not a message that can be understood: {one_line(error)}") from None


@contextmanager
def _as_flight_errors() -> Iterator[None]:
    """Turns the exceptions of a handler into ``FlightError``: Flight would send any other one with its traceback."""
    try:
        yield
    except FlightError:
        raise
    except ShuffleError as error:
        raise as_flight_error(error) from None
    except (pa.ArrowException, UnicodeError) as error:
        # Handlers decode only what a client has sent, so the client's message is not what it claims to be.
        raise as_flight_error(BadInput(f"not a message that can be understood: {one_line(error)}")) from None
    except Exception as error:
        raise as_flight_error(ShuffleError(one_line(error))) from None


def _wrap_handler(handler: Callable[P, Any]) -> Callable[P, Any]:
    @functools.wraps(handler)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        with _as_flight_errors():
            result = handler(*args, **kwargs)
            # Flight would run an iterator later, outside of this block, so it is run now.
            return list(result) if isinstance(result, Iterator) else result

    return wrapped


def _refusing_handler(method: str) -> Callable[..., Any]:
    def refuse(*given: Any) -> Any:
        error = BadInput(f"{method} is not something that this server does")
        if method == "get_schema":
            # Here Flight sends tracebacks even of its own errors. So the response is a schema without columns that
            # has the error in its metadata.
            return _flight.SchemaResult(pa.schema([], {"error": to_wire(error)}))
        raise error

    return refuse


_HANDLERS = (
    "list_flights",
    "get_flight_info",
    "get_schema",
    "do_get",
    "do_put",
    "do_exchange",
    "list_actions",
    "do_action",
)
"""The methods of a server that Flight calls."""


class FlightServerBase(_flight.FlightServerBase):  # type: ignore[misc]
    """A Flight server whose handlers may raise any exception, and which refuses the methods it has no handler for."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _HANDLERS:
            own = getattr(cls, name)
            if own is getattr(_flight.FlightServerBase, name):
                own = _refusing_handler(name)
            setattr(cls, name, _wrap_handler(own))


def check_schema(reader: Any, expected: pa.Schema) -> None:
    """Raises ``BadInput`` unless an exchange begins with this schema. Call it before anything is read from it.

    With a schema of its own choice a client can end the process: where a column has a dictionary, Flight reads the next
    message without checking whether there is a batch in it, and dereferences a null pointer if there is none.
    """
    with _understood():
        schema = reader.schema
    if not schema.equals(expected):
        raise BadInput(f"an exchange of the columns {expected.names} was begun with {shown(str(schema.names))}")


def GeneratorStream(schema: pa.Schema, batches: Iterator[Any]) -> Any:  # noqa: N802
    """Flight's class of this name, for a generator that may raise: it runs after its handler has returned."""
    return _flight.GeneratorStream(schema, _wrap_batches(batches))


def _wrap_batches(batches: Iterator[R]) -> Iterator[R]:
    with _as_flight_errors():
        yield from batches


def do_action(
    client: Any,
    action: str,
    body: bytes = b"",
    *,
    who: str,
    timeout_s: float = CALL_TIMEOUT_S,
) -> bytes:
    """Calls the action of this name and returns the body of its one response."""
    with typed_errors(who):
        results = list(client.do_action(Action(action, body), call_options(timeout_s)))
    return bytes(results[0].body.to_pybytes()) if results else b""


def shutdown(server: Any, timeout_s: float = 5.0, is_idle: Callable[[], bool] = lambda: False) -> bool:
    """Stops a server, waiting at most ``timeout_s`` for calls that still run. Returns whether all of them ended.

    ``FlightServerBase.shutdown`` waits for live calls without a bound, so it runs in a thread of its own. Calls may be
    open only because their clients do not end them: once ``is_idle`` says so, they are waited for no longer.
    """
    thread = threading.Thread(target=server.shutdown, name="flight-shutdown", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + timeout_s
    thread.join(min(IDLE_S, timeout_s))
    while thread.is_alive() and time.monotonic() < deadline_s and not is_idle():
        thread.join(IDLE_CHECK_S)
    return not thread.is_alive()


def location(listen: str) -> str:
    """``host:port`` or ``grpc://host:port`` as a Flight location."""
    return str(Endpoint.parse_listen(listen))
