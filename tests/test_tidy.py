"""The mechanical rules of this code base, as tests that fail with the place to look at."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import house_picture, layers

ROOT = Path(__file__).resolve().parent.parent

# ---- the rules ------------------------------------------------------------------------------------------------------

PACKAGES = (
    "shuffle",
    "mapper",
    "reducer",
    "statestore",
    "spark_connector",
    "pyspark_shuffle",
    "perf",
    "examples",
    "tools",
)
"""What the rules below hold for; those that are there."""

GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
FOLDER_MODULES_MAX = 16

IMPORTED_ONLY_BY: dict[str, set[str]] = {
    "rocksdict": {"statestore/local/rocks.py", "perf/yardsticks/raw_rocks.py"},
    "pyarrow.flight": {"shuffle/support/flight.py"},
    "deltalake": {"reducer/outputs/delta.py"},
    "pyiceberg": {"reducer/outputs/iceberg.py"},
}
"""Libraries with traps are behind one module each, which is where the traps are dealt with."""

IMPORTED_BY_NONE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
"""What is stored or sent can be read by other versions and other languages, and never runs code when it is read."""

ALIASES = {"mapper", "reducer", "statestore", "spark_connector", "examples"}
"""Packages of ``shuffle`` that people may import by their last name. The project does not: a user's module of that name
would be imported instead."""

PURE_MODULES = (
    "mapper/window.py",
    "mapper/bucket.py",
    "mapper/rows.py",
    "mapper/core.py",
    "mapper/spill/format.py",
    "mapper/spill/index.py",
    "mapper/spill/response.py",
    "mapper/spill/policy.py",
    "mapper/spill/stragglers.py",
    "reducer/core.py",
    "reducer/cycle.py",
    "reducer/exporter/core.py",
    "reducer/exporter/cycle.py",
    "statestore/engine/conflicts.py",
    "statestore/engine/leases.py",
)
"""Logic apart from I/O: time, chance and the world are passed in, so that these can be simulated."""

IMPURE_IMPORTS = {"threading", "time", "random", "socket", "os", "asyncio", "uuid"}

TEXTS = ("*.md", "docs/**/*.md", "pyproject.toml", "constraints.txt", "Makefile", ".ci/*", "tools/*")
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted\.org|/simple\b|artifactory|nexus|index-url|find-links|trusted-host|\bPIP_[A-Z]",
    re.IGNORECASE,
)
"""Where packages come from is the machine's setting, not the project's."""

# ---- reading the code -----------------------------------------------------------------------------------------------


def sources() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if not GENERATED.search(path.name)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, at the top or inside functions; ``from a import b`` is ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_of(tree: ast.AST, library: str) -> list[int]:
    return [line for line, name in imports(tree) if name == library or name.startswith(f"{library}.")]


def long_functions(tree: ast.AST) -> list[tuple[int, str, int]]:
    """Line, name and length of each function over the limit."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                found.append((node.lineno, node.name, lines))
    return found


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in sources():
        yield name_of(path), ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# ---- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", IMPORTED_ONLY_BY)
def test_library_is_imported_only_by_the_module_that_wraps_it(library: str) -> None:
    allowed = IMPORTED_ONLY_BY[library]
    found = [f"{name}:{line}" for name, tree in parsed() if name not in allowed for line in imports_of(tree, library)]
    assert not found, f"{library} is imported outside of {sorted(allowed)}"


def test_packages_are_imported_by_their_whole_name() -> None:
    found = [
        f"{name}:{line} {imported}"
        for name, tree in parsed()
        if not name.startswith("examples/")
        for line, imported in imports(tree)
        if imported.partition(".")[0] in ALIASES
    ]
    assert not found, "write shuffle.mapper, and likewise for the others"


def test_links_lead_from_the_package_to_its_folders() -> None:
    assert {name: (ROOT / "shuffle" / name).resolve() for name in ALIASES} == {name: ROOT / name for name in ALIASES}


def test_nothing_is_pickled() -> None:
    found = [
        f"{name}:{line} {library}"
        for name, tree in parsed()
        for library in IMPORTED_BY_NONE
        for line in imports_of(tree, library)
    ]
    assert not found


@pytest.mark.parametrize("module", PURE_MODULES)
def test_pure_module_imports_nothing_of_the_world(module: str) -> None:
    path = ROOT / module
    assert path.exists(), f"{module} has moved: mend PURE_MODULES"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [f"{module}:{line} {library}" for library in IMPURE_IMPORTS for line in imports_of(tree, library)]
    assert not found


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    found = {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX}
    assert not found, f"over {FILE_LINES_MAX} lines"


def test_functions_are_short() -> None:
    found = [
        f"{name}:{line} {function} has {lines} lines"
        for name, tree in parsed()
        for line, function, lines in long_functions(tree)
    ]
    assert not found, f"over {FUNCTION_LINES_MAX} lines"


def test_folders_are_small() -> None:
    modules = Counter(name_of(path.parent) for path in sources() if path.stem not in ("__init__", "__main__"))
    found = {folder: count for folder, count in modules.items() if count > FOLDER_MODULES_MAX}
    assert not found, f"over {FOLDER_MODULES_MAX} modules: a folder of so many wants rooms"


# The layers are drawn in docs/architecture.md; tools/layers.py prints the table of who imports whom.


def test_no_import_points_upwards() -> None:
    assert not [str(found) for found in layers.all_imports() if found.points_upwards]


def test_mapper_and_reducer_do_not_know_each_other() -> None:
    assert not [str(found) for found in layers.all_imports() if found.is_between_strangers]


