"""What people see of a run whose reducers are somebody else's."""

from __future__ import annotations

import io

from rich.console import Console

from shuffle.run.status import MapperStatus, ProcessorStatus, ReducerStatus
from shuffle.run.terminal import ChildView, Rates, progress_line, render


def status_of(mappers: int, reducers: int) -> ProcessorStatus:
    return ProcessorStatus(
        "job",
        "store",
        [MapperStatus(index, 0, 0, ["guid"], "grpc://h:1", 0, {}) for index in range(mappers)],
        [ReducerStatus(index, [-1] * mappers) for index in range(reducers)],
    )


def test_reducers_of_somebody_else_are_not_missed() -> None:
    status = status_of(3, 2)
    assert progress_line(status, Rates(), 0).startswith("job: 3 of 5 workers up,")
    assert progress_line(status, Rates(), 0, reducers=False).startswith("job: 3 of 3 mappers up,")
    console = Console(file=io.StringIO(), width=160)
    console.print(render(status, Rates(), {f"mapper {index}": ChildView(True, 0, None) for index in range(3)}))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("elsewhere") == 2
    assert "down" not in shown
