"""The target of each input, by its number alone, so that one input can be run again without the others."""

from __future__ import annotations

from collections.abc import Iterator

WEIGHTS = {
    "lane": 34,
    "flight": 17,
    "grpc": 10,
    "getrows": 12,
    "metrics": 4,
    "shared_memory": 8,
    "segments": 8,
    "specs": 6,
    "logs": 1,
}
"""Inputs of each target out of a hundred."""

ONLINE = ("lane", "flight", "grpc", "getrows", "metrics")
"""Those that need the processes of ``world``; the others run in children of their own."""

TARGETS = tuple(WEIGHTS)


def _pattern() -> tuple[str, ...]:
    """A hundred turns in which every target comes as often as its weight, spread evenly."""
    turns = [
        (turn * 100 / weight + 1e-3 * place, name)
        for place, (name, weight) in enumerate(WEIGHTS.items())
        for turn in range(weight)
    ]
    return tuple(name for _, name in sorted(turns))


PATTERN = _pattern()
assert len(PATTERN) == 100


def target_of(number: int) -> str:
    return PATTERN[number % len(PATTERN)]


def numbers(count: int, targets: tuple[str, ...], first: int = 0) -> Iterator[int]:
    """The first ``count`` inputs of these targets."""
    number = first
    while count > 0:
        if target_of(number) in targets:
            yield number
            count -= 1
        number += 1
