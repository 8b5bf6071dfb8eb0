"""Makes ``format("shuffle")`` known to Spark: it loads data sources from top-level modules named ``pyspark_*``."""

from __future__ import annotations

from shuffle.spark_connector.datasource import ShuffleDataSource as DefaultSource

__all__ = ["DefaultSource"]
