"""The reference says what the code does: its tables are made from it, its examples run, its links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import io
import re
import sys
from pathlib import Path

import pytest
import yaml

from shuffle import cli, metrics
from shuffle.errors import SpecError
from shuffle.spec import config
from shuffle.spec.config import load_spec
from shuffle.support.units import parse_duration_ms, parse_size
from tools.reference import command, pages, python, spark, spec, text
from tools.reference import errors as reference_errors
from tools.reference import metrics as reference_metrics

PAGES = sorted(pages.FOLDER.glob("*.md"))
BY_NAME = {path.name: path for path in PAGES}
LEAST_SPEC = {
    "processor": "p",
    "state": "./s",
    "input": {"queue": "q"},
    "mapper": {"class": "jobs:M"},
    "reducer": {"class": "jobs:R", "count": 1},
}


def by_hand(path: Path) -> str:
    """A page without what is made from the code."""
    return pages._REGION.sub("", path.read_text(encoding="utf-8"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


# ---- the tables are those of the code -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_is_as_the_code_makes_it(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == pages.made_page(path), f"{path.name} is stale: run `make reference`"


def test_everything_that_is_made_is_in_one_page() -> None:
    named = [name for path in PAGES for name in pages.named_in(path.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(pages.regions())


def test_page_that_was_edited_in_a_table_is_stale() -> None:
    page = BY_NAME["spec.md"].read_text(encoding="utf-8")
    assert pages.filled(page.replace("1 MiB to 1 TiB", "1 MiB to 2 TiB"), pages.regions()) == page
    with pytest.raises(KeyError):
        pages.filled("<!-- made from the code: what nobody makes -->\n<!-- until here -->", pages.regions())


def test_another_range_is_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = spec.regions()
    monkeypatch.setitem(config.RANGES, "fetch_rows_max", (1, 65))
    assert {name for name, made in spec.regions().items() if made != before[name]} == {"spec reducer"}


def test_another_option_of_a_command_is_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = command.regions()["commands"]
    built = cli.build_parser

    def with_one_more(given: str = "") -> argparse.ArgumentParser:
        parser = built(given)
        command.subcommands(parser)["check"][1].add_argument("--louder", action="store_true", help="say more")
        return parser

    monkeypatch.setattr(cli, "build_parser", with_one_more)
    after = command.regions()["commands"]
    assert after != before
    assert "| `--louder` |   | Say more. |" in after


def test_option_of_spark_without_a_meaning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    options = spark._options()
    monkeypatch.setitem(options.OPTIONS, "read", (*options.OPTIONS["read"], "colour"))
    with pytest.raises(LookupError, match="colour"):
        spark.regions()


def test_another_metric_is_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one_more(self: metrics.MapperMetrics, processor: str, index: int, enabled: bool = True) -> None:
        made(self, processor, index, enabled)
        self._counter("naps", "Times it slept")

    before = reference_metrics.regions()
    made = metrics.MapperMetrics.__init__
    monkeypatch.setattr(metrics.MapperMetrics, "__init__", with_one_more)
    after = reference_metrics.regions()
    assert {name for name in after if after[name] != before[name]} == {"metrics mapper"}
    assert "| `shuffle_naps_total` | counter |   | Times it slept. |" in after["metrics mapper"]


def test_only_metrics_that_somebody_serves_are_named() -> None:
    assert set(reference_metrics.served()) >= {"mapper", "reducer"}
    assert all(f"metrics {role}" in pages.regions() for role in reference_metrics.served())


def test_public_member_without_a_docstring_is_found() -> None:
    class Bare:
        """A class."""

        def work(self) -> None: ...

    with pytest.raises(LookupError, match=r"Bare\.work"):
        python._methods(Bare)


def test_what_is_left_out_is_there() -> None:
    things = {name: thing for package in python.PACKAGES for name, thing in python.public(package).items()}
    for place in python.LEFT_OUT:
        name, _, member = place.partition(".")
        assert hasattr(things[name], member), f"{place} is gone: take it out of LEFT_OUT"


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in reference_errors.tree()]
    assert len(codes) == len(set(codes)) > 20


# ---- what the tables say is so --------------------------------------------------------------------------------------


def load(folder: Path, values: object) -> config.ProcessorSpec:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_spec(path)


def with_value(key: spec.Key, name: str, value: object) -> dict[str, object]:
    """The least spec with one key more, and with what that key needs."""
    values: dict[str, dict[str, object]] = yaml.safe_load(yaml.safe_dump(LEAST_SPEC))
    if key.section == "spill":
        values["spill"] = {}
    if key.section == "output":
        values["output"] = {"parquet": "./totals"}
    section: dict[str, object] = values[key.section] if key.section else values  # type: ignore[assignment]
    section[name] = value
    if key.place == "mapper.memory":
        section["batch_bytes_max"] = 1024
    if key.place in ("mapper.batch_bytes_max", "mapper.per_process"):
        section["memory"] = "1TiB"
    if key.place == "reducer.backoff":
        section["backoff_max"] = "10min"
    if key.place == "reducer.backoff_max":
        section["backoff"] = "1ms"
    return values  # type: ignore[return-value]


NUMBERS = [key for keys in spec.sections().values() for key in keys if key.reader in spec._NUMBERS]


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.place)
def test_range_is_what_is_accepted(key: spec.Key, tmp_path: Path) -> None:
    least, most = spec.limits(key.section, key.field.name)
    for name in key.names:
        # A key without its unit in the name takes no plain number.
        unit = "ms" if key.field.name.endswith(("_ms", "_ms_max")) and name != key.field.name else ""
        for value in (least, most):
            loaded = load(tmp_path, with_value(key, name, f"{value}{unit}" if unit else value))
            holder = getattr(loaded, key.section) if key.section else loaded
            assert getattr(holder, key.field.name) == value
        for value in (least - 1, most + 1):
            with pytest.raises(SpecError, match=name):
                load(tmp_path, with_value(key, name, f"{value}{unit}" if unit else value))


def test_defaults_of_the_docstrings_are_those_of_the_code() -> None:
    wrong = []
    for keys in spec.sections().values():
        for key in keys:
            section = {"": config.ProcessorSpec, "input": config.InputSpec, "mapper": config.MapperSpec}.get(
                key.section,
                {"reducer": config.ReducerSpec, "output": config.OutputSpec, "spill": config.SpillSpec}.get(
                    key.section
                ),
            )
            assert section is not None
            docs = {name: doc for holder in spec.holders(section) for name, doc in text.attribute_docs(holder).items()}
            _, said = text.without_default(docs[key.field.name])
            value = key.field.default
            if said is None or value is None or not isinstance(value, bool | int | float | str):
                continue
            shown = str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else value
            if said.replace("`", "") not in (str(shown), key.default):
                wrong.append(f"{key.place}: {said} is said, {value} is so")
    assert not wrong


def usual_names(spec: config.ProcessorSpec, section: str) -> set[str]:
    """The fields of a section; of an input those of its kind, and none of an output that is not there."""
    holder = getattr(spec, section) if section else spec
    return {field.name for field in dataclasses.fields(holder)} if holder is not None else set()


def test_spec_with_everything_has_every_key_and_its_default(tmp_path: Path) -> None:
    path = tmp_path / "everything.yaml"
    path.write_text(spec.example(), encoding="utf-8")
    loaded = load_spec(path)
    least = load(tmp_path, LEAST_SPEC)
    shown = spec.example()
    for section, keys in spec.sections().items():
        for key in keys:
            assert re.search(rf"^ *(# )?{key.names[0]}:", shown, re.MULTILINE)
            if (
                key.inner is None
                and key.place not in spec.EXAMPLE_VALUES
                and key.field.name in usual_names(least, section)
            ):
                there, usual = (getattr(one, section) if section else one for one in (loaded, least))
                assert getattr(there, key.field.name) == getattr(usual, key.field.name), key.place


def test_times_of_spark_are_those_of_the_code() -> None:
    """Each option that is read with a default has that default in its meaning."""
    options = spark._options()
    package = options.__name__.rpartition(".")[0]
    namespace: dict[str, object] = {}
    for module in ("options", "sink.writer", "batch", "source.reader"):
        namespace |= vars(importlib.import_module(f"{package}.{module}"))
    seen = set()
    for name, calls in spark.read_by().items():
        _, said = text.without_default(options.MEANINGS[name])
        for call in calls:
            method = call.func.attr  # type: ignore[attr-defined]
            if method == "seconds":
                value = eval(ast.unparse(call.args[1]), dict(namespace))
                assert options.Options("read", {"timeout": str(said)}).seconds("timeout", 0) == value, name
                seen.add(name)
            if method == "choice":
                assert said == ast.literal_eval(call.args[2]), name
                seen.add(name)
    assert seen >= {"timeout", "stagedTtl", "snapshotTtl", "startingOffsets"}


def test_every_option_of_spark_is_read_somewhere() -> None:
    loops = {"processor", "table", "queue"}  # Named by a variable in some places; see datasource.py and batch.py.
    assert {name for name, calls in spark.read_by().items() if not calls} <= loops


def test_every_variable_of_the_environment_is_named() -> None:
    found = set()
    for folder in ("shuffle", "mapper", "reducer", "statestore", "spark_connector"):
        for path in (pages.ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"\bSHUFFLE_[A-Z_]+[A-Z]\b", path.read_text(encoding="utf-8")))
    named = set(re.findall(r"\| `(SHUFFLE_[A-Z_]+)` \|", by_hand(BY_NAME["command.md"])))
    assert named == found


@pytest.mark.parametrize("name", ["spec.md", "spark.md"])
def test_units_of_the_pages_are_taken(name: str) -> None:
    page = by_hand(BY_NAME[name])
    sizes, times = (
        re.search(rf"\*\*{what}\*\* is a number with (.+?): `", page, re.DOTALL) for what in ("size", "time")
    )
    assert sizes is not None
    assert times is not None
    assert [parse_size(f"1{unit}") for unit in re.findall(r"`(\w+)`", sizes[1])] == [
        *(1, 10**3, 10**6, 10**9, 10**12),
        *(2**10, 2**20, 2**30, 2**40),
    ]
    assert [parse_duration_ms(f"1{unit}") for unit in re.findall(r"`(\w+)`", times[1])] == [
        *(1, 1_000, 60_000, 60_000, 3_600_000, 86_400_000)
    ]


# ---- the examples run, and print what they say ----------------------------------------------------------------------


def expected_output(example: str) -> list[str]:
    return re.findall(r"^ *print\(.*\)  # (.*)$", example, re.MULTILINE)


@pytest.mark.parametrize(
    "path", [path for path in PAGES if blocks(by_hand(path), "python")], ids=lambda path: path.name
)
def test_examples_print_what_they_say(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    namespace: dict[str, object] = {"__name__": "example"}
    expected: list[str] = []
    printed = io.StringIO()
    for example in blocks(by_hand(path), "python"):
        if name := re.match(r"# (\w+\.py)\n", example):
            (tmp_path / name[1]).write_text(example, encoding="utf-8")
        expected += expected_output(example)
        with contextlib.redirect_stdout(printed):
            exec(compile(example, f"{path.name}", "exec"), namespace)
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    assert expected
    assert printed.getvalue().splitlines() == expected


def test_specs_of_the_page_can_be_read(tmp_path: Path) -> None:
    examples = blocks(by_hand(BY_NAME["spec.md"]), "yaml")
    assert len(examples) >= 2
    for example in examples:
        name = re.match(r"# (\w+\.yaml)\n", example)
        assert name is not None
        (tmp_path / name[1]).write_text(example, encoding="utf-8")
        assert load_spec(tmp_path / name[1]).processor == name[1].removesuffix(".yaml")


# ---- the links lead somewhere ---------------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", page):
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        assert to.is_file(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(to.read_text(encoding="utf-8")), f"{path.name} links to {target}"
