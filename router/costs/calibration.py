# SPDX-License-Identifier: Apache-2.0
"""Learns the constants of the cost model from observed times to first token. Pure: time is an argument.

Every constant is its prior times two scale factors: one of the whole fleet and one of the worker or of the
(source, destination). The logarithms of the factors are the state of an extended Kalman filter whose measurement is
the logarithm of a time to first token; the slope of a factor is the share of the prediction that it scales. Through
the fleet's factors all links learn from each other; a link or worker that is not like the rest departs from them.
Covariances between owners are not kept, so the intervals are somewhat too narrow.

Robust in two ways: a surprise counts for at most two standard deviations, so one outlier moves little; three large
surprises of one direction in a row mean that the worker or link has changed, and its variance is raised again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from router.costs.calibration_state import (
    CalibrationState,
    dump_scales,
    load_scales,
    prior_constants,
    show_constants,
)
from router.costs.estimate import Estimate, estimate
from router.costs.model import CostModel, Link
from router.costs.observation import LINK_TERMS, WORKER_TERMS, Observation, prior_seconds
from router.costs.profile import CostProfile
from router.costs.scaled import scaled_link, scaled_profile
from router.costs.scales import LogScales, factors

_FLEET_VARIANCE = 1.4**2  # a profile is wrong by a factor of four, sometimes more
_WORKER_VARIANCE = 0.3**2  # workers of one fleet are mostly alike
_LINK_VARIANCE = 0.7**2  # links less so: same host, same rack, congestion
_FLEET_RELAX_S = 7 * 86400.0
_WORKER_RELAX_S = 1800.0
_LINK_RELAX_S = 300.0  # by when a link that was slow is worth another try
_NOISE = 0.15  # relative standard deviation of a time to first token on an idle worker
_CLIP = 2.0
_SURPRISE = 3.0
_RUN = 3
_MOST_QUEUE = 0.5
_AS_PLANNED = 0.01  # of the prompt: a block more or less of a long one changes no term
_BLAMES_LINK = 0.3
_FAILED_PULL = math.log(4.0)
_ROUND_S = 10.0
_PER_OBSERVATION = 4
_FORGET_AFTER = 5.0  # time constants, after which nothing is left of what was learnt
_K = TypeVar("_K")
_P = TypeVar("_P")
_Owners = Sequence[tuple[LogScales, list[float]]]


class Calibration:
    """Constants of every worker and link. Memory: O(workers + links observed in the last 25 minutes)."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.observations = 0
        self.skipped: Counter[str] = Counter()
        """Observations that said nothing about the constants, by reason."""
        self._fleet = LogScales(_FLEET_VARIANCE, len(WORKER_TERMS), _FLEET_RELAX_S)
        self._fleet_links = LogScales(_FLEET_VARIANCE, len(LINK_TERMS), _FLEET_RELAX_S)
        self._workers: dict[str, LogScales] = {}
        self._links: dict[tuple[str, str], LogScales] = {}
        self._models: dict[str, CostModel] = {}
        self._pulls: dict[tuple[str, str], Link] = {}
        self._round: list[str | tuple[str, str]] = []
        self._round_s: float | None = None
        self._publish_fleet()

    # What planning asks

    def model_for(self, worker: str) -> CostModel:
        """The formulas with the worker's constants; O(1), and rebuilt only when they have moved by a percent."""
        model = self._models.get(worker)
        if model is None:
            model = self._models[worker] = self._build_model(worker)
        return model

    def link(self, source: str, destination: str) -> Link:
        """The constants of pulls from ``source`` to ``destination``; O(1)."""
        pair = (source, destination)
        pull = self._pulls.get(pair)
        if pull is None:
            own = self._links.get(pair)
            if own is None:
                return self._fleet_pull
            own.mark()
            pull = self._pulls[pair] = scaled_link(self.profile, factors(self._fleet_links, own))
        return pull

    # What observing changes

    def observe(self, seen: Observation, now_s: float) -> None:
        """Learn from one request. O(1), some tens of microseconds; ``now_s`` does not go back."""
        extra_tokens = seen.cached_tokens - seen.planned_cached_tokens
        as_planned = abs(extra_tokens) <= _AS_PLANNED * seen.prompt_tokens
        failed = seen.source is not None and extra_tokens < 0 and not as_planned
        if not as_planned and not failed:
            # The engine took another path than the one whose terms are known.
            self.skipped["stale_plan"] += 1
            return
        self._relax_some(now_s)
        worker = self._worker(seen.worker, now_s)
        link = self._link(seen.source, seen.worker, now_s) if seen.source and seen.peer_tokens else None
        expected = estimate(
            prior_seconds(self.profile, seen),
            seen.queue_s,
            factors(self._fleet, worker),
            factors(self._fleet_links, link),
        )
        if failed:
            self.skipped["failed_pull"] += 1
            if link is not None:
                _learn_failed_pull(expected, link, seen.ttft_s)
        elif seen.queue_s > _MOST_QUEUE * expected.ttft_s:
            # Mostly the sum of what was predicted for others, whose errors show when they answer.
            self.skipped["long_queue"] += 1
            return
        else:
            self.observations += 1
            self._learn(expected, worker, link, seen)
        self._publish(seen, worker, link)

    def forget(self, worker: str) -> None:
        """The worker left the fleet."""
        self._workers.pop(worker, None)
        self._models.pop(worker, None)
        for pair in [pair for pair in self._links if worker in pair]:
            del self._links[pair]
            self._pulls.pop(pair, None)

    # What is shown and kept

    def snapshot(self) -> dict[str, Any]:
        """Prior, fit, n and 95 % interval of every constant, as plain values."""
        worker_priors, link_priors = prior_constants(self.profile)
        return {
            "observations": self.observations,
            "skipped": dict(self.skipped),
            "fleet": show_constants(worker_priors, [self._fleet])
            | show_constants(link_priors, [self._fleet_links]),
            "workers": {
                name: show_constants(worker_priors, [self._fleet, own])
                for name, own in sorted(self._workers.items())
            },
            "links": [
                {"source": source, "destination": destination}
                | show_constants(link_priors, [self._fleet_links, own])
                for (source, destination), own in sorted(self._links.items())
            ],
        }

    def dump(self, now_s: float) -> CalibrationState:
        """Everything learnt, in a form that survives the process; ages are relative to ``now_s``."""
        return CalibrationState(
            profile=self.profile,
            observations=self.observations,
            fleet=dump_scales(self._fleet, now_s),
            fleet_links=dump_scales(self._fleet_links, now_s),
            workers={name: dump_scales(own, now_s) for name, own in self._workers.items()},
            links=[(*pair, dump_scales(own, now_s)) for pair, own in self._links.items()],
        )

    def load(self, state: CalibrationState, now_s: float) -> bool:
        """Go on from ``state``; False, and nothing changed, when it was learnt over another profile or model."""
        if state.profile != self.profile or not state.fits(len(WORKER_TERMS), len(LINK_TERMS)):
            return False
        self.observations = state.observations
        load_scales(self._fleet, state.fleet, now_s)
        load_scales(self._fleet_links, state.fleet_links, now_s)
        for name, kept in state.workers.items():
            load_scales(self._worker(name, now_s), kept, now_s)
        for source, destination, kept in state.links:
            load_scales(self._link(source, destination, now_s), kept, now_s)
        self._publish_fleet()
        return True

    def _learn(
        self, expected: Estimate, worker: LogScales, link: LogScales | None, seen: Observation
    ) -> None:
        innovation = math.log(max(seen.ttft_s, 1e-6) / expected.ttft_s)
        owners = [(self._fleet, expected.worker_slope), (worker, expected.worker_slope)]
        if link is not None:
            owners += [(self._fleet_links, expected.link_slope), (link, expected.link_slope)]
        queue_share = seen.queue_s / expected.ttft_s
        # The step that runs when a request comes must end first: half a step of jitter.
        step_share = expected.step_s / expected.ttft_s / 2
        noise = _NOISE**2 + queue_share**2 + step_share**2
        blamed = link if link is not None and sum(expected.link_slope) > _BLAMES_LINK else worker
        _correct(owners, innovation, noise, blamed)

    def _worker(self, name: str, now_s: float) -> LogScales:
        found = self._workers.get(name)
        if found is None:
            found = LogScales(_WORKER_VARIANCE, len(WORKER_TERMS), _WORKER_RELAX_S, now_s)
            self._workers[name] = found
        found.relax(now_s)
        return found

    def _link(self, source: str, destination: str, now_s: float) -> LogScales:
        found = self._links.get((source, destination))
        if found is None:
            found = LogScales(_LINK_VARIANCE, len(LINK_TERMS), _LINK_RELAX_S, now_s)
            self._links[source, destination] = found
        found.relax(now_s)
        return found

    def _build_model(self, worker: str) -> CostModel:
        own = self._workers.get(worker)
        if own is None:
            return self._fleet_model
        own.mark()
        return CostModel(scaled_profile(self.profile, factors(self._fleet, own), self._fleet_pull))

    def _publish(self, seen: Observation, worker: LogScales, link: LogScales | None) -> None:
        """Drop the models whose constants have moved; planning builds them again when it asks."""
        if self._fleet.moved() or self._fleet_links.moved():
            self._publish_fleet()
            return
        if worker.moved():
            self._models.pop(seen.worker, None)
        if link is not None and seen.source is not None and link.moved():
            self._pulls.pop((seen.source, seen.worker), None)

    def _publish_fleet(self) -> None:
        """The fleet's factors moved, and everything is made of them. Rare once they have settled."""
        self._fleet.mark()
        self._fleet_links.mark()
        self._models.clear()
        self._pulls.clear()
        self._fleet_pull = scaled_link(self.profile, factors(self._fleet_links, None))
        self._fleet_model = CostModel(
            scaled_profile(self.profile, factors(self._fleet, None), self._fleet_pull)
        )

    def _relax_some(self, now_s: float) -> None:
        """Those that are not observed return to the fleet's constants too, and are forgotten in the end.

        A round starts every ten seconds and takes a few of them per observation, so that none is slow.
        """
        if not self._round:
            if self._round_s is not None and now_s - self._round_s < _ROUND_S:
                return
            self._round_s = now_s
            self._round = [*self._workers, *self._links]
            self._fleet.relax(now_s)
            self._fleet_links.relax(now_s)
        for _ in range(min(_PER_OBSERVATION, len(self._round))):
            key = self._round.pop()
            if isinstance(key, str):
                _relax(key, self._workers, self._models, now_s)
            else:
                _relax(key, self._links, self._pulls, now_s)


