# SPDX-License-Identifier: Apache-2.0
"""Metrics of trust and of the decision log, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.decisions.log_writer import LogWriter
from router.decisions.trust import Trust
from router.fleet.fleet import Fleet


class TrustCollector(Collector):
    """O(workers)."""

    def __init__(self, fleet: Fleet, trust: Trust, monotonic_s: Callable[[], float]) -> None:
        self._fleet = fleet
        self._trust = trust
        self._monotonic_s = monotonic_s

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "pointsman_worker_trust",
            "Share of the blocks promised at a worker that are expected there.",
            labels=["worker"],
        )
        for status in self._fleet.statuses():
            family.add_metric([status.spec.id], self._trust.of(status.spec.id, self._monotonic_s()))
        yield family


class LogCollector(Collector):
    """O(1)."""

    def __init__(self, writer: LogWriter | None) -> None:
        self._writer = writer

    def collect(self) -> Iterable[Metric]:
        writer = self._writer
        yield CounterMetricFamily(
            "pointsman_decision_log_lines",
            "Lines written to the decision log.",
            value=writer.written_lines if writer else 0,
        )
        yield CounterMetricFamily(
            "pointsman_decision_log_dropped",
            "Lines that the decision log could not keep.",
            value=writer.dropped if writer else 0,
        )
        yield CounterMetricFamily(
            "pointsman_decision_log_errors",
            "Writes of the decision log that failed.",
            value=writer.errors if writer else 0,
        )
        yield GaugeMetricFamily(
            "pointsman_decision_log_degraded",
            "1 while the decision log cannot be written.",
            value=float(writer is not None and writer.degraded is not None),
        )
