"""Figures of the tables and queues of a store: what they hold, and what was written for them since it was opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shuffle.statestore.engine.catalogue import Catalogue
from shuffle.statestore.engine.ordered_table import Partition

Partitions = Mapping[tuple[int, int], Partition]


def table_statistics(
    catalogue: Catalogue, table_bytes: Mapping[int, tuple[int, int]], partitions: Partitions
) -> dict[str, dict[str, int]]:
    """The figures of each table; ``table_bytes`` has the rows and bytes written, by table id."""
    found = {}
    for table_id, entry in catalogue.tables.items():
        rows, size_bytes = table_bytes.get(table_id, (0, 0))
        changelog_bytes = sum(segment.size_bytes for segment in partitions[table_id, 0].segments)
        found[entry.schema.name] = {
            "rows_written": rows,
            "log_bytes": size_bytes,
            "changelog_bytes": changelog_bytes,
        }
    return found


def queue_statistics(
    catalogue: Catalogue, queue_bytes: Mapping[int, int], partitions: Partitions
) -> dict[str, dict[str, Any]]:
    """The figures of each queue; ``queue_bytes`` has the bytes written, by queue id."""
    found = {}
    for queue_id, queue in catalogue.queues.items():
        own = [partitions[queue_id, index] for index in range(queue.schema.partitions)]
        found[queue.schema.name] = {
            "partitions": len(own),
            "rows": sum(partition.end - partition.begin for partition in own),
            "segments": sum(len(partition.segments) for partition in own),
            "segment_bytes": sum(segment.size_bytes for partition in own for segment in partition.segments),
            "segment_bytes_written": queue_bytes.get(queue_id, 0),
        }
    return found
