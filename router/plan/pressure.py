# SPDX-License-Identifier: Apache-2.0
"""What a GPU second costs the requests that come after: more, the busier the fleet is.

A second of work put on a busy worker delays everyone who arrives before that worker is idle again: in a queue with
Poisson arrivals these are on average rho / (1 - rho) requests, rho being the share of time it is busy (the mean length
of a busy period over that of a service, times rho; Kleinrock, Queueing Systems I, section 5.8). Arrivals see time
averages, so the share of busy ranks that decisions find, smoothed, is rho. An idle fleet may so spread and recompute
freely, while a busy one is kept from computing twice what it holds.
"""

from __future__ import annotations

MOST = 3.0
"""Nobody waits behind a worker for ever: requests leave for others, so the weight is bounded."""
_MEMORY = 0.02


class Pressure:
    """Share of busy ranks, smoothed over some fifty decisions. O(1)."""

    def __init__(self) -> None:
        self._busy_share: float | None = None

    def observe(self, busy: int, ranks: int) -> None:
        """A decision finds ``busy`` of ``ranks`` ranks with prefills under way."""
        share = busy / ranks
        before = share if self._busy_share is None else self._busy_share
        self._busy_share = before + _MEMORY * (share - before)

    @property
    def weight(self) -> float:
        """Seconds that a GPU second costs the others; 0 for an idle fleet."""
        rho = self._busy_share or 0.0
        return MOST if rho >= MOST / (1 + MOST) else rho / (1 - rho)
