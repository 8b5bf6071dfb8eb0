"""The metrics that workers and the store serve, from the registries themselves."""

from __future__ import annotations

import inspect
import re
from typing import Any

from prometheus_client.metrics_core import Metric

from shuffle.metrics import ExporterMetrics, MapperMetrics, ReducerMetrics
from shuffle.statestore.server.metrics import StoreMetrics
from shuffle.support.metrics import LABELS
from tools.reference import text
from tools.reference.pages import ROOT

_ARGUMENTS = {"processor": "PROCESSOR", "index": 0, "role": "ROLE"}


def regions() -> dict[str, str]:
    families = {role: _families(kind) for role, kind in served().items()}
    workers = [named for role, named in families.items() if role != "store"]
    first = workers[0]
    common = {name for name in first if all(name in found for found in workers)}
    found = {"metrics of every worker": _table([first[name] for name in first if name in common])}
    for role, named in families.items():
        found[f"metrics {role}"] = _table([family for name, family in named.items() if name not in common])
    return found


def served() -> dict[str, type[Any]]:
    """The classes of metrics that processes serve, by the role of the process."""
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("mapper", "reducer", "statestore", "shuffle", "spark_connector")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    made = (MapperMetrics, ReducerMetrics, ExporterMetrics, StoreMetrics)
    kinds = [kind for kind in made if re.search(rf"(?<!class ){kind.__name__}\(", sources)]
    return {kind.__name__.removesuffix("Metrics").lower(): kind for kind in kinds}


def _families(kind: type[Any]) -> dict[str, Metric]:
    wanted = inspect.signature(kind).parameters
    made = kind(**{name: value for name, value in _ARGUMENTS.items() if name in wanted})
    for value in vars(made).values():
        if inspect.isfunction(value):
            value(0)  # There is one gauge for each reducer, which is created when it is first used.
    return {family.name: family for family in made.registry.collect()}


def _table(families: list[Metric]) -> str:
    rows = []
    for family in families:
        # The family of a counter has no "_total" at the end of its name, and what Prometheus reads has.
        name = f"{family.name}_total" if family.type == "counter" else family.name
        own = [label for label in family.samples[0].labels if label not in (*LABELS, "le")]
        labels = ", ".join(text.code(label) for label in own)
        rows.append((text.code(name), family.type, labels, text.sentence(family.documentation)))
    return text.table(("metric", "type", "further labels", "what it says"), rows)
