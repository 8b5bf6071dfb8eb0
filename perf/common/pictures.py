"""Pictures of what the benchmarks measured, drawn from the ``series`` in their JSON files.

    python -m perf.common.pictures perf/results/*.json --to FOLDER --format svg

Drawing is separate from measuring, so that a picture can be changed without measuring again. Matplotlib is an optional
extra (``perf``) and imported only when something is drawn; it needs no display.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perf.common import report
from shuffle.errors import ShuffleError

RESULTS = Path(__file__).resolve().parents[1] / "results"
INSTALL = "python -m pip install 'streaming-shuffle[perf]' (make setup does it)"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
"""The colours of Okabe and Ito, which can be distinguished by colour-blind readers and in print."""
ACCENT, MUTED, SHADE = "#D55E00", "#8DA0B3", "#F6DDCC"

_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "figure.figsize": (7.2, 3.4),
    "font.size": 9.5,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    # The same numbers give the same file, and its text stays text: small, and found by a search.
    "svg.fonttype": "none",
    "svg.hashsalt": "shuffle",
}

Draw = Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]
"""A function that yields (name, figure) for one benchmark's series."""


def is_installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _library(name: str) -> Any:
    """Import a module late, and untyped, so that the rest can be used and checked without it."""
    return importlib.import_module(name)


def pyplot() -> Any:
    return _library("matplotlib.pyplot")


@contextmanager
def style() -> Iterator[Any]:
    """Set the style of all pictures; yields ``matplotlib.pyplot``, which needs no display."""
    if not is_installed():
        raise ShuffleError(f"pictures need matplotlib, which is not installed: {INSTALL}")
    _library("matplotlib").use("agg")
    with pyplot().rc_context(_STYLE):
        yield pyplot()


def save(figure: Any, folder: Path, name: str, ending: str = "svg") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{ending}"
    # Without a date in it, an unchanged picture is an unchanged file.
    figure.savefig(path, metadata={"Date": None} if ending == "svg" else None)
    pyplot().close(figure)
    return path


def draw(series: Mapping[str, Any], folder: Path, ending: str = "svg") -> list[Path]:
    """Draw all pictures of one benchmark; returns the files written."""
    _library("perf.common.compare_pictures")  # adds what it can draw
    kind = series.get("kind")
    if kind not in DRAWN:
        raise ShuffleError(f"there are no pictures of {kind!r}; known are {', '.join(sorted(DRAWN))}")
    with style():
        return [save(figure, folder, name, ending) for name, figure in DRAWN[kind](series)]


# -- for the benchmarks -----------------------------------------------------------------------------------------------


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pictures", metavar="FOLDER", type=Path, default=RESULTS, help="where pictures go (default: perf/results)"
    )


def draw_and_report(series: Mapping[str, Any], folder: Path) -> None:
    """Draw the pictures after a measurement, and print their paths. Without matplotlib only a line is printed: the
    measurement must not be lost because a picture cannot be drawn."""
    if not is_installed():
        print(f"no pictures: matplotlib is not installed: {INSTALL}", file=sys.stderr)
        return
    for path in draw(series, folder):
        print(path)


WINDOW_SECONDS = 3
WINDOW_UNIT = f"window, MB (largest of {WINDOW_SECONDS} s)"

# -- failures ---------------------------------------------------------------------------------------------------------


def failures(series: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The thesis's figures 5.1 to 5.5, and what the other reducers did while one was down."""
    mapper, reducer = (next(o for o in series["outages"] if o["role"] == role) for role in ("mapper", "reducer"))
    yield "failures-reducer-throughput", _reducer_throughput(series, mapper)
    yield "failures-read-lag", _read_lag(series, mapper)
    yield "failures-mapper-down-lag", _mapper_lag(series, mapper)
    yield "failures-mapper-down-window", _mapper_window(series, mapper)
    yield "failures-reducer-down-windows", _all_windows(series, reducer)
    yield "failures-reducer-down-throughput", _reducer_throughput(series, reducer)


def _reducer_throughput(series: Mapping[str, Any], outage: Mapping[str, Any]) -> Any:
    """One panel; two if a reducer was down, since its rate after the outage is so high that the other curves would be
    flat in the same panel."""
    title = f"Reducer throughput, {outage['role']} {outage['index']} down for {_length(outage)}"
    down = outage["index"] if outage["role"] == "reducer" else None
    figure, panels = _figure(outage, title, "rows committed, MB/s", panels=1 if down is None else 2)
    for index, rates in enumerate(series["reducer_mb_per_s"]):
        panel = panels[-1] if index == down else panels[0]
        _line(panel, outage, rates, label=f"reducer {index}", color=COLOURS[index % len(COLOURS)])
    return _finish(figure, panels)


def _largest(values: Sequence[float | None]) -> list[float | None]:
    """The largest value of the last ``WINDOW_SECONDS``, because a window is filled and emptied many times a second."""
    found: list[float | None] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - WINDOW_SECONDS) : end] if value is not None]
        found.append(max(known) if known and values[end - 1] is not None else None)
    return found


def _read_lag(series: Mapping[str, Any], outage: Mapping[str, Any]) -> Any:
    """The read lag before the outage, while all workers run."""
    figure, (axes,) = _figure(outage, "Read lag of the mappers under steady load", "read lag, ms", shade=False)
    for index, lags in enumerate(series["read_lag_s"]):
        steady = [None if lag is None else 1000 * lag for lag in lags[: int(outage["begin_s"])]]
        _line(axes, outage, steady, label=f"mapper {index}", color=COLOURS[index % len(COLOURS)])
    axes.set_xlim(0, outage["begin_s"] - outage["before_s"])
    axes.set_xlabel("time, s (the worst lag of each second)")
    return _finish(figure, [axes])


