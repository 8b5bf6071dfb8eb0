"""Is the result exact when everything around it breaks, every few seconds, for minutes?

The activity job, two mappers and two reducers, over input that is appended at a set rate. Meanwhile workers and the
store are killed, paused, and started a second time; all connections of the workers go through a proxy
(``perf.parts.chaos_proxy``) that cuts, delays and half-opens them; clients of the store that only request large
responses are killed in the middle of them (``perf.parts.chaos_clients``); and where this machine lets us mount a small
file system, the store's disk becomes full and read-only. At the end the table is compared with an independent count of
what was appended, and no process may have lost a thread that others depend on.

``longest_stall_s`` is the longest time in which nothing was committed, seen by reading the reducers' positions every
twentieth of a second, from the first commit to the end of the faults. A fault is one action: one kill, one pause, one
second instance, one cut of however many connections, one full disk. The store gets its next fault only after something
was committed since the last one: what is measured is how long it takes to come back.
"""

from __future__ import annotations

import os
import random
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from perf.common import report
from perf.parts import chaos_clients
from perf.parts.chaos_parts import MAPPERS, PROCESSOR, QUEUE, REDUCERS, Disk, Producer, Slot, Watch
from perf.parts.chaos_proxy import Proxy
from shuffle.errors import ShuffleError, StoreUnavailable
from shuffle.examples.activity import TABLE
from shuffle.examples.workload import SCHEMA, Difference, difference, oracle_sum
from shuffle.run.launch import die_with_parent
from shuffle.statestore import StateClient

PAUSE_BETWEEN_FAULTS_S = (1.2, 3.5)
START_S_MAX = 60.0
DRAIN_S_MAX = 90.0
CLIENTS = 3
"""The number of client processes. Each has five threads that read responses."""
ROWS_PER_S_DEFAULT = 20_000
PROXY_VARIABLE = "grpc_proxy"
"""The environment variable from which gRPC takes its proxy."""
PROJECT = Path(__file__).resolve().parent.parent


