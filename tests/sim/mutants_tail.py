"""Planted bugs of the tails of responses. Every function here is one; see ``mutants``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shuffle.mapper.core import MapperCore as _Core
from shuffle.reducer.core import ReducerCore as _ReducerCore


def complete_up_to_one_too_far(patch: Any) -> None:
    original = _Core.tail

    def tail(self: Any, request: Any, served: Any) -> Any:
        made = original(self, request, served)
        return made._replace(complete_up_to=made.complete_up_to + 1)

    patch(_Core, "tail", tail)


def front_of_the_newest_entry_told(patch: Any) -> None:
    original = _Core.tail
    patch(_Core, "tail", lambda self, request, served: original(self, request, served)._replace(front=self.front))


def front_of_the_newest_entry_persisted(patch: Any) -> None:
    original = _Core._state_after
    patch(_Core, "_state_after", lambda self, entry: replace(original(self, entry), front=self.front))


def front_of_what_is_still_queued_committed(patch: Any) -> None:
    original = _ReducerCore._take_parts

    def take_parts(self: Any) -> Any:
        return [replace(part, front=self.front(part.mapper_index)) for part in original(self)]

    patch(_ReducerCore, "_take_parts", take_parts)


def generation_not_compared(patch: Any) -> None:
    original = _Core._check_request

    def check(self: Any, request: Any) -> None:
        original(self, replace(request, generation=self.persisted.generation))

    patch(_Core, "_check_request", check)


def tail_of_the_empty_answer_stale(patch: Any) -> None:
    """An answer without rows repeats the promises of the answer before it."""
    original = _Core.tail

    def tail(self: Any, request: Any, served: Any) -> Any:
        made = original(self, request, served)
        told = self.__dict__.setdefault("told", {})
        before = told.setdefault(request.reducer_index, made)
        if served:
            told[request.reducer_index] = made
            return made
        return before._replace(last_row_index=made.last_row_index)

    patch(_Core, "tail", tail)
