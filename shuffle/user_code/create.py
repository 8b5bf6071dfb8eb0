"""Creates the user's mapper or reducer. No other module calls a constructor of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from shuffle.api import Emit, Reducer, WorkerSpec
from shuffle.config_schema import check_config
from shuffle.errors import SpecError, UserCodeError
from shuffle.user_code.poison import is_transient, raised_at, reason_of

if TYPE_CHECKING:
    from shuffle.statestore import StateClient


def create(
    cls: type[Any], role: Literal["mapper", "reducer"], config: Mapping[str, Any] | None, worker: WorkerSpec, *args: Any
) -> Any:
    """An object of the user's class ``cls``, with the defaults of ``config`` filled in that the class declares.

    ``args`` are the arguments of its constructor after ``config`` and ``worker``. An exception of the constructor
    becomes a ``UserCodeError`` that names the worker, the class and the line, with two exceptions: a ``SpecError``
    already says what is to be corrected, and an error of the store or the machine is not the user's.
    """
    checked = check_config(cls, config)
    try:
        return cls(checked, worker, *args)
    except Exception as error:
        if isinstance(error, SpecError) or is_transient(error):
            raise
        raise UserCodeError(
            f"processor {worker.processor}, {role} {worker.index}: {cls.__module__}:{cls.__qualname__} could not be "
            f"created: {reason_of(error)}{raised_at(error, __file__)}",
            processor=worker.processor,
            role=role,
            worker=worker.index,
            reason=reason_of(error),
        ) from error


def create_reducer(
    cls: type[Reducer], config: Mapping[str, Any] | None, worker: WorkerSpec, state: StateClient, emit: Emit
) -> Reducer:
    """The user's reducer, with what its ``emit`` does: what the constructor is given stays as it always was."""
    made: Reducer = create(cls, "reducer", config, worker, state)
    made._shuffle_emit = emit
    return made
