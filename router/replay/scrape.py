# SPDX-License-Identifier: Apache-2.0
"""The engines' gauges as a router that polls them sees them.

vLLM sets its gauges when a step ends, so a request that came during a long prefill step does not show before that;
and a poll is up to one interval old. Rules that place by such gauges send everything that comes in between to the
same place.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_ext.sim.output import SimMetrics
from router.plan.peers import Gauges

SCRAPE_INTERVAL_S = 0.05
"""Default of llm-d-router's ``--refresh-metrics-interval``."""

_IDLE = Gauges(0, 0.0)


class Scraper:
    """What the last poll of each worker saw."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._gauges: dict[str, Gauges] = {}
        self._polled: dict[str, tuple[float, Gauges]] = {}

    def step_ended(self, worker: str, metrics: SimMetrics) -> None:
        """The engine sets its gauges."""
        self._gauges[worker] = Gauges(metrics.waiting, metrics.kv_cache_usage)

    def __call__(self, worker: str) -> Gauges:
        now_s = self._now_s()
        polled = self._polled.get(worker)
        if polled is None or now_s - polled[0] >= SCRAPE_INTERVAL_S:
            polled = self._polled[worker] = now_s, self._gauges.get(worker, _IDLE)
        return polled[1]
