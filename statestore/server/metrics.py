"""The metrics of the daemon: counting costs one addition for each group of commits and each response, none per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shuffle.errors import CommitConflict, ShuffleError
from shuffle.statestore.engine.commit_group import CommitGroup
from shuffle.support.metrics import LABELS, Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

GROUP_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""The buckets of the number of transactions in a group, which is 1,024 at most."""

_FIGURES: dict[str, tuple[str, str, str]] = {
    "log_bytes": ("counter", "store_rocksdb_log_bytes", "Bytes that RocksDB has written to its log"),
    "flush_bytes": (
        "counter",
        "store_rocksdb_flush_bytes",
        "Bytes that RocksDB has written when it emptied its memory",
    ),
    "compaction_bytes": ("counter", "store_rocksdb_compaction_bytes", "Bytes that RocksDB has written in compactions"),
    "memtable_bytes": ("gauge", "store_rocksdb_memtable_bytes", "Bytes that RocksDB holds in memory until a flush"),
    "cache_bytes": ("gauge", "store_rocksdb_cache_bytes", "Bytes in RocksDB's block cache"),
    "segment_bytes": ("counter", "store_segment_bytes", "Bytes written to segment files, staged rows included"),
    "marker_syncs": ("counter", "store_marker_syncs", "Times the marker of the last durable version was synced"),
    "staged": ("gauge", "store_staged", "Runs of rows that are staged and not published yet"),
    "open_moments": ("gauge", "store_open_snapshots", "Versions of the store that somebody still reads at"),
    "conflict_keys": ("gauge", "store_conflict_keys", "Keys kept to find conflicts with transactions that are open"),
}
"""The figures that the store counts anyway, by their names in the totals of ``Store.stats``: the type, the name and the
description of the metric of each."""


class StoreMetrics(Metrics):
    """The metrics of one daemon. Where they are not enabled, nothing is counted."""

    def __init__(self, enabled: bool = True) -> None:
        super().__init__("", "statestore", "", enabled)
        self.commits = self._counter("store_commits", "Transactions committed")
        self.conflicts = self._counter("store_conflicts", "Transactions refused because something read had changed")
        self.refusals = self._counter("store_refusals", "Transactions refused for any other reason")
        self.group_transactions = self._histogram(
            "store_group_transactions", "Transactions in a group, which has one sync for all of them", GROUP_BUCKETS
        )
        self.sync_seconds = self._seconds("store_sync_seconds", "Time to write a group and to sync it to storage")
        self.written_rows = self._counter("store_written_rows", "Rows written to or deleted from sorted tables")
        self.appended_rows = self._counter("store_appended_rows", "Rows appended to queues")
        self.appended_bytes = self._counter("store_appended_bytes", "Bytes written to queues, without staged rows")
        self.lookup_keys = self._counter("store_lookup_keys", "Keys looked up in sorted tables")
        self.scanned_rows = self._counter("store_scanned_rows", "Rows handed to scans of sorted tables")
        self.read_rows = self._counter("store_read_rows", "Rows of queues handed to readers, repeated ones included")
        self.read_bytes = self._counter("store_read_bytes", "Bytes of queues handed to readers, repeated ones included")
        self.sessions = self._gauge("store_sessions", "Sessions of clients")
        self.lane_connections = self._gauge("store_lane_connections", "Connections of clients to the lane")
        self.flight_streams = self._gauge("store_flight_streams", "Streams of clients to the Flight exchange")
        self.totals: Callable[[], Mapping[str, Any]] = dict
        """Returns the totals of ``Store.stats``; called when the metrics are read."""
        if self.registry is not None:
            self.registry.register(self)  # An object with the method ``collect`` is a collector.

    def count_group(self, group: CommitGroup, sync_s: float) -> None:
        """Count a group of commits that have their outcomes. Called by the store's writer."""
        refused = [outcome for outcome in group.results if isinstance(outcome, ShuffleError)]
        conflicts = sum(isinstance(outcome, CommitConflict) for outcome in refused)
        self.commits.inc(len(group.results) - len(refused))
        self.conflicts.inc(conflicts)
        self.refusals.inc(len(refused) - conflicts)
        self.group_transactions.observe(len(group.results))
        self.sync_seconds.observe(sync_s)
        self.written_rows.inc(sum(rows for rows, _ in group.table_bytes.values()))
        self.appended_rows.inc(group.appended_rows)
        self.appended_bytes.inc(group.appended_bytes)

    def count_read(self, rows: int, size_bytes: int) -> None:
        """Count rows of a queue that were sent to a reader, or whose location was."""
        self.read_rows.inc(rows)
        self.read_bytes.inc(size_bytes)

    def collect(self) -> Iterator[Metric]:
        """The figures that the store counts anyway, all read at once. Called when the metrics are read."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        totals = self.totals()
        for figure, (metric_type, name, description) in _FIGURES.items():
            family: Any = CounterMetricFamily if metric_type == "counter" else GaugeMetricFamily
            metric = family(f"shuffle_{name}", description, labels=LABELS)
            metric.add_metric(self.label_values, totals.get(figure, 0))
            yield metric
