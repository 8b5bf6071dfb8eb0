"""Probes in mappers that read several partitions; see ``probes``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shuffle.durable.read_order import ReadOrder
from shuffle.mapper.readers.grouped import GroupedReader

Mark = Callable[[str], None]


def install(watch: Callable[..., None]) -> None:
    watch(GroupedReader, "_catch_up", _after_catch_up)
    watch(ReadOrder, "append", _after_append)
    watch(ReadOrder, "trim", _after_trim)


def _after_catch_up(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    if error is None and seen[1][0]:
        mark("an entry was read again")
        if seen[1][1].entry == args[0].entry:
            mark("an entry was read again in parts")


def _after_append(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    if error is None and not seen[1]:
        mark("an entry of another instance was found")


def _after_trim(mark: Mark, self: Any, args: tuple[Any, ...], seen: Any, error: BaseException | None) -> None:
    if error is None and args[0] > 0:
        mark("entries were deleted")
