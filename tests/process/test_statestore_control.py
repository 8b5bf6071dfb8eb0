"""The control plane of the daemon: the same answers to gRPC's callers and to Flight's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shuffle.errors import BadInput, Expired, StoreUnavailable, from_wire
from shuffle.statestore import StateClient
from shuffle.statestore.remote.control_client import ControlClient
from shuffle.statestore.remote.remote import RemoteStore
from shuffle.statestore.server.control_server import Health
from shuffle.statestore.server.daemon import StoreDaemon
from shuffle.statestore.wire.proto import control_pb2 as pb
from shuffle.statestore.wire.proto import control_pb2_grpc
from tests.daemons import StoreProcess, wait_until

TIMEOUT_S = 10.0
LEASE_ID_MAX = 2**64 - 1


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("control") / "state") as running:
        yield running


@pytest.fixture
def flight(daemon: StoreProcess) -> Iterator[ControlClient]:
    client = ControlClient(daemon.address)
    yield client
    client.close()


def test_grpc_and_flight_say_the_same(daemon: StoreProcess, flight: ControlClient) -> None:
    attributes = {"where": 'a "place" \\ \u00fc'}
    with grpc.insecure_channel(daemon.listen) as channel:
        stub: Any = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        request = pb.RegisterRequest(group="g", member="by grpc", attributes=attributes, ttl_ms=60_000)
        stub.Register(request, timeout=TIMEOUT_S)
        lease = flight.call("Register", TIMEOUT_S, group="g", member="by flight", attributes=attributes, ttl_ms=60_000)
        seen = stub.Members(pb.MembersRequest(group="g"), timeout=TIMEOUT_S)
        found = flight.call("Members", TIMEOUT_S, group="g")
        assert {member.name: dict(member.attributes) for member in seen.members} == {
            member["name"]: member["attributes"] for member in found["members"]
        }
        assert seen.revision == int(found["revision"])
        stub.Leave(pb.LeaseRequest(lease_id=int(lease["lease_id"])), timeout=TIMEOUT_S)
        assert [member["name"] for member in flight.call("Members", TIMEOUT_S, group="g")["members"]] == ["by grpc"]
        info = stub.Info(pb.InfoRequest(), timeout=TIMEOUT_S)
        assert flight.info(TIMEOUT_S).lane_local_name == info.lane_local_name


@pytest.mark.parametrize(
    ("method", "fields", "error"),
    [
        ("Rename", {}, BadInput),
        ("Members", {"grup": "g"}, BadInput),
        ("Register", {"group": "g", "member": "m", "attributes": {"a": 1}, "ttl_ms": 1000}, BadInput),
        ("Register", {"group": "g", "member": "m", "attributes": {}, "ttl_ms": -1}, BadInput),
        ("Register", {"group": "g", "member": "m", "attributes": {}, "ttl_ms": object()}, BadInput),
        ("Renew", {"lease_id": LEASE_ID_MAX}, Expired),
    ],
)
def test_action_that_fails_has_a_typed_error(
    flight: ControlClient, method: str, fields: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        flight.call(method, TIMEOUT_S, **fields)
    assert flight.call("Groups", TIMEOUT_S)["groups"] is not None, "and the next one is answered"


def test_daemon_that_went_away_is_found_again_at_the_next_call(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state") as first:
        listen, address = first.listen, first.address
        client = ControlClient(address)
        before = client.info(TIMEOUT_S)
    with pytest.raises(StoreUnavailable, match="is it running"):
        client.call("Groups", TIMEOUT_S)
    with StoreProcess(tmp_path / "state", listen=listen):
        assert client.call("Groups", TIMEOUT_S) == {"groups": []}
        assert client.info(TIMEOUT_S).store_id == before.store_id, "it is the store's, not the daemon's"
    client.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        client.call("Groups", TIMEOUT_S)


def test_shared_snapshot_outlives_everybody_who_has_read_at_it(tmp_path: Path) -> None:
    """Whoever forgot to close such a snapshot, or just dropped it, once took it from all the others."""
    with StoreProcess(tmp_path / "state") as daemon:
        short = RemoteStore(daemon.address, session_ttl_ms=300)
        with StateClient(short) as client, StateClient.connect(daemon.address) as other:
            client.create_table("t", key=pa.schema([("k", pa.int64())]), value=pa.schema([("v", pa.int64())]))
            token = client.share_snapshot(60_000)
            with client.snapshot_at(token) as closed:
                assert closed.version == client.snapshot_at(token).version  # This one is dropped as it is.
            del closed
            gc.collect()
            with client.transaction() as tx:  # It has a session from here on, in whose renewals moments are released.
                tx.write("t", pa.table({"k": [1], "v": [1]}))
                tx.lookup("t", pa.table({"k": [1]}))
                tx.commit()
            time.sleep(0.5)
            with other.snapshot_at(token) as snapshot:
                assert snapshot.scan("t").read_all().num_rows == 0


# --- calls that are over ---

CALLS = 40
WATCHES = 100
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreDaemon]:
    """A daemon in this process, whose objects can be counted."""
    made = StoreDaemon(str(tmp_path_factory.mktemp("near") / "state"), "127.0.0.1:0", lambda error: None)
    yield made
    made.close()


def calls_kept() -> int:
    gc.collect()
    return sum(str(type(found)) == "<class 'grpc._server._RPCState'>" for found in gc.get_objects())


@pytest.mark.parametrize(
    "method",
    [
        "/statestore.v1.Control/Info",
        "/arrow.flight.protocol.FlightService/DoAction",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_request_that_is_no_message_is_refused_and_its_call_is_not_kept(near: StoreDaemon, method: str) -> None:
    with grpc.insecure_channel(near.address.removeprefix("grpc://")) as channel:
        for _ in range(CALLS):
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.unary_stream(method)(b"\xff\xff", timeout=10))
            error = from_wire(caught.value.details())
            assert isinstance(error, BadInput)
            assert "not a request" in error.message
        wait_until(lambda: not calls_kept(), "every call is freed")


def test_watches_of_health_whose_clients_leave_at_once_are_not_kept(near: StoreDaemon) -> None:
    unknown, serving = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN, health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(near.address.removeprefix("grpc://")) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for number in range(WATCHES):
            call = stub.Watch(health_pb2.HealthCheckRequest(service=f"name {number}" if number % 2 else ""), timeout=10)
            assert next(call).status == (unknown if number % 2 else serving)
            call.cancel()
        wait_until(lambda: not calls_kept(), "every call is freed")
    texts = [found for found in gc.get_objects() if isinstance(found, dict) and "name 1" in found]
    assert not texts, "a name that a client has made up is kept"


def test_watches_of_health_that_come_and_go_do_not_stop_the_control_plane(near: StoreDaemon) -> None:
    """A client that leaves while another is being answered: gRPC's own health service stops for ever then."""

    def come_and_go() -> None:
        with grpc.insecure_channel(near.address.removeprefix("grpc://"), OWN_CONNECTION) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for _ in range(WATCHES):
                call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
                assert next(call).status == health_pb2.HealthCheckResponse.SERVING
                call.cancel()

    with futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(come_and_go) for _ in range(4)]:
            done.result()
    wait_until(lambda: not calls_kept(), "every call is freed")


class Gone:
    """The context of a call whose client has left between its request and the callback."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


def test_watch_whose_client_has_left_is_not_kept() -> None:
    health = Health()
    sent: list[Any] = []
    health._watch(health_pb2.HealthCheckRequest(), Gone(), sent.append)
    assert (health.watch_count, sent) == (0, [])


def test_watch_of_health_is_told_when_it_is_turned_off(tmp_path: Path) -> None:
    made = StoreDaemon(str(tmp_path / "state"), "127.0.0.1:0", lambda error: None)
    try:
        with grpc.insecure_channel(made.address.removeprefix("grpc://")) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            call = stub.Watch(health_pb2.HealthCheckRequest(service="statestore.v1.Control"), timeout=10)
            assert next(call).status == health_pb2.HealthCheckResponse.SERVING
            made._health.turn_off()
            assert next(call).status == health_pb2.HealthCheckResponse.NOT_SERVING
            call.cancel()
    finally:
        made.close()
