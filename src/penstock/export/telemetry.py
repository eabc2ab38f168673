"""The metrics of export: those of metrics-governor with our prefix, and a few of our own.

All have the label `route`. Gauges read the routes at a scrape; counters are updated per batch.
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial

from penstock.export.context import Clock
from penstock.metrics import Counter, Metrics

# The gauges of a route: name (without prefix) to value, or to values by label.
Gauges = Mapping[str, float | Mapping[str, float]]
GAUGES = {
    "queue_size": "Batches in the send queue",
    "queue_bytes": "Bytes of the send queue, on disk and in memory only",
    "queue_max_size": "Most batches that the send queue may hold",
    "queue_max_bytes": "Most bytes that the send queue may hold",
    "queue_utilization_ratio": "Fill level of the queue, 0 to 1: the higher of batches and bytes",
    "queue_effective_max_size": "Most blocks held in memory, after adaptive sizing",
    "queue_disk_available_bytes": "Free space on the send queue's disk",
    "queue_oldest_age_seconds": "Age of the oldest batch in the send queue",
    "queue_time_to_full_seconds": "Estimated time until the send queue is full; -1 = not filling",
    "queue_drain_eta_seconds": "Estimated time until the send queue is empty; -1 = not draining",
    "queue_records": "Records in the send queue",
    "fastqueue_inmemory_blocks": "Blocks held in memory",
    "fastqueue_disk_bytes": "Bytes of the send queue's files on disk",
    "queue_workers_active": "Workers that are sending a batch",
    "queue_workers_total": "Number of workers",
    "queue_preparers_active": "Preparers that are preparing a batch (pipeline_split)",
    "queue_senders_active": "Senders that are sending a batch (pipeline_split)",
    "queue_sends_inflight": "Sends in flight",
    "queue_export_latency_ewma_seconds": "Moving average of the duration of a send",
    "queue_backoff_seconds": "Time until the next try: the rest of the backoff, or until the next "
    "probe while the circuit breaker is open; 0 = none",
    "route_paused": "1 while the route is paused, by a person or after the destination denied it",
    "route_source_lag": "Records of the source topic or queue that the route has not read yet",
    "dead_letters": "Dead letters of the route now, in records",
    "storage_failing": "1 while writes to the send queue's disk fail",
    "circuit_breaker_state": "1 for the current state of the circuit breaker",
}
COUNTERS = {
    "queue_push_total": "Batches added to the send queue",
    "queue_accepted_records_total": "Records accepted into the send queue",
    "queue_delivered_records_total": "Records delivered to the destination",
    "queue_dead_lettered_records_total": "Records that became dead letters",
    "queue_retry_total": "Retries of batches",
    "queue_retry_success_total": "Successful retries of batches",
    "queue_disk_full_total": "Writes refused because the disk, or its free-space reserve, was full",
    "fastqueue_meta_sync_total": "Times fastqueue.meta was written",
    "fastqueue_chunk_rotations": "Queue files (chunks) started",
    "fastqueue_inmemory_flushes": "Times that blocks in memory were written to disk",
    "fastqueue_fsync_failed_total": "Failed fsyncs, after which the data was written again",
    "fastqueue_quarantined_total": "Damaged places moved to quarantine/",
    "fastqueue_lost_blocks_total": "Blocks lost in a crash or to damage",
    "fastqueue_torn_bytes_total": "Bytes of incomplete writes cut off after a crash",
    "circuit_breaker_open_total": "Times the circuit breaker opened",
    "circuit_breaker_rejected_total": "Times a worker waited for an open circuit breaker",
    "data_loss_total": "Records lost that no policy or person dropped: in a crash, to damage, or "
    "because the source no longer had them",
    "batches_total": "Successful sends",
    "bytes_total": "Bytes sent",
    "rejected_items_total": "Spans, data points and log records that the destination rejected in "
    "requests that it accepted (OTLP's partial success)",
}
LABELLED_COUNTERS = {
    "queue_dropped_total": ("Batches dropped, by reason", "reason"),
    "queue_dropped_records_total": ("Records dropped, by reason", "reason"),
    "queue_retry_failure_total": ("Failed sends, by type of error", "error_type"),
}
RATE_SECONDS = 30.0  # over which rates are averaged
GAUGES_SECONDS = 0.01  # for which the answers of the routes are cached


class ExportMetrics:
    """The instruments of all routes, registered once per process."""

    def __init__(self, metrics: Metrics, show: Callable[[], Mapping[str, Gauges]]) -> None:
        self._show = show  # the gauges of all routes, by name
        self._shown: Mapping[str, Gauges] = {}
        self._shown_at = -GAUGES_SECONDS
        self._counters = {
            name: metrics.counter(f"penstock_export_{name}", text, "route")
            for name, text in COUNTERS.items()
        }
        self._counters |= {
            name: metrics.counter(f"penstock_export_{name}", text, "route", label)
            for name, (text, label) in LABELLED_COUNTERS.items()
        }
        for name, text in GAUGES.items():
            labels = ("route", "state") if name == "circuit_breaker_state" else ("route",)
            read = partial(self._read, name)
            metrics.gauge(f"penstock_export_{name}", text, *labels, read=read)

    def _read(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a gauge of all routes. A scrape reads all gauges, and asks each route once."""
        now = time.monotonic()
        if now - self._shown_at > GAUGES_SECONDS:
            self._shown, self._shown_at = self._show(), now
        values: dict[tuple[str, ...], float] = {}
        for route, gauges in self._shown.items():
            value = gauges.get(name)
            if isinstance(value, Mapping):
                values |= {(route, label): float(each) for label, each in value.items()}
            elif value is not None:
                values[route,] = float(value)
        return values

    def of(self, route: str) -> "RouteMetrics":
        return RouteMetrics(self._counters, route)


class RouteMetrics:
    """One route's counters."""

    def __init__(self, counters: Mapping[str, Counter], route: str) -> None:
        self._counters = counters
        self._route = route
        for name in COUNTERS:
            self.add(name, 0)  # create the series before the first event, for rates

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        self._counters[name].add(amount, self._route, *labels)


class Rate:
    """A moving average of events per second, computed from a running total."""

    def __init__(self, clock: Clock, total: float = 0.0) -> None:
        self.value = 0.0
        self._clock = clock
        self._at = clock.monotonic()
        self._total = total

    def update(self, total: float) -> None:
        now = self._clock.monotonic()
        passed = now - self._at
        if passed > 0:
            weight = 1 - math.exp(-passed / RATE_SECONDS)
            self.value += weight * ((total - self._total) / passed - self.value)
            self._at, self._total = now, total
