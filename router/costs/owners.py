# SPDX-License-Identifier: Apache-2.0
"""Whose factors are learnt: the fleet, its workers and its links. Pure: time is an argument."""

from __future__ import annotations

from typing import TypeVar

from router.costs.observation import LINK_TERMS, WORKER_TERMS
from router.costs.scales import LogScales

_FLEET = 1.4**2  # a profile is wrong by a factor of four, sometimes more
_EXPONENT = 0.7**2  # how links are shared is known better
_WORKER = 0.3**2  # workers of one fleet are mostly alike
_LINK = 0.7**2  # links less so: same host, same rack, congestion
FLEET_VARIANCES = (_FLEET,) * len(WORKER_TERMS)
FLEET_LINK_VARIANCES = tuple(_EXPONENT if term == "share" else _FLEET for term in LINK_TERMS)
WORKER_VARIANCES = (_WORKER,) * len(WORKER_TERMS)
LINK_VARIANCES = tuple(0.0 if term == "share" else _LINK for term in LINK_TERMS)
"""Several pulls at once are too rare on one link to learn its own exponent."""

_FLEET_RELAX_S = 7 * 86400.0
_WORKER_RELAX_S = 1800.0
_LINK_RELAX_S = 300.0  # by when a link that was slow is worth another try
_ROUND_S = 10.0
_PER_OBSERVATION = 4
_FORGET_AFTER = 5.0  # time constants, after which nothing is left of what was learnt

Pair = tuple[str, str]
"""(source, destination)."""
_K = TypeVar("_K", str, Pair)


class Owners:
    """Factors of all of them. Memory: O(workers + links observed in the last 25 minutes)."""

    def __init__(self) -> None:
        self.fleet = LogScales(FLEET_VARIANCES, _FLEET_RELAX_S)
        self.fleet_links = LogScales(FLEET_LINK_VARIANCES, _FLEET_RELAX_S)
        self.workers: dict[str, LogScales] = {}
        self.links: dict[Pair, LogScales] = {}
        self._round: list[str | Pair] = []
        self._round_s: float | None = None

    def worker(self, name: str, now_s: float) -> LogScales:
        """The worker's own factors, as they are now; made where there are none."""
        found = self.workers.get(name)
        if found is None:
            found = self.workers[name] = LogScales(WORKER_VARIANCES, _WORKER_RELAX_S, now_s)
        found.relax(now_s)
        return found

    def link(self, source: str, destination: str, now_s: float) -> LogScales:
        """The pair's own factors, as they are now; made where there are none."""
        found = self.links.get((source, destination))
        if found is None:
            found = self.links[source, destination] = LogScales(LINK_VARIANCES, _LINK_RELAX_S, now_s)
        found.relax(now_s)
        return found

    def forget(self, worker: str) -> list[Pair]:
        """The worker left the fleet; returns the links that went with it."""
        self.workers.pop(worker, None)
        pairs = [pair for pair in self.links if worker in pair]
        for pair in pairs:
            del self.links[pair]
        return pairs

    def relax_some(self, now_s: float) -> list[str | Pair]:
        """Those that are not observed return to the fleet's factors too, and are forgotten in the end.

        A round starts every ten seconds and each call does a few of it, so that none is slow. Returns those whose
        factors have moved since planning was given them.
        """
        if not self._round:
            if self._round_s is not None and now_s - self._round_s < _ROUND_S:
                return []
            self._round_s = now_s
            self._round = [*self.workers, *self.links]
            self.fleet.relax(now_s)
            self.fleet_links.relax(now_s)
        moved: list[str | Pair] = []
        for _ in range(min(_PER_OBSERVATION, len(self._round))):
            key = self._round.pop()
            changed = (
                _relax(key, self.workers, now_s) if isinstance(key, str) else _relax(key, self.links, now_s)
            )
            if changed:
                moved.append(key)
        return moved


def _relax(key: _K, owners: dict[_K, LogScales], now_s: float) -> bool:
    own = owners.get(key)
    if own is None:
        return False
    own.relax(now_s)
    if own.idle(now_s) > _FORGET_AFTER:
        del owners[key]
        return True
    return own.moved()
