"""The control plane of the daemon: the gRPC service of ``proto/control.proto``, health and reflection.

Its methods are Flight actions too, which is how our own clients call them (``control_client``).
"""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format, message_factory
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from shuffle.errors import (
    BadInput,
    CommitConflict,
    DiskFull,
    Expired,
    ShuffleError,
    StoreUnavailable,
    TableExists,
    TooLarge,
    UnknownTable,
    one_line,
)
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.request import CreateQueue, CreateTable, Drop
from shuffle.statestore.server.session_registry import SessionRegistry
from shuffle.statestore.wire.operations import CONTROL
from shuffle.statestore.wire.proto import control_pb2 as pb
from shuffle.statestore.wire.proto import control_pb2_grpc
from shuffle.support.endpoint import Endpoint
from shuffle.support.fields import Field, check_fields, shown
from shuffle.support.flight import short_wire
from shuffle.support.slots import machine_of
from shuffle.support.vital_threads import alive

T = TypeVar("T")

Stats = Callable[[], dict[str, Any]]

_CONTROL = pb.DESCRIPTOR.services_by_name["Control"]
SERVICE = _CONTROL.full_name
FLIGHT_SERVICE = "arrow.flight.protocol.FlightService"
CONTROL_THREADS = 256
"""The threads of the control plane: each call holds one while it is handled."""

WATCHES_MAX = 192
"""The most calls of ``Watch`` that may wait at once: enough for the reducers of a few processors, and it leaves a
quarter of the threads for everything else. One more returns the current members at once, and its caller repeats it."""

HEALTH_THREADS = 4
"""The threads for health checks alone, so that health is reported even while all other threads wait."""

_HEALTH_NAMES = ("", SERVICE)
"""The names under which health is reported."""

CALLS_MAX = 4096
"""The most calls that are handled, or wait for a thread, at once; gRPC refuses one more."""

