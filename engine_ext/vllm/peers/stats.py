# SPDX-License-Identifier: Apache-2.0
"""From `Tally` to vLLM's stats hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from .metrics import METRICS, Kind, Metric, Tally


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """As `SecondaryTierManager.build_metric_definitions` returns them."""
    return {metric.name: _definition(metric) for metric in METRICS}


def connector_stats(tally: Tally, gauges: Mapping[Metric, float]) -> OffloadingConnectorStats:
    """As `SecondaryTierManager.get_stats` returns them."""
    stats = OffloadingConnectorStats()
    for (metric, labels), value in tally.counts.items():
        stats.increase_counter(metric.name, value, labels)
    for (metric, labels), values in tally.samples.items():
        for value in values:
            stats.observe_histogram(metric.name, value, labels)
    for metric, value in gauges.items():
        stats.set_gauge(metric.name, value)
    return stats


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    shared: dict[str, Any] = {"documentation": metric.documentation, "labelnames": metric.labels}
    match metric.kind:
        case Kind.COUNTER:
            return OffloadingCounterMetadata(**shared)
        case Kind.GAUGE:
            return OffloadingGaugeMetadata(**shared)
        case Kind.HISTOGRAM:
            return OffloadingHistogramMetadata(**shared, buckets=metric.buckets)
