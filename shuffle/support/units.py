"""Sizes and durations as people write and read them: in a spec, in an option of Spark, on a screen.

A size without a unit is bytes. A duration without one is refused, unless the name of the option has the unit
(``trim_period_ms: 500``): ``timeout: 30`` may mean seconds to its writer and milliseconds to its reader, and the
mistake would go unnoticed for long. Zero needs no unit.
"""

from __future__ import annotations

import re

from shuffle.limits import GIB, KIB, MIB

TIB = 1024 * GIB

NUMBER_CHARS_MAX = 32
"""The most characters of a number with its unit. No number in use needs half of that."""

TEXT_SHOWN_MAX = 60
"""The most characters of a wrong value that an error message quotes."""

SIZE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS |= {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
"""Bytes in each unit of size. Case does not matter."""

DURATION_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
"""Milliseconds in each unit of time. Case does not matter."""

_SIZES = {unit.lower(): scale for unit, scale in SIZE_UNITS.items()}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """The bytes that ``text`` names: ``256MiB``, ``64 KB``, ``1.5GiB`` or a plain number. ``ValueError`` if none."""
    number, unit = _split_unit(text)
    scale = _SIZES.get(unit.lower() or "b")
    if scale is None:
        raise ValueError(f"{quoted(text)} has no unit of size: write for example 256MiB or 64KiB")
    return int(number * scale)


def parse_duration_ms(text: str, plain_ms: bool = False) -> int:
    """The milliseconds that ``text`` names: ``500ms``, ``5s``, ``2min``. ``ValueError`` if none.

    With ``plain_ms`` a plain number is milliseconds; without it, only 0 needs no unit.
    """
    number, unit = _split_unit(text)
    if not unit and number and not plain_ms:
        plain = text.strip()
        raise ValueError(f"{quoted(text)} has no unit of time: write {plain}s or {plain}ms")
    scale = DURATION_UNITS.get(unit.lower() or "ms")
    if scale is None:
        raise ValueError(f"{quoted(text)} has no unit of time: write for example 500ms or 5s")
    return int(number * scale)


def exact_size(nbytes: int) -> str:
    """Bytes in the largest unit that leaves no fraction: ``256 MiB``, ``1,000 B``."""
    for scale, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes:,} B"


def rough_size(nbytes: int) -> str:
    """Bytes with one decimal in the unit that fits: ``1.5 MiB``; below 1 KiB the exact number."""
    if nbytes < KIB:
        return f"{nbytes:,} B"
    amount, unit = nbytes / KIB, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:,.1f} {unit}"


def exact_duration(ms: int) -> str:
    """Milliseconds in the largest unit up to hours that leaves no fraction: ``500 ms``, ``10 min``."""
    for scale, unit in ((3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if ms >= scale and ms % scale == 0:
            return f"{ms // scale} {unit}"
    return f"{ms} ms"


def quoted(text: str) -> str:
    """``text`` as an error message quotes it: in quotes, and cut where it is long."""
    return repr(text if len(text) <= TEXT_SHOWN_MAX else text[: TEXT_SHOWN_MAX - 1] + "…")


def _split_unit(text: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or len(text) > NUMBER_CHARS_MAX:
        raise ValueError(f"{quoted(text)} is not a number with a unit")
    return float(match[1].replace("_", "")), match[2]
