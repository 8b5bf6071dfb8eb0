"""Finds the regions of the pages, and fills them from the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"

_REGION = re.compile(
    r"(?P<head><!-- made from the code: (?P<name>[^>]+?) -->\n)(?P<body>.*?)(?P<foot><!-- until here -->)", re.DOTALL
)


@cache
def regions() -> Mapping[str, str]:
    """The text of every region there is, by its name."""
    from tools.reference import command, errors, metrics, python, spark, spec

    makers: list[Callable[[], dict[str, str]]] = [
        spec.regions,
        command.regions,
        python.regions,
        spark.regions,
        metrics.regions,
        errors.regions,
    ]
    return {name: text for maker in makers for name, text in maker().items()}


def filled(page: str, texts: Mapping[str, str]) -> str:
    """``page`` with its regions generated again. Raises ``KeyError`` for a region that has no generator."""
    return _REGION.sub(lambda found: f"{found['head']}\n{texts[found['name']].strip()}\n\n{found['foot']}", page)


def named_in(page: str) -> list[str]:
    """The regions of a page, in order."""
    return [found["name"] for found in _REGION.finditer(page)]


def made_page(path: Path) -> str:
    return filled(path.read_text(encoding="utf-8"), regions())


def made() -> dict[Path, str]:
    """Every page with its current contents, by path."""
    return {path: made_page(path) for path in sorted(FOLDER.glob("*.md"))}
