"""Trying again: which errors pass by themselves, how the waits grow, and that a wait ends when it is told to."""

from __future__ import annotations

import threading

import pytest

from shuffle.errors import (
    BadInput,
    CommitConflict,
    CommitUnknown,
    CorruptData,
    DiskFull,
    Expired,
    FormatTooNew,
    ShuffleError,
    SpecError,
    SplitBrain,
    StoreLocked,
    StoreNotWritable,
    StoreUnavailable,
    TooBusy,
    UserCodeError,
)
from shuffle.support.retry import Backoff, doubled_s, passes_by_itself, patiently, trouble_behind


def no_chance() -> float:
    raise AssertionError("chance was asked")


# ---- which errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [StoreUnavailable, TooBusy, DiskFull, CommitConflict, CommitUnknown, Expired, SplitBrain]
)
def test_trouble_of_the_store_passes(kind: type[ShuffleError]) -> None:
    assert passes_by_itself(kind("now"))


@pytest.mark.parametrize("kind", [CorruptData, FormatTooNew, StoreLocked, StoreNotWritable])
def test_lasting_trouble_is_trouble_and_does_not_pass(kind: type[ShuffleError]) -> None:
    error = kind("now and later")
    assert not passes_by_itself(error)
    assert trouble_behind(error) is error


def test_memory_that_is_not_there_does_not_come_by_waiting() -> None:
    assert not passes_by_itself(MemoryError())
    assert trouble_behind(MemoryError()) is not None


@pytest.mark.parametrize("error", [BadInput("x"), SpecError("x"), UserCodeError("x"), ValueError("x"), KeyError("x")])
def test_mistakes_are_no_trouble_of_the_store(error: Exception) -> None:
    assert not passes_by_itself(error)
    assert trouble_behind(error) is None


def wrapped(inner: Exception) -> Exception:
    try:
        try:
            raise inner
        except Exception as error:
            raise RuntimeError("the lookup failed") from error
    except RuntimeError as outer:
        return outer


def test_wrapped_error_is_judged_by_what_it_wraps() -> None:
    away, damaged = StoreUnavailable("away"), CorruptData("damaged")
    assert trouble_behind(wrapped(away)) is away
    assert passes_by_itself(wrapped(away))
    assert trouble_behind(wrapped(damaged)) is damaged
    assert not passes_by_itself(wrapped(damaged))


def test_outermost_trouble_decides() -> None:
    error = StoreUnavailable("the daemon is gone")
    error.__cause__ = CorruptData("and this is why")
    assert passes_by_itself(error)


def test_ring_of_causes_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert trouble_behind(one) is None


# ---- how long -------------------------------------------------------------------------------------------------------


def test_backoff_doubles_to_its_bound_and_begins_again() -> None:
    backoff = Backoff(100, 500, chance=lambda: 1.0)
    assert [backoff.next_s() for _ in range(4)] == [0.1, 0.2, 0.4, 0.5]
    assert backoff.failures == 4
    backoff.reset()
    assert backoff.next_s() == 0.1
    assert Backoff(100, 500, chance=lambda: 0.0).next_s() == 0.05


def test_backoff_without_jitter_does_not_ask_chance() -> None:
    backoff = Backoff(50, 2_000, no_chance, jitter=0.0)
    assert [backoff.next_s() for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_jitter_is_a_share_of_the_wait() -> None:
    assert Backoff(100, 500, lambda: 0.0, jitter=1.0).next_s() == 0.0
    assert Backoff(100, 500, lambda: 0.0, jitter=0.2).next_s() == pytest.approx(0.08)
    assert Backoff(100, 500, lambda: 1.0, jitter=0.2).next_s() == pytest.approx(0.1)


def test_wait_after_very_many_failures_is_the_bound() -> None:
    assert doubled_s(0.2, 10.0, 0) == 0.2
    assert doubled_s(0.2, 10.0, 10**9) == 10.0
    assert doubled_s(20.0, 10.0, 0) == 10.0


# ---- trying again ---------------------------------------------------------------------------------------------------


class Flaky:
    """Raises each of ``errors`` once, then answers 7."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return 7


def test_patience_waits_for_what_passes_and_says_so() -> None:
    told: list[tuple[str, float]] = []
    backoff = Backoff(1, 2, jitter=0.0)
    ask = Flaky(StoreUnavailable("a"), CommitConflict("b"), StoreUnavailable("c"))
    assert patiently(ask, backoff, threading.Event(), lambda error, s: told.append((error.message, s))) == 7
    assert told == [("a", 0.001), ("b", 0.002), ("c", 0.002)]
    assert backoff.failures == 0


@pytest.mark.parametrize("error", [CorruptData("damaged"), SpecError("wrong"), ValueError("a bug")])
def test_patience_ends_with_what_does_not_pass(error: Exception) -> None:
    ask = Flaky(StoreUnavailable("away"), error)
    with pytest.raises(type(error)):
        patiently(ask, Backoff(1, 1), threading.Event(), lambda error, s: None)
    assert ask.calls == 2


def test_patience_ends_when_it_is_told_to() -> None:
    stop = threading.Event()
    ask = Flaky(*(StoreUnavailable("away") for _ in range(9)))
    assert patiently(ask, Backoff(60_000, 60_000), stop, lambda error, s: stop.set()) is None
    assert ask.calls == 1
    assert patiently(ask, Backoff(1, 1), stop, lambda error, s: None) is None
    assert ask.calls == 1
