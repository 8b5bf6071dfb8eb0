"""The table ``<processor>/meta``: the fingerprint, and which Spark query reads the processor."""

from __future__ import annotations

import pyarrow as pa

META_KEY = pa.schema([pa.field("name", pa.string(), nullable=False)])
META_VALUE = pa.schema([pa.field("value", pa.string(), nullable=False)])
PARTITIONS = "partitions"
"""The name of the row that numbers the partitions of an input which can get more of them."""

META_ROW = pa.schema([*META_KEY, *META_VALUE])
