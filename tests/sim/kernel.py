"""The world's clock and its one loop: events in the order of (time, number), and the tasks that they resume.

A *process* is what can crash, be paused and be started again; its *tasks* are what its threads would be. A task runs
until it waits for something; then the next event happens. Whatever a task of a crashed process does next raises
``Killed``, so that nothing of it reaches the world any more.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from tests.sim.switching import new_turn

US_PER_S = 1_000_000
WALL_BASE_US = 1_700_000_000 * US_PER_S

EVENTS_MAX = 400_000
"""A run that needs more is stuck in a loop that takes no time."""

FOLD_LINES = 500
"""So much of the trace is kept before it is folded into its hash."""


class Killed(BaseException):
    """The process of the running task has crashed."""


class Stuck(Exception):
    """The world does not come to rest."""


class Process:
    """Something with memory of its own."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.frozen_until_us = 0
        self.wall_offset_us = 0
        self.port = 0
        """Where it listens, if it does."""
        self.tasks: dict[int, Task] = {}
        self.at_end: list[Callable[[], None]] = []
        """Called once when it ends, however it ends: its connections break, its lock is let go."""
        world.processes.append(self)

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        task = Task(self, name, body)
        world = self.world
        world.at(world.now_us + world.jitter_us(), task.resume, 0)
        return task

    def serve(self, name: str, body: Callable[[], None]) -> None:
        """A task for a message that has come just now: it begins at once, for chance had its say on the way."""
        Task(self, name, body).resume(0)

    def freeze(self, until_us: int) -> None:
        self.frozen_until_us = max(self.frozen_until_us, until_us)

    def kill(self) -> None:
        """Crash: nothing it does from now on has any effect."""
        if not self.alive:
            return
        self.alive = False
        self.world.log("kill", self.name)
        for callback in self.at_end:
            callback()
        # Unwinding the stacks now keeps what they hold from being released at some other seed's time.
        for task in list(self.tasks.values()):
            if task is not self.world.current:
                task.unwind()


class Task:
    """One thread of a process."""

    __slots__ = (
        "_body",
        "_turn",
        "ended",
        "name",
        "number",
        "parked",
        "process",
        "thread",
        "turn_number",
        "waiters",
        "woken",
    )

    def __init__(self, process: Process, name: str, body: Callable[[], None]) -> None:
        world = process.world
        self.process = process
        self.name = name
        self.number = world.next_number()
        self.turn_number = 0
        self.parked = False
        self.woken: Any = None
        self.waiters: list[Task] = []
        self.thread: Any = None
        self.ended = False
        self._body: Any = body
        self._turn: Any = new_turn(self._run)
        process.tasks[self.number] = self

    def _run(self) -> None:
        try:
            if self.process.alive:
                self._body()
        except Killed:
            pass
        except BaseException as error:
            self.process.world.crashed(self, error)
        finally:
            self.ended = True
            self.process.tasks.pop(self.number, None)
            for waiter in self.waiters:
                waiter.wake(True)
            # Nothing here refers to itself any more, so it goes at once and without the collector.
            self._body = self._turn = None

    def park(self, timeout_us: int | None) -> Any:
        """Waits to be woken; what it was woken with, or None when the time was over."""
        world = self.process.world
        if not self.process.alive:
            raise Killed
        self.turn_number += 1
        self.parked = True
        self.woken = None
        if timeout_us is not None:
            until_us = world.now_us + timeout_us if timeout_us > 0 else world.now_us
            world.at(until_us, self.resume, self.turn_number)
        self._turn.pause()
        if not self.process.alive:
            raise Killed
        return self.woken

    def wake(self, value: Any) -> None:
        if self.parked and self.woken is None:
            self.woken = value
            world = self.process.world
            world.at(world.now_us + world.jitter_us(), self.resume, self.turn_number)

    def wake_now(self, value: Any) -> None:
        """As ``wake``, by a message that has come just now."""
        if self.parked and self.woken is None:
            self.woken = value
            self.resume(self.turn_number)

    def resume(self, turn_number: int) -> None:
        # Most events come to nothing here: the time limit of a wait that is long over.
        if turn_number != self.turn_number or self.ended:
            return
        process = self.process
        if not process.alive:
            return
        world = process.world
        if process.frozen_until_us > world.now_us:
            world.at(process.frozen_until_us, self.resume, turn_number)
            return
        if turn_number and not self.parked:
            return
        self.parked = False
        self.turn_number += turn_number == 0
        world.log("run", process.name, self.name)
        before, world.current = world.current, self
        self._turn.resume()
        world.current = before

    def unwind(self) -> None:
        if not self.ended:
            world = self.process.world
            before, world.current = world.current, self
            self._turn.resume()
            world.current = before


