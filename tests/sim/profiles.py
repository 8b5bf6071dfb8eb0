"""The profiles of runs: ordinary ones, or every seed with much of one type of fault.

A profile adds faults from a random stream of its own, so that ordinary runs do not change whatever is added here.
"""

from __future__ import annotations

import os

EXPORTER = "exporter"
GROWTH = "growth"
HOSTING = "hosting"
LOGGED = "logged"
PARTITIONS = "partitions"
STRAGGLERS = "stragglers"
TWINS = "twins"
NAMES = (STRAGGLERS, TWINS, HOSTING, LOGGED, PARTITIONS, GROWTH, EXPORTER)
_VARIABLE = "SHUFFLE_SIM_PROFILE"


def use(name: str | None) -> None:
    """For this process and those it starts."""
    if name is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = name


def current() -> str | None:
    return os.environ.get(_VARIABLE)
