"""The mappers or reducers that one process hosts: sets of indexes, and their text on a command line, ``0,1,2`` or
``0-2``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shuffle.errors import BadInput

PER_PROCESS_MAX = 512
"""The most mappers, or reducers, in one process. Each has threads of its own, and they take turns in one
interpreter."""

PARTITIONS_PER_MAPPER_MAX = 512
"""The most partitions of the input that one mapper reads: its token has the positions of all of them."""

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def parse_indexes(text: str, role: str = "mapper") -> list[int]:
    """The indexes that ``text`` names, in their order: ``3``, ``0,2,5``, ``0-3``, or several of these with commas."""
    indexes: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise BadInput(f"{text!r} names no {role}s: write one index (3), several (0,2,5) or a range (0-3)")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise BadInput(f"{part.strip()!r} is a range that ends before it begins: write it as {last}-{first}")
        if last - first >= PER_PROCESS_MAX or len(indexes) + last - first >= PER_PROCESS_MAX:
            raise BadInput(f"{text!r} are more than {PER_PROCESS_MAX} {role}s: start more processes with fewer each")
        indexes += range(first, last + 1)
    if len(set(indexes)) < len(indexes):
        raise BadInput(f"{text!r} names a {role} twice")
    return indexes


def indexes_text(indexes: Sequence[int]) -> str:
    """The text that ``parse_indexes`` reads as ``indexes``: a range if they are contiguous."""
    if len(indexes) > 1 and list(indexes) == list(range(indexes[0], indexes[0] + len(indexes))):
        return f"{indexes[0]}-{indexes[-1]}"
    return ",".join(str(index) for index in indexes)


def share_out_of(indexes: range, per_process: int) -> list[range]:
    """Contiguous indexes, shared out to as few processes as possible with at most ``per_process`` in each."""
    return [indexes[begin : begin + per_process] for begin in range(0, len(indexes), per_process)]


def share_out(count: int, per_process: int) -> list[range]:
    """The indexes below ``count``, shared out to as few processes as possible with at most ``per_process`` in each."""
    return share_out_of(range(count), per_process)
