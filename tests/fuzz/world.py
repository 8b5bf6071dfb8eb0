"""What is attacked: a store as a process, a mapper with rows that nobody commits, and a job that runs meanwhile.

``check`` sends requests with known responses to every port, with a client of its own. ``repair`` starts dead processes
again, so that a run goes on after a finding.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shuffle.discovery import MapperAddress, arrange_mappers
from shuffle.errors import ShuffleError
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.messages import GetRows
from shuffle.statestore import StateClient
from shuffle.support import flight
from tests.daemons import StoreProcess
from tests.fuzz import job as jobs
from tests.fuzz.findings import Problem
from tests.fuzz.job import Job, Worker
from tests.fuzz.oracles import SECRET

ANSWER_S_MAX = 15.0
"""A canary that waits longer than this has met a hang. Processors are shared and a sync may be slow: an honest answer
takes milliseconds, and seconds at the very worst."""

DEATH_S_MAX = 3.0
"""A store that has failed looks once a second whether it has, and ends then."""

VALUE = pa.schema([("s", pa.string()), ("n", pa.int64())])
KEY = pa.schema([("k", pa.string())])
FUZZ_QUEUE = pa.schema(
    [
        *(("n", pa.int64()), ("s", pa.string()), ("b", pa.binary())),
        *(("nothing", pa.null()), ("l", pa.list_(pa.int32())), ("d", pa.float64())),
    ]
)
TABLES = ("fuzz_lane", "fuzz_flight", "secret", "canary", "large")
QUEUES = ("fuzz_lane_q", "fuzz_flight_q", "bulk")
OPEN_TO_ALL = ("fuzz_lane", "fuzz_flight", "fuzz_lane_q", "fuzz_flight_q")
"""What fuzzed messages may change. Everything else is read only to them: a valid message that changes it is no
attack on the code, and would spoil what the canaries know."""

FUZZ_PARTITIONS = 2
SECRET_ROWS = 200
LARGE_ROWS = 64
LARGE_VALUE = "L" * 12_000
BULK_ROWS = 4000
BULK_TEXT = "b" * 1000

VICTIM_SCHEMA = pa.schema([("n", pa.int64()), ("pad", pa.string())])
VICTIM_ROWS = 6000
VICTIM_REDUCERS = 8
VICTIM_PAD = "p" * 200

HEAL_S_MAX = 6.0
"""A mapper that was told that rows are committed which are not finds out when it trims, and reads its input again."""

LISTED_S_MAX = 5.0
"""So long a worker that was killed may still be listed, with ports on which nobody answers."""

SESSION_MS = 3_600_000
"""Of the attackers' sessions: they are closed at the end, and a slow run must not lose them."""


def ticket_fields(processor: str, guid: str, reducer: int) -> dict[str, Any]:
    """A ticket of GetRows for a reducer that has committed nothing, field by field."""
    made = GetRows(Guid(guid), ReducerIndex(reducer), ShuffleIndex(-1), ShuffleIndex(-1), 100, 1 << 20)
    fields: dict[str, Any] = json.loads(made.encode())
    if "processor" in GetRows.__dataclass_fields__:
        fields["processor"] = processor
    return fields


@dataclass(slots=True)
class Places:
    """Where everything is, and under which ids."""

    table_ids: dict[str, int] = field(default_factory=dict)
    queue_ids: dict[str, int] = field(default_factory=dict)
    flight: str = ""
    lane: tuple[str, int] = ("", 0)
    lane_name: str = ""

    @property
    def open_ids(self) -> set[int]:
        both = {**self.table_ids, **self.queue_ids}
        return {both[name] for name in OPEN_TO_ALL}


