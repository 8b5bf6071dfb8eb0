"""A real Kafka broker on this machine, for tests, benchmarks and people who want to try the examples.

    python -m tools.kafka              fetch the broker's jars, if they are not here, and print their folder
    python -m tools.kafka FOLDER       run a broker with its data in FOLDER until Ctrl-C; its address is printed

A broker is its jars and a Java of version 17 or later: one node that is broker and controller (KRaft), on loopback.
The jars are in ``kafka_jars.txt``, with their checksums; ``tools/jars.py`` fetches them once. A broker ends with the
process that has started it, even if that one is killed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tools import end_with_parent
from tools.jars import JarList, NoJars, java

JARS = JarList("Kafka", "kafka", Path(__file__).with_name("kafka_jars.txt"))
START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 30
FORMAT_SECONDS_MAX = 60
POLL_SECONDS = 0.05

CLUSTER_ID = "c2h1ZmZsZS1icm9rZXItMA"
"""Any 16 bytes in base64: a broker of ours is never a member of somebody's cluster."""
STARTED = "Kafka Server started"
JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""A broker of one user on few cores: it starts in 2 s, and its threads leave the cores to what is measured."""

SETTINGS: Mapping[str, str | int] = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "num.partitions": 1,
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "group.initial.rebalance.delay.ms": 0,
    "auto.create.topics.enable": "false",
    "log.cleaner.backoff.ms": 500,
    "log.cleaner.dedupe.buffer.size": 8_388_608,
    "num.network.threads": 1,
    "num.io.threads": 2,
    "background.threads": 2,
}
LOGGING = """\
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %m (%c)%n
"""


class NoBroker(Exception):
    """A broker cannot be had here; the message says why."""


def fetched_jars() -> Path:
    """The folder of the jars, which are fetched if they are not there; ``NoBroker`` if they cannot be had."""
    try:
        return JARS.fetched()
    except NoJars as error:
        raise NoBroker(str(error)) from error


def _java() -> str:
    try:
        return java()
    except NoJars as error:
        raise NoBroker(str(error)) from error


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Broker:
    """A broker with its data in a folder, on ports of loopback that it keeps over restarts.

    As a context manager it is started, and killed at the end if it still runs. It does not outlive this process.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str | int] | None = None, memory: str = "256m") -> None:
        self.folder = folder
        self.port, self._controller_port = free_ports(2)
        self._settings = settings or {}
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The value of ``bootstrap.servers``."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    def start(self) -> Self:
        """Start it, with the data of an earlier start if there are any; ``NoBroker`` if it does not come up."""
        assert not self.running, "it runs already"
        # The kernel would end it with the thread that has started it.
        assert threading.current_thread() is threading.main_thread(), "a broker is started by the main thread"
        jars = fetched_jars()
        java = _java()
        classes = ("-cp", f"{jars}/*")
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self.folder / "server.properties"
        if not properties.exists():
            self._configure(properties)
            storage = [java, "-Xmx64m", *JAVA_OPTIONS, *classes, "kafka.tools.StorageTool"]
            done = subprocess.run(
                [*storage, "format", "-t", CLUSTER_ID, "-c", str(properties)],
                capture_output=True,
                text=True,
                timeout=FORMAT_SECONDS_MAX,
                check=False,
            )
            if done.returncode != 0:
                raise NoBroker(f"the folder {self.folder} cannot be prepared: {(done.stdout + done.stderr)[-600:]}")
        logging = f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}"
        with self.log.open("ab") as log:
            begin = log.tell()
            server = (f"-Xmx{self._memory}", *JAVA_OPTIONS, logging, *classes, "kafka.Kafka", str(properties))
            self._process = subprocess.Popen(
                end_with_parent.command(java, *server),
                stdout=log,
                stderr=log,
                # Ctrl-C at a terminal goes to whoever runs the broker, and that one stops it.
                start_new_session=True,
            )
        self._wait_for_start(begin)
        return self

    def _configure(self, properties: Path) -> None:
        settings = {
            **SETTINGS,
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "log.dirs": str((self.folder / "data").resolve()),
            **self._settings,
        }
        properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        (self.folder / "log4j2.properties").write_text(LOGGING)

    def _wait_for_start(self, begin: int) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while STARTED not in (said := self._said_since(begin)):
            if not self.running or time.monotonic() > deadline:
                self.kill()
                raise NoBroker(f"the broker did not start: {said[-1500:]}")
            time.sleep(POLL_SECONDS)

    def _said_since(self, begin: int) -> str:
        with self.log.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """``kill -9``: nothing is flushed, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS_MAX)

    def stop(self) -> None:
        """SIGTERM, and wait; killed if it takes too long."""
        if self._process is None or not self.running:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()

    def restart(self) -> None:
        """Start again with the same data at the same address, after ``kill`` or ``stop``."""
        self.start()

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kafka", description="Run a Kafka broker on this machine.")
    parser.add_argument("folder", nargs="?", type=Path, help="where its data go; without it the jars are only fetched")
    parser.add_argument("--remove", action="store_true", help="remove the folder at the end")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.folder is None:
            print(fetched_jars())
            return 0
        broker = Broker(chosen.folder).start()
    except NoBroker as error:
        print(f"tools.kafka: {error}", file=sys.stderr)
        return 1
    try:
        print(f"a broker runs at {broker.address}; Ctrl-C ends it", flush=True)
        while broker.running:
            time.sleep(POLL_SECONDS)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        broker.stop()
        if chosen.remove:
            shutil.rmtree(chosen.folder, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
