"""The pictures of ``perf.compare``, ``perf.write_amplification`` and ``perf.growth``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perf.common import pictures

SYSTEM_COLOURS = {
    "this project": pictures.COLOURS[0],
    "this project under Spark": pictures.COLOURS[5],
    "Spark": pictures.COLOURS[1],
    "Spark, real-time mode": pictures.COLOURS[2],
    "Flink": pictures.COLOURS[3],
}
TITLES = {
    "count": "Count and latest time per key",
    "repartition": "Full rows repartitioned by key",
    "many_reducers": "The same count with 20 reducers",
    "large_state": "Count and sum per key, 3 million keys",
}
PANELS = (
    ("mb_per_s", "MB/s", "more is better"),
    ("cpu_s_per_gb", "processor s per GB", "less is better"),
    ("written_per_byte", "bytes written per byte in", "less is better"),
)


def compare(series: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """One picture for each job, with a bar for each system in each panel."""
    for job in dict.fromkeys(row["job"] for row in series["systems"]):
        rows = [row for row in series["systems"] if row["job"] == job]
        yield f"compare-{job.replace('_', '-')}", _systems(job, rows)


def _systems(job: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    rows = sorted(rows, key=lambda row: list(SYSTEM_COLOURS).index(row["system"]), reverse=True)
    names = [row["system"] for row in rows]
    colours = [SYSTEM_COLOURS[name] for name in names]
    figure, panels = pictures.pyplot().subplots(1, len(PANELS), sharey=True, figsize=(9.6, 0.8 + 0.45 * len(rows)))
    for axes, (figure_name, unit, better) in zip(panels, PANELS, strict=True):
        values = [_middle(row[figure_name]) for row in rows]
        errors = _range(rows, values) if figure_name == "mb_per_s" else None
        axes.barh(names, values, color=colours, xerr=errors, error_kw={"lw": 1, "ecolor": "#555555"})
        for at, value in enumerate(values):
            axes.text(value, at, f" {value:.3g}", va="center", fontsize=8.5)
        axes.set_xlabel(f"{unit} ({better})")
        axes.set_xlim(0, max(values) * 1.25 or 1)
        axes.grid(axis="y", visible=False)
    panels[0].set_title(TITLES[job])
    return figure


def _middle(value: Any) -> float:
    return float(value["median"] if isinstance(value, Mapping) else value)


def _range(rows: Sequence[Mapping[str, Any]], middles: Sequence[float]) -> list[list[float]]:
    below = [middle - row["mb_per_s"]["min"] for row, middle in zip(rows, middles, strict=True)]
    above = [row["mb_per_s"]["max"] - middle for row, middle in zip(rows, middles, strict=True)]
    return [below, above]


def write_amplification(series: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The bytes that each run has written for a byte shuffled, by purpose. The scale is logarithmic, because the runs
    differ by orders of magnitude."""
    names = list(series["scenarios"])
    figure, axes = pictures.pyplot().subplots(figsize=(7.2, 0.8 + 0.45 * len(names)))
    for at, name in enumerate(reversed(names)):
        found = series["scenarios"][name]
        axes.barh(at, found["bytes_per_byte"], color=pictures.COLOURS[0])
        kinds = sorted(found["kinds_mb"].items(), key=lambda kind: -kind[1])
        share = [f"{kind.replace('_', ' ')} {mb / found['written_mb']:.0%}" for kind, mb in kinds[:3] if mb > 0]
        axes.text(found["bytes_per_byte"], at, f"  {found['bytes_per_byte']:.3g}: {', '.join(share)}", va="center")
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xscale("log")
    axes.set_xlim(1e-4, 1e3)
    axes.set_xlabel("bytes written per byte shuffled")
    axes.grid(axis="y", visible=False)
    axes.set_title("Write amplification, and what most of it is")
    yield "write-amplification", figure


def growth(series: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A panel for each curve: the cost of a row by role, one above the other."""
    curves = {axis: found for axis, found in series["curves"].items() if len(found) > 1}
    if not curves:
        return
    figure, panels = pictures.pyplot().subplots(1, len(curves), squeeze=False, figsize=(2.6 * len(curves) + 1.2, 3.0))
    for axes, (axis, found) in zip(panels[0], curves.items(), strict=True):
        values = [str(point["value"]) for point in found]
        below = [0.0] * len(found)
        for role, colour in zip(("store", "mapper", "reducer"), pictures.COLOURS, strict=False):
            costs = [point[f"{role}_us_per_row"] for point in found]
            axes.bar(values, costs, bottom=below, color=colour, label=role)
            below = [low + cost for low, cost in zip(below, costs, strict=True)]
        axes.set_xlabel(axis.replace("_", " "))
        axes.tick_params(axis="x", rotation=45)
        axes.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("processor µs per row")
    panels[0][0].set_title("What a row costs")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    yield "growth", figure


pictures.DRAWN.update({"compare": compare, "write_amplification": write_amplification, "growth": growth})
add_argument = pictures.add_argument
draw_and_report = pictures.draw_and_report
