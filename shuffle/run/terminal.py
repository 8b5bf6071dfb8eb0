"""The output for people while a processor runs: tables on a terminal, otherwise a line of progress at intervals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shuffle.errors import StoreUnavailable
from shuffle.run.dead_letters import dead_letter_summary
from shuffle.run.status import MapperStatus, ProcessorStatus, ReducerStatus
from shuffle.support.units import rough_size

RATE_WINDOW_S = 5.0
"""The seconds over which rates are averaged: a shorter time flickers with every trim, a longer one hides a stall."""
LOOKS_MAX = 64
"""The most samples that are kept for the rates."""


@dataclass(frozen=True, slots=True)
class ChildView:
    """The part of a child process that the screen shows. All workers of one process have the same."""

    running: bool
    """True while the process runs."""
    restarts: int
    """The number of its restarts since the beginning of the run."""
    last_error: str | None
    """The reason of its last death; None if it has not died."""
    process: str = ""
    """The name of the process, if it is not that of the worker."""


class Rates:
    """Computes rows per second from positions at known times."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, int]]] = deque(maxlen=LOOKS_MAX)

    def note(self, now_s: float, status: ProcessorStatus) -> None:
        positions = {f"mapper {m.index}": _read_position(m) for m in status.mappers}
        for reducer in status.reducers:
            positions[f"reducer {reducer.index}"] = sum(index + 1 for index in reducer.committed_row_indices)
            positions[f"spill {reducer.index}"] = reducer.spilled_bytes_ever
        for exporter in status.exporters:
            positions[f"exporter {exporter.name}"] = exporter.position
        positions["total"] = status.committed_rows
        self._looks.append((now_s, positions))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - RATE_WINDOW_S:
            self._looks.popleft()

    def of(self, name: str) -> float | None:
        """The rows per second of ``mapper I`` (rows read), ``reducer I`` (shuffle indexes passed), ``exporter I`` (rows
        exported) or ``total``, or the bytes per second of ``spill I`` (spilled for that reducer); None if it is not
        known yet."""
        if len(self._looks) < 2:
            return None
        (begin_s, first), (end_s, last) = self._looks[0], self._looks[-1]
        if end_s <= begin_s or name not in first or name not in last:
            return None
        return max(0.0, (last[name] - first[name]) / (end_s - begin_s))


def _read_position(mapper: MapperStatus) -> int:
    read = mapper.number("next_input_index")
    return mapper.input_unread_row_index if read is None else read


def render(
    status: ProcessorStatus, rates: Rates, children: Mapping[str, ChildView] | None = None, note: str = ""
) -> RenderableType:
    """The screen for one status. Only the controller knows ``children``."""
    children = children or {}
    title = Text.assemble(("streaming processor ", "dim"), (status.processor, "bold"), (f"  {note}", "dim"))
    parts: list[RenderableType] = [title, _mappers(status, rates, children), _reducers(status, rates, children)]
    if status.exporters:
        parts.append(_exporters(status, rates, children))
    if words := dead_letter_summary(status.dead_letters):
        parts.append(Text(f"{words}; `shuffle dead-letters SPEC show` prints them", style="yellow"))
    # The error of a process is shown once, however many workers it has.
    errors = {view.process or name: view.last_error for name, view in children.items() if view.last_error}
    parts += [Text(f"{name}: {error}", style="red") for name, error in list(errors.items())[-4:]]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(columns[0], min_width=11)
    for name in columns[1:]:
        table.add_column(name, justify="right", min_width=9)
    return table


def _mappers(status: ProcessorStatus, rates: Rates, children: Mapping[str, ChildView]) -> Table:
    restarts = ["restarts"] if children else []
    table = _table("mapper", "state", "rows/s", "read lag", "window", "rows held", "committed", *restarts)
    for mapper in status.mappers:
        name = f"mapper {mapper.index}"
        lag = mapper.number("read_lag_rows")
        table.add_row(
            name,
            _state(mapper.instances, children.get(name), responded=mapper.live is not None),
            _rate(rates.of(name)),
            _count(mapper.input_rows_left if lag is None else lag),
            _bytes(mapper.number("window_bytes")),
            _count(mapper.number("window_rows")),
            _count(mapper.done_rows),
            *_restarts(name, children),
        )
    return table


def _restarts(name: str, children: Mapping[str, ChildView]) -> list[str]:
    """The cell of the column "restarts", which exists only where the child processes are known."""
    if not children:
        return []
    return [str(children[name].restarts) if name in children else ""]


def _reducers(status: ProcessorStatus, rates: Rates, children: Mapping[str, ChildView]) -> Table:
    restarts = ["restarts"] if children else []
    table = _table("reducer", "state", "rows/s", "pending", "spilled", "spilled/s", "passed", *restarts, "")
    for reducer in status.reducers:
        name = f"reducer {reducer.index}"
        table.add_row(
            name,
            _reducer_state(reducer, name, children),
            _rate(rates.of(name)),
            _count(reducer.pending_rows),
            _bytes(reducer.spilled_bytes) if reducer.spilled_rows else "",
            _spill_rate(rates.of(f"spill {reducer.index}")) if reducer.is_straggler else "",
            _count(sum(index + 1 for index in reducer.committed_row_indices)),
            *_restarts(name, children),
            _lag(reducer),
        )
    return table


