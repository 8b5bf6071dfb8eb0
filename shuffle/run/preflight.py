"""What is checked about a spec once the store can be asked, before any worker starts.

1. The user's classes can be imported and are what they should be.
2. The input is there; its partitions say how many mappers there are.
3. The processor's own tables are there, or are created.
4. The input queue has no other consumer, and nothing of it was trimmed before this processor could read it.
5. The state in them was made by the same processor: its *fingerprint* in ``<processor>/meta``.

At the first start the fingerprint and the registration as the queue's consumer are written in one transaction.

On 5: rows are known by their number alone, so a state is only worth something together with the numbering and the
distribution it was made with. What may not change is kept beside it and compared at every start.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from shuffle.durable.mapper_state import MAPPERS_KEY, MAPPERS_VALUE
from shuffle.durable.reducer_state import REDUCERS_KEY, REDUCERS_VALUE
from shuffle.durable.tables import mappers_group, reducers_group
from shuffle.durable.upgrade import refuse_old_tables
from shuffle.errors import CommitConflict, SpecError
from shuffle.mapper.reader import Input
from shuffle.mapper.readers.opening import open_input
from shuffle.mapper.spill.store import SPILLS_KEY, SPILLS_VALUE
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.inputs import ClassInputSpec
from shuffle.statestore.client.queue_consumers import create_consumers_table, queue_consumers, register_consumer
from shuffle.support.suggest import did_you_mean

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction

META_KEY = pa.schema([pa.field("name", pa.string(), nullable=False)])
META_VALUE = pa.schema([pa.field("value", pa.string(), nullable=False)])
META_ROW = pa.schema([*META_KEY, *META_VALUE])

MAPPERS_MAX = 4096
"""As for reducers: one process and one connection to every reducer for each."""
ATTEMPTS_MAX = 10
"""Of writing the fingerprint, when several workers start at once."""
PARTITION_FUNCTION = "xxhash64/42"

ALIASES = ("mapper", "reducer", "statestore", "spark_connector")
"""Packages of ``shuffle`` that are importable by their last name, too: ``python -m mapper``."""

_OWN_FOLDER = Path(__file__).resolve().parents[2]

_OF_THE_MAP = ("mapper_class", "mapper_config", "mapper_code")


def check_against_store(
    spec: ProcessorSpec, client: StateClient, accept_new_map: bool = False, register: bool = True
) -> int:
    """The steps 1 to 5 above; the number of mappers. Every mistake of 1 and 2 is named in one ``SpecError``.

    Without ``register`` the processor does not become the consumer of its queue: that is for who only looks.
    """
    mistakes: list[str] = []
    classes: dict[str, type[Any]] = {}
    roles: tuple[Literal["mapper", "reducer"], ...] = ("mapper", "reducer")
    for role in roles:  # 1
        try:
            classes[role] = import_class(spec, role)
        except SpecError as error:
            mistakes.append(error.message)
    with ExitStack() as closing:
        try:  # 2
            opened = closing.enter_context(open_input(spec, client))
            mapper_count = count_partitions(spec, opened)
        except SpecError as error:
            mistakes.append(error.message)
        if mistakes:
            raise SpecError("\n".join(mistakes), path=str(spec.path), mistakes=mistakes)
        create_tables(spec, client)  # 3
        check_fingerprint(spec, client, mapper_count, classes["mapper"], opened, accept_new_map, register)  # 4, 5
    return mapper_count


# 1. Classes ----------------------------------------------------------------------------------------------------------


def import_class(spec: ProcessorSpec, role: Literal["mapper", "reducer"]) -> type[Any]:
    """The user's class for ``role``, with its configuration checked; ``SpecError`` as of ``import_user_class``."""
    from shuffle import api

    name = spec.mapper.class_name if role == "mapper" else spec.reducer.class_name
    found = import_user_class(spec, f"{role}.class", name, api.Mapper if role == "mapper" else api.Reducer)
    _check_user_config(spec, role, found)
    return found


def import_input_class(spec: ProcessorSpec, base: type[Any]) -> type[Any]:
    """The user's class for the input."""
    if not isinstance(spec.input, ClassInputSpec):
        raise SpecError(f"{spec.at('input')}: names no class")
    found = import_user_class(spec, "input.class", spec.input.class_name, base)
    if found.ends is not base.ends and found.reached is base.reached:
        raise SpecError(f"{spec.at('input.class')}: {spec.input.class_name} defines ends, but not reached")
    return found


