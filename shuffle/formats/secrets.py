"""Secrets in a spec: a spec names where a secret is, the environment or a file, and the secret itself is in neither the
spec nor in what is logged, stored or shown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shuffle.errors import SpecError
from shuffle.limits import KIB

SECRET_BYTES_MAX = 64 * KIB
"""The most bytes of a file with a secret: certificates and keys have a few thousand."""

Given = str | int | float | bool | Mapping[str, str]
"""A value as it is in a spec: itself, or where it is: ``{env: NAME}`` or ``{file: PATH}``."""


def secret_mistake(value: Any) -> str | None:
    """What is wrong with a value as it is in a spec; None if nothing."""
    if isinstance(value, Mapping):
        if len(value) == 1 and (set(value) <= {"env", "file"}) and all(isinstance(one, str) for one in value.values()):
            return None
        return "a value that is elsewhere is written as {env: NAME} or {file: PATH}"
    if isinstance(value, str | int | float | bool):
        return None
    return "a single value is needed here"


def resolved(value: Given, folder: Path, name: str) -> str:
    """The value itself. ``SpecError`` if it is not where the spec says; the message has the place, never the value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, Mapping):
        return str(value)
    if "env" in value:
        variable = value["env"]
        if variable not in os.environ:
            raise SpecError(f"{name}: the environment variable {variable} is not set")
        return os.environ[variable]
    path = folder / Path(value["file"]).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
        if len(content) > SECRET_BYTES_MAX:
            raise SpecError(f"{name}: {path} has over {SECRET_BYTES_MAX} bytes")
        return content.decode().strip()
    except (OSError, UnicodeError) as error:
        raise SpecError(f"{name}: {path} cannot be read: {type(error).__name__}") from None