_STATUS_CODES: list[tuple[type[ShuffleError], grpc.StatusCode]] = [
    (UnknownTable, grpc.StatusCode.NOT_FOUND),
    (TableExists, grpc.StatusCode.ALREADY_EXISTS),
    (TooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DiskFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (BadInput, grpc.StatusCode.INVALID_ARGUMENT),
    (CommitConflict, grpc.StatusCode.ABORTED),
    (Expired, grpc.StatusCode.FAILED_PRECONDITION),
    (StoreUnavailable, grpc.StatusCode.UNAVAILABLE),
]


class ControlService(control_pb2_grpc.ControlServicer):
    """Each method is one request to the store; ``_guarded`` turns its errors into status codes."""

    def __init__(self, store: LocalStore, sessions: SessionRegistry, info: pb.InfoReply, stats: Stats) -> None:
        """``stats`` returns the object that ``Stats`` responds with."""
        self._store = store
        self._sessions = sessions
        self._info = info
        self._stats = stats
        self._watches = threading.BoundedSemaphore(WATCHES_MAX)
        for name, fields in CONTROL.items():
            setattr(self, name, _checked(name, fields, getattr(self, name)))

    def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoReply:  # noqa: N802
        return self._info

    def ListTables(self, request: pb.ListTablesRequest, context: Any) -> pb.ListTablesReply:  # noqa: N802
        return pb.ListTablesReply(schema_json=[schema.to_json() for schema in self._store.tables()])

    def ListQueues(self, request: pb.ListQueuesRequest, context: Any) -> pb.ListQueuesReply:  # noqa: N802
        return pb.ListQueuesReply(schema_json=[schema.to_json() for schema in self._store.queues()])

    def CreateTable(self, request: pb.CreateTableRequest, context: Any) -> pb.ChangeReply:  # noqa: N802
        change = CreateTable(_parse_schema(TableSchema.from_json, request.schema_json), request.if_not_exists)
        self._store.change_catalogue(change)
        return pb.ChangeReply()

    def CreateQueue(self, request: pb.CreateQueueRequest, context: Any) -> pb.ChangeReply:  # noqa: N802
        change = CreateQueue(_parse_schema(QueueSchema.from_json, request.schema_json), request.if_not_exists)
        self._store.change_catalogue(change)
        return pb.ChangeReply()

    def Drop(self, request: pb.DropRequest, context: Any) -> pb.ChangeReply:  # noqa: N802
        self._store.change_catalogue(Drop(request.kind, request.name))
        return pb.ChangeReply()

    def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.SessionReply:  # noqa: N802
        peer = machine_of(context.peer())
        return pb.SessionReply(session_id=self._sessions.open_session(request.ttl_ms, peer))

    def RenewSession(self, request: pb.SessionRequest, context: Any) -> pb.SessionReply:  # noqa: N802
        self._sessions.renew_session(request.session_id)
        return pb.SessionReply(session_id=request.session_id)

    def CloseSession(self, request: pb.SessionRequest, context: Any) -> pb.SessionReply:  # noqa: N802
        self._sessions.close_session(request.session_id)
        return pb.SessionReply(session_id=request.session_id)

    def Register(self, request: pb.RegisterRequest, context: Any) -> pb.LeaseReply:  # noqa: N802
        lease_id = self._store.register(request.group, request.member, dict(request.attributes), request.ttl_ms)
        return pb.LeaseReply(lease_id=lease_id)

    def Renew(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseReply:  # noqa: N802
        self._store.renew(request.lease_id)
        return pb.LeaseReply(lease_id=request.lease_id)

    def Leave(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseReply:  # noqa: N802
        self._store.leave(request.lease_id)
        return pb.LeaseReply(lease_id=request.lease_id)

    def Members(self, request: pb.MembersRequest, context: Any) -> pb.MembersReply:  # noqa: N802
        return _members_reply(*self._store.members(request.group))

    def Watch(self, request: pb.WatchRequest, context: Any) -> pb.MembersReply:  # noqa: N802
        if not self._watches.acquire(blocking=False):
            return _members_reply(*self._store.watch(request.group, request.revision, 0))
        try:
            return _members_reply(*self._store.watch(request.group, request.revision, request.wait_ms))
        finally:
            self._watches.release()

    def Groups(self, request: pb.GroupsRequest, context: Any) -> pb.GroupsReply:  # noqa: N802
        return pb.GroupsReply(groups=self._store.groups())

    def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:  # noqa: N802
        return pb.StatsReply(stats_json=json.dumps({**self._stats(), "threads": alive()}))


def _parse_schema(from_json: Callable[[str], T], text: str) -> T:
    """The schema in a client's request, which may be any text: every error of ``from_json`` becomes ``BadInput``."""
    try:
        return from_json(text)
    except Exception as error:
        raise BadInput(f"not the description of a table or queue: {one_line(error)}") from None


def _members_reply(revision: int, members: list[Any]) -> pb.MembersReply:
    entries = [pb.Member(name=member.name, attributes=dict(member.attributes)) for member in members]
    return pb.MembersReply(revision=revision, members=entries)


class Health:
    """The standard health service, on threads of its own.

    gRPC's own one holds a lock while it waits for a message of ``Watch`` to be sent. Only gRPC's serving thread notices
    that it was, and it takes the same lock for each client that has left: together they stop the whole control plane.
    """

    def __init__(self) -> None:
        self._pool = futures.ThreadPoolExecutor(HEALTH_THREADS, thread_name_prefix="health")
        self._status: int = health_pb2.HealthCheckResponse.SERVING
        self._watches: set[_HealthWatch] = set()
        self._lock = threading.Lock()
        """Held for changes of the set alone, never while something is sent."""

    def turn_off(self) -> None:
        """Report ``NOT_SERVING``, so that whoever depends on this process stops using it."""
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            self._pool.submit(watch.send, self._response)

    def _response(self) -> Any:
        return health_pb2.HealthCheckResponse(status=self._status)

    def _check(self, request: Any, context: Any) -> Any:
        if request.service in _HEALTH_NAMES:
            return self._response()
        context.set_code(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse()

    def _watch(self, request: Any, context: Any, send: Callable[[Any], None]) -> None:
        """Send the status now, and again when it changes. The stream stays open until its client leaves."""
        if request.service not in _HEALTH_NAMES:
            return send(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN))
        watch = _HealthWatch(send)
        with self._lock:
            self._watches.add(watch)
        if not context.add_callback(lambda: self._leave(watch)):
            return self._leave(watch)  # The client has left already, and gRPC will not call back.
        return watch.send(self._response)

    def _leave(self, watch: _HealthWatch) -> None:
        with self._lock:
            self._watches.discard(watch)

    @property
    def watch_count(self) -> int:
        return len(self._watches)

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        def check(request: Any, context: Any) -> Any:
            return self._check(request, context)

        def watch(request: Any, context: Any, send: Any) -> None:
            self._watch(request, context, send)

        # This is how gRPC learns which threads handle a method; a stream of ``Watch`` holds none of them.
        vars(check)["experimental_thread_pool"] = self._pool
        vars(watch).update(experimental_thread_pool=self._pool, experimental_non_blocking=True)
        read, write = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(check, read, write),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, read, write),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)


class _HealthWatch:
    """A client that watches health."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        """Held while a message is sent: the status is read under it, so that the newest is sent last."""

    def send(self, response: Callable[[], Any]) -> None:
        with self._lock:
            self._send(response())


class _Unreadable:
    """Stands for a request that is not a message of its type."""

    def __init__(self, error: Exception) -> None:
        self.reason = one_line(error)


class _TypedErrors(grpc.ServerInterceptor):  # type: ignore[misc]
    """Errors leave as a status code and one JSON object, never as a traceback.

    That includes requests that cannot be parsed. gRPC would end such a call twice (``_server._receive_message`` and
    ``_unary_request``), and everything that belongs to it, some 20 KB, would never be freed.
    """

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        read, write = _reader(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_guarded(handler.unary_unary), read, write)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_guarded(handler.unary_stream), read, write)
        assert handler.stream_stream, f"{details.method}: nothing guards a call of this kind"
        return grpc.stream_stream_rpc_method_handler(_guarded_stream(handler.stream_stream), read, write)


def _reader(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """``read`` that raises nothing, and returns ``_Unreadable`` instead."""

    def try_read(data: bytes) -> Any:
        try:
            return read(data)
        except Exception as error:
            return _Unreadable(error)

    return try_read


def _readable(request: Any) -> Any:
    """``request``; raises ``BadInput`` when it is unreadable."""
    if isinstance(request, _Unreadable):
        raise BadInput(f"not a request that this method understands: {request.reason}")
    return request


def _checked(name: str, fields: tuple[Field, ...], method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``method`` with a check that the fields of its request are within their bounds, over gRPC and Flight alike."""

    def call(request: Any, context: Any) -> Any:
        check_fields(name, fields, {field.name: getattr(request, field.name) for field in fields})
        return method(request, context)

    return call


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` with every exception turned into a status code and one JSON object."""

    @functools.wraps(method)
    def call(request: Any, context: Any, *send: Any) -> Any:
        try:
            return method(_readable(request), context, *send)
        except Exception as raised:
            error = raised
        return _abort(context, error)

    return call


def _guarded_stream(method: Callable[[Iterator[Any], Any], Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """As ``_guarded``, for a method with a stream of requests, which raises while it is iterated."""

    @functools.wraps(method)
    def call(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        try:
            yield from method(map(_readable, requests), context)
            return
        except grpc.RpcError:
            raise  # The client has left.
        except Exception as raised:
            error = raised
        _abort(context, error)

    return call


def _abort(context: Any, raised: Exception) -> Any:
    error = raised if isinstance(raised, ShuffleError) else ShuffleError(one_line(raised))
    codes = (code for error_type, code in _STATUS_CODES if isinstance(error, error_type))
    return context.abort(next(codes, grpc.StatusCode.INTERNAL), short_wire(error))


class FlightActions:
    """``DoAction`` of Arrow Flight: every method of the control plane by its name, with JSON for its messages."""

    def __init__(self, service: ControlService) -> None:
        self._methods = {
            method.name: (getattr(service, method.name), message_factory.GetMessageClass(method.input_type))
            for method in _CONTROL.methods
        }

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        action = grpc.unary_stream_rpc_method_handler(
            self._act, pb.FlightAction.FromString, pb.FlightResult.SerializeToString
        )
        return grpc.method_handlers_generic_handler(FLIGHT_SERVICE, {"DoAction": action})

    def _act(self, action: pb.FlightAction, context: Any) -> Iterator[pb.FlightResult]:
        if action.type not in self._methods:
            raise BadInput(f"unknown action {shown(action.type)}: client and store are of different versions")
        method, request = self._methods[action.type]
        try:
            parsed = json_format.Parse(action.body, request())
        except (json_format.ParseError, ValueError, RecursionError, SystemError) as error:
            raise BadInput(f"not a request that {action.type} understands: {one_line(error)}") from None
        response = json_format.MessageToJson(
            method(parsed, context), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return iter([pb.FlightResult(body=response.encode())])


def check_listen(listen: Endpoint) -> None:
    """Raise ``BadInput`` when ``listen`` cannot be listened on: gRPC would print lines of its own on stderr."""
    try:
        infos = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)
        for family, socket_type, protocol, _, address in infos:
            with socket.socket(family, socket_type, protocol) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
    except OSError as error:
        raise BadInput(f"cannot listen on {listen.target}: {error.strerror}") from None


class ControlServer:
    """A gRPC server that serves the control plane and health until it is stopped."""

    def __init__(self, service: ControlService, states: Health, listen: str) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="control"),
            interceptors=[_TypedErrors()],
            maximum_concurrent_rpcs=CALLS_MAX,
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4 << 20)],
        )
        control_pb2_grpc.add_ControlServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        self._server.add_generic_rpc_handlers((FlightActions(service).handler, states.handler))
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            self.port: int = self._server.add_insecure_port(listen)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise BadInput(f"cannot listen on {listen}: the port is taken, or the host is not one of this machine")
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Take no new calls, and give those that run ``grace_s`` seconds to end."""
        self._server.stop(grace=grace_s)
