"""The two transports of the store: every operation over each that it is declared for; daemons without the lane."""

from __future__ import annotations

import threading
import time
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.errors import CommitConflict, CorruptData, OutOfRange, ShuffleError, UnknownTable
from shuffle.statestore import StateClient
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.remote.flight_client import FlightClient
from shuffle.statestore.remote.lane_client import LaneAddress, LaneClient
from shuffle.statestore.server.handlers import Handlers
from shuffle.statestore.server.metrics import StoreMetrics
from shuffle.statestore.server.session_registry import SessionRegistry
from shuffle.statestore.wire.messages import Header, Rows
from shuffle.statestore.wire.operations import OPERATIONS
from shuffle.support import flight
from tests.daemons import StoreProcess, wait_until
from tests.process.test_statestore_lane import info

NUMBERS = pa.schema([("n", pa.int64())])

REQUESTS: dict[str, tuple[Header, Rows | None]] = {
    "get": ({"table": 9999}, ([b"k"], [None])),
    "scan": ({"table": 9999, "rows": 1}, ([b"a"], [b"b"])),
    "open": ({"session": 1}, None),
    "release": ({"session": 1, "view": 1}, None),
    "commit": ({"sections": [["trim", 9999, 0, 0]]}, None),
    "stage": ({"queue": 9999, "ttl_ms": 1000}, ([None], [b"x"])),
    "discard": ({"staged": "0" * 32}, None),
    "bounds": ({"queue": 9999}, None),
    "read": ({"queue": 9999, "partition": 0, "begin": 0, "rows": 1, "bytes": 1, "wait_ms": 0}, None),
}
"""A request of each operation that is understood, and does nothing: there is no such table, queue or session."""


def unexpected(error: Exception) -> None:
    raise AssertionError(f"a thread died: {error}")


def lane_of(daemon: StoreProcess) -> LaneClient:
    found = info(daemon)
    host, _, port = found.lane_address.removeprefix("tcp://").rpartition(":")
    return LaneClient(lambda: LaneAddress(host, int(port), ""), daemon.address)


def test_every_operation_has_a_handler(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "state")
    sessions = SessionRegistry(store)
    assert set(Handlers(store, sessions, StoreMetrics(enabled=False)).operations) == set(OPERATIONS)
    sessions.close()
    store.close()


def test_every_operation_is_understood_over_every_transport_that_it_is_declared_for(tmp_path: Path) -> None:
    assert set(REQUESTS) == set(OPERATIONS), "an operation is not tried"
    with StoreProcess(tmp_path / "state") as daemon:
        lane = lane_of(daemon)
        exchange = FlightClient(lambda: flight.connect(info(daemon).flight_address), daemon.address, unexpected)
        for name, (fields, rows) in REQUESTS.items():
            for transport in (exchange, lane):
                text = ""
                try:
                    transport.send({"op": name, **fields}, rows, 10.0)
                except ShuffleError as error:
                    text = error.message
                refused = "are sent over Flight" in text
                assert refused == (transport is lane and not OPERATIONS[name].lane), (name, text)
                assert "different versions" not in text
        lane.close()
        exchange.close()


def test_daemon_without_the_lane_opens_none_and_its_clients_need_none(tmp_path: Path) -> None:
    with (
        StoreProcess(tmp_path / "state", options=["--no-lane"]) as daemon,
        StateClient.connect(daemon.address) as client,
    ):
        assert (info(daemon).lane_address, info(daemon).lane_local_name) == ("", "")
        assert "store-lane" not in client.stats()["threads"]
        queue = client.create_queue("q", NUMBERS, 1)
        queue.append(0, pa.table({"n": [1, 2]}))
        assert queue.read(0, 0)[0]["n"].to_pylist() == [1, 2]


@pytest.mark.parametrize("lane_first", [True, False])
def test_client_goes_on_when_the_daemon_comes_back_with_or_without_the_lane(tmp_path: Path, lane_first: bool) -> None:
    options = [[], ["--no-lane"]] if lane_first else [["--no-lane"], []]
    with StoreProcess(tmp_path / "state", options=options[0]) as first:
        client = StateClient.connect(first.address, local_files=False)
        queue = client.create_queue("q", NUMBERS, 1)
        queue.append(0, pa.table({"n": [1]}), producer="p", sequence=1)
        assert first.stop() == 0
        with StoreProcess(tmp_path / "state", listen=first.listen, options=options[1]) as second:
            assert queue.read(0, 0)[0]["n"].to_pylist() == [1]
            queue.append(0, pa.table({"n": [2]}), producer="p", sequence=2)
            assert queue.read(0, 0)[0]["n"].to_pylist() == [1, 2]
            client.close()
            assert second.stop() == 0


def test_lane_is_left_alone_where_the_environment_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreProcess(tmp_path / "state", options=["--metrics", "127.0.0.1:0"]) as daemon:
        for value, used in (("off", False), ("", True)):
            monkeypatch.setenv("SHUFFLE_STORE_LANE", value)
            with StateClient.connect(daemon.address, local_files=False) as client:
                queue = client.create_queue("q", NUMBERS, 1, if_not_exists=True)
                queue.append(0, pa.table({"n": [1]}))
                assert queue.read(0, 0)[1] > 0
                assert (figure(client, "shuffle_store_lane_connections") > 0) == used


# --- reads over Flight ---


