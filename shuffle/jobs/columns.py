"""What the ready-made jobs check about the columns that a subclass declares."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from shuffle.errors import SchemaMismatch, SpecError


def check_names(cls: type, attribute: str, *, required: bool) -> None:
    names = getattr(cls, attribute, None)
    if isinstance(names, str):
        raise SpecError(f"{cls.__name__}.{attribute} must be a list of columns: [{names!r}]")
    if required and not names:
        raise SpecError(f'{cls.__name__} needs its key columns: {attribute} = ["…"]')


def check_column(column: str, names: Sequence[str], where: str, error: type[SpecError] | type[SchemaMismatch]) -> None:
    if column in names:
        return
    close = difflib.get_close_matches(column, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}"
    raise error(f"{where}: the rows have no column {column!r}; {hint}", column=column)
