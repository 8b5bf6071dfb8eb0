"""The file that a spec is read from, with the mistakes found in it, and the readers of texts, folders and names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from shuffle.errors import SpecError
from shuffle.spec.yaml_file import Node
from shuffle.support.units import quoted

Reader = Callable[["_File", str, Node], Any]
"""A function that reads one value; it gets the path of the key (``mapper.class``), and returns None after noting a
mistake."""


class _File:
    """The file being read, and the mistakes found so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.resolve().parent
        self.mistakes: list[tuple[int, str]] = []
        self.lines: dict[str, int] = {}

    def note(self, key_path: str, node: Node | None, what: str) -> None:
        line = node.start_mark.line + 1 if node is not None else self._line_of(key_path)
        self.mistakes.append((line, f"{self.path}:{line}: {key_path + ': ' if key_path else ''}{what}"))

    def _line_of(self, key_path: str) -> int:
        """The line of the key ``key_path``, or of the nearest section around it that is in the file."""
        while key_path and key_path not in self.lines:
            key_path = key_path.rpartition(".")[0]
        return self.lines.get(key_path, 1)

    def raise_if_mistaken(self) -> None:
        if self.mistakes:
            texts = [text for _, text in sorted(self.mistakes, key=lambda mistake: mistake[0])]
            raise SpecError("\n".join(texts), path=str(self.path), mistakes=texts)


def _scalar(file: _File, key_path: str, node: Node) -> str | None:
    if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null":
        text = str(node.value)
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            file.note(key_path, node, f"{quoted(text)} has a character that no name, path or number has")
            return None
        return text
    given = {"sequence": "a list", "mapping": "a mapping"}.get(getattr(node, "id", ""), "nothing")
    file.note(key_path, node, f"a single value is needed here, not {given}")
    return None


def _folder(file: _File, key_path: str, node: Node, text: str | None = None) -> str | None:
    """The absolute path of a folder. ``text`` is the path in the node, if the node has more than that."""
    text = _scalar(file, key_path, node) if text is None else text
    if text == "":
        file.note(key_path, node, "a folder is needed here")
        return None
    if text is None:
        return None
    if "://" in text:
        file.note(key_path, node, f"{quoted(text)} is an address, and a folder is needed here")
        return None
    try:
        return str((file.folder / Path(text).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # The home of an unknown user, a long name, a cycle of links.
        file.note(key_path, node, f"{quoted(text)} is not a folder: {error}")
        return None


def _place(file: _File, key_path: str, node: Node) -> str | None:
    """The absolute path of a folder, or an address as it is."""
    text = _scalar(file, key_path, node)
    return text if text is not None and "://" in text else _folder(file, key_path, node, text)


def _names(file: _File, key_path: str, node: Node) -> tuple[str, ...] | None:
    """A list of different names; a single one needs no list."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    texts = [_scalar(file, key_path, one) for one in nodes]
    found = tuple(text for text in texts if text)
    if len(found) < len(texts) or len(set(found)) < len(found):
        if None not in texts:
            file.note(key_path, node, "a list of different names is needed here, such as [day, country]")
        return None
    return found
