"""The load at which a reducer lets rows add up, and asks less often."""

from __future__ import annotations

from shuffle.limits import KIB, MIB
from shuffle.reducer.pace import GATHER_S, GATHER_S_MAX, IDLE_S, IDLE_S_MAX, RESPONSE_BYTES_SMALL, SLOW_S, Pace


def paced(reducers_per_core: float, size_bytes: int, seconds: float) -> Pace:
    pace = Pace(reducers_per_core)
    pace.taken(size_bytes, 100.0)
    pace.is_loaded(100.0 + seconds)
    return pace


def test_small_batch_is_no_load_however_fast() -> None:
    pace = Pace()
    pace.taken(MIB, 100.0)
    assert not pace.is_loaded(100.0)


def test_load_is_bytes_over_the_time_since_they_were_taken() -> None:
    pace = Pace()
    pace.taken(3 * MIB // 2, 100.0)
    assert pace.is_loaded(100.09)
    assert not pace.is_loaded(100.097)


def test_slow_cycle_is_load_whatever_the_rate() -> None:
    pace = Pace()
    pace.taken(3 * MIB // 2, 100.0)
    assert pace.is_loaded(100.0 + 2 * SLOW_S)


def test_one_of_many_reducers_of_a_core_takes_its_own_load_for_that_of_the_others() -> None:
    many = Pace(64)
    many.taken(20 * KIB, 100.0)
    assert many.is_loaded(100.07)
    assert not many.is_loaded(100.09)
    one = Pace(1)
    one.taken(20 * KIB, 100.0)
    assert not one.is_loaded(100.0)


def test_requests_are_delayed_only_under_load_and_after_small_responses() -> None:
    assert paced(64, 64 * KIB, 0.1).request_pause_s(1) > 0
    assert paced(64, 64 * KIB, 0.1).request_pause_s(RESPONSE_BYTES_SMALL) == 0
    assert paced(64, 20 * KIB, 0.09).request_pause_s(1) == 0
    assert Pace().request_pause_s(1) == 0


def test_pause_ends_before_the_reducer_gives_up_waiting_for_rows() -> None:
    for reducers_per_core in (0.1, 1, 16, 64, 1000):
        pace = paced(reducers_per_core, 2 * MIB, 0.01)
        assert 0 < pace.request_pause_s(1) < pace.idle_s < pace.gather_s


def test_many_reducers_wait_longer_for_more_rows_but_not_without_bound() -> None:
    assert (Pace(1).gather_s, Pace(1).idle_s) == (Pace(2).gather_s, Pace(2).idle_s) == (GATHER_S, IDLE_S)
    assert Pace(64).gather_s > Pace(1).gather_s
    assert Pace(64).idle_s > Pace(1).idle_s
    assert (Pace(1000).gather_s, Pace(1000).idle_s) == (GATHER_S_MAX, IDLE_S_MAX)
