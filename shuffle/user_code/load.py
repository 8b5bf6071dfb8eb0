"""Loads the classes that a spec names: the user's modules are imported, and the classes are checked.

Modules are looked for in the working folder, beside the spec, and where Python looks by default. Every error is one
line with the position in the spec and, where there is one, the line of the user's file.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Literal

from shuffle import api
from shuffle.config_schema import check_config
from shuffle.errors import SpecError
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.inputs import ClassInputSpec
from shuffle.support.suggest import did_you_mean

ALIASES = ("mapper", "reducer", "statestore", "spark_connector", "examples")
"""The packages of ``shuffle`` that can also be imported by their last name, as in ``python -m mapper``."""

_OWN_FOLDER = Path(__file__).resolve().parents[2]


def load_class(spec: ProcessorSpec, role: Literal["mapper", "reducer"]) -> type[Any]:
    """The user's class for ``role``, with its configuration checked. Raises ``SpecError`` like
    ``import_user_class``."""
    name = spec.mapper.class_name if role == "mapper" else spec.reducer.class_name
    user_class = import_user_class(spec, f"{role}.class", name, api.Mapper if role == "mapper" else api.Reducer)
    _check_user_config(spec, role, user_class)
    return user_class


def load_input_class(spec: ProcessorSpec, base: type[Any]) -> type[Any]:
    """The user's class for the input."""
    if not isinstance(spec.input, ClassInputSpec):
        raise SpecError(f"{spec.at('input')}: names no class")
    user_class = import_user_class(spec, "input.class", spec.input.class_name, base)
    if user_class.ends is not base.ends and user_class.reached is base.reached:
        raise SpecError(f"{spec.at('input.class')}: {spec.input.class_name} defines ends, but not reached")
    return user_class


def import_user_class(spec: ProcessorSpec, key: str, name: str, base: type[Any]) -> type[Any]:
    """The class ``name`` (``module:Class``) that ``key`` of the spec names, checked to be a subclass of ``base``.

    Raises a ``SpecError`` of one line, with the position in the user's file, if it cannot be imported.
    Modules are looked for in the working folder, beside the spec, and where Python looks by default.
    """
    at = spec.at(key)
    module_name, _, path = name.partition(":")
    _make_findable(spec, module_name.partition(".")[0])
    try:
        member: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise SpecError(f"{at}: there is no module {module_name}{_similar_modules(spec, module_name)}") from None
        raise SpecError(f"{at}: {module_name} cannot be imported: {_where(error)}") from None
    except (Exception, SystemExit) as error:  # The user's module may raise anything at all.
        raise SpecError(f"{at}: {module_name} cannot be imported: {_where(error)}") from None
    for part in path.split("."):
        if not hasattr(member, part):
            hint = _hidden(spec, member) or did_you_mean(part, _classes_in(member, base))
            raise SpecError(f"{at}: {module_name} has no class {path}{hint}")
        member = getattr(member, part)
    if not (inspect.isclass(member) and issubclass(member, base)):
        raise SpecError(f"{at}: {name} is not a subclass of shuffle.{base.__name__}")
    missing = ", ".join(sorted(getattr(member, "__abstractmethods__", ())))
    if missing:
        raise SpecError(f"{at}: {name} does not define {missing}")
    return member


def _user_folders(spec: ProcessorSpec) -> list[Path]:
    return list(dict.fromkeys([Path.cwd(), spec.path.parent.absolute()]))


def _make_findable(spec: ProcessorSpec, top_name: str) -> None:
    """Puts the user's folders on the path: behind Python's own modules, which they must not hide, and before ours.

    Workers import only ``shuffle`` of this project, so a user's ``mapper.py`` or ``reducer.py`` hides nothing. The
    other top-level names of the project are aliases for the command line, and the user's modules of the same names are
    imported instead of them.
    """
    for folder in _user_folders(spec):
        for taken in (folder / "shuffle.py", folder / "shuffle" / "__init__.py"):
            if taken.exists() and not taken.samefile(_OWN_FOLDER / "shuffle" / "__init__.py"):
                raise SpecError(f"{taken} has the name of this project, and would be imported in its place: rename it")
    own = [entry for entry in sys.path if entry and Path(entry).resolve() == _OWN_FOLDER]
    others = [entry for entry in sys.path if entry not in own]
    users = [str(folder) for folder in _user_folders(spec) if str(folder) not in others and folder != _OWN_FOLDER]
    installed = next((at for at, entry in enumerate(others) if entry.endswith("-packages")), len(others))
    sys.path[:] = [*others[:installed], *users, *others[installed:], *own]
    if top_name in ALIASES and _in_user_folder(spec, top_name) is not None:
        imported = sys.modules.get(top_name)
        if imported is not None and Path(imported.__file__ or "").parent.parent == _OWN_FOLDER:
            del sys.modules[top_name]


def _in_user_folder(spec: ProcessorSpec, top_name: str) -> Path | None:
    """The user's module of this name: a file, or the folder of a package."""
    for folder in _user_folders(spec):
        for path in (folder / f"{top_name}.py", folder / top_name):
            if path.exists() and folder != _OWN_FOLDER:
                return path
    return None


def _hidden(spec: ProcessorSpec, module: Any) -> str:
    """A hint if another module was imported than the user's one of the same name; otherwise empty."""
    mine = _in_user_folder(spec, module.__name__.partition(".")[0])
    imported = getattr(module, "__file__", None)
    if mine is None or (imported is not None and Path(imported).is_relative_to(mine.parent)):
        return ""
    return f": that is Python's own module, or an installed one, and {mine} was not imported; rename yours"


def _check_user_config(spec: ProcessorSpec, role: Literal["mapper", "reducer"], user_class: type[Any]) -> None:
    try:
        check_config(user_class, spec.mapper.config if role == "mapper" else spec.reducer.config)
    except SpecError as error:
        raise SpecError(f"{spec.at(f'{role}.config')}: {error.message}") from None


def _where(error: BaseException) -> str:
    """One line: the innermost line of code that belongs to neither Python nor an installed package, and the
    exception."""
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    outside = (os.path.dirname(os.__file__), "<frozen")
    own = [
        frame for frame in frames if not frame.filename.startswith(outside) and "site-packages" not in frame.filename
    ]
    return f"{own[-1].filename}:{own[-1].lineno}: {what}" if own else what


def _similar_modules(spec: ProcessorSpec, module_name: str) -> str:
    folder, _, last = module_name.rpartition(".")
    names: set[str] = set()
    for root in (Path.cwd(), spec.path.parent):
        inside = root.joinpath(*folder.split(".")) if folder else root
        if inside.is_dir():
            names |= {path.stem for path in inside.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return did_you_mean(last, sorted(names)) or "; it is looked for in the working folder and beside the spec"


def _classes_in(module: Any, base: type[Any]) -> list[str]:
    return [n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, base) and v is not base]
