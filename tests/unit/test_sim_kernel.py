"""The simulated threads, locks and clock behave as those they stand for; and the same seed makes the same world."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.sim import kernel, shims
from tests.sim.kernel import Process, World


@pytest.fixture
def world() -> Iterator[World]:
    made = World(1)
    kernel.set_world(made)
    yield made
    for process in made.processes:
        process.kill()
    kernel.set_world(None)


def play(world: World, *bodies: Callable[[], None]) -> Process:
    process = Process(world, "process")
    for number, body in enumerate(bodies):
        process.spawn(f"task-{number}", body)
    world.run(lambda: False, 60_000_000)
    assert not world.failures, world.failures
    return process


def test_sleep_takes_virtual_time(world: World) -> None:
    woke: list[int] = []

    def sleeper() -> None:
        kernel.sleep(5)
        woke.append(world.now_us)

    play(world, sleeper)
    assert 5_000_000 <= woke[0] < 5_001_000


def test_lock_lets_one_in_at_a_time(world: World) -> None:
    lock = shims.Lock()
    inside: list[int] = []
    most: list[int] = []

    def worker() -> None:
        for _ in range(3):
            with lock:
                inside.append(1)
                most.append(len(inside))
                kernel.sleep(0.01)
                inside.pop()

    play(world, worker, worker, worker)
    assert most == [1] * 9


def test_lock_can_be_waited_for_in_vain(world: World) -> None:
    lock = shims.Lock()
    got: list[bool] = []

    def holder() -> None:
        with lock:
            kernel.sleep(10)

    def other() -> None:
        kernel.sleep(1)
        got.append(lock.acquire(timeout=0.5))
        got.append(lock.acquire(blocking=False))

    play(world, holder, other)
    assert got == [False, False]


def test_condition_wakes_who_waits(world: World) -> None:
    condition = shims.Condition()
    items: list[int] = []
    got: list[int] = []

    def consumer() -> None:
        with condition:
            condition.wait_for(lambda: items)
            got.append(items.pop())

    def producer() -> None:
        kernel.sleep(1)
        with condition:
            items.append(7)
            condition.notify_all()

    play(world, consumer, producer)
    assert got == [7]


def test_event_and_join_tell_whether_it_was_in_time(world: World) -> None:
    event = shims.Event()
    told: list[bool] = []

    def waiter() -> None:
        told.append(event.wait(0.5))
        told.append(event.wait(5))

    def main() -> None:
        thread = shims.Thread(target=waiter)
        thread.start()
        kernel.sleep(1)
        event.set()
        thread.join()
        told.append(thread.is_alive())

    play(world, main)
    assert told == [False, True, False]


def test_crashed_process_does_nothing_more(world: World) -> None:
    done: list[str] = []

    def worker() -> None:
        try:
            while True:
                kernel.sleep(1)
                done.append("step")
        finally:
            done.append("unwound")
            kernel.sleep(1)
            done.append("never")

    process = Process(world, "process")
    process.spawn("worker", worker)
    world.at(2_500_000, lambda _: process.kill())
    world.run(lambda: False, 10_000_000)
    assert done == ["step", "step", "unwound"]


def test_paused_process_goes_on_where_it_was(world: World) -> None:
    woke: list[int] = []

    def worker() -> None:
        kernel.sleep(1)
        woke.append(world.now_us)

    process = Process(world, "process")
    process.spawn("worker", worker)
    process.freeze(3_000_000)
    world.run(lambda: False, 10_000_000)
    assert woke[0] >= 3_000_000


def test_error_that_nobody_catches_is_told(world: World) -> None:
    def worker() -> None:
        raise RuntimeError("no")

    Process(world, "process").spawn("worker", worker)
    world.run(lambda: False, 1_000_000)
    assert [who for who, _ in world.failures] == ["process/worker"]


def test_loop_that_takes_no_time_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "EVENTS_MAX", 1_000)
    event = shims.Event()

    def again() -> None:
        while True:
            event.wait(0)

    Process(world, "process").spawn("again", again)
    with pytest.raises(kernel.Stuck):
        world.run(lambda: False, 1_000_000)
