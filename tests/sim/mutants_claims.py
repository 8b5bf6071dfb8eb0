"""Planted bugs of claims: what a mapper takes for committed. Every function here is one; see ``mutants``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as _pa

import shuffle.mapper.trim as _trim
from shuffle.durable.mapper_state import lookup_committed as _lookup_committed
from shuffle.durable.reducer_state import REDUCERS_KEY as _KEY
from shuffle.durable.reducer_state import ReducerState as _State
from shuffle.mapper.claims import Claims as _Claims
from shuffle.mapper.core import MapperCore as _Core
from shuffle.mapper.instance import MapperInstance as _Instance
from shuffle.mapper.shared_core import SharedCore as _Shared
from shuffle.mapper.trim import Trimmer as _Trimmer


def claims_beyond_what_was_served_believed(patch: Any) -> None:
    patch(_Claims, "check_request", lambda self, request, bucket: None)


def claims_confirmed_without_the_store(patch: Any) -> None:
    """What was refused is believed the second time."""
    original = _Shared._confirm

    def confirm(self: Any) -> bool:
        asked = original(self)
        self.core.learn_committed(dict.fromkeys(range(self.core.reducer_count), self.core.next_shuffle_index - 1))
        return asked

    patch(_Shared, "_confirm", confirm)


def state_moved_by_claims(patch: Any) -> None:
    """The store is not asked before the state moves and the input is trimmed."""
    patch(_Trimmer, "_check_claims", lambda self, claims: None)


def committed_index_of_another_reducer_used(patch: Any) -> None:
    def lookup(source: Any, processor: str, mapper_index: Any, reducer_count: int) -> Any:
        found = _lookup_committed(source, processor, mapper_index, reducer_count)
        return {reducer: max(found.values()) for reducer in found}

    patch(_trim, "lookup_committed", lookup)


def committed_index_of_another_mapper_used(patch: Any) -> None:
    def lookup(source: Any, processor: str, mapper_index: Any, reducer_count: int) -> Any:
        keys = _pa.table([_pa.array(range(reducer_count), _pa.int32())], schema=_KEY)
        rows = source.lookup(f"{processor}/reducers", keys).to_pylist()
        states = {row["reducer_index"]: _State.decode_any(row["committed_row_indices"]) for row in rows}
        return {reducer: max(state.committed_row_indices) for reducer, state in states.items()}

    patch(_trim, "lookup_committed", lookup)


def restart_after_a_false_claim_forgotten(patch: Any) -> None:
    patch(_Instance, "_false_claim", lambda self, error: None)


def false_claim_forgiven(patch: Any) -> None:
    """The claim is found to be false once; from then on the mapper believes itself instead of the store."""

    def false_claim(self: Any, error: Any) -> None:
        self._core.learn_committed({error.reducer_index: error.claimed_row_index})

    patch(_Instance, "_false_claim", false_claim)


def store_asked_before_the_claims(patch: Any) -> None:
    """What the store said a round ago is compared with what requests say now."""
    original = _Trimmer._check_claims
    said: dict[Any, Any] = {}

    def check_claims(self: Any, claims: Any) -> None:
        core = self._core
        before = said.get(self, {})
        said[self] = _lookup_committed(self._client, self._processor, core.mapper_index, core.reducer_count)
        if claims and before:
            with self._lock:
                core.check_claims(claims, before)
        else:
            original(self, claims)

    patch(_Trimmer, "_check_claims", check_claims)


def request_of_another_processor_answered(patch: Any) -> None:
    original = _Core._check_request

    def check(self: Any, request: Any) -> None:
        original(self, replace(request, processor=self.processor))

    patch(_Core, "_check_request", check)