def import_user_class(spec: ProcessorSpec, key: str, name: str, base: type[Any]) -> type[Any]:
    """The class ``name`` (``module:Class``) that stands at ``key`` in the spec, checked to be a subclass of ``base``.

    ``SpecError`` in one line, with the place in the user's file, if it cannot be had.
    Modules are looked for in the working folder and beside the spec, and where else Python looks.
    """
    place = spec.at(key)
    module_name, _, path = name.partition(":")
    _make_findable(spec, module_name.partition(".")[0])
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise SpecError(f"{place}: there is no module {module_name}{_similar_modules(spec, module_name)}") from None
        raise SpecError(f"{place}: {module_name} cannot be imported: {_where(error)}") from None
    except (Exception, SystemExit) as error:  # Anything at all may be raised by the user's module.
        raise SpecError(f"{place}: {module_name} cannot be imported: {_where(error)}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            hint = _hidden(spec, found) or did_you_mean(part, _classes_in(found, base))
            raise SpecError(f"{place}: {module_name} has no class {path}{hint}")
        found = getattr(found, part)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise SpecError(f"{place}: {name} is not a subclass of shuffle.{base.__name__}")
    missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
    if missing:
        raise SpecError(f"{place}: {name} does not define {missing}")
    return found


def _user_folders(spec: ProcessorSpec) -> list[Path]:
    return list(dict.fromkeys([Path.cwd(), spec.path.parent.absolute()]))


def _make_findable(spec: ProcessorSpec, top_name: str) -> None:
    """Put the user's folders on the path: behind Python's own modules, which they must not hide, and before ours.

    Of ours only ``shuffle`` is ever imported by workers, so a user's ``mapper.py`` or ``reducer.py`` hides nothing. The
    names that the project has at the top level beside it are aliases for people, and give way.
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
        for found in (folder / f"{top_name}.py", folder / top_name):
            if found.exists() and folder != _OWN_FOLDER:
                return found
    return None


def _hidden(spec: ProcessorSpec, module: Any) -> str:
    """A hint, if the module that was imported is not the one of that name which the user has."""
    mine = _in_user_folder(spec, module.__name__.partition(".")[0])
    imported = getattr(module, "__file__", None)
    if mine is None or (imported is not None and Path(imported).is_relative_to(mine.parent)):
        return ""
    return f": that is Python's own module, or an installed one, and {mine} was not imported; rename yours"


def _check_user_config(spec: ProcessorSpec, role: Literal["mapper", "reducer"], found: type[Any]) -> None:
    from shuffle.support.config_schema import check_config

    try:
        check_config(found, spec.mapper.config if role == "mapper" else spec.reducer.config)
    except SpecError as error:
        raise SpecError(f"{spec.at(f'{role}.config')}: {error.message}") from None


def _where(error: BaseException) -> str:
    """One line: the innermost place that belongs to neither Python nor an installed package, and the exception."""
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


# 2. Input ------------------------------------------------------------------------------------------------------------


def count_mappers(spec: ProcessorSpec, client: StateClient) -> int:
    """One mapper for each partition of the input."""
    with open_input(spec, client) as opened:
        return count_partitions(spec, opened)


def count_partitions(spec: ProcessorSpec, opened: Input) -> int:
    place = spec.at(f"input.{spec.input.kind}")
    with _said_of_input(spec):
        count = opened.partition_count()
    if not 1 <= count <= MAPPERS_MAX:
        raise SpecError(f"{place}: {count} partitions; there can be 1 to {MAPPERS_MAX} mappers")
    return count


@contextmanager
def _said_of_input(spec: ProcessorSpec) -> Iterator[None]:
    """What an input finds wrong with itself, with its place in the spec."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{spec.at(f'input.{spec.input.kind}')}: {error.message}", **error.fields) from None


# 3. Tables -----------------------------------------------------------------------------------------------------------


def create_tables(spec: ProcessorSpec, client: StateClient) -> None:
    refuse_old_tables(client, spec.processor)
    client.create_table(spec.meta_table, key=META_KEY, value=META_VALUE, if_not_exists=True)
    client.create_table(spec.mappers_table, key=MAPPERS_KEY, value=MAPPERS_VALUE, if_not_exists=True)
    client.create_table(spec.spills_table, key=SPILLS_KEY, value=SPILLS_VALUE, if_not_exists=True)
    client.create_table(spec.reducers_table, key=REDUCERS_KEY, value=REDUCERS_VALUE, if_not_exists=True)
    create_consumers_table(client)


