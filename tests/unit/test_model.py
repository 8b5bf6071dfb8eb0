"""The exhaustive model: the protocol holds in every state, and protocols with a mistake in them do not."""

from __future__ import annotations

import pytest

from tests.model import MISTAKES, Model, explore

ONE_MAPPER = ((0, 1),)
"""Enough for most mistakes, and a hundredth of the states."""


def test_protocol_holds_in_every_state_with_two_instances_of_everyone() -> None:
    """One mapper with a row for each of two reducers, everyone there twice, and one fault on top."""
    outcome = explore(Model(rows=ONE_MAPPER, instances=2, faults_max=1))
    assert outcome.broken is None, outcome.trail
    assert outcome.stuck == 0
    assert outcome.states > 10_000


@pytest.mark.long
def test_protocol_holds_in_every_state_of_two_mappers_and_two_reducers() -> None:
    outcome = explore(Model())
    assert outcome.broken is None, outcome.trail
    assert outcome.stuck == 0
    assert outcome.states > 100_000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(mistake: str) -> None:
    # Positions of two mappers are needed for one that compares only some of them.
    rows = ((0,), (0,)) if mistake == "only moved positions compared" else ONE_MAPPER
    outcome = explore(Model(rows=rows, mistake=mistake))
    assert outcome.broken is not None
    assert outcome.trail
