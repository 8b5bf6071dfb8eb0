"""Spark: the state store and its shuffled streams as Spark sources and sinks."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# The buffers of rows that came over Flight are not aligned as Acero likes them, and it would warn of that for every
# batch in Spark's workers.
os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "ignore")

if TYPE_CHECKING:
    from shuffle.spark_connector.engine import run_on_spark
    from shuffle.spark_connector.reduce import reduce_frame, reduce_stream
    from shuffle.spark_connector.sink.write_stream import write_stream

__all__ = ["reduce_frame", "reduce_stream", "run_on_spark", "write_stream"]

_MODULES = {
    "reduce_frame": "reduce",
    "reduce_stream": "reduce",
    "run_on_spark": "engine",
    "write_stream": "sink.write_stream",
}


def __getattr__(name: str) -> Any:
    # Spark's workers import this package for a few of its modules; the modules that they do not use are not imported.
    if name in _MODULES:
        return getattr(importlib.import_module(f"shuffle.spark_connector.{_MODULES[name]}"), name)
    raise AttributeError(name)