@pytest.fixture
def flight_only(tmp_path: Path) -> StoreProcess:
    changed = {"shuffle.statestore.server.handlers.WAITING_READS_MAX": 2}
    with StoreProcess(tmp_path / "state", changed=changed, options=["--no-lane"]) as daemon:
        yield daemon  # type: ignore[misc]


def test_long_poll_over_flight_ends_with_the_first_row_and_the_crowd_is_not_kept(flight_only: StoreProcess) -> None:
    with StateClient.connect(flight_only.address, local_files=False) as client:
        queue = client.create_queue("q", NUMBERS, 1)
        found: list[tuple[int, float]] = []

        def poll() -> None:
            begin_s = time.monotonic()
            rows, _ = queue.read(0, 0, wait_ms=20_000)
            found.append((rows.num_rows, time.monotonic() - begin_s))

        pollers = [threading.Thread(target=poll) for _ in range(2)]
        for poller in pollers:
            poller.start()
        time.sleep(0.5)
        begin_s = time.monotonic()
        assert queue.read(0, 0, wait_ms=20_000)[0].num_rows == 0, "those who may wait are as many as they may be"
        assert time.monotonic() - begin_s < 5
        queue.append(0, pa.table({"n": [1]}))
        for poller in pollers:
            poller.join(15)
        assert [rows for rows, _ in found] == [1, 1]
        assert max(took_s for _, took_s in found) < 15


def poll_until_closed(client: StateClient) -> None:
    with pytest.raises(ShuffleError):
        client.queue("q").read(0, 0, wait_ms=60_000)


def test_poll_whose_client_is_gone_gives_its_place_back(flight_only: StoreProcess) -> None:
    with StateClient.connect(flight_only.address, local_files=False) as client:
        queue = client.create_queue("q", NUMBERS, 1)
        for _ in range(2):
            gone = StateClient.connect(flight_only.address, local_files=False)
            poller = threading.Thread(target=poll_until_closed, args=(gone,))
            poller.start()
            time.sleep(0.3)
            gone.close()
            poller.join(10)

        def waits() -> bool:
            begin_s = time.monotonic()
            queue.read(0, 0, wait_ms=600)
            return time.monotonic() - begin_s > 0.5

        wait_until(waits, "there is a place to wait again")


def test_errors_of_reads_over_flight_are_typed(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "state", options=["--no-lane"]) as daemon:
        with StateClient.connect(daemon.address, local_files=False) as client:
            queue = client.create_queue("q", NUMBERS, 1)
            queue.append(0, pa.table({"n": [1, 2, 3]}))
            with pytest.raises(OutOfRange):
                queue.read(0, 9)
            [segment] = (tmp_path / "state" / "segments").glob("q*.seg")
            whole = segment.read_bytes()
            segment.write_bytes(whole[:-8])
            with pytest.raises(CorruptData, match="the file was cut"):
                queue.read(0, 0)
            segment.write_bytes(whole[:-8] + b"\xff" * 8)
            with pytest.raises(CorruptData, match="checksum"):
                queue.read(0, 0)
            client.drop_queue("q")
            with pytest.raises(UnknownTable):
                queue.read(0, 0)
        assert daemon.stop() == 0


# --- metrics ---


def metrics(client: StateClient) -> dict[str, float]:
    text = urllib.request.urlopen(client.stats()["metrics"], timeout=10).read().decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, _, value in lines if "_bucket" not in name}


def figure(client: StateClient, name: str) -> float:
    return metrics(client)[name]


@pytest.mark.parametrize("how", [{}, {"local_files": False}, {"lane": False, "local_files": False}])
def test_metrics_of_the_store_count_what_was_done(tmp_path: Path, how: dict[str, bool]) -> None:
    with (
        StoreProcess(tmp_path / "state", options=["--metrics", "127.0.0.1:0"]) as daemon,
        StateClient.connect(daemon.address, **how) as client,
    ):
        client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.int64())]))
        queue = client.create_queue("q", NUMBERS, 1)
        before = metrics(client)
        with client.transaction() as first, client.transaction() as second:
            for tx in (first, second):
                tx.lookup("t", pa.table({"n": [1]}))
                tx.write("t", pa.table({"n": [1, 2], "v": [1, 1]}))
            first.append("q", 0, pa.table({"n": [1, 2, 3]}))
            first.commit()
            with pytest.raises(CommitConflict):
                second.commit()
        assert queue.read(0, 1)[0].num_rows == 2
        assert client.scan("t").read_all().num_rows == 2
        after = metrics(client)
        grown = {name.removeprefix("shuffle_store_"): after[name] - before.get(name, 0) for name in after}
        assert {name: grown[f"{name}_total"] for name in ("commits", "conflicts", "written_rows", "appended_rows")} == {
            "commits": 1,
            "conflicts": 1,
            "written_rows": 2,
            "appended_rows": 3,
        }
        assert (grown["lookup_keys_total"], grown["read_rows_total"], grown["scanned_rows_total"]) == (2, 2, 2)
        assert grown["appended_bytes_total"] > 0
        assert grown["read_bytes_total"] > 0
        assert grown["rocksdb_log_bytes_total"] > 0
        assert grown["group_transactions_count"] == grown["sync_seconds_count"] >= 1
        assert after["shuffle_store_sessions"] == 1


def test_metrics_that_cannot_be_served_are_one_line_and_no_store(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"error: cannot listen on 127\.0\.0\.1:no"):
        StoreProcess(tmp_path / "state", options=["--metrics", "127.0.0.1:no"])