# 4. Whose queue it is ------------------------------------------------------------------------------------------------


def check_consumer(spec: ProcessorSpec, client: StateClient, tx: Transaction, queue: str | None) -> None:
    """Refuses a queue that another processor consumes; None is an input that nothing is deleted from."""
    consumer = None if queue is None else queue_consumers(client, tx).get(queue)
    if consumer is not None and consumer != spec.processor:
        raise SpecError(
            f"{spec.at(f'input.{spec.input.kind}')}: the queue {queue!r} is consumed by the processor {consumer!r},"
            " which trims what it has committed: let the producer write to two queues, or, if that processor is over"
            f" for good, run `shuffle state release STORE {queue}`",
            queue=queue,
            consumer=consumer,
        )


def check_begin(spec: ProcessorSpec, client: StateClient, opened: Input) -> None:
    """Refuses to start on an input of which rows are gone that this processor has never read."""

    def started() -> set[int]:
        rows = client.scan(spec.mappers_table, columns=["mapper_index"]).read_all()
        return set(rows["mapper_index"].to_pylist())

    with _said_of_input(spec):
        opened.check_start(started)


# 5. Fingerprint ------------------------------------------------------------------------------------------------------


def fingerprint(spec: ProcessorSpec, mapper_count: int, mapper_class: type[Any], opened: Input) -> dict[str, str]:
    return {
        "reducer_count": str(spec.reducer.count),
        "mapper_count": str(mapper_count),
        "max_parallelism": str(spec.max_parallelism),
        "partition_function": PARTITION_FUNCTION,
        "input": opened.describe(),
        "mapper_class": spec.mapper.class_name,
        "mapper_config": json.dumps(spec.mapper.config, sort_keys=True, default=str),
        "mapper_code": code_digest(mapper_class),
    }


def code_digest(mapper_class: type[Any]) -> str:
    """A digest of what the user's class does: its compiled methods, its plain attributes, and the constants and
    functions of its module that they use. Comments, docstrings and layout do not matter.

    It is compared only with one that begins alike: of the same version of Python, since another one compiles otherwise,
    and of the same kind. (Those of ``hashlib`` would bring OpenSSL into each worker, which is 4 MB.)
    """
    parts: list[str] = []
    for cls in mapper_class.__mro__:
        if cls.__module__.split(".")[0] in ("builtins", "abc", "typing", "shuffle"):
            continue
        for name, member in sorted(vars(cls).items()):
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                parts.append(name)
                parts.extend(_function_parts(function, set()))
            elif not name.startswith("__") and name != "_abc_impl":
                parts.append(f"{name}={_plain(member)}")
    digest = xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "backslashreplace"))
    return f"{sys.implementation.cache_tag}-xxh3:{digest}"


def _function_parts(function: FunctionType, seen: set[CodeType]) -> Iterator[str]:
    """A function and the functions and constants of the same module that it names, each once."""
    if function.__code__ in seen:
        return
    seen.add(function.__code__)
    yield from _code_parts(function.__code__, function.__doc__)
    for name in sorted(_names_in(function.__code__)):
        used = function.__globals__.get(name)
        if isinstance(used, FunctionType) and used.__module__ == function.__module__:
            yield name
            yield from _function_parts(used, seen)
        elif used is not None:
            yield f"{name}={_plain(used)}"


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _code_parts(code: CodeType, doc: str | None) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant, None)
        elif constant is None or constant != doc:
            yield _plain(constant)


