"""Planted bugs (mutants): each is a mistake that somebody could make, patched in, and must be found within 1,000 seeds.

The product has no switches for them. ``planted`` replaces attributes of its classes for the length of a run.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.sim import (
    mutants_claims,
    mutants_exporter,
    mutants_grouping,
    mutants_growth,
    mutants_links,
    mutants_logs,
    mutants_mapper,
    mutants_reducer,
    mutants_spill,
    mutants_store,
    mutants_tail,
    mutants_twins,
    profiles,
)

SEEDS_MAX = 1_000

_OWN_FAULT = re.compile(r"\b(AttributeError|NameError)\b|TypeError: \w+\.<locals>\.")
"""A violation that is the fault of the planted bug's own code, which no longer fits the product. A simulation that
fails of that has found nothing, so the run fails."""

Patch = Callable[[Any, str, Any], None]
Mutant = Callable[[Patch], None]


class NoTarget(Exception):
    """A planted bug that is not in the product: what it replaces was moved or renamed. The run fails."""


def _collect() -> dict[str, Mutant]:
    made: dict[str, Mutant] = {}
    modules = (mutants_reducer, mutants_mapper, mutants_claims, mutants_store, mutants_spill, mutants_tail)
    for module in (
        *modules,
        mutants_twins,
        mutants_logs,
        mutants_links,
        mutants_grouping,
        mutants_growth,
        mutants_exporter,
    ):
        for name, value in vars(module).items():
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_"):
                if name in made:
                    raise ValueError(f"two planted bugs are called {name}")
                made[name] = value
    return made


MUTANTS = _collect()
_PROFILES = {
    mutants_spill.__name__: profiles.STRAGGLERS,
    mutants_twins.__name__: profiles.TWINS,
    mutants_links.__name__: profiles.HOSTING,
    mutants_logs.__name__: profiles.LOGGED,
    mutants_grouping.__name__: profiles.PARTITIONS,
    mutants_exporter.__name__: profiles.EXPORTER,
    mutants_growth.__name__: profiles.GROWTH,
}
"""Of the modules whose bugs are looked for in runs of another kind than the ordinary."""


def _profile(name: str) -> str | None:
    return _PROFILES.get(getattr(MUTANTS.get(name), "__module__", ""))


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with one bug in it."""
    undo: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, attribute: str, replacement: Any) -> None:
        if attribute not in owner.__dict__:
            raise NoTarget(f"planted bug {name}: {owner.__name__} has no {attribute} of its own to replace")
        undo.append((owner, attribute, owner.__dict__[attribute]))
        setattr(owner, attribute, replacement)

    try:
        if name not in MUTANTS:
            raise NoTarget(f"there is no planted bug {name}")
        MUTANTS[name](patch)
        if not undo:
            raise NoTarget(f"planted bug {name}: it replaces nothing")
        yield
    finally:
        for owner, attribute, original in reversed(undo):
            setattr(owner, attribute, original)


def hunt(name: str) -> tuple[str, int | None, str, float]:
    """(the bug, the first seed that finds it or None, what was found or why it cannot be, seconds)."""
    from tests.sim.cli import run_seed

    begin_s = time.monotonic()
    profiles.use(_profile(name))
    for seed in range(SEEDS_MAX):
        try:
            result = run_seed((seed, name))
        except NoTarget as error:
            return name, None, str(error), time.monotonic() - begin_s
        if result.violations:
            what, seconds = result.violations[0].splitlines()[0], time.monotonic() - begin_s
            if _OWN_FAULT.search(what):
                return name, None, f"the planted bug itself is broken: {what}", seconds
            if without := run_seed((seed, None)).violations:
                return name, None, f"seed {seed} fails without the bug, too: {without[0].splitlines()[0]}", seconds
            return name, seed, what, seconds
    return name, None, "", time.monotonic() - begin_s


def main(options: argparse.Namespace) -> int:
    from tests.sim.cli import spread

    names = options.mutant.split(",") if options.mutant else sorted(MUTANTS)
    if options.profile and not options.mutant:
        names = [name for name in names if _profile(name) == options.profile]
    found = 0
    width = max(map(len, names))
    for name, seed, what, seconds in spread(options.jobs, hunt, iter(names)):
        found += seed is not None
        told = f"{seed + 1:4d} seeds  {what[:110]}" if seed is not None else what or f"not found in {SEEDS_MAX} seeds"
        print(f"{name:{width}}  {seconds:5.1f} s  {told}", flush=True)
    print(f"{found}/{len(names)} found")
    return 0 if found == len(names) else 1