def _mapper_lag(series: Mapping[str, Any], outage: Mapping[str, Any]) -> Any:
    me = outage["index"]
    figure, (axes,) = _figure(outage, f"Read lag of mapper {me}, down for {_length(outage)}", "read lag, s")
    begin, end = outage["begin_s"] - outage["before_s"], outage["end_s"] - outage["before_s"]
    for index, lags in enumerate(series["read_lag_s"]):
        if index != me:
            _line(axes, outage, lags, label="the other mappers", color=MUTED, width=1.0)
    axes.plot([begin, end], [0, end - begin], ":", color=ACCENT, label="its oldest unread row")
    _line(axes, outage, series["read_lag_s"][me], label=f"mapper {me}", color=ACCENT, width=2.2)
    caught_up = end + series["mapper_catch_up_s"]
    axes.annotate(
        f"caught up {series['mapper_catch_up_s']:.1f} s\nafter its return",
        (caught_up, 0),
        (begin + 0.62 * (end - begin), 0.2 * (end - begin)),
        ha="center",
        arrowprops={"arrowstyle": "->", "color": "#444444"},
    )
    return _finish(figure, [axes])


def _mapper_window(series: Mapping[str, Any], outage: Mapping[str, Any]) -> Any:
    me = outage["index"]
    figure, (axes,) = _figure(outage, f"Window of mapper {me}, down for {_length(outage)}", WINDOW_UNIT)
    for index, windows in enumerate(series["window_mb"]):
        if index != me:
            _line(axes, outage, _largest(windows), label="the other mappers", color=MUTED, width=1.0)
    _line(axes, outage, _largest(series["window_mb"][me]), label=f"mapper {me}", color=ACCENT, width=2.2)
    return _finish(figure, [axes])


def _all_windows(series: Mapping[str, Any], outage: Mapping[str, Any]) -> Any:
    title = f"Windows of the mappers, reducer {outage['index']} down for {_length(outage)}"
    figure, (axes,) = _figure(outage, title, WINDOW_UNIT)
    for index, windows in enumerate(series["window_mb"]):
        _line(axes, outage, _largest(windows), label=f"mapper {index}", color=COLOURS[index % len(COLOURS)])
    return _finish(figure, [axes])


def _figure(
    outage: Mapping[str, Any], title: str, unit: str, shade: bool = True, panels: int = 1
) -> tuple[Any, list[Any]]:
    """Panels over the time in which an outage was observed. The outage is shaded."""
    size = (_STYLE["figure.figsize"][0], _STYLE["figure.figsize"][1] * (1 + 0.4 * (panels - 1)))
    figure, found = pyplot().subplots(panels, sharex=True, squeeze=False, figsize=size)
    axes = [panel for row in found for panel in row]
    axes[0].set_title(title)
    axes[-1].set_xlabel("time, s")
    axes[0].set_xlim(0, outage["after_s"] - outage["before_s"])
    for panel in axes:
        panel.set_ylabel(unit)
        if shade:
            begin, end = outage["begin_s"] - outage["before_s"], outage["end_s"] - outage["before_s"]
            label = f"{outage['role']} {outage['index']} is down"
            panel.axvspan(begin, end, color=SHADE, lw=0, zorder=0, label=label)
    return figure, axes


def _line(
    axes: Any, outage: Mapping[str, Any], values: Sequence[float | None], *, label: str, color: str, width: float = 1.3
) -> None:
    """Draw one value for each second in which the outage was observed; None leaves a gap."""
    begin, end = int(outage["before_s"]), int(outage["after_s"]) + 1
    shown = [float("nan") if value is None else value for value in values[begin:end]]
    times = [second - outage["before_s"] for second in range(begin, begin + len(shown))]
    axes.plot(times, shown, label=label, color=color, linewidth=width)


def _length(outage: Mapping[str, Any]) -> str:
    seconds = outage["end_s"] - outage["begin_s"]
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _finish(figure: Any, panels: Sequence[Any]) -> Any:
    one_each: dict[str, Any] = {}
    for panel in panels:
        panel.set_ylim(bottom=0)
        handles, labels = panel.get_legend_handles_labels()
        one_each |= dict(zip(labels, handles, strict=True))
    order = sorted(one_each, key=lambda label: (not label.endswith("is down"), label))
    figure.legend([one_each[label] for label in order], order, loc="outside right upper")
    return figure


DRAWN: dict[str, Draw] = {"failures": failures}
"""The functions that draw, by the ``kind`` of the series; ``perf.common.compare_pictures`` adds more."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.common.pictures", description="Draw what benchmarks have measured."
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="what a benchmark wrote with --json")
    parser.add_argument("--to", metavar="FOLDER", type=Path, default=RESULTS, help="default: perf/results")
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    args = parser.parse_args(argv)
    drawn = 0
    for file in args.files:
        try:
            series = json.loads(file.read_text()).get("series")
        except (OSError, ValueError, AttributeError) as error:
            raise ShuffleError(f"{file} is not what a benchmark writes with --json: {error}") from None
        for path in draw(series, args.to, args.format) if series is not None else ():
            print(path)
            drawn += 1
    if not drawn:
        raise ShuffleError("nothing to draw: none of the files has series in it")
    return 0


if __name__ == "__main__":
    # Under its own name, so that those who add to DRAWN add to this one.
    from perf.common import pictures

    sys.exit(report.run_and_report_errors(pictures.main))
