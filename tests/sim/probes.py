"""Probes in the product's rare branches, which set the marks of ``coverage``. They do not change what the product
does."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from shuffle.errors import (
    BadInput,
    CommitConflict,
    DiskFull,
    FalseClaim,
    NotServed,
    RowsGone,
    ShuffleError,
    SplitBrain,
    StaleGeneration,
    StaleMapper,
)
from shuffle.mapper.core import MapperCore
from shuffle.mapper.serve import MapperServer
from shuffle.mapper.shared_core import SharedCore
from shuffle.reducer.core import ReducerCore
from shuffle.reducer.reduce import ReduceStage
from shuffle.reducer.shared_core import SharedCore as SharedReducerCore
from shuffle.statestore.engine.engine import Engine
from shuffle.statestore.engine.leases import LeaseTable
from tests.sim import kernel

After = Callable[[Callable[[str], None], Any, tuple[Any, ...], Any, BaseException | None], None]
"""A probe that is called after a method with (mark, self, arguments, result, error)."""


def _watch(owner: type, name: str, after: After, before: Callable[..., Any] | None = None) -> None:
    original = owner.__dict__[name]

    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        world = kernel.maybe_world()
        if world is None:
            return original(self, *args, **kwargs)
        seen = before(self, *args) if before is not None else None
        try:
            result = original(self, *args, **kwargs)
        except ShuffleError as error:
            after(world.mark, self, args, seen, error)
            raise
        after(world.mark, self, args, (seen, result), None)
        return result

    setattr(owner, name, watched)


observe_false_claim: Callable[[int, int, int], None] = lambda mapper, reducer, dropped: None  # noqa: E731
"""The checkers' callback for rows that a mapper has dropped although they are not committed."""


observe_tail: Callable[[str, Any, Any, Any], None] = lambda guid, window, request, tail: None  # noqa: E731
"""The checkers' callback for the tail of a mapper's response, at the moment when it is made."""


def install() -> None:
    _watch_mapper()
    _watch_reducer()
    _watch_store()
    importlib.import_module("tests.sim.probes_spill").install(_watch)
    importlib.import_module("tests.sim.probes_logs").install(_watch)
    importlib.import_module("tests.sim.probes_grouping").install(_watch)
    importlib.import_module("tests.sim.probes_exporter").install(_watch)
    importlib.import_module("tests.sim.growth").install(_watch)


def _watch_mapper() -> None:
    def observed(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if isinstance(error, SplitBrain):
            mark("a mapper noticed another instance")
        elif error is None and result[0] is not core.persisted:
            mark("a trim whose answer was lost had happened")

    _watch(MapperCore, "observe", observed, before=lambda core, state: core.persisted)

    def served(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if isinstance(error, StaleMapper):
            mark("a mapper refused a request for another instance")
        elif isinstance(error, RowsGone):
            mark("rows were gone")

    _watch(MapperCore, "get_rows", served)
    _watch_claims()

    def mapped(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and result[1] is None:
            mark("rows were mapped again that were committed already")

    _watch(MapperCore, "_uncommitted_part", mapped)

    def ingested(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if not core.wants_input:
            mark("a window was full")

    _watch(MapperCore, "ingest", ingested)

    def planned(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and result[1] is not None and result[1].dead_letters is not None:
            mark("a mapper set rows aside")

    _watch(MapperCore, "trim_plan", planned)

    def told(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if error is None:
            observe_tail(core.guid, core._window, args[0], result[1])
            if result[1].complete_up_to > result[1].last_row_index:
                mark("a reducer was told that what comes next is not for it")

    _watch(MapperCore, "tail", told)
    _watch_entries()


def _watch_entries() -> None:
    modules: list[Any] = [importlib.import_module(f"shuffle.mapper.{name}") for name in ("window", "core")]
    original = modules[0].after

    def after(life: Any, event: str) -> Any:
        following = original(life, event)
        world = kernel.maybe_world()
        if world is not None:
            world.mark(f"a window entry that was {life.value} did {event}")
        return following

    for module in modules:
        module.after = after


def _watch_claims() -> None:
    def is_beyond(shared: Any, request: Any, *_: Any) -> bool:
        core = shared.core
        known = core._claims.believable(core.buckets[request.reducer_index])
        return bool(request.mapper_id == core.guid and request.committed_row_index > known)

    def asked(mark: Any, shared: Any, args: Any, result: Any, error: Any) -> None:
        if isinstance(error, NotServed):
            mark("a mapper refused a claim")
        elif isinstance(error, BadInput) and args[0].processor != shared.core.processor:
            mark("a mapper refused a request of another processor")
        elif isinstance(error, StaleGeneration):
            mark("a mapper refused a request of another generation")
        elif error is None and result[0]:
            mark("the store confirmed a claim")

    _watch(SharedCore, "get_rows", asked, before=is_beyond)

    def checked(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if isinstance(error, FalseClaim):
            mark("a false claim was found at the trim")
            observe_false_claim(core.mapper_index, error.reducer_index, error.claimed_row_index)

    _watch(MapperCore, "check_claims", checked)

    def routed(mark: Any, server: Any, args: Any, result: Any, error: Any) -> None:
        if isinstance(error, StaleMapper):
            mark("a mapper process refused a request for an instance of another life")

    _watch(MapperServer, "mapper", routed)


def _watch_reducer() -> None:
    def settled(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if error is None:
            mark(f"a commit was settled: {result[1].value}")

    _watch(ReducerCore, "settle", settled)

    def fetched(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if args and args[1] and args[0].epoch != core.epoch:
            mark("an answer of an abandoned epoch had rows")

    _watch(ReducerCore, "fetched", fetched)

    def reconciled(mark: Any, shared: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and result[1] is not None:
            mark("a reducer learned from a mapper that another instance is alive")

    _watch(SharedReducerCore, "reconcile", reconciled)

    def letters(mark: Any, stage: Any, args: Any, result: Any, error: Any) -> None:
        mark("a reducer set rows aside")

    _watch(ReduceStage, "_dead_letters", letters)


def _watch_store() -> None:
    def prepared(mark: Any, engine: Any, args: Any, result: Any, error: Any) -> None:
        if error is not None:
            return
        answers = result[1].results
        if len(answers) > 1:
            mark("several commits in one group")
        for answer in answers:
            if isinstance(answer, CommitConflict):
                mark("the store refused a commit that had read what changed")
            elif isinstance(answer, DiskFull):
                mark("the store refused a commit for want of room")

    _watch(Engine, "prepare", prepared)

    def persisted(mark: Any, engine: Any, args: Any, result: Any, error: Any) -> None:
        if error is not None and not args[0].reached_rocks:
            mark("a group failed before anything of it was written")
        elif error is not None:
            mark("a group failed, and nobody knows whether it is durable")

    _watch(Engine, "persist", persisted)

    def expired(mark: Any, leases: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and result[1]:
            mark("a lease ran out")

    _watch(LeaseTable, "expire", expired)