def _exporters(status: ProcessorStatus, rates: Rates, children: Mapping[str, ChildView]) -> Table:
    restarts = ["restarts"] if children else []
    table = _table("exporter", "state", "rows/s", "waiting", "exported", *restarts)
    for exporter in status.exporters:
        name = f"exporter {exporter.name}"
        table.add_row(
            name,
            _state(exporter.instances, children.get(name)),
            _rate(rates.of(name)),
            _count(exporter.waiting_rows),
            _count(exporter.position),
            *_restarts(name, children),
        )
    return table


def _state(instances: list[str], child: ChildView | None, responded: bool = True) -> Text:
    if child is not None and not child.running:
        return Text("down", style="red")
    if not instances:
        return Text("starting" if child is not None else "down", style="yellow" if child is not None else "red")
    return Text("up", style="green") if responded else Text("silent", style="yellow")


def _reducer_state(reducer: ReducerStatus, name: str, children: Mapping[str, ChildView]) -> Text:
    if children and name not in children and not reducer.instances:
        return Text("elsewhere", style="dim")  # With mappers only: Spark runs the reducers, and they hold no leases.
    return _state(reducer.instances, children.get(name))


def _spill_rate(value: float | None) -> str:
    return "-" if value is None else _bytes(int(value))


def _lag(reducer: ReducerStatus) -> Text:
    """A note if the reducer lags behind the others, and since when."""
    if reducer.spilled_since_ms is not None:
        minutes = max(0.0, time.time() - reducer.spilled_since_ms / 1000) / 60
        return Text(f"lags, spilled for {minutes:,.1f} min", style="yellow")
    return Text("lags", style="yellow") if reducer.is_straggler else Text("")


def progress_line(status: ProcessorStatus, rates: Rates, restarts: int | None, reducers: bool = True) -> str:
    """The status in one line, for logs and pipes. Without ``reducers``, those run elsewhere and are not counted."""
    window_bytes = sum(mapper.number("window_bytes") or 0 for mapper in status.mappers)
    lags = [mapper.number("read_lag_rows") for mapper in status.mappers]
    lag = sum(lag for lag in lags if lag is not None) if any(lag is not None for lag in lags) else None
    up = sum(bool(mapper.instances) for mapper in status.mappers)
    workers = f"{len(status.mappers)} mappers"
    if reducers:
        up += sum(bool(reducer.instances) for reducer in status.reducers)
        workers = f"{len(status.mappers) + len(status.reducers)} workers"
    return (
        f"{status.processor}: {up} of {workers} up,"
        f" {_count(status.committed_rows)} rows done, {_rate(rates.of('total'))} rows/s,"
        f" read lag {_count(lag)}, window {_bytes(window_bytes)}"
    ) + (
        _spill_words(status)
        + _outbox_words(status)
        + _dead_letter_words(status)
        + ("" if restarts is None else f", restarts {restarts}")
    )


def _spill_words(status: ProcessorStatus) -> str:
    late = [reducer for reducer in status.reducers if reducer.spilled_rows]
    if not late:
        return ""
    names = ", ".join(str(reducer.index) for reducer in late)
    rows, nbytes = sum(reducer.spilled_rows for reducer in late), sum(reducer.spilled_bytes for reducer in late)
    return f", spilled {_count(rows)} rows ({_bytes(nbytes)}) for reducer {names}"


def _outbox_words(status: ProcessorStatus) -> str:
    if not status.exporters:
        return ""
    # Those of dead letters are named by their queue, too, and what waits for them is told as dead letters.
    of_outbox = [exporter for exporter in status.exporters if exporter.name == str(exporter.index)]
    waiting = sum(exporter.waiting_rows for exporter in of_outbox)
    down = sum(not exporter.instances for exporter in status.exporters)
    words = f", outbox {_count(waiting)} rows" if of_outbox else ", dead letters are exported"
    return words + (f" ({down} exporters down)" if down else "")


def _dead_letter_words(status: ProcessorStatus) -> str:
    words = dead_letter_summary(status.dead_letters)
    return f", {words}" if words else ""


def print_status(status: ProcessorStatus, console: Console | None = None) -> None:
    (console or Console()).print(render(status, Rates()))


def show_repeatedly(
    look: Callable[[], ProcessorStatus], interval_s: float, count: int | None, console: Console | None = None
) -> None:
    """``shuffle top``: updates a screen, or prints lines where there is no terminal. While the store cannot be reached,
    the error is shown instead."""
    console = console or Console()
    rates = Rates()
    shown = 0
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while count is None or shown < count:
            if shown:
                time.sleep(interval_s)
            shown += 1
            try:
                status = look()
            except StoreUnavailable as error:
                picture: RenderableType = Text(str(error), style="red")
            else:
                rates.note(time.monotonic(), status)
                picture = render(status, rates) if live is not None else progress_line(status, rates, None)
            if live is not None:
                live.update(picture, refresh=True)
            else:
                console.print(picture, soft_wrap=True, highlight=False)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else rough_size(value)
