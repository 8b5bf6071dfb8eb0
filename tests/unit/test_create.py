"""Creating the user's mapper and reducer: defaults filled in, and whose fault a failure is."""

from __future__ import annotations

from typing import Any, ClassVar

import pyarrow as pa
import pytest

from shuffle.api import Mapper, PartitionedRowset, Reducer, WorkerSpec
from shuffle.errors import SpecError, StoreUnavailable, UnknownTable, UserCodeError
from shuffle.ids import Guid
from shuffle.user_code.create import create

WORKER = WorkerSpec("activity", 2, Guid("g"), 1, 3)


class Limited(Mapper):
    config_schema: ClassVar[dict[str, Any]] = {"limit": (int, 3), "column": str}

    def map(self, rows: pa.Table) -> PartitionedRowset:
        raise NotImplementedError


class Raising(Reducer):
    error: ClassVar[Exception] = ValueError("no such thing")

    def __init__(self, config: Any, spec: WorkerSpec, state: Any) -> None:
        super().__init__(config, spec, state)
        raise self.error

    def reduce(self, rows: pa.Table) -> None:
        raise NotImplementedError


def raising(error: Exception) -> type[Raising]:
    return type("Raising", (Raising,), {"error": error})


def test_mapper_written_by_hand_gets_the_defaults_that_it_declares() -> None:
    made = create(Limited, "mapper", {"column": "user"}, WORKER, None, pa.schema([]))
    assert made.config == {"column": "user", "limit": 3}


def test_configuration_that_the_class_does_not_take_is_an_error_of_the_spec() -> None:
    with pytest.raises(SpecError, match="'column' is missing"):
        create(Limited, "mapper", {}, WORKER, None, pa.schema([]))


@pytest.mark.parametrize("error", [ValueError("no such thing"), UnknownTable("no table")])
def test_constructor_that_raises_is_reported_with_worker_class_and_line(error: Exception) -> None:
    with pytest.raises(UserCodeError) as caught:
        create(raising(error), "reducer", {}, WORKER, None)
    message = caught.value.message
    assert message.startswith("processor activity, reducer 2: ")
    assert f"Raising could not be created: {type(error).__name__}: {error}" in message
    assert "test_create.py:" in message
    assert (caught.value.role, caught.value.worker) == ("reducer", 2)


def test_constructor_that_takes_other_arguments_is_reported_without_a_line_of_ours() -> None:
    with pytest.raises(UserCodeError, match=r"could not be created: TypeError: .* positional arguments") as caught:
        create(Raising, "reducer", {}, WORKER, None, "one too many")
    assert "create.py" not in caught.value.message


@pytest.mark.parametrize("error", [SpecError("Raising needs its key"), StoreUnavailable("away")])
def test_error_that_says_itself_what_to_do_or_passes_is_raised_as_it_came(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        create(raising(error), "reducer", {}, WORKER, None)
    assert caught.value is error
