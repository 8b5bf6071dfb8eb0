"""Writes ``docs/entry-life.md``: the life of a window entry, drawn from the table in ``mapper/entry_life.py``.

Run ``python -m tools.entry_life`` after a change of the table; a test compares the page with it.
"""

from __future__ import annotations

from pathlib import Path

from shuffle.mapper import entry_life
from shuffle.mapper.entry_life import TRANSITIONS, Life

PAGE = Path(__file__).parent.parent / "docs" / "entry-life.md"

_HEAD = """# The life of a window entry

A window entry is one batch of mapped rows in a mapper's memory. This page is made by `python -m tools.entry_life` from
the table `TRANSITIONS` in `mapper/entry_life.py`, which the mapper asserts against whenever an entry changes.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_diagram(), "", *_states(), "", *_events(), ""])


def _diagram() -> list[str]:
    arrows = [f"    {life.value} --> {following.value}: {event}" for (life, event), following in TRANSITIONS.items()]
    return [
        "```mermaid",
        "stateDiagram-v2",
        "    direction LR",
        f"    [*] --> {Life.HELD.value}",
        *arrows,
        f"    {Life.PERSISTED.value} --> [*]",
        "```",
    ]


def _states() -> list[str]:
    rows = ["| state | what can happen | then it is |", "|---|---|---|"]
    for life in Life:
        for (before, event), following in TRANSITIONS.items():
            if before is life:
                rows.append(f"| {life.value} | {event} | {following.value} |")
    return rows


def _events() -> list[str]:
    """The verbs, and what is said of a restart, in the words of the module itself."""
    text = entry_life.__doc__ or ""
    return text[text.index("There is one verb") :].strip().splitlines()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
