"""Planted bugs of the exchange that carries the requests of many pairs. Every function here is one; see ``mutants``."""

from __future__ import annotations

from typing import Any

from shuffle.reducer.exchange import RowsResponse as _RowsResponse
from shuffle.reducer.link import Link as _Link


def answers_given_to_the_next_pair(patch: Any) -> None:
    original = _Link._hand_out

    def hand_out(self: Any, asked: Any, answers: Any, seconds: float) -> Any:
        return original(self, asked, answers[1:] + answers[:1], seconds)

    patch(_Link, "_hand_out", hand_out)


def answers_taken_for_those_of_a_later_plan(patch: Any) -> None:
    original = _Link._hand_out

    def hand_out(self: Any, asked: Any, answers: Any, seconds: float) -> Any:
        # A pair whose core was restarted meanwhile has another cursor by now.
        again = [(seat, seat.passenger.plan_on_board() or plan) for seat, plan in asked]
        return original(self, again, answers, seconds)

    patch(_Link, "_hand_out", hand_out)


def requests_that_need_the_store_never_made_alone(patch: Any) -> None:
    original = _Link._hand_out

    def hand_out(self: Any, asked: Any, answers: Any, seconds: float) -> Any:
        kept = [_RowsResponse(is_early=True) if one is None else one for one in answers]
        return original(self, asked, kept, seconds)

    patch(_Link, "_hand_out", hand_out)