class ProxiedSockets:
    """Replaces the module ``socket`` in the client of the lane, so that its plain sockets go through the proxy, too."""

    def __init__(self, proxy: str) -> None:
        host, _, port = proxy.removeprefix("http://").rpartition(":")
        self._proxy = host, int(port)

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def create_connection(self, address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        made = socket.create_connection(self._proxy, timeout)
        try:
            made.sendall(f"CONNECT {address[0]}:{address[1]} HTTP/1.1\r\n\r\n".encode())
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                # Byte by byte: what comes after the head belongs to the caller.
                if not (piece := made.recv(1)):
                    raise ConnectionResetError("the proxy closed the connection")
                head += piece
            if b" 200 " not in head:
                raise ConnectionRefusedError(f"{address[0]}:{address[1]} cannot be reached")
        except BaseException:
            made.close()
            raise
        return made


def worker(arguments: Sequence[str]) -> None:
    """Run a mapper or reducer whose connections go through the proxy. The product itself uses no proxies."""
    import shuffle.statestore.remote.lane_client
    import shuffle.support.flight

    die_with_parent(int(arguments[0]))
    options = shuffle.support.flight._CHANNEL_OPTIONS
    options[:] = [(name, 1 if name == "grpc.enable_http_proxy" else value) for name, value in options]
    vars(shuffle.statestore.remote.lane_client)["socket"] = ProxiedSockets(os.environ[PROXY_VARIABLE])
    sys.argv[:] = list(arguments[1:])
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


@dataclass
class Chaos:
    folder: Path
    seed: int
    rows_per_s: int
    counts: Counter[str] = field(default_factory=Counter)
    log: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.proxy = Proxy(self.seed)
        self.disk = Disk(self.folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.listen = f"127.0.0.1:{free.getsockname()[1]}"
        self.spec = self.folder / "chaos.yaml"
        self.spec.write_text(
            yaml.safe_dump(
                {
                    "processor": PROCESSOR,
                    "state": f"grpc://{self.listen}",
                    "input": {"queue": QUEUE},
                    "metrics": False,
                    "lease_ttl": "2s",
                    "mapper": {"class": "examples.activity:ParseLogs", "trim_period": "500ms"},
                    "reducer": {"class": "examples.activity:CountByUser", "count": REDUCERS, "fetch_wait_ms": 500},
                }
            )
        )
        self.store = Slot("store", self._start_store)
        workers = [("mapper", index) for index in range(MAPPERS)] + [("reducer", index) for index in range(REDUCERS)]
        self.workers = [
            Slot(f"{role} {index}", lambda role=role, index=index: self._start_worker(role, index))  # type: ignore[misc]
            for role, index in workers
        ]
        self.clients = [Slot(f"client {index}", partial(self._start_client, index)) for index in range(CLIENTS)]
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._store_ends = 0
        """The number of faults of the store that are not over."""
        self._store_struck_s = 0.0
        self.producer = Producer(self.connect, self.seed, self.rows_per_s)
        self.watch = Watch(self.connect)
        self.lost_threads: list[str] = []

    # --- processes ---

    def _popen(self, name: str, arguments: list[str], **variables: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.folder), **variables},
                start_new_session=True,
            )

    def _start_store(self) -> subprocess.Popen[bytes]:
        arguments = ["statestore", "--path", str(self.disk.path / "store"), "--listen", self.listen]
        return self._popen("store", ["shuffle.run.launch", str(os.getpid()), *arguments])

    def _start_worker(self, role: str, index: int) -> subprocess.Popen[bytes]:
        arguments = ["perf.chaos", "--worker", str(os.getpid()), role, str(self.spec), "--index", str(index)]
        return self._popen(
            f"{role}-{index}", arguments, **{PROXY_VARIABLE: self.proxy.url}, no_proxy="", no_grpc_proxy=""
        )

    def _start_client(self, index: int) -> subprocess.Popen[bytes]:
        return self._popen(f"client-{index}", ["perf.chaos", "--client", str(os.getpid()), f"grpc://{self.listen}"])

    @property
    def slots(self) -> list[Slot]:
        return [self.store, *self.workers, *self.clients]

    def connect(self) -> StateClient:
        """A client that does not use the proxy: what is measured must not depend on which connections are cut."""
        deadline_s = time.monotonic() + START_S_MAX
        while True:
            try:
                return StateClient.connect(f"grpc://{self.listen}")
            except StoreUnavailable:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    # --- the run ---

    def begin(self) -> None:
        self.store.add()
        with self.connect() as client:
            client.create_queue(QUEUE, schema=SCHEMA, partitions=MAPPERS)
            chaos_clients.make_ballast(client)
        self.producer.start()
        self.watch.start()
        for slot in (*self.workers, *self.clients):
            slot.add()
        deadline_s = time.monotonic() + START_S_MAX
        while self.watch.moved_s is None:
            self._tick()
            if time.monotonic() > deadline_s:
                raise ShuffleError(f"no commit in {START_S_MAX:.0f} s: see the logs in {self.folder}")

    def torture(self, minutes: float) -> None:
        end_s = time.monotonic() + 60 * minutes
        told_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            next_s = time.monotonic() + self.rng.uniform(*PAUSE_BETWEEN_FAULTS_S)
            kind, act = self.rng.choice(self._kinds())
            if act():
                self.counts[kind] += 1
                self.log.append((time.monotonic(), kind))
            while time.monotonic() < min(next_s, end_s):
                self._tick()
            if time.monotonic() > told_s:
                told_s += 30
                print(
                    f"{sum(self.counts.values())} faults, {self.producer.rows} rows in, longest stall "
                    f"{self.watch.longest_stall_s:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )

    def _tick(self) -> None:
        now_s = time.monotonic()
        for due in [end for end in self._ends if end[0] <= now_s]:
            self._ends.remove(due)
            due[1]()
        for slot in self.slots:
            slot.tick()
        if self.producer.failure is not None:
            raise ShuffleError(f"the producer failed: {self.producer.failure!r}") from self.producer.failure
        time.sleep(0.02)

    def finish(self) -> Difference:
        """End the faults, and compare the table with everything that was appended."""
        self.watch.stopping.set()
        self.watch.join(10)
        stall_s = self.watch.longest_stall_s
        self.stall_s = stall_s
        ends, self._ends = self._ends, []
        for _, end in ends:
            end()
        self.proxy.heal()
        for slot in self.slots:
            slot.calm()
        self.producer.stopping.set()
        deadline_s = time.monotonic() + DRAIN_S_MAX
        found: Difference | None = None
        with self.connect() as client:
            while found is None or not found.exact:
                if found is not None and time.monotonic() > deadline_s:
                    break
                for _ in range(20):
                    self._tick()
                if self.producer.is_alive():
                    continue
                with suppress(ShuffleError):
                    found = difference(oracle_sum(self.producer.parts), client.scan(TABLE).read_all())
            self.lost_threads = chaos_clients.lost_threads(client, self.folder)
        assert found is not None
        return found

    def close(self) -> None:
        self.watch.stopping.set()
        self.producer.stopping.set()
        for slot in reversed(self.slots):
            slot.end()
        self.proxy.close()
        self.disk.close()

    # --- faults ---

    def _kinds(self) -> list[tuple[str, Callable[[], bool]]]:
        kinds: list[tuple[str, Callable[[], bool]]] = [
            ("kill mapper", lambda: self._kill("mapper")),
            ("kill reducer", lambda: self._kill("reducer")),
            ("pause mapper", lambda: self._pause("mapper", 0.5, 6.0)),
            ("pause reducer", lambda: self._pause("reducer", 0.5, 6.0)),
            ("second mapper", lambda: self._double("mapper")),
            ("second reducer", lambda: self._double("reducer")),
            ("kill clients", self._kill_clients),
            ("kill clients", self._kill_clients),
            ("kill store", lambda: self._strike_store("kill")),
            ("pause store", lambda: self._strike_store("pause")),
            ("cut connections", lambda: self.proxy.cut(self.rng.random()) > 0),
            ("delay connections", lambda: self.proxy.delay(self.rng.uniform(0.02, 0.4), self.rng.uniform(1, 3)) > 0),
            ("half-open connections", self._half_open),
        ]
        if self.disk.mounted:
            kinds += [
                ("disk full", lambda: self._strike_store("full")),
                ("read-only disk", lambda: self._strike_store("read-only")),
            ]
        return kinds

    def _pick(self, role: str) -> tuple[Slot, subprocess.Popen[bytes]] | None:
        living = [(slot, process) for slot in self.workers if slot.name.startswith(role) for process in slot.processes]
        return self.rng.choice(living) if living else None

    def _kill(self, role: str) -> bool:
        picked = self._pick(role)
        if picked is None:
            return False
        picked[0].kill(picked[1])
        return True

    def _kill_clients(self) -> bool:
        """Kill one client, or several at once, wherever they are in their responses."""
        living = [(slot, process) for slot in self.clients for process in slot.processes]
        for slot, process in self.rng.sample(living, self.rng.randint(min(1, len(living)), len(living))):
            slot.kill(process)
        return bool(living)

    def _pause(self, role: str, least_s: float, most_s: float) -> bool:
        picked = self._pick(role)
        if picked is None or picked[1].pid in picked[0].paused:
            return False
        picked[0].pause(picked[1], self.rng.uniform(least_s, most_s))
        return True

    def _double(self, role: str) -> bool:
        slots = [slot for slot in self.workers if slot.name.startswith(role) and len(slot.processes) == 1]
        if not slots:
            return False
        slot = self.rng.choice(slots)
        slot.add()

        def end() -> None:
            if len(slot.processes) > 1:
                slot.kill(self.rng.choice(slot.processes))

        self._ends.append((time.monotonic() + self.rng.uniform(4, 9), end))
        return True

    def _half_open(self) -> bool:
        """Half-open several connections for seconds, or a single one for longer than any call waits."""
        if self.rng.random() < 0.25:
            return self.proxy.half_open(0.0, 45.0) > 0
        return self.proxy.half_open(self.rng.uniform(0, 0.3), self.rng.uniform(1, 6)) > 0

    def _store_is_due(self) -> bool:
        """Whether the store runs, and something was committed since its last fault."""
        if not self.store.processes or self.store.paused or self._store_ends or self.disk.is_full:
            return False
        return self.watch.moved_s is not None and self.watch.moved_s > self._store_struck_s

    def _strike_store(self, kind: str) -> bool:
        if not self._store_is_due():
            return False
        struck = {
            "kill": self._kill_store,
            "pause": self._pause_store,
            "full": self._disk_full,
            "read-only": self._read_only,
        }[kind]()
        self._store_struck_s = time.monotonic()
        return struck

    def _end_store_later(self, after_s: float, end: Callable[[], None]) -> None:
        self._store_ends += 1

        def ended() -> None:
            end()
            self._store_ends -= 1
            self._store_struck_s = time.monotonic()

        self._ends.append((time.monotonic() + after_s, ended))

    def _kill_store(self) -> bool:
        self.store.kill(self.store.processes[0])
        return True

    def _pause_store(self) -> bool:
        process, for_s = self.store.processes[0], self.rng.uniform(0.3, 2.5)
        self.store.pause(process, for_s)
        self._end_store_later(for_s, lambda: self.store.resume(process))
        return True

    def _disk_full(self) -> bool:
        self.disk.fill()
        self._end_store_later(self.rng.uniform(0.5, 2.5), self.disk.make_room)
        return True

    def _read_only(self) -> bool:
        """Kill the store, and make its disk read-only for when it comes back; later it is made writable again.

        A file system cannot be made read-only while files on it are open for writing, so the store is killed first.
        """
        self.store.kill(self.store.processes[0])
        if not self.disk.remount("ro"):
            return False
        self._end_store_later(self.rng.uniform(0.5, 2.0), self.disk.make_writable)
        return True

    # --- what is reported ---

    def worst(self) -> list[str]:
        """The longest stalls, each with the faults shortly before it and in it."""
        lines = []
        for length_s, end_s in sorted(self.watch.stalls, reverse=True)[:3]:
            acts = [kind for at_s, kind in self.log if end_s - length_s - 3 <= at_s <= end_s]
            lines.append(f"{length_s:.1f} s: {', '.join(acts)}")
        return lines


def run(minutes: float, seed: int, rows_per_s: int, json_path: Path | None, keep: bool) -> int:
    folder = Path(tempfile.mkdtemp(prefix="shuffle-chaos-"))
    chaos = Chaos(folder, seed, rows_per_s)
    if not chaos.disk.mounted:
        print(f"left out: full and read-only disk; no file system can be mounted here ({chaos.disk.reason})")
    try:
        chaos.begin()
        chaos.torture(minutes)
        found = chaos.finish()
    finally:
        chaos.close()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    faults = sum(chaos.counts.values())
    report.publish(
        f"The activity job under {faults} faults in {minutes:g} minutes",
        {
            "faults": faults,
            "lost": found.lost,
            "duplicated": found.duplicated,
            "longest_stall_s": chaos.stall_s,
            "threads_lost": len(chaos.lost_threads),
        },
        {
            "faults_by_kind": dict(sorted(chaos.counts.items())),
            "rows": chaos.producer.rows,
            "rows_with_a_user": found.rows,
            "restarts": sum(slot.starts for slot in (chaos.store, *chaos.workers)) - 1 - len(chaos.workers),
            "clients_killed": sum(slot.starts - 1 for slot in chaos.clients),
            "lost_threads": chaos.lost_threads,
            "positions_seen_moving": chaos.watch.commits_seen,
            "seed": seed,
            "minutes": minutes,
            "disk_faults": "tried" if chaos.disk.mounted else f"left out: {chaos.disk.reason}",
            "longest_stalls": chaos.worst(),
        },
        json_path,
        {
            "faults": ">= 100 in 10 minutes",
            "lost": "0",
            "duplicated": "0",
            "longest_stall_s": "<= 10",
            "threads_lost": "0",
        },
    )
    for stall in chaos.worst():
        print(f"stall of {stall}")
    for lost in chaos.lost_threads:
        print(lost)
    print(found)
    return 0 if found.exact and chaos.stall_s <= 10 and not chaos.lost_threads else 1


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["--client"]:
        chaos_clients.run(int(sys.argv[2]), sys.argv[3])
        return 0
    parser = report.parser("chaos", __doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and the rows; times differ all the same")
    parser.add_argument("--rows-per-s", type=int, default=ROWS_PER_S_DEFAULT)
    parser.add_argument("--keep", action="store_true", help="leave the folder with the logs")
    options = parser.parse_args()
    return report.run_and_report_errors(
        lambda: run(options.minutes, options.seed, options.rows_per_s, options.json, options.keep)
    )


if __name__ == "__main__":
    sys.exit(main())
