"""Sections of a spec that a module of their own checks: plain values in, mistakes out, each with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from shuffle.spec.yaml_file import Node

DEPTH_MAX = 8
"""The levels of a section whose lines are noted; what is deeper is reported at the level above."""

Check = Callable[[Any, Callable[[str, str], None]], Any]
"""Makes an object of a plain value, or notes mistakes, by the path of the key and the text, and returns None."""


def read_options(check: Check, read_value: Callable[[Any, str, Node], Any]) -> Callable[[Any, str, Node], Any]:
    """A reader of a section, for ``spec_file``: ``read_value`` makes plain values of a node, ``check`` checks them."""

    def read(file: Any, key_path: str, node: Node) -> Any:
        before = len(file.mistakes)
        value = read_value(file, key_path, node)
        if len(file.mistakes) > before:
            return None
        _note_lines(file.lines, key_path, node, DEPTH_MAX)
        return check(value, lambda path, what: file.note(f"{key_path}.{path}" if path else key_path, None, what))

    return read


def _note_lines(lines: dict[str, int], path: str, node: Node, depth: int) -> None:
    if not isinstance(node, yaml.MappingNode) or depth == 0:
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            place = f"{path}.{key.value}"
            lines[place] = key.start_mark.line + 1
            _note_lines(lines, place, value, depth - 1)
