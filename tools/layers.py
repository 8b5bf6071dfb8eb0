"""Which layer of the project imports which, and whether an import points upwards.

    python tools/layers.py

prints a table with a row for each layer that imports and a column for each that is imported, both from the bottom layer
to the top one, and the number of imports in each cell. Everything must be below the diagonal;
``tests/test_tidy.py`` checks it. Imports inside of functions count like all others.

The ``__init__`` of a package with sub-packages in several layers is the *face* of the package: it imports what users
find there, and nothing inside of the package imports it. Faces are layers of their own here.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SPARK_BASE = ("options", "schemas", "store_handle", "waiting", "filters")

LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("base", ("shuffle.errors", "shuffle.ids", "shuffle.limits")),
    ("support", ("shuffle.support",)),
    ("store.codec", ("shuffle.statestore.codec",)),
    ("store.model", ("shuffle.statestore.store", "shuffle.statestore.request", "shuffle.statestore.key_range")),
    ("store.engine", ("shuffle.statestore.engine",)),
    ("store.wire", ("shuffle.statestore.wire",)),
    ("store.local", ("shuffle.statestore.local",)),
    ("store.remote", ("shuffle.statestore.remote",)),
    ("store.client", ("shuffle.statestore.client",)),
    ("statestore", ("shuffle.statestore",)),
    ("store.server", ("shuffle.statestore.server", "shuffle.statestore.__main__")),
    ("durable", ("shuffle.durable",)),
    ("store.admin", ("shuffle.statestore.admin",)),
    (
        "api",
        tuple(
            f"shuffle.{name}" for name in ("api", "config_schema", "messages", "messages_many", "metrics", "discovery")
        ),
    ),
    ("partition", ("shuffle.partition",)),
    ("jobs", ("shuffle.jobs",)),
    ("formats", ("shuffle.formats",)),
    ("spec", ("shuffle.spec",)),
    ("user_code", ("shuffle.user_code",)),
    ("mapper.window", tuple(f"shuffle.mapper.{name}" for name in ("window", "entry_life", "bucket", "rows", "reader"))),
    ("mapper.readers", ("shuffle.mapper.readers",)),
    ("reducer.outputs", ("shuffle.reducer.outputs",)),
    ("preflight", ("shuffle.preflight",)),
    ("mapper.spill", ("shuffle.mapper.spill",)),
    ("mapper", ("shuffle.mapper",)),
    ("reducer", ("shuffle.reducer",)),
    ("exporter", ("shuffle.reducer.exporter",)),
    ("run", ("shuffle.run",)),
    ("spark.base", tuple(f"shuffle.spark_connector.{name}" for name in SPARK_BASE)),
    ("spark.source", ("shuffle.spark_connector.source",)),
    ("spark.sink", ("shuffle.spark_connector.sink",)),
    ("spark", ("shuffle.spark_connector",)),
    ("shuffle", ("shuffle", "pyspark_shuffle")),
    ("examples", ("shuffle.examples",)),
    ("cli", ("shuffle.cli",)),
    ("broker", ("tools.kafka", "tools.java_home")),
    ("perf", ("perf",)),
    ("tools", ("tools",)),
)
"""The layers, the lowest first, each with its modules or packages. If several names fit a module, the longest counts.
The order is total, so that no two layers can import each other."""

STRANGERS = (("mapper", "reducer"),)
"""Pairs of layers that must not import each other in either direction; ``mapper`` includes ``mapper.spill``."""

FACES = ("shuffle", "statestore")
"""Layers that are the ``__init__`` of a package with sub-packages. Examples import them as users do."""

LINKED = ("mapper", "reducer", "statestore", "spark_connector", "examples")
"""Folders of the repository that are packages of ``shuffle``."""

GENERATED = "_pb2"

_PARTS = {name: part for part, names in LAYERS for name in names}
RANKS = {part: rank for rank, (part, _) in enumerate(LAYERS)}


@dataclass(frozen=True, order=True)
class Import:
    """One import of a module of the project by another one."""

    importer: str
    line: int
    imported: str

    @property
    def parts(self) -> tuple[str, str]:
        return part_of(self.importer), part_of(self.imported)

    @property
    def points_upwards(self) -> bool:
        importer, imported = self.parts
        return RANKS[imported] > RANKS[importer]

    @property
    def is_between_strangers(self) -> bool:
        one, other = (part.partition(".")[0] for part in self.parts)
        return (one, other) in STRANGERS or (other, one) in STRANGERS

    @property
    def is_of_own_face(self) -> bool:
        inside = self.importer.startswith(f"{self.imported}.") and part_of(self.imported) in FACES
        return inside and part_of(self.importer) != "examples"

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def part_of(module: str) -> str:
    """The layer that a module belongs to."""
    name = module
    while name not in _PARTS:
        if "." not in name:
            raise LookupError(f"{module} is in no layer: add it to LAYERS in tools/layers.py")
        name = name.rpartition(".")[0]
    # A module directly in such a package that LAYERS does not name would count as the face, which is __init__ only.
    if _PARTS[name] in FACES and name.startswith("shuffle") and name != module:
        raise LookupError(f"{module} is in no layer: add it to LAYERS in tools/layers.py")
    return _PARTS[name]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the project by its full name."""
    found = {}
    for top in ("shuffle", *LINKED, "pyspark_shuffle", "perf", "tools"):
        for path in sorted((root / top).rglob("*.py")):
            if GENERATED in path.name:
                continue
            names = [*path.relative_to(root).with_suffix("").parts]
            names = ["shuffle", *names] if top in LINKED else names
            found[".".join(names).removesuffix(".__init__")] = path
    return found


def imports(tree: ast.AST, importer: str, known: Iterable[str]) -> Iterator[Import]:
    """What a module imports of the project, at its top and inside of functions."""
    known = set(known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise SyntaxError(f"{importer}:{node.lineno}: packages are imported by their whole name")
        else:
            continue
        for name in names:
            name = f"shuffle.{name}" if name.partition(".")[0] in LINKED else name
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and name != importer:
                yield Import(importer, node.lineno, name)


def all_imports(root: Path = ROOT) -> list[Import]:
    known = modules(root)
    return sorted(
        found for module, path in known.items() for found in imports(ast.parse(path.read_text()), module, known)
    )


def table(found: Iterable[Import]) -> str:
    """A table with the number of imports of each layer by each other layer."""
    counts = Counter(one.parts for one in found if one.parts[0] != one.parts[1])
    parts = [part for part, _ in LAYERS]
    width = max(map(len, parts))
    lines = [" " * width + " ".join(f"{number:>4}" for number in range(1, len(parts) + 1))]
    for number, importer in enumerate(parts, start=1):
        cells = [counts[importer, imported] or "·" for imported in parts[: number - 1]]
        above = [counts[importer, imported] or "" for imported in parts[number:]]
        row = " ".join(f"{cell:>4}" for cell in [*cells, "–", *above])
        lines.append(f"{importer:<{width}}{row}  {number}".rstrip())
    return "\n".join(lines)


def main() -> int:
    found = all_imports()
    print(table(found))
    wrong = [one for one in found if one.points_upwards or one.is_between_strangers or one.is_of_own_face]
    for one in wrong:
        print(one)
    print(f"{len(found)} imports, {len(wrong)} of them point upwards or where they should not")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
