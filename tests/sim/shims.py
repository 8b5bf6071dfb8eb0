"""The modules of the standard library that the product reaches the world with, over the simulated one.

Only what the product uses is here; a use of anything else raises. Nothing here decides anything by itself: time is the
world's, random numbers are those of the world's stream ``chance``, threads are tasks.
"""

from __future__ import annotations

import queue as real_queue
import time as real_time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.sim import kernel
from tests.sim.kernel import Task


def _preempt(world: kernel.World, me: Task) -> None:
    """Now and then another thread comes first at the places where threads meet."""
    if not me.process.alive:
        raise kernel.Killed
    if world.preempt_chance and world.streams["schedule"].random() < world.preempt_chance:
        kernel.park(world.streams["schedule"].random() * 0.002)


class Lock:
    def __init__(self) -> None:
        self._owner: Any = None
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = kernel.maybe_world()
        if world is not None and (me := world.current) is not None:
            if world.preempt_chance:
                _preempt(world, me)
            elif not me.process.alive:
                raise kernel.Killed
            if self._owner is None:
                return self._taken(me)
        return self._take(blocking, timeout)

    def _taken(self, me: Any) -> bool:
        self._owner = me
        return True

    def _take(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = kernel.maybe_world()
        me: Any = (world.current if world is not None else None) or self
        while self._owner is not None:
            assert me is not self, "the loop itself met a held lock"
            if not blocking:
                return False
            self._waiters.append(me)
            if kernel.park(None if timeout < 0 else timeout) is None:
                return False
        return self._taken(me)

    def release(self) -> None:
        assert self._owner is not None
        self._owner = None
        if self._waiters:
            self._wake_next()

    def _wake_next(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.parked and waiter.woken is None and waiter.process.alive:
                waiter.wake(True)
                return

    def locked(self) -> bool:
        return self._owner is not None

    __enter__ = acquire

    def __exit__(self, *args: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def _taken(self, me: Any) -> bool:
        self._owner = me
        self._depth = 1
        return True

    def _take(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = kernel.maybe_world()
        if self._owner is ((world.current if world is not None else None) or self):
            self._depth += 1
            return True
        return super()._take(blocking, timeout)

    def release(self) -> None:
        assert self._depth
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiters:
                self._wake_next()

    def _release_all(self) -> int:
        depth, self._depth = self._depth, 0
        Lock.release(self)
        return depth

    def _take_again(self, depth: int) -> None:
        Lock._take(self)
        self._depth = depth


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock if lock is not None else RLock()
        self._waiters: list[Task] = []

    def acquire(self, *args: Any) -> bool:
        return self._lock.acquire(*args)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *args: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = kernel.current()
        self._waiters.append(me)
        depth = 0
        if isinstance(self._lock, RLock):
            depth = self._lock._release_all()
        else:
            self._lock.release()
        try:
            woken = kernel.park(timeout)
        finally:
            if me in self._waiters:
                self._waiters.remove(me)
            if isinstance(self._lock, RLock):
                if me.process.alive:
                    self._lock._take_again(depth or 1)
                else:
                    self._lock._owner, self._lock._depth = me, depth or 1
            elif me.process.alive:
                self._lock._take()
            else:
                self._lock._owner = me
        return woken is not None

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end_us = None if timeout is None else kernel.world().now_us + int(timeout * kernel.US_PER_S)
        result = predicate()
        while not result:
            left_s = None if end_us is None else (end_us - kernel.world().now_us) / kernel.US_PER_S
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        woken, self._waiters = self._waiters[:n], self._waiters[n:]
        for task in woken:
            task.wake(True)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        woken, self._waiters = self._waiters, []
        for task in woken:
            task.wake(True)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        me = kernel.current()
        _preempt(kernel.world(), me)
        if not self._set:
            self._waiters.append(me)
            kernel.park(timeout)
            if me in self._waiters:
                self._waiters.remove(me)
        return self._set


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._target = target
        self._arguments = args, kwargs or {}
        self.name = name or "thread"
        self.daemon = daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = kernel.current().process.spawn(self.name, self.run)
        self._task.thread = self

    def run(self) -> None:
        if self._target is not None:
            args, kwargs = self._arguments
            self._target(*args, **kwargs)

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and not self._task.ended:
            self._task.waiters.append(kernel.current())
            kernel.park(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended


_MAIN = Thread(name="main")


def current_thread() -> Thread:
    task = kernel.current()
    if task.thread is None:
        task.thread = Thread(name=task.name)
        task.thread._task = task
    thread: Thread = task.thread
    return thread


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition(Lock())

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._changed:
            if not self._items and block:
                self._changed.wait_for(lambda: self._items, timeout)
            if not self._items:
                raise real_queue.Empty
            return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)


class Future:
    def __init__(self) -> None:
        self._done = Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._cancelled = False

    def cancel(self) -> bool:
        self._cancelled = True
        return not self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def _work(self, function: Callable[[], Any]) -> None:
        if self._cancelled:
            return
        try:
            self._result = function()
        except Exception as error:
            self._error = error
        self._done.set()


class ThreadPoolExecutor:
    """One thread is enough for the one pool that the product's workers have."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "pool") -> None:
        assert max_workers == 1
        self._name = thread_name_prefix
        self._work = SimpleQueue()
        self._started = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        future = Future()
        if not self._started:
            self._started = True
            kernel.current().process.spawn(self._name, self._run)
        self._work.put((future, lambda: function(*args)))
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            item[0]._work(item[1])

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._work.put(None)


def _now_us() -> int:
    world = kernel.maybe_world()
    return world.now_us if world is not None else 0


def _monotonic() -> float:
    world = kernel.maybe_world()
    return world.now_us / kernel.US_PER_S if world is not None else 0.0


def _wall_us() -> int:
    world = kernel.maybe_world()
    if world is None:
        return kernel.WALL_BASE_US
    offset_us = world.current.process.wall_offset_us if world.current is not None else 0
    return kernel.WALL_BASE_US + world.now_us + offset_us


class _Uuid:
    def __init__(self, number: int) -> None:
        self.hex = f"{number:032x}"

    def __str__(self) -> str:
        return self.hex


def _uuid4() -> _Uuid:
    return _Uuid(kernel.world().streams["chance"].getrandbits(128))


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    return module


def modules() -> dict[str, ModuleType]:
    """By the names under which the product imports them."""
    return {
        "threading": _module(
            "threading",
            Lock=Lock,
            RLock=RLock,
            Condition=Condition,
            Event=Event,
            Thread=Thread,
            current_thread=current_thread,
            main_thread=lambda: _MAIN,
        ),
        "time": _module(
            "time",
            monotonic=_monotonic,
            monotonic_ns=lambda: _now_us() * 1000,
            perf_counter=_monotonic,
            time=lambda: _wall_us() / kernel.US_PER_S,
            time_ns=lambda: _wall_us() * 1000,
            sleep=kernel.sleep,
            strftime=real_time.strftime,
            gmtime=real_time.gmtime,
            localtime=real_time.localtime,
        ),
        "random": _module("random", random=lambda: kernel.world().streams["chance"].random()),
        "uuid": _module("uuid", uuid4=_uuid4),
        "queue": _module("queue", SimpleQueue=SimpleQueue, Empty=real_queue.Empty),
        "concurrent.futures": _module("concurrent.futures", ThreadPoolExecutor=ThreadPoolExecutor, Future=Future),
    }
