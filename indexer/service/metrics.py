# SPDX-License-Identifier: Apache-2.0
"""Metrics of the service. The table in the package's README lists them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.holders import HolderTable
from indexer.identity import WorkerRank
from indexer.service.registry import Registry
from indexer.service.workers import STATUSES, Streams, listener_status

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_STREAM_LABELS = ("model", "tenant", "instance", "dp_rank", "what")
_STREAM_COUNTERS = ("gaps", "replays", "replay_failures", "duplicates", "incarnations", "overflows")
_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)


class ServiceMetrics:
    """Counts requests; reads everything else when it is asked."""

    def __init__(self, registry: Registry, holders: HolderTable, streams: Streams) -> None:
        self._prometheus = CollectorRegistry()
        self._requests = Counter(
            "pointsman_indexer_requests",
            "Requests answered.",
            ("endpoint", "status"),
            registry=self._prometheus,
        )
        self._seconds = Histogram(
            "pointsman_indexer_request_duration_seconds",
            "Time from a request's last byte to its answer.",
            ("endpoint",),
            buckets=_BUCKETS_S,
            registry=self._prometheus,
        )
        self._answered: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._prometheus.register(_StateCollector(registry, holders, streams))

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """A request is done; ``endpoint`` is one of the service's own paths."""
        known = self._answered.get((endpoint, status))
        if known is None:  # looking up labels takes longer than to count
            known = self._requests.labels(endpoint, str(status)), self._seconds.labels(endpoint)
            self._answered[endpoint, status] = known
        known[0].inc()
        known[1].observe(seconds)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._prometheus)


class _StateCollector(Collector):
    def __init__(self, registry: Registry, holders: HolderTable, streams: Streams) -> None:
        self._registry = registry
        self._holders = holders
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        index = self._holders.index
        gauge = GaugeMetricFamily
        groups = list(self._registry.groups())
        yield gauge("pointsman_indexer_groups", "Models and tenants with an index.", value=len(groups))
        yield gauge(
            "pointsman_indexer_blocks", "Distinct blocks that anybody holds.", value=index.distinct_blocks
        )
        yield gauge(
            "pointsman_indexer_memory_bytes", "Memory of the index's tables.", value=index.memory_bytes
        )
        yield gauge("pointsman_indexer_version", "Grows with every change of the index.", value=index.version)
        listeners = gauge("pointsman_indexer_listeners", "Event streams by status.", labels=("status",))
        events = CounterMetricFamily(
            "pointsman_indexer_events", "What batches did, by kind.", labels=_STREAM_LABELS
        )
        order = CounterMetricFamily(
            "pointsman_indexer_stream_faults", "Gaps, replays, restarts and the like.", labels=_STREAM_LABELS
        )
        running = self._streams.streams()
        found = dict.fromkeys(STATUSES, 0)
        for group in groups:
            for one in group.registrations.values():
                state = self._holders.workers()[one.worker].ranks[one.dp_rank]
                found[listener_status(one, state, running)] += 1
                labels = (group.key.model, group.key.tenant, str(one.instance_id), str(one.dp_rank))
                for what, count in state.totals.items():
                    events.add_metric((*labels, what), count)
                stream = running.get(WorkerRank(one.worker, one.dp_rank))
                for what in _STREAM_COUNTERS if stream is not None else ():
                    order.add_metric((*labels, what), getattr(stream.counters, what))  # type: ignore[union-attr]
        for status, count in found.items():
            listeners.add_metric((status,), count)
        yield from (listeners, events, order)
