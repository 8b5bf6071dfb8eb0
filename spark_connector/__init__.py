"""Spark: the state store and its shuffled streams as Spark sources and sinks."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Rows that came over Flight lie where gRPC put them, and Acero would warn of it, batch by batch, in Spark's workers.
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
    # Spark's workers import this package for their own parts of it; what they do not use should cost them nothing.
    if name in _MODULES:
        return getattr(importlib.import_module(f"shuffle.spark_connector.{_MODULES[name]}"), name)
    raise AttributeError(name)
