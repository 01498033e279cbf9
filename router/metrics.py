# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of the router. One registry per app; the table in the README lists every name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.holders import TOTALS, HolderTable
from indexer.stream import EventStream
from indexer.subscriber import EventSubscriber
from router.fleet.fleet import Fleet
from router.fleet.worker import Health
from router.plan.load import Board

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)
_DECISION_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)


class RouterMetrics:
    """Counters that events bump; the state of fleet and index is read at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"pointsman_{name}", text, labels, registry=self.registry)

        self.attempts = counter("attempts", "Attempts at workers, by how they ended.", ("worker", "outcome"))
        self.decisions = counter("decisions", "Decisions, by policy.", ("policy",))
        self.path_blocks = counter("path_blocks", "Prompt blocks planned, by path.", ("path",))
        self.fallbacks = counter("fallbacks", "Requests not routed by the index, by reason.", ("reason",))
        self.split_requests = counter(
            "split_requests", "Attempts split into a prefill and a decode leg.", ("transfer",)
        )
        self.refused = counter("refused", "Requests without a worker, by reason.", ("reason",))
        self.predicted_cached_tokens = counter(
            "predicted_cached_tokens", "Cached tokens promised by plans whose outcome is known."
        )
        self.observed_cached_tokens = counter(
            "observed_cached_tokens", "Cached tokens that engines reported for those."
        )
        self.stale_decisions = counter(
            "stale_decisions", "Decisions that promised more cached tokens than there were.", ("worker",)
        )
        self.stale_tokens = counter("stale_tokens", "Cached tokens promised and not there.", ("worker",))
        self.lost_tokens = counter(
            "lost_tokens", "Prompt tokens computed, by why: workload, routing, stale.", ("kind",)
        )
        self.regret_s = Histogram(
            "pointsman_regret_seconds",
            "Time to first token beyond what the best candidate would have taken, by all that is known after it.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.shed = counter("shed", "Requests answered 429, by reason.", ("tenant", "reason"))
        self.waiting = Gauge(
            "pointsman_waiting_requests",
            "Requests that wait at the router for a worker with room.",
            ("tenant",),
            registry=self.registry,
        )
        self.wait_s = Histogram(
            "pointsman_wait_seconds",
            "Time that requests waited which then went to a worker.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "pointsman_ttft_seconds",
            "Time from decision to first byte of streamed answers.",
            ("worker",),
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.decision_s = Histogram(
            "pointsman_decision_seconds",
            "Time to decide, tokenisation left out.",
            buckets=_DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self.tokenize_s = Histogram(
            "pointsman_tokenize_seconds",
            "Time to get a prompt's token ids.",
            buckets=_DECISION_BUCKETS_S,
            registry=self.registry,
        )


class StateCollector(Collector):
    """Fleet, load and index as they are at the scrape. O(workers); block counts walk the index."""

    def __init__(
        self,
        fleet: Fleet,
        board: Board,
        holders: HolderTable,
        subscriber: EventSubscriber,
        silent: Callable[[], Iterable[str]],
    ) -> None:
        self._fleet = fleet
        self._board = board
        self._holders = holders
        self._subscriber = subscriber
        self._silent = silent

    def collect(self) -> Iterable[Metric]:
        yield from self._workers()
        yield from self._blocks()
        yield from self._events()
        yield from self._streams()

    def _workers(self) -> Iterable[Metric]:
        health = GaugeMetricFamily(
            "pointsman_worker_health", "1 for the state it is in.", labels=["worker", "state"]
        )
        in_flight = GaugeMetricFamily(
            "pointsman_in_flight_requests", "Our requests at the worker.", labels=["worker"]
        )
        silent = GaugeMetricFamily(
            "pointsman_worker_event_silent",
            "1 when it serves prompts and publishes no events.",
            labels=["worker"],
        )
        quiet = set(self._silent())
        for status in self._fleet.statuses():
            for state in Health:
                health.add_metric([status.spec.id, state.value], float(status.health is state))
            in_flight.add_metric([status.spec.id], self._board.in_flight(status.spec.id))
            silent.add_metric([status.spec.id], float(status.spec.id in quiet))
        yield health
        yield in_flight
        yield silent

    def _blocks(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily(
            "pointsman_index_blocks", "Blocks known, by tier.", labels=["worker", "tier"]
        )
        waiting = GaugeMetricFamily(
            "pointsman_index_waiting_blocks", "Blocks not identified yet, by why.", labels=["worker", "state"]
        )
        partial = GaugeMetricFamily(
            "pointsman_index_partial", "1 when batches of a rank are lost.", labels=["worker", "rank"]
        )
        suspect = GaugeMetricFamily(
            "pointsman_index_suspect", "1 when a rank may be another process.", labels=["worker", "rank"]
        )
        incarnation = GaugeMetricFamily(
            "pointsman_worker_incarnation", "Incarnations seen.", labels=["worker"]
        )
        for worker, holders in list(self._holders.workers().items()):
            incarnation.add_metric([worker], holders.incarnation)
            totals = [self._holders.index.counts(state.slot) for state in holders.ranks]
            store = self._holders.index.counts(holders.store_slot)
            blocks.add_metric([worker, "hbm"], sum(one.hbm for one in totals))
            blocks.add_metric([worker, "ram"], sum(one.ram for one in totals))
            blocks.add_metric([worker, "storage"], store.storage)
            waiting.add_metric([worker, "detached"], sum(one.detached for one in totals))
            waiting.add_metric([worker, "unidentified"], sum(one.unidentified for one in totals))
            for rank, state in enumerate(holders.ranks):
                partial.add_metric([worker, str(rank)], float(state.partial is not None))
                suspect.add_metric([worker, str(rank)], float(state.suspect is not None))
        yield from (blocks, waiting, partial, suspect, incarnation)
        yield GaugeMetricFamily(
            "pointsman_index_memory_bytes", "Memory of the index.", value=self._holders.index.memory_bytes
        )

    def _events(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "pointsman_kv_events",
            "What batches of KV events did, in blocks or events.",
            labels=["worker", "effect"],
        )
        for worker, holders in list(self._holders.workers().items()):
            for name in TOTALS:
                family.add_metric([worker, name], sum(state.totals[name] for state in holders.ranks))
        yield family

    def _streams(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "pointsman_kv_stream", "Faults and repairs of event streams.", labels=["worker", "rank", "what"]
        )
        for rank, stream in self._subscriber.streams().items():
            for what, value in stream_counts(stream).items():
                family.add_metric([rank.worker, str(rank.dp_rank), what], value)
        yield family


def stream_counts(stream: EventStream) -> dict[str, int]:
    """The counters of a stream by name."""
    counters = stream.counters
    return {name: getattr(counters, name) for name in type(counters).__slots__}