class World:
    """All of it. ``address`` stays the same when the store is started again."""

    def __init__(self, folder: Path, with_job: bool = True, with_victim: bool = True) -> None:
        self.folder = folder
        self._with_job, self._with_victim = with_job, with_victim
        (folder / "fuzz_job.py").write_text(jobs.CODE)
        self.store = StoreProcess(folder / "store")
        self.address = self.store.address
        self.client = StateClient.connect(self.address, timeout_s=ANSWER_S_MAX)
        self.places = Places()
        self._prepare()
        self.job = Job(folder, self.address)
        self.victim: Worker | None = None
        self.mapper: MapperAddress | None = None
        self._canaries = 0
        self._canary_known = True
        self.restarts = 0
        self.epoch = 0
        """Another one when connections and sessions of the attackers are no more, and have to be opened again."""
        self._repaired_s = 0.0
        self._sessions: list[int] = []

    # --- the beginning ---

    def _prepare(self) -> None:
        for name in TABLES:
            self.client.create_table(name, key=KEY, value=VALUE, if_not_exists=True)
        for name in QUEUES[:2]:
            self.client.create_queue(name, schema=FUZZ_QUEUE, partitions=FUZZ_PARTITIONS, if_not_exists=True)
        self.client.create_queue("bulk", schema=VICTIM_SCHEMA, partitions=1, if_not_exists=True)
        self.client.create_queue("victim_input", schema=VICTIM_SCHEMA, partitions=1, if_not_exists=True)
        Job.prepare(self.client)
        secrets = [SECRET.decode() + f"{n:06}" * 20 for n in range(SECRET_ROWS)]
        self._write("secret", [f"k{n:04}" for n in range(SECRET_ROWS)], secrets)
        self._write("canary", ["bird"], ["0"])
        self._write("large", [f"k{n:04}" for n in range(LARGE_ROWS)], [LARGE_VALUE] * LARGE_ROWS)
        self.client.queue("bulk").append(0, pa.table({"n": list(range(BULK_ROWS)), "pad": [BULK_TEXT] * BULK_ROWS}))
        victim = pa.table({"n": list(range(VICTIM_ROWS)), "pad": [VICTIM_PAD] * VICTIM_ROWS})
        self.client.queue("victim_input").append(0, victim)
        self._find_places()

    def _write(self, table: str, keys: list[str], texts: list[str]) -> None:
        with self.client.transaction() as tx:
            tx.write(table, pa.table({"k": keys, "s": texts, "n": list(range(len(keys)))}))
            tx.commit()

    def _find_places(self) -> None:
        self.places.table_ids = {table.name: table.table_id for table in self.client.tables()}
        self.places.queue_ids = {queue.name: queue.queue_id for queue in self.client.queues()}
        info = self._info()
        self.places.flight = info["flight_address"].removeprefix("grpc://")
        host, _, port = info["lane_address"].removeprefix("tcp://").rpartition(":")
        self.places.lane = host, int(port)
        self.places.lane_name = info["lane_local_name"]

    def _info(self) -> dict[str, Any]:
        control = flight.connect(self.address)
        try:
            found: dict[str, Any] = json.loads(flight.do_action(control, "Info", b"{}", who="store", timeout_s=10))
            return found
        finally:
            control.close()

    def start_workers(self) -> None:
        if self._with_job:
            self.job.start()
        if self._with_victim:
            self._start_victim()
        if self._with_job:
            self._wait(lambda: self.job.counted(self.client).total() > 0, "the job counts rows")
        self._find_places()

    def _start_victim(self) -> None:
        spec = self.folder / "victim.yaml"
        spec.write_text(
            f"processor: victim\nstate: {self.address}\ninput: {{queue: victim_input}}\nspill: false\n"
            'mapper: {class: "fuzz_job:Spread", trim_period: 200ms, batch_rows_max: 500}\nlease_ttl_ms: 3000\n'
            f'reducer: {{class: "fuzz_job:Nothing", count: {VICTIM_REDUCERS}}}\n'
        )
        self.victim = Worker(self.folder, "mapper", spec, 0)
        self._wait(self._victim_serves, "the mapper serves")

    def _wait(self, true: Callable[[], bool], what: str, wait_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + wait_s
        while not true():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {wait_s:g} s: {what}; {self.deaths()}")
            time.sleep(0.02)

    def _victim_serves(self) -> bool:
        assert self.victim is not None
        found = arrange_mappers(self.client.leases.members("victim/mappers")).get(MapperIndex(0), [])
        alive = [mapper for mapper in found if self._status(mapper.address)]
        if not alive:
            return False
        self.mapper = alive[0]
        return bool(self._status(alive[0].address).get("next_input_index") == VICTIM_ROWS)

    @staticmethod
    def _status(address: str) -> dict[str, Any]:
        client = flight.connect(address)
        try:
            found: dict[str, Any] = json.loads(flight.do_action(client, "status", who="mapper", timeout_s=ANSWER_S_MAX))
            return found
        except ShuffleError:
            return {}
        finally:
            client.close()

    def metrics_addresses(self) -> list[tuple[str, int]]:
        """Of every worker that serves metrics: host and port."""
        found = []
        for group in ("victim/mappers", "job/mappers", "job/reducers"):
            for member in self.client.leases.members(group):
                host, _, port = (
                    member.attributes.get("metrics", "").removeprefix("http://").partition("/")[0].rpartition(":")
                )
                if port.isdecimal():
                    found.append((host, int(port)))
        return found

    def job_mappers(self) -> list[MapperAddress]:
        found = arrange_mappers(self.client.leases.members("job/mappers"))
        return [instances[0] for instances in found.values()]

    # --- whether all is well ---

    def pids(self) -> dict[str, int]:
        found = {"store": self.store.pid}
        if self.victim is not None:
            found[self.victim.name] = self.victim.pid
        return {**found, **{worker.name: worker.pid for worker in self.job.workers}}

    def deaths(self) -> list[Problem]:
        """Processes that are no more. Costs next to nothing."""
        found = []
        if not self.store.running:
            last_words = (self.store.errors().splitlines() or [""])[-1][-400:]
            found.append(Problem("crash", f"the store ended with {self.store.exit_code}: {last_words}"))
        workers = [*self.job.workers, *([self.victim] if self.victim is not None else [])]
        found += [Problem("crash", told) for worker in workers if (told := worker.died()) is not None]
        return found

    def check(self, metrics: bool = True) -> list[Problem]:
        """Every port answers, and answers rightly."""
        found = self.deaths()
        if found:
            return found
        canaries: list[tuple[str, Callable[[], str | None]]] = [
            ("control plane", self._canary_health),
            ("lane", self._canary_lane),
            ("flight", self._canary_flight),
        ]
        if self.victim is not None:
            canaries.append(("mapper", self._canary_mapper))
        if metrics and self.victim is not None and time.monotonic() - self._repaired_s > LISTED_S_MAX:
            canaries.append(("metrics", self._canary_metrics))
        for name, canary in canaries:
            begin_s = time.monotonic()
            wrong: str | None
            try:
                wrong = canary()
            except (ShuffleError, OSError, grpc.RpcError, http.client.HTTPException, TimeoutError) as error:
                wrong = f"{type(error).__name__}: {str(error)[:300]}"
            if wrong is not None:
                return self._explained(name, wrong, time.monotonic() - begin_s)
        return []

    def _explained(self, name: str, wrong: str, took_s: float) -> list[Problem]:
        """A port that does not answer: because the process is dying, or although it lives."""
        deadline_s = time.monotonic() + DEATH_S_MAX
        while time.monotonic() < deadline_s:
            died = self.deaths()
            if died:
                return died
            time.sleep(0.05)
        return [Problem("hang", f"{name} does not answer rightly after {took_s:.1f} s: {wrong}")]

    def _canary_health(self) -> str | None:
        with grpc.insecure_channel(self.address.removeprefix("grpc://")) as channel:
            asked = health_pb2.HealthCheckRequest(service="")
            state = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=ANSWER_S_MAX).status
        return None if state == health_pb2.HealthCheckResponse.SERVING else f"health is {state}"

    def _canary_lane(self) -> str | None:
        """A fresh client reads what the last one wrote, and writes the next: reads, commits and new connections."""
        with StateClient.connect(self.address, timeout_s=ANSWER_S_MAX) as client:
            with client.transaction() as tx:
                found = tx.lookup("canary", pa.table({"k": ["bird"]})).to_pylist()
                if [row["n"] for row in found] != [self._canaries] and self._canary_known:
                    return f"the canary's row is {found}, not {self._canaries}"
                self._canary_known = False
                self._canaries = found[0]["n"] + 1
                tx.write("canary", pa.table({"k": ["bird"], "s": ["x"], "n": [self._canaries]}))
                tx.commit()
            self._canary_known = True
            rows, _ = client.queue("victim_input").read(0, 17, max_rows=3)
            return None if rows["n"].to_pylist() == [17, 18, 19] else f"the queue gives {rows['n'].to_pylist()}"

    def _canary_flight(self) -> str | None:
        rows = self.client.scan("secret").read_all()
        wanted = [SECRET.decode() + f"{n:06}" * 20 for n in range(SECRET_ROWS)]
        return None if rows["s"].to_pylist() == wanted else f"a scan gives {rows.num_rows} rows, or others"

    def _canary_mapper(self) -> str | None:
        """Reducer 0 has committed nothing, so its first rows are there, or soon again."""
        assert self.mapper is not None
        wanted = list(range(0, 10 * VICTIM_REDUCERS, VICTIM_REDUCERS))
        deadline_s = time.monotonic() + HEAL_S_MAX
        while True:
            try:
                got = self._first_rows(self.mapper)
                if got == wanted:
                    return None
                wrong = f"reducer 0 is given {got}"
            except ShuffleError as error:
                wrong = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline_s:
                return wrong
            time.sleep(0.05)

    @staticmethod
    def _first_rows(mapper: MapperAddress) -> list[int]:
        asked = ticket_fields("victim", mapper.guid, 0) | {"max_rows": 10}
        client = flight.connect(mapper.address)
        try:
            got: list[int] = []
            with flight.typed_errors("the mapper"):
                ticket = flight.Ticket(json.dumps(asked).encode())
                for chunk in client.do_get(ticket, flight.call_options(ANSWER_S_MAX)):
                    got += chunk.data.column("n").to_pylist()
            return got
        finally:
            client.close()

    def _canary_metrics(self) -> str | None:
        for host, port in self.metrics_addresses():
            with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=ANSWER_S_MAX) as answer:
                if b"python_info" not in (told := answer.read()) and b"# HELP" not in told:
                    return f"port {port} has no metrics: {told[:80]!r}"
        return None

    def durable_problems(self) -> list[Problem]:
        """What no request may have changed: no reducer has committed anything, so the mapper may forget nothing."""
        found = []
        begin, end = self.client.store.bounds(self.places.queue_ids["victim_input"])[0]
        if begin != 0 or end != VICTIM_ROWS:
            found.append(
                Problem("wrong", f"the input of the mapper was trimmed to {begin} though nothing was committed")
            )
        for name in ("fuzz_lane", "fuzz_flight"):
            try:
                self.client.scan(name).read_all().validate(full=True)
            except ShuffleError as error:
                found.append(Problem("wrong", f"a row was accepted into {name} that no scan can read: {error}"))
        return found

    # --- sessions of the attackers ---

    def open_session(self) -> int:
        """One between two others that nobody uses: fuzzed messages that miss it by one hit nobody's."""
        control = flight.connect(self.address)
        try:
            asked = json.dumps({"ttl_ms": SESSION_MS}).encode()
            answers = [flight.do_action(control, "OpenSession", asked, who="store", timeout_s=10) for _ in range(3)]
        finally:
            control.close()
        sessions = [int(json.loads(answer)["session_id"]) for answer in answers]
        self._sessions += sessions
        return sessions[1]

    def close_sessions(self) -> None:
        """Release what the attackers hold. Each opens another session with its next input.

        As long as they hold a read view, the store remembers the keys of every commit since, rightly, and its memory
        grows: what is not released over a whole run looks like a leak, and hides one.
        """
        self.epoch += 1
        control = flight.connect(self.address)
        try:
            for session in self._sessions:
                asked = json.dumps({"session_id": session}).encode()
                with contextlib.suppress(ShuffleError):
                    flight.do_action(control, "CloseSession", asked, who="store", timeout_s=10)
        finally:
            control.close()
        self._sessions.clear()

    # --- going on ---

    def repair(self) -> None:
        """Start again what died, and clear what was spoiled."""
        if not self.store.running or not self._answers():
            self.restarts += 1
            self.epoch += 1
            listen = self.store.listen
            if self.store.running:
                self.store.kill()
            self.store = StoreProcess(self.folder / "store", listen=listen)
            self.client.close()
            self.client = StateClient.connect(self.address, timeout_s=ANSWER_S_MAX)
            self._find_places()
        self.job.replace_dead()
        if self.victim is not None:
            self.victim.stop()
            self._start_victim()
        self._repaired_s = time.monotonic()

    def _answers(self) -> bool:
        return all(self._quietly(canary) for canary in (self._canary_health, self._canary_lane, self._canary_flight))

    @staticmethod
    def _quietly(canary: Callable[[], str | None]) -> bool:
        try:
            return canary() is None
        except (ShuffleError, OSError, grpc.RpcError):
            return False

    def clear_tables(self) -> None:
        """What fuzzed messages wrote is removed."""
        for name in ("fuzz_lane", "fuzz_flight"):
            self.client.drop_table(name)
            self.client.create_table(name, key=KEY, value=VALUE)
        self.trim_queues()
        self._find_places()

    def trim_queues(self) -> None:
        for name in QUEUES[:2]:
            queue = self.client.queue(name)
            for partition, (_, end) in enumerate(self.client.store.bounds(queue.queue_id)):
                queue.trim(partition, end)

    def close(self) -> None:
        self.job.close()
        if self.victim is not None and self.victim.process.poll() is None:
            self.victim.kill()
        self.client.close()
        if self.store.running:
            self.store.kill()


@contextlib.contextmanager
def opened(folder: Path, with_job: bool, with_victim: bool) -> Iterator[World]:
    world = World(folder, with_job, with_victim)
    try:
        world.start_workers()
        yield world
    finally:
        world.close()
