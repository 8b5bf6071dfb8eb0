"""Reads a YAML file into nodes, each with its line, and refuses what no person writes into a spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from shuffle.errors import SpecError
from shuffle.support.suggest import did_you_mean

SPEC_BYTES_MAX = 1024 * 1024
"""The most bytes of a spec. It is a page of text; a file far larger than that was given by mistake."""

DEPTH_MAX = 32
"""The most levels of mappings and lists within each other. A spec has three; the rest is for the user's own
configuration."""

NODES_MAX = 100_000
"""The most keys, values, lists and mappings, with aliases expanded: a few lines of aliases of aliases can expand to
more than fits into memory."""

Node = yaml.Node


def compose_file(path: Path) -> Node | None:
    """The tree of nodes of the YAML in ``path``; None if the file is empty."""
    try:
        with path.open("rb") as file:
            content = file.read(SPEC_BYTES_MAX + 1)
        if len(content) > SPEC_BYTES_MAX:
            raise SpecError(f"{path}: too large for a spec: more than {SPEC_BYTES_MAX} bytes")
        text = content.decode("utf-8")
        _check_nesting(path, text)
        node: Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return node
    except FileNotFoundError:
        hint = did_you_mean(path.name, [sibling.name for sibling in _siblings(path)])
        raise SpecError(f"{path}: there is no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(f"{path}:{line}: not YAML: {in_one_line(error.problem or error)}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}:1: not YAML: {in_one_line(error)}") from None


def in_one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]


@dataclass(slots=True)
class _Open:
    """A mapping or list that is not complete yet."""

    anchor: str | None
    begin: int
    """The number of nodes before it."""
    height: int = 1
    """The levels of its content so far, itself included."""


def _check_nesting(path: Path, text: str) -> None:
    """Raises ``SpecError`` for what no person writes: very deep nesting, and aliases that expand to very many nodes.

    It is checked on the events of the parser, which come one by one: composing the file takes one level of recursion
    for each level of nesting.
    """
    known: dict[str, tuple[int, int] | None] = {}
    """For each anchor, the nodes and levels that it stands for; None while it is not complete."""
    around: list[_Open] = []
    count = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        height = 0
        if isinstance(event, yaml.AliasEvent):
            target = known.get(event.anchor or "", (1, 0))  # An alias without an anchor is refused when it is composed.
            if target is None:
                raise SpecError(f"{path}:{line}: the alias *{event.anchor} is inside of what it stands for")
            count, height = count + target[0], target[1]
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = around.pop()
            height = ended.height
            if ended.anchor is not None:
                known[ended.anchor] = count - ended.begin, height
        elif isinstance(event, yaml.NodeEvent):
            is_collection = isinstance(event, yaml.CollectionStartEvent)
            if event.anchor is not None:
                known[event.anchor] = None if is_collection else (1, 0)
            if is_collection:
                around.append(_Open(event.anchor, count))
            count += 1
        if len(around) + height > DEPTH_MAX:
            raise SpecError(f"{path}:{line}: more than {DEPTH_MAX} lists and mappings within each other")
        if count > NODES_MAX:
            raise SpecError(f"{path}:{line}: more than {NODES_MAX} keys and values, with what aliases stand for")
        if around:
            around[-1].height = max(around[-1].height, height + 1)


def _siblings(path: Path) -> list[Path]:
    try:
        return list(path.parent.glob("*.y*ml"))
    except OSError:
        return []