def _relax(key: _K, owners: dict[_K, LogScales], published: dict[_K, _P], now_s: float) -> None:
    own = owners.get(key)
    if own is None:
        return
    own.relax(now_s)
    over = own.idle(now_s) > _FORGET_AFTER
    if over:
        del owners[key]
    if over or own.moved():
        published.pop(key, None)


def _learn_failed_pull(expected: Estimate, link: LogScales, ttft_s: float) -> None:
    """Blocks were promised and did not come: stalled, refused or gone.

    Only the link is blamed, for the time that the rest does not explain, and at least as for a slow one.
    """
    pull_s = ttft_s - (expected.ttft_s - expected.pull_s)
    innovation = math.log(pull_s / expected.pull_s) if pull_s > 0 else 0.0
    _correct([(link, expected.pull_slope)], max(innovation, _FAILED_PULL), _NOISE**2, link)


def _correct(owners: _Owners, innovation: float, noise: float, blamed: LogScales) -> None:
    """One step of the filter over all owners of a prediction."""
    spreads = [owner.project(slope) for owner, slope in owners]
    variance = noise + sum(own_variance for _, own_variance in spreads)
    deviation = math.sqrt(variance)
    surprise = innovation / deviation
    clipped = min(max(surprise, -_CLIP), _CLIP) * deviation
    for (owner, slope), (spread, _) in zip(owners, spreads, strict=True):
        owner.correct(spread, slope, clipped, variance)
    if blamed.count_surprise(surprise, _SURPRISE) >= _RUN:
        blamed.doubt()