class World:
    """Time, chance, and what happens next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_us = 0
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.streams = {
            name: random.Random(f"{seed}/{name}")
            for name in ("network", "disk", "workload", "faults", "schedule", "chance")
        }
        self._schedule = self.streams["schedule"].random
        self.preempt_chance = 0.0
        self._events: list[tuple[int, int, Callable[..., None], Any]] = []
        self._numbers = 0
        self._lines: list[tuple[object, ...]] = []
        self.event_count = 0
        self.marks: dict[str, int] = {}
        self.fault_counts: dict[str, int] = {}
        self.failures: list[tuple[str, BaseException]] = []
        self.halted = False
        """Nothing more is to be learned from this run: something is wrong already."""
        self.keep_lines = False
        self._hash = hashlib.blake2b(digest_size=16)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def jitter_us(self) -> int:
        """How long a thread that may run waits for a core."""
        return int(self._schedule() * 40)

    def at(self, time_us: int, action: Callable[..., None], argument: Any = None) -> None:
        self._numbers += 1
        heappush(self._events, (time_us, self._numbers, action, argument))

    def run(self, until: Callable[[], bool], until_us: int, every_us: int = 0) -> bool:
        """Lets things happen until ``until`` is true, or something is wrong; whether that was in time.

        ``until`` is asked after an event, and then not for ``every_us``.
        """
        events = self._events
        ask_us = self.now_us
        while events:
            if self.halted:
                return True
            if self.now_us >= ask_us:
                if until():
                    return True
                ask_us = self.now_us + every_us
            time_us, _, action, argument = heappop(events)
            if time_us > until_us:
                self.at(time_us, action, argument)
                self.now_us = until_us
                return until()
            if time_us > self.now_us:
                self.now_us = time_us
            self.event_count += 1
            if self.event_count > EVENTS_MAX:
                raise Stuck(f"{EVENTS_MAX} events and only {self.now_us / US_PER_S:.1f} s")
            action(argument)
        return self.halted or until()

    def clear(self) -> None:
        """It is over: what will not happen any more is forgotten, with all that it refers to."""
        self._events.clear()
        self.processes.clear()

    # What is told about a run

    def log(self, *what: object) -> None:
        self._lines.append((self.now_us, *what))
        if len(self._lines) >= FOLD_LINES and not self.keep_lines:
            self._fold()

    def _fold(self) -> None:
        if not self._lines:
            return
        # Only numbers and strings are logged: their repr says everything, and costs less than joining them.
        self._hash.update(repr(self._lines).encode())
        self._lines.clear()

    @property
    def lines(self) -> list[str]:
        return [" ".join(map(str, line)) for line in self._lines]

    def trace_hash(self) -> str:
        if self.keep_lines:
            # What has been kept is hashed in the same portions.
            whole = hashlib.blake2b(digest_size=16)
            for at in range(0, len(self._lines), FOLD_LINES):
                whole.update(repr(self._lines[at : at + FOLD_LINES]).encode())
            return whole.hexdigest()
        self._fold()
        return self._hash.hexdigest()

    def mark(self, name: str) -> None:
        """Something rare happened; a run of many seeds in which it never does proves less than it seems to."""
        self.marks[name] = self.marks.get(name, 0) + 1

    def fault(self, kind: str, *what: object) -> None:
        self.fault_counts[kind] = self.fault_counts.get(kind, 0) + 1
        self.log("fault", kind, *what)

    def crashed(self, task: Task, error: BaseException) -> None:
        """A task ended with an error that nobody caught."""
        self.halted = True
        self.failures.append((f"{task.process.name}/{task.name}", error))
        self.log("crashed", task.process.name, task.name, type(error).__name__)


_world: World | None = None


def set_world(world: World | None) -> None:
    global _world
    _world = world


def world() -> World:
    assert _world is not None, "no simulation is running"
    return _world


def maybe_world() -> World | None:
    return _world


def current() -> Task:
    assert _world is not None, "no simulation is running"
    task = _world.current
    assert task is not None, "only tasks can wait"
    if not task.process.alive:
        raise Killed
    return task


def park(timeout_s: float | None = None) -> Any:
    # Rounded up: a wait that takes no time at all could be repeated for ever.
    return current().park(None if timeout_s is None else int(timeout_s * US_PER_S) + 1)


def sleep(seconds: float) -> None:
    current().park(int(seconds * US_PER_S) + 1)
