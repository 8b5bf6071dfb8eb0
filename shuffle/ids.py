"""Distinct types for numbers and names that must not be mixed up."""

from __future__ import annotations

import uuid
from typing import NewType

MapperIndex = NewType("MapperIndex", int)
ReducerIndex = NewType("ReducerIndex", int)
InputIndex = NewType("InputIndex", int)
"""A position in a mapper's input numbering."""
ShuffleIndex = NewType("ShuffleIndex", int)
"""A position in a mapper's shuffle numbering."""
Guid = NewType("Guid", str)
"""The name of one instance of a worker; a restarted worker has another one."""
Token = NewType("Token", bytes)
"""A continuation token: opaque to everyone but the reader that made it."""

NOTHING_COMMITTED = ShuffleIndex(-1)
"""*Committed* and *cursor* name the last row, so before the first row they are -1."""


def new_guid() -> Guid:
    return Guid(uuid.uuid4().hex)
