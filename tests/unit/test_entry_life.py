"""The table of the life of a window entry: what it allows, that all of it occurs, and that the picture shows it."""

from __future__ import annotations

import itertools

import pytest

from shuffle.mapper.entry_life import EVENTS, TRANSITIONS, Life, after
from tools.entry_life import PAGE, page


@pytest.mark.parametrize(("life", "event"), list(itertools.product(Life, EVENTS)))
def test_entry_moves_on_by_the_table_and_not_otherwise(life: Life, event: str) -> None:
    if (life, event) in TRANSITIONS:
        assert after(life, event) is TRANSITIONS[life, event]
    else:
        with pytest.raises(AssertionError, match=f"{life.value} cannot {event}"):
            after(life, event)


def test_every_state_is_reached_and_all_but_the_last_are_left() -> None:
    reached = {Life.HELD, *TRANSITIONS.values()}
    left = {life for life, _ in TRANSITIONS}
    assert reached == set(Life)
    assert left == set(Life) - {Life.PERSISTED}


def test_picture_in_the_documentation_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tools.entry_life`"