def test_nothing_inside_of_a_package_imports_its_face() -> None:
    assert not [str(found) for found in layers.all_imports() if found.is_of_own_face]


def test_map_of_the_project_shows_these_layers() -> None:
    assert not house_picture.mistakes()
    assert house_picture.PICTURE.read_text() == house_picture.picture(), "run: python -m tools.house_picture"


def test_every_package_says_what_it_is() -> None:
    found = [
        name for name, tree in parsed() if name.endswith("/__init__.py") and not (ast.get_docstring(tree) or "").strip()
    ]
    assert not found, "a package without a docstring"


def test_every_folder_of_code_is_a_package() -> None:
    found = {name_of(path.parent) for path in sources() if not (path.parent / "__init__.py").exists()}
    assert not found, "no __init__.py: it would not be installed"


def test_every_package_ships_its_types() -> None:
    """Without the marker file, whoever imports the package has ``Any`` for everything in it."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    installed = [pattern.rstrip("*") for pattern in setuptools["packages"]["find"]["include"]]
    assert set(installed) == set(PACKAGES) - {"tools", "perf", "examples"}, "the last two are in the repository only"
    found = [package for package in installed if not (ROOT / package / "py.typed").is_file()]
    assert not found, "no py.typed"
    assert "py.typed" in setuptools["package-data"]["*"], "it would not be installed"


def test_texts_name_no_package_registry() -> None:
    files = sorted({path for pattern in TEXTS for path in ROOT.glob(pattern) if path.is_file()})
    found = [
        f"{name_of(path)}:{number} {match.group()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if (match := REGISTRY.search(line))
    ]
    assert not found


def test_every_dependency_is_accounted_for_and_pinned() -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[; ]", name, maxsplit=1)[0]).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {normal(entry) for group in groups for entry in group}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = {normal(name) for name in re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)}
    assert explained == wanted, "docs/dependencies.md and pyproject.toml disagree"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normal(line) for line in constraints if re.fullmatch(r"[\w.-]+==[\w.]+", line)}
    assert wanted <= pinned, "not pinned in constraints.txt"


# ---- the rules can fail ---------------------------------------------------------------------------------------------

KNOWN = [
    *("shuffle", "shuffle.errors", "shuffle.mapper.core", "shuffle.mapper.daemon", "shuffle.reducer.core"),
    *("shuffle.run.status", "shuffle.run.controller", "shuffle.cli", "shuffle.statestore", "shuffle.statestore.store"),
    *("shuffle.statestore.engine.engine", "shuffle.statestore.client.client", "shuffle.examples.demo"),
]


def imported_by(importer: str, text: str) -> list[layers.Import]:
    return list(layers.imports(ast.parse(text), importer, KNOWN))


@pytest.mark.parametrize(
    "text",
    [
        "from shuffle.run import status",
        "from shuffle.run.status import collect",
        "import shuffle.run.status",
        "def f():\n    from shuffle.run.status import collect",
        "if TYPE_CHECKING:\n    from shuffle.run.status import collect",
        "import mapper, shuffle.run.status as s",
    ],
)
def test_import_that_points_upwards_is_seen_in_every_spelling(text: str) -> None:
    assert any(found.points_upwards for found in imported_by("shuffle.mapper.core", text))


@pytest.mark.parametrize(
    "text", ["from shuffle.errors import BadInput", "import shuffle.errors", "from shuffle.mapper.daemon import run"]
)
def test_import_of_a_lower_or_the_same_layer_is_allowed(text: str) -> None:
    assert not any(found.points_upwards for found in imported_by("shuffle.mapper.core", text))


def test_strangers_are_seen_in_both_directions() -> None:
    assert imported_by("shuffle.mapper.core", "from shuffle.reducer.core import X")[0].is_between_strangers
    assert imported_by("shuffle.reducer.core", "from mapper.core import X")[0].is_between_strangers


def test_import_of_the_own_face_is_seen() -> None:
    [inside] = imported_by("shuffle.statestore.client.client", "from shuffle.statestore import StateClient")
    [outside] = imported_by("shuffle.mapper.core", "from shuffle.statestore import StateClient")
    [user] = imported_by("shuffle.examples.demo", "from shuffle import Mapper")
    assert inside.is_of_own_face
    assert not outside.is_of_own_face
    assert not user.is_of_own_face, "examples are written as users write"


def test_module_that_is_in_no_layer_is_refused() -> None:
    with pytest.raises(LookupError, match="is in no layer"):
        layers.part_of("shuffle.something_new")
    with pytest.raises(LookupError, match="is in no layer"):
        layers.part_of("shuffle.statestore.something_new")


@pytest.mark.parametrize(
    "text",
    [
        "import pyarrow.flight",
        "import pyarrow.flight as fl",
        "from pyarrow import flight",
        "from pyarrow.flight import FlightClient",
        "def f():\n    from pyarrow import flight as fl",
    ],
)
def test_import_is_seen_in_every_spelling(text: str) -> None:
    assert imports_of(ast.parse(text), "pyarrow.flight")


@pytest.mark.parametrize("text", ["import pyarrow", "from pyarrow import compute", "import pyarrow.flights"])
def test_other_import_is_not_taken_for_it(text: str) -> None:
    assert not imports_of(ast.parse(text), "pyarrow.flight")


def test_long_function_is_seen() -> None:
    body = "    pass\n" * FUNCTION_LINES_MAX
    assert long_functions(ast.parse("async def f():\n" + body))
    assert not long_functions(ast.parse("def f():\n" + body.removesuffix("    pass\n")))
