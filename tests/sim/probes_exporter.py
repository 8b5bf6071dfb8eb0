"""Probes in the rare branches of the exporter, which set the marks of ``exporting``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shuffle.errors import PublishUnknown, SplitBrain
from shuffle.reducer.exporter.core import ExporterCore
from shuffle.reducer.exporter.cycle import ExportCycle

observe_clean_stop: Callable[[int], None] = lambda partition: None  # noqa: E731
"""The simulation's callback for an exporter of this partition that has stopped with nothing under way."""


def install(watch: Callable[..., None]) -> None:
    def opened(mark: Any, core: Any, args: Any, result: Any, error: Any) -> None:
        if error is not None:
            return
        if result[1]:
            mark("a sink was told its position")
        if core.position > core.state.position:
            mark("an exporter found more in the sink than in its row")

    watch(ExporterCore, "opened", opened)

    def published(mark: Any, cycle: Any, args: Any, result: Any, error: Any) -> None:
        redo = result if error is not None else result[0]
        if isinstance(error, PublishUnknown):
            mark("a publication was unknown")
        elif isinstance(error, SplitBrain):
            mark("a sink refused an instance that another one has replaced")
        elif error is None and redo:
            mark("a batch was published again from its note")

    watch(ExportCycle, "_publish", published, before=lambda cycle, batch: cycle._core._redo_end is not None)

    def read(mark: Any, cycle: Any, args: Any, result: Any, error: Any) -> None:
        if isinstance(error, SplitBrain):
            mark("rows of the outbox were trimmed by another instance")

    watch(ExportCycle, "_read", read)

    def written(mark: Any, cycle: Any, args: Any, result: Any, error: Any) -> None:
        if error is None and args[-1] is True:
            mark("the outbox was trimmed")

    watch(ExportCycle, "_write", written)

    def stopped(mark: Any, cycle: Any, args: Any, result: Any, error: Any) -> None:
        if error is None:
            mark("an exporter stopped cleanly")
            observe_clean_stop(cycle._core.partition)

    watch(ExportCycle, "stop", stopped)
