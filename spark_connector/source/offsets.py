"""Offsets of the streaming source: one shuffle index for each mapper, and where a micro-batch ends.

An offset is the JSON object ``{"0": 4711, "1": 4650}``: for each mapper the last shuffle index before the offset; -1 if
there is none. Spark compares offsets as text, so the mappers are always in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shuffle.errors import BadInput

Indexes = list[int]
"""One shuffle index for each mapper."""


def to_offset(indexes: Sequence[int]) -> dict[str, int]:
    return {str(mapper): int(index) for mapper, index in enumerate(indexes)}


def from_offset(offset: Mapping[str, int], mapper_count: int) -> Indexes:
    if sorted(offset, key=_number) != [str(mapper) for mapper in range(mapper_count)]:
        raise BadInput(
            f"the checkpoint is of {len(offset)} mappers and the processor has {mapper_count}: it belongs to another "
            "processor. Start the query with a new checkpoint"
        )
    return [int(offset[str(mapper)]) for mapper in range(mapper_count)]


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def admit(start: Sequence[int], latest: Sequence[int], rows_max: int | None) -> Indexes:
    """The end of a micro-batch after ``start`` of at most ``rows_max`` rows, in proportion to what each mapper has.

    Every shuffle index is one row for one reducer, so the rows of a micro-batch are counted exactly.
    """
    waiting = [max(0, last - first) for first, last in zip(start, latest, strict=True)]
    if rows_max is None or sum(waiting) <= rows_max:
        return [first + rows for first, rows in zip(start, waiting, strict=True)]
    shares = [rows_max * rows // sum(waiting) for rows in waiting]
    left = rows_max - sum(shares)
    for mapper, rows in enumerate(waiting):
        more = min(left, rows - shares[mapper])
        shares[mapper] += more
        left -= more
    return [first + share for first, share in zip(start, shares, strict=True)]


def rows_between(start: Sequence[int], end: Sequence[int]) -> int:
    return sum(last - first for first, last in zip(start, end, strict=True))
