"""Checks of the columns that a subclass of a ready-made job declares."""

from __future__ import annotations

from collections.abc import Sequence

from shuffle.errors import SchemaMismatch, SpecError
from shuffle.support.suggest import did_you_mean


def check_names(cls: type, attribute: str, *, required: bool) -> None:
    names = getattr(cls, attribute, None)
    if isinstance(names, str):
        raise SpecError(f"{cls.__name__}.{attribute} must be a list of columns: [{names!r}]")
    if required and not names:
        raise SpecError(f'{cls.__name__} needs its key columns: {attribute} = ["…"]')


def check_column(column: str, names: Sequence[str], where: str, error: type[SpecError] | type[SchemaMismatch]) -> None:
    if column in names:
        return
    hint = did_you_mean(column, names, f"; there are: {', '.join(names)}")
    raise error(f"{where}: the rows have no column {column!r}{hint}", column=column)
