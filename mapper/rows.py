"""Cutting Arrow batches, and adding the metadata columns to them. Nothing in here depends on windows or buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.messages import METADATA_FIELDS


def with_metadata(
    rows: pa.RecordBatch, indexes: np.ndarray[Any, np.dtype[np.int64]], times: np.ndarray[Any, np.dtype[np.int64]]
) -> pa.RecordBatch:
    """``rows`` with the columns of ``METADATA_FIELDS`` behind them."""
    return pa.RecordBatch.from_arrays(
        [*rows.columns, *(pa.array(c).cast(f.type) for c, f in zip((indexes, times), METADATA_FIELDS, strict=True))],
        schema=pa.schema([*rows.schema, *METADATA_FIELDS], rows.schema.metadata),
    )


def fit(rows: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """A prefix of ``rows`` of at most ``max_bytes``: the longest, or one that leaves a 64th of them at most.

    The first guess assumes rows of equal size, and is most often good enough; if they differ much, the rest is halving.
    """
    # The size of the buffers is an upper bound that is known at once; that of the rows alone takes 15 µs.
    if rows.get_total_buffer_size() <= max_bytes:
        return rows
    size_bytes = rows.nbytes
    if size_bytes <= max_bytes:
        return rows
    fits, too_many = 0, rows.num_rows
    middle = max(1, too_many * max_bytes * 127 // (size_bytes * 128))
    while too_many - fits > 1:
        size_bytes = rows.slice(0, middle).nbytes
        if size_bytes > max_bytes:
            too_many = middle
        else:
            fits = middle
            if (max_bytes - size_bytes) * 64 <= max_bytes:
                break
        middle = (fits + too_many) // 2
    return rows.slice(0, fits)
