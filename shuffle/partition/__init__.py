"""Computes which reducer a row goes to (``key_group``), and splits rows into one batch for each reducer (``split``)."""

from __future__ import annotations

from shuffle.partition.key_group import (
    KEY_GROUPS_MAX,
    Indexes,
    hash_partition,
    key_group_range,
    key_groups,
    reducer_of_key_group,
)
from shuffle.partition.split import check_partition_indexes, split_by_partition

__all__ = [
    "KEY_GROUPS_MAX",
    "Indexes",
    "check_partition_indexes",
    "hash_partition",
    "key_group_range",
    "key_groups",
    "reducer_of_key_group",
    "split_by_partition",
]
