"""The metrics of mappers, reducers and exporters. ``shuffle.support.metrics`` has their base class, and the endpoint
that serves them."""

from __future__ import annotations

from shuffle.support.metrics import Metrics, MetricsServer, serve_metrics

__all__ = ["ExporterMetrics", "MapperMetrics", "MetricsServer", "ReducerMetrics", "serve_metrics"]


class MapperMetrics(Metrics):
    def __init__(self, processor: str, index: int, enabled: bool = True, beside: MapperMetrics | None = None) -> None:
        super().__init__(processor, "mapper", index, enabled, beside)
        self.input_rows = self._counter("input_rows", "Rows read from the input")
        self.input_bytes = self._counter("input_bytes", "Bytes of the rows read from the input")
        self.shuffle_rows = self._counter("shuffle_rows", "Rows that map produced")
        self.shuffle_bytes = self._counter("shuffle_bytes", "Bytes of the rows that map produced")
        self.served_rows = self._counter("served_rows", "Rows handed to reducers, repeated ones included")
        self.served_bytes = self._counter("served_bytes", "Bytes handed to reducers, repeated ones included")
        self.window_bytes = self._gauge("window_bytes", "Bytes held in the window")
        self.window_rows = self._gauge("window_rows", "Rows held in the window")
        self.read_lag_rows = self._gauge("read_lag_rows", "Rows in the input that are not read yet")
        self.trims = self._counter("trims", "Times the state was persisted and the input trimmed")
        self.conflicts = self._counter("conflicts", "Commits refused because something read had changed")
        self.dead_letters = self._counter("dead_letters", "Rows set aside in the dead-letter queue")
        self.split_brains = self._counter("split_brains", "Times another instance of this worker was noticed")
        self.false_claims = self._counter("false_claims", "Times rows were called committed in a request and were not")
        self.stragglers = self._gauge("stragglers", "Reducers that lag so far behind that their rows may be spilled")
        self.spill_rows = self._gauges_by_reducer("spill_rows", "Rows in the spill that the reducer has not committed")
        self.spill_bytes = self._gauges_by_reducer("spill_bytes", "Bytes of the rows in the spill, uncompressed")
        self.spilled_rows = self._counter("spilled_rows", "Rows moved to the spill")
        self.spilled_bytes = self._counter("spilled_bytes", "Bytes of the rows moved to the spill, uncompressed")
        self.spilled_stored_bytes = self._counter("spilled_stored_bytes", "Bytes written for the rows spilled")
        self.map_seconds = self._seconds("map_seconds", "Time in the user's map, per batch")


class ReducerMetrics(Metrics):
    def __init__(self, processor: str, index: int, enabled: bool = True, beside: ReducerMetrics | None = None) -> None:
        super().__init__(processor, "reducer", index, enabled, beside)
        self.fetched_rows = self._counter("fetched_rows", "Rows fetched from mappers, repeated ones included")
        self.fetched_bytes = self._counter("fetched_bytes", "Bytes fetched from mappers, repeated ones included")
        self.reduced_rows = self._counter("reduced_rows", "Rows whose effect is committed")
        self.reduced_bytes = self._counter("reduced_bytes", "Bytes of the rows whose effect is committed")
        self.commits = self._counter("commits", "Transactions committed")
        self.conflicts = self._counter("conflicts", "Commits refused because something read had changed")
        self.dead_letters = self._counter("dead_letters", "Rows set aside in the dead-letter queue")
        self.split_brains = self._counter("split_brains", "Times another instance of this worker was noticed")
        self.restarts = self._counter("restarts", "Times the pipeline started again from the persisted state")
        self.fetch_seconds = self._seconds("fetch_seconds", "Time of one GetRows, the long poll included")
        self.reduce_seconds = self._seconds("reduce_seconds", "Time in the user's reduce, per batch")
        self.commit_seconds = self._seconds("commit_seconds", "Time of one commit")

    def observe_reduce(self, seconds: float) -> None:
        self.reduce_seconds.observe(seconds)

    def observe_commit(self, seconds: float) -> None:
        self.commit_seconds.observe(seconds)

    def count_commit(self, rows: int, size_bytes: int, dead_letter_rows: int) -> None:
        self.commits.inc()
        self.reduced_rows.inc(rows)
        self.reduced_bytes.inc(size_bytes)
        self.dead_letters.inc(dead_letter_rows)

    def count_conflict(self) -> None:
        self.conflicts.inc()


class ExporterMetrics(Metrics):
    def __init__(
        self, processor: str, index: int | str, enabled: bool = True, beside: ExporterMetrics | None = None
    ) -> None:
        super().__init__(processor, "exporter", index, enabled, beside)
        self.exported_rows = self._counter("exported_rows", "Rows published to the output")
        self.exported_bytes = self._counter("exported_bytes", "Bytes of the rows published to the output, as in memory")
        self.publishes = self._counter("publishes", "Batches published to the output")
        self.export_lag_rows = self._gauge("export_lag_rows", "Rows of the queue that are not published yet")
        self.split_brains = self._counter("split_brains", "Times another instance of this worker was noticed")
        self.restarts = self._counter("restarts", "Times the pipeline started again from the persisted state")
        self.publish_seconds = self._seconds("publish_seconds", "Time of one publication")

    def count_publish(self, rows: int, size_bytes: int, seconds: float) -> None:
        self.publishes.inc()
        self.exported_rows.inc(rows)
        self.exported_bytes.inc(size_bytes)
        self.publish_seconds.observe(seconds)
