"""The broker that the other tests are run with: it starts, keeps its data over kill -9, and is what its list says."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kafka.processors import environment
from tests.kafka.topics import Topics
from tests.waiting import wait_until
from tools import kafka
from tools.jars import REPOSITORY_VARIABLE
from tools.kafka import Broker, NoBroker


@pytest.mark.long
def test_broker_killed_and_restarted_has_its_records_at_the_same_address(own_broker: Broker) -> None:
    address = own_broker.address
    topics = Topics(address)
    name = topics.create()
    topics.write(name, [b"a", b"b"])
    own_broker.kill()
    assert not own_broker.running
    own_broker.restart()
    topics.write(name, [b"c"])
    assert own_broker.address == address
    assert [message.value() for message in topics.read(name)] == [b"a", b"b", b"c"]
    own_broker.stop()
    assert not own_broker.running


def test_committed_records_are_read_and_aborted_ones_are_not(topics: Topics) -> None:
    name = topics.create()
    topics.write_in_transaction(name, [b"a", b"b"])
    topics.write_in_transaction(name, [b"x"], commit=False)
    topics.write_in_transaction(name, [b"c"])
    assert [message.value() for message in topics.read(name)] == [b"a", b"b", b"c"]
    assert topics.end(name) == 2 + 1 + 1 + 1 + 1 + 1, "each transaction has a marker at its end"


def test_jars_are_those_of_the_list() -> None:
    folder = kafka.fetched_jars()
    wanted = {jar.file_name: jar.sha256 for jar in kafka.JARS.wanted()}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert found == wanted
    assert len(wanted) == 46


def test_jars_that_cannot_be_fetched_are_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(REPOSITORY_VARIABLE, f"http://127.0.0.1:{kafka.free_ports(1)[0]}")
    with pytest.raises(NoBroker, match=REPOSITORY_VARIABLE):
        kafka.fetched_jars()
    assert not kafka.JARS.folder.exists()


def test_broker_that_does_not_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(NoBroker, match=r"(?s)did not start|cannot be prepared"):
        Broker(tmp_path, {"log.retention.hours": "never"}).start()


STARTER = """
import sys, time
from pathlib import Path
from tools.kafka import Broker
broker = Broker(Path(sys.argv[1])).start()
print(broker.pid, flush=True)
time.sleep(600)
"""


def test_broker_whose_starter_is_killed_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "broker")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert b"kafka.Kafka" in Path(f"/proc/{pid}/cmdline").read_bytes(), "the broker itself has the pid"
        starter.kill()
    wait_until(lambda: has_ended(pid), f"the broker {pid} has ended")


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or nothing but the entry that its parent has not looked at."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