def _plain(value: Any) -> str:
    """Text of a value made of plain data, the same in every process; the type alone of anything else."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_plain(name)}: {_plain(part)}' for name, part in value.items())}}}"
    plain = value is None or value is ... or isinstance(value, (str, bytes, bool, int, float, complex))
    return repr(value) if plain else type(value).__qualname__


def check_fingerprint(
    spec: ProcessorSpec,
    client: StateClient,
    mapper_count: int,
    mapper_class: type[Any],
    opened: Input,
    accept_new_map: bool = False,
    register: bool = True,
) -> None:
    """Writes the fingerprint over a state that is empty; refuses one that does not fit a state that is not.

    With ``register`` the processor becomes the consumer of its queue in the same transaction.
    """
    ours = fingerprint(spec, mapper_count, mapper_class, opened)
    for _ in range(ATTEMPTS_MAX):
        tx = client.transaction()
        with tx:
            stored = {row["name"]: row["value"] for row in tx.scan(spec.meta_table).read_all().to_pylist()}
            changed = [name for name in ours if name in stored and not _same(name, ours[name], stored[name])]
            if changed:
                _refuse_change(spec, client, ours, stored, changed, accept_new_map)
            check_consumer(spec, client, tx, opened.consumes)
            check_begin(spec, client, opened)
            registers = register and register_consumer(client, tx, spec.processor, opened.consumes)
            if changed or not stored.keys() >= ours.keys():
                names = sorted(ours)
                tx.write(spec.meta_table, pa.table([names, [ours[name] for name in names]], schema=META_ROW))
            elif not registers:
                return
            try:
                tx.commit()
                return
            except CommitConflict:
                continue  # Another worker of this processor was faster; look at what it wrote.
    raise SpecError(f"{spec.path}: {spec.meta_table} is being changed all the time; is something else writing to it?")


def _same(name: str, ours: str, stored: str) -> bool:
    if name == "mapper_code" and ours.partition(":")[0] != stored.partition(":")[0]:
        return True
    return ours == stored


_PLACES = {
    "reducer_count": "reducer.count",
    "mapper_count": "input",
    "max_parallelism": "max_parallelism",
    "partition_function": "processor",
    "input": "input",
    "mapper_class": "mapper.class",
    "mapper_config": "mapper.config",
    "mapper_code": "mapper.class",
}


def _refuse_change(
    spec: ProcessorSpec,
    client: StateClient,
    ours: dict[str, str],
    stored: dict[str, str],
    changed: list[str],
    accept_new_map: bool,
) -> None:
    """Returns if the change is harmless; else ``SpecError`` with what to do."""
    alive = client.leases.members(mappers_group(spec.processor)) + client.leases.members(reducers_group(spec.processor))
    mappers = client.scan(spec.mappers_table).read_all()
    reducers = client.scan(spec.reducers_table).read_all()
    if not alive and not has_progress(mappers, reducers):
        return
    only_map = all(name in _OF_THE_MAP for name in changed)
    if only_map and accept_new_map and not alive:
        if nothing_ahead(mappers, reducers):
            return
        raise SpecError(
            f"{spec.at('mapper.class')}: a new map cannot be accepted yet: reducers have committed rows whose input"
            " is not trimmed; put the old one back, end with `shuffle run SPEC --until-drained`, then try again"
        )
    mistakes = []
    for name in changed:
        was = "" if name == "mapper_code" else f": {ours[name]}, but the existing state was made with {stored[name]}"
        word = "the code of the mapper class" if name == "mapper_code" else name.replace("_", " ")
        mistakes.append(f"{spec.at(_PLACES[name])}: {word} has changed{was}")
    advice = "put it back, or give the processor another name, so that it begins with an empty state"
    if only_map:
        advice = "put it back, or, with no worker running and all input drained, start once with --accept-new-map"
    mistakes.append(f"{spec.path}: what to do: {advice}")
    raise SpecError("\n".join(mistakes), path=str(spec.path), mistakes=mistakes, changed=changed)


def committed_indices(blob: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The committed shuffle index for each mapper, from a reducer's persisted row."""
    return np.frombuffer(blob, dtype="<i8")


def has_progress(mappers: pa.Table, reducers: pa.Table) -> bool:
    """Whether anything has been committed by a reducer or trimmed by a mapper."""
    if any(row["input_unread_row_index"] or row["shuffle_unread_row_index"] for row in mappers.to_pylist()):
        return True
    return any((committed_indices(blob) >= 0).any() for blob in reducers["committed_row_indices"].to_pylist())


def nothing_ahead(mappers: pa.Table, reducers: pa.Table) -> bool:
    """Whether no reducer has committed a row that a mapper would map again.

    Then the numbering after the persisted state is free: nothing that it numbers has been counted.
    """
    unread = {row["mapper_index"]: row["shuffle_unread_row_index"] for row in mappers.to_pylist()}
    for blob in reducers["committed_row_indices"].to_pylist():
        for index, committed in enumerate(committed_indices(blob)):
            if committed >= unread.get(index, 0):
                return False
    return True
