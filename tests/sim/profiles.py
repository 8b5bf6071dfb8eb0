"""Which kind of runs: ordinary ones, or every seed with much of one thing.

A profile adds to what a seed has by chance of its own, so that ordinary runs stay what they are whatever is added here.
"""

from __future__ import annotations

import os

HOSTING = "hosting"
STRAGGLERS = "stragglers"
TWINS = "twins"
NAMES = (STRAGGLERS, TWINS, HOSTING)
_VARIABLE = "SHUFFLE_SIM_PROFILE"


def use(name: str | None) -> None:
    """For this process and those it starts."""
    if name is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = name


def current() -> str | None:
    return os.environ.get(_VARIABLE)
