"""The options that tables of a lake have in common in a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shuffle.formats.secrets import Given, secret_mistake
from shuffle.spec.kafka import Note


def storage_options(given: Any, note: Note) -> Mapping[str, Given] | None:
    """Settings of the library for its storage: names and values, of which some are elsewhere; None after mistakes."""
    if not isinstance(given, Mapping):
        note("", "a mapping of the library's own names to values is needed here")
        return None
    mistakes = {str(name): secret_mistake(value) for name, value in given.items()}
    for name, mistake in mistakes.items():
        if mistake is not None:
            note(name, mistake)
    return None if any(mistakes.values()) else {str(name): value for name, value in given.items()}
