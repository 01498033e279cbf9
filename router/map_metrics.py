# SPDX-License-Identifier: Apache-2.0
"""Metrics of where maps come from. The table in the README lists them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.map_sources import APPROXIMATE, EVENTS, MapSources, Switch


class MapMetrics(Collector):
    """Counts switches; reads the state at each scrape. O(ranks)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._maps: MapSources | None = None
        self._switches = Counter(
            "pointsman_index_map_switches",
            "Maps of ranks that came from somewhere else from then on.",
            ("worker", "source", "why"),
            registry=registry,
        )
        registry.register(self)

    def follow(self, maps: MapSources) -> None:
        """Show these."""
        self._maps = maps

    def switched(self, switch: Switch) -> None:
        self._switches.labels(switch.worker, switch.source, switch.why).inc()

    def collect(self) -> Iterable[Metric]:
        source = GaugeMetricFamily(
            "pointsman_index_map_source",
            "1 for where a rank's map comes from: its events, or our own decisions (approximate).",
            labels=["worker", "rank", "source"],
        )
        guessed = GaugeMetricFamily(
            "pointsman_index_approximate_blocks",
            "Blocks that only our own decisions vouch for.",
            labels=["worker", "rank"],
        )
        for worker, rank, now, _, _, blocks in self._maps.rows() if self._maps is not None else ():
            for one in (EVENTS, APPROXIMATE):
                source.add_metric([worker, str(rank), one], float(one == now))
            guessed.add_metric([worker, str(rank)], blocks)
        yield source
        yield guessed
