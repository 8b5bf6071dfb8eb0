"""Draws the map of the project, ``docs/pictures/house.svg``: the layers, and the way of a row through them.

    python -m tools.house_picture

The order of the layers is taken from ``tools.layers``, which the tests check, so that the picture cannot show another
one; ``tests/test_tidy.py`` fails when the picture is out of date or a part is missing in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

from tools.layers import LAYERS, RANKS, ROOT

PICTURE = ROOT / "docs" / "pictures" / "house.svg"

FLOORS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("around it", (("tools", "layers, reference, pictures"), ("perf", "benchmarks"), ("broker", "Kafka to try"))),
    (
        "what people start",
        (("cli", "the command shuffle"), ("examples", "jobs, the demo"), ("shuffle", "from shuffle import …")),
    ),
    (
        "Spark",
        (
            ("spark", "data source, reduce, cluster"),
            ("spark.sink", "queues and tables"),
            ("spark.source", "shuffled rows"),
            ("spark.base", "options, schemas"),
        ),
    ),
    ("a run", (("run", "controller, supervisor, status, screen, dead letters, upgrade"),)),
    (
        "workers",
        (
            ("exporter", "outbox to outside"),
            ("reducer", "fetch, reduce, commit"),
            ("mapper", "ingest, map, GetRows, trim"),
            ("mapper.spill", "stragglers"),
            ("preflight", "checks before the start"),
            ("reducer.outputs", "queue, outside"),
            ("mapper.readers", "queue, folder"),
            ("mapper.window", "window, bucket"),
        ),
    ),
    (
        "what a job is",
        (
            ("user_code", "load, call, poison"),
            ("spec", "YAML, frozen objects"),
            ("formats", "JSON, Avro, …"),
            ("jobs", "ready-made"),
            ("partition", "key groups"),
            ("api", "Mapper, Reducer, messages"),
        ),
    ),
    ("what is durable", (("store.admin", "shuffle state"), ("durable", "tables, states and leases of a processor"))),
    (
        "the state store",
        (
            ("store.server", "daemon"),
            ("statestore", "face"),
            ("store.client", "typed API"),
            ("store.remote", "over the wire"),
            ("store.local", "RocksDB, files"),
        ),
    ),
    (
        "",
        (
            ("store.wire", "operations"),
            ("store.engine", "rules, no I/O"),
            ("store.model", "Store, requests"),
            ("store.codec", "rows as bytes"),
        ),
    ),
    ("everybody", (("support", "threads, retries, units, endpoints, Flight, logs"), ("base", "errors, ids, limits"))),
)
"""The rows of the picture from the top down; in each the layers from the highest to the lowest, with their contents."""

WAY = ("reader", "ingest", "map", "window", "bucket", "GetRows", "fetch", "reduce", "commit", "trim")

WIDTH, MARGIN, LABEL = 1120, 24, 132
FLOOR, GAP, HEAD = 58, 10, 132
_COLOURS = {"shuffle": "#e8eef7", "store": "#e7f3ec", "workers": "#fdf1e0", "spark": "#f6e9f2", "other": "#f0f0f0"}


def colour(part: str) -> str:
    family = part.partition(".")[0]
    if family in ("store", "statestore"):
        return _COLOURS["store"]
    if family in ("mapper", "reducer", "exporter"):
        return _COLOURS["workers"]
    if family == "spark":
        return _COLOURS["spark"]
    return _COLOURS["other"] if part in ("tools", "perf", "examples", "cli") else _COLOURS["shuffle"]


def text(x: float, y: float, words: str, size: int = 13, style: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="#8a8f98"/>'


def way() -> Iterator[str]:
    """The stations of a row, in one line at the top."""
    step = (WIDTH - 2 * MARGIN) / len(WAY)
    yield text(MARGIN, 28, "the way of a row", 14, ' font-weight="600"', "start")
    for number, station in enumerate(WAY):
        x = MARGIN + number * step
        yield box(x, 42, step - 22, 34, _COLOURS["workers"])
        yield text(x + (step - 22) / 2, 64, station)
        if number + 1 < len(WAY):
            yield text(x + step - 11, 65, "→", 15)


def floors() -> Iterator[str]:
    yield text(
        MARGIN,
        HEAD - 16,
        "the layers: imports point down, or to the right on one floor",
        14,
        ' font-weight="600"',
        "start",
    )
    for number, (label, rooms) in enumerate(FLOORS):
        y = HEAD + number * (FLOOR + GAP)
        yield text(MARGIN, y + FLOOR / 2 + 4, label, 13, ' fill="#555"', "start")
        step = (WIDTH - 2 * MARGIN - LABEL) / len(rooms)
        for place, (part, inside) in enumerate(rooms):
            x = MARGIN + LABEL + place * step
            yield box(x, y, step - GAP, FLOOR, colour(part))
            yield text(x + (step - GAP) / 2, y + 24, part, 14, ' font-weight="600"')
            yield text(x + (step - GAP) / 2, y + 43, inside, 12, ' fill="#444"')


def mistakes() -> list[str]:
    """The layers that the picture lacks, and those that it shows in another order than ``tools.layers``."""
    drawn = [part for _, rooms in FLOORS for part, _ in rooms]
    found = [f"{part} is not drawn" for part, _ in LAYERS if part not in drawn]
    for upper, lower in pairwise(drawn):
        if RANKS[upper] < RANKS[lower]:
            found.append(f"{upper} is drawn before {lower}, which is a higher layer")
    return found


def picture() -> str:
    height = HEAD + len(FLOORS) * (FLOOR + GAP) + MARGIN
    size = f'viewBox="0 0 {WIDTH} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" fill="#1c1e21">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *way(),
        *floors(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    found = mistakes()
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    Path(PICTURE).write_text(picture(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
