"""What a trim makes durable: the plan of one transaction, and the ranges that have retired and wait for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from shuffle.durable.mapper_state import MapperState
from shuffle.ids import ReducerIndex, ShuffleIndex
from shuffle.mapper.entry_life import Life
from shuffle.mapper.spill.format import SpillPart


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """One transaction: if the persisted state is ``expected``, append ``dead_letters``, store ``spill`` and write
    ``state``."""

    expected: MapperState
    state: MapperState
    dead_letters: pa.Table | None
    spill: Mapping[ReducerIndex, Sequence[SpillPart]] = field(default_factory=dict)
    """For each straggler, its uncommitted rows before ``state``, in their order."""
    claims: Mapping[ReducerIndex, ShuffleIndex] = field(default_factory=dict)
    """The claims that must be true before this is committed (see ``MapperCore.claims``)."""
    freed: Mapping[ReducerIndex, ShuffleIndex] = field(default_factory=dict)
    """For each straggler, the last of its rows that is in neither the window nor the spill, because it is committed."""


@dataclass(slots=True)
class RetiredRange:
    """A range that left the window and is not persisted yet."""

    state: MapperState
    dead_letters: list[pa.Table] = field(default_factory=list)
    dead_letter_bytes: int = 0
    life: Life = Life.RETIRED
    """The state of all entries in the range."""
