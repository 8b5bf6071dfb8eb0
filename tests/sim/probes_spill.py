"""Probes in the rare branches of spilling, which set the marks of ``stragglers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shuffle.mapper.core import MapperCore
from shuffle.mapper.spill.index import Spill
from shuffle.mapper.spill.policy import Spilling
from shuffle.mapper.spill.response import SpillResponse
from shuffle.mapper.spill.store import SpillStore
from shuffle.mapper.trim import Trimmer


def install(watch: Callable[..., None]) -> None:
    def recorded(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        mark("rows were spilled")
        if len(args[0]) > 1:
            mark("rows were spilled for two reducers at once")

    watch(MapperCore, "spilled", recorded)

    def planned(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and result[1] is not None:
            for reducer, parts in result[1].spill.items():
                if parts[0].row_indexes[0] - 1 <= core.buckets[reducer].committed >= 0:
                    mark("a spilled part was partly committed")

    watch(MapperCore, "trim_plan", planned)

    def loaded(mark: Any, spilling: Any, args: Any, result: Any, error: Any) -> None:
        if not any(not spill.is_empty for spill in args[0].values()):
            return
        if not result[0]:
            mark("a commit that had spilled was unknown, and had happened")
        else:
            mark("a mapper found its spill again after a restart")

    watch(Spilling, "load", loaded, before=lambda spilling, spills, buckets: spilling.is_known)

    def blocked(mark: Any, spilling: Any, args: Any, result: Any, error: Any) -> None:
        mark("a spill was refused for want of room")

    watch(Spilling, "block", blocked)

    def trimmed(mark: Any, store: Any, args: Any, result: Any, error: Any) -> None:
        mark("a spill was trimmed")

    watch(SpillStore, "trim", trimmed)

    def prepared(mark: Any, store: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and result[1].staged:
            mark("rows were staged for the spill")

    watch(SpillStore, "prepare", prepared)

    def committed(mark: Any, spill: Any, args: Any, result: Any, error: Any) -> None:
        if not result[0] and spill.is_empty:
            mark("a reducer caught up with its spill")

    watch(Spill, "commit", committed, before=lambda spill, row_index: spill.is_empty)

    def discarded(mark: Any, trimmer: Any, args: Any, result: Any, error: Any) -> None:
        if args[0] is not None:
            mark("another instance had spilled")

    watch(Trimmer, "_discard", discarded)

    def served(mark: Any, answer: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and answer.served:
            mark("rows came from the spill")

    watch(SpillResponse, "add", served)

    def read(mark: Any, store: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and args[0].position < args[0].spill.begin + len(args[0].spill._heads):
            mark("spilled rows were asked for again")

    watch(SpillStore, "read", read)
