# SPDX-License-Identifier: Apache-2.0
"""Learns the constants of the cost model from observed times. Pure: time is an argument.

Every constant is its prior times two scale factors: one of the whole fleet and one of the worker or of the
(source, destination). The logarithms of the factors are the state of an extended Kalman filter whose measurements
are the logarithms of times to first token and of the times that answers took after it; the slope of a factor is the
share of the prediction that it scales. Through the fleet's factors all links learn from each other; a link or worker
that is not like the rest departs from them. Covariances between owners are not kept, so the intervals are somewhat
too narrow. How one observation is taken in: ``router.costs.filter``.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from router.costs.calibration_state import (
    CalibrationState,
    ScalesState,
    dump_scales,
    load_scales,
    prior_constants,
    show_constants,
)
from router.costs.doubts import pull_variance, tier_variances
from router.costs.estimate import estimate, estimate_decode
from router.costs.filter import learn_decode, learn_failed_pull, learn_ttft
from router.costs.model import CostChanges, CostModel, Doubts, Link
from router.costs.observation import (
    LINK_TERMS,
    WORKER_TERMS,
    DecodeObservation,
    Observation,
    PullObservation,
    TierObservation,
    prior_seconds,
)
from router.costs.owners import Owners
from router.costs.profile import CostProfile, constants
from router.costs.reported import learn_pull, learn_tier
from router.costs.scaled import scaled_link, scaled_profile
from router.costs.scales import LogScales, factors

_MOST_QUEUE = 0.5
_MOST_PREFILL = 0.5
_FEWEST_TOKENS = 8
_AS_PLANNED = 0.01  # of the prompt: a block more or less of a long one changes no term


class Calibration:
    """Constants of every worker and link. Memory: O(workers + links observed in the last 25 minutes)."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.observations = 0
        """Times to first token that were learnt from."""
        self.decode_observations = 0
        self.reported = 0
        """Pulls and loads that engine extensions measured."""
        self.skipped: Counter[str] = Counter()
        """Observations that said nothing about the constants, by reason."""
        self._owners = Owners()
        self._models: dict[str, CostModel] = {}
        self._pulls: dict[tuple[str, str], Link] = {}
        self._watches: list[CostChanges] = []
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
            own = self._owners.links.get(pair)
            if own is None:
                return self._fleet_pull
            own.mark()
            pull = self._pulls[pair] = scaled_link(self.profile, factors(self._owners.fleet_links, own))
        return pull

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        """Standard deviations of the log seconds of loads; a few microseconds."""
        ram, storage = tier_variances(self._owners, worker)
        peer = 0.0
        if source is not None and peer_s > 0:
            lookup = min(self.link(source, worker).lookup_s / peer_s, 1.0)
            peer = pull_variance(self._owners, (source, worker), lookup)
        return Doubts(math.sqrt(ram), math.sqrt(peer), math.sqrt(storage))

    def watch(self) -> CostChanges:
        """See ``WatchedCosts``; kept up as long as this calibration lives."""
        changes = CostChanges()
        changes.links.update(self._owners.links)
        self._watches.append(changes)
        return changes

    # What observing changes

    def observe(self, seen: Observation, now_s: float) -> None:
        """Learn from a time to first token. O(1), some tens of microseconds; ``now_s`` does not go back."""
        if seen.peer_tokens and seen.source is None:
            self.skipped["handed_over"] += 1  # by a prefill worker, whose own time is part of it
            return
        extra_tokens = seen.cached_tokens - seen.planned_cached_tokens
        as_planned = abs(extra_tokens) <= _AS_PLANNED * seen.prompt_tokens
        failed = seen.source is not None and extra_tokens < 0 and not as_planned
        if not as_planned and not failed:
            # The engine took another path than the one whose terms are known.
            self.skipped["stale_plan"] += 1
            return
        self._relax_some(now_s)
        owners = self._owners
        worker = owners.worker(seen.worker, now_s)
        link = owners.link(seen.source, seen.worker, now_s) if seen.source and seen.peer_tokens else None
        if link is not None and seen.source is not None and (seen.source, seen.worker) not in self._pulls:
            self._drop((seen.source, seen.worker))  # from now on it is not like the rest
        expected = estimate(
            prior_seconds(self.profile, seen),
            seen.queue_s,
            factors(owners.fleet, worker),
            factors(owners.fleet_links, link),
        )
        if failed:
            self.skipped["failed_pull"] += 1
            if link is not None:
                learn_failed_pull(expected, link, seen.ttft_s)
        elif seen.queue_s > _MOST_QUEUE * expected.ttft_s:
            # Mostly the sum of what was predicted for others, whose errors show when they answer.
            self.skipped["long_queue"] += 1
            return
        else:
            self.observations += 1
            links = [] if link is None else [owners.fleet_links, link]
            learn_ttft(expected, [owners.fleet, worker], links, seen.queue_s, seen.ttft_s)
        self._publish(seen.worker, worker, seen.source, link)

    def observe_decode(self, seen: DecodeObservation, now_s: float) -> None:
        """Learn from the time of an answer after its first token. O(1); ``now_s`` does not go back."""
        if seen.output_tokens < _FEWEST_TOKENS:
            self.skipped["short_answer"] += 1
            return
        self._relax_some(now_s)
        fleet, worker = self._owners.fleet, self._owners.worker(seen.worker, now_s)
        expected = estimate_decode(self.profile, seen, factors(fleet, worker))
        if seen.prefill_s > _MOST_PREFILL * expected.decode_s:
            # Mostly the prefills of others.
            self.skipped["beside_prefills"] += 1
            return
        self.decode_observations += 1
        learn_decode(expected, [fleet, worker], seen.output_tokens - 1, seen.prefill_s, seen.decode_s)
        self._publish(seen.worker, worker)

    def observe_pull(self, seen: PullObservation, now_s: float) -> None:
        """Learn from the parts of a pull, as an engine extension reported them. O(1); ``now_s`` does not go back."""
        if seen.lookup_s is None and seen.transfer_s is None and not seen.failed:
            return
        self._relax_some(now_s)
        owners, pair = self._owners, (seen.source, seen.worker)
        worker, link = owners.worker(seen.worker, now_s), owners.link(*pair, now_s)
        if pair not in self._pulls:
            self._drop(pair)  # from now on it is not like the rest
        if learn_pull(self.profile, seen, owners.fleet_links, link):
            self.reported += 1
            self._publish(seen.worker, worker, seen.source, link)

    def observe_tier(self, seen: TierObservation, now_s: float) -> None:
        """Learn from a promotion or a read from storage, as an engine extension reported it. O(1)."""
        self._relax_some(now_s)
        fleet, worker = self._owners.fleet, self._owners.worker(seen.worker, now_s)
        if learn_tier(self.profile, seen, fleet, worker):
            self.reported += 1
            self._publish(seen.worker, worker)

    def forget(self, worker: str) -> None:
        """The worker left the fleet."""
        pairs = self._owners.forget(worker)
        self._drop(worker, *pairs)

    # What is shown and kept

    def snapshot(self) -> dict[str, Any]:
        """Prior, fit, n and 95 % interval of every constant, as plain values."""
        owners = self._owners
        worker_priors, link_priors = prior_constants(self.profile)
        return {
            "observations": self.observations,
            "decode_observations": self.decode_observations,
            "reported": self.reported,
            "skipped": dict(self.skipped),
            "fleet": show_constants(worker_priors, [owners.fleet])
            | show_constants(link_priors, [owners.fleet_links]),
            "workers": {
                name: show_constants(worker_priors, [owners.fleet, own])
                for name, own in sorted(owners.workers.items())
            },
            "links": [
                {"source": source, "destination": destination}
                | show_constants(link_priors, [owners.fleet_links, own])
                for (source, destination), own in sorted(owners.links.items())
            ],
        }

    @property
    def revision(self) -> int:
        """Grows with all that is learnt."""
        return self.observations + self.decode_observations + self.reported + self.skipped["failed_pull"]

    def dump(self, now_s: float) -> CalibrationState:
        """Everything learnt, in a form that survives the process; ages are relative to ``now_s``.

        About a microsecond per worker and link; what it returns does not change afterwards.
        """
        owners = self._owners
        return CalibrationState(
            profile=self.profile,
            observations=self.observations,
            decode_observations=self.decode_observations,
            fleet=dump_scales(owners.fleet, now_s),
            fleet_links=dump_scales(owners.fleet_links, now_s),
            workers={name: dump_scales(own, now_s) for name, own in owners.workers.items()},
            links=[(*pair, dump_scales(own, now_s)) for pair, own in owners.links.items()],
        )

    def dump_fleet(self, now_s: float) -> tuple[ScalesState, ScalesState]:
        """What was learnt of the fleet: of workers, of links."""
        owners = self._owners
        return dump_scales(owners.fleet, now_s), dump_scales(owners.fleet_links, now_s)

    def dump_worker(self, name: str, now_s: float) -> ScalesState | None:
        """A worker's own factors; None where it is like the rest."""
        own = self._owners.workers.get(name)
        return dump_scales(own, now_s) if own is not None else None

    def dump_link(self, source: str, destination: str, now_s: float) -> ScalesState | None:
        """A link's own factors; None where it is like the rest."""
        own = self._owners.links.get((source, destination))
        return dump_scales(own, now_s) if own is not None else None

    def load(self, state: CalibrationState, now_s: float) -> bool:
        """Go on from ``state``; False, and nothing changed, when it was learnt over other constants or formulas.

        A ``now_s`` before the present lets the time between pass.
        """
        same = constants(state.profile) == constants(self.profile)
        if not same or not state.fits(len(WORKER_TERMS), len(LINK_TERMS)):
            return False
        owners = self._owners
        self.observations = state.observations
        self.decode_observations = state.decode_observations
        load_scales(owners.fleet, state.fleet, now_s)
        load_scales(owners.fleet_links, state.fleet_links, now_s)
        for name, kept in state.workers.items():
            load_scales(owners.worker(name, now_s), kept, now_s)
        for source, destination, kept in state.links:
            load_scales(owners.link(source, destination, now_s), kept, now_s)
        self._publish_fleet()
        return True

    # What planning is given

    def _build_model(self, worker: str) -> CostModel:
        own = self._owners.workers.get(worker)
        if own is None:
            return self._fleet_model
        own.mark()
        return CostModel(scaled_profile(self.profile, factors(self._owners.fleet, own), self._fleet_pull))

    def _publish(
        self, name: str, worker: LogScales, source: str | None = None, link: LogScales | None = None
    ) -> None:
        """Drop the models whose constants have moved; planning builds them again when it asks."""
        if self._owners.fleet.moved() or self._owners.fleet_links.moved():
            self._publish_fleet()
            return
        if worker.moved():
            self._drop(name)
        if link is not None and source is not None and link.moved():
            self._drop((source, name))

    def _drop(self, *keys: str | tuple[str, str]) -> None:
        """What planning was given for these workers and links is no longer current."""
        for key in keys:
            if isinstance(key, str):
                self._models.pop(key, None)
            else:
                self._pulls.pop(key, None)
        for changes in self._watches:
            for key in keys:
                if isinstance(key, str):
                    changes.workers.add(key)
                else:
                    changes.links.add(key)

    def _publish_fleet(self) -> None:
        """The fleet's factors moved, and everything is made of them. Rare once they have settled."""
        owners = self._owners
        owners.fleet.mark()
        owners.fleet_links.mark()
        self._models.clear()
        self._pulls.clear()
        self._fleet_pull = scaled_link(self.profile, factors(owners.fleet_links, None))
        self._fleet_model = CostModel(
            scaled_profile(self.profile, factors(owners.fleet, None), self._fleet_pull)
        )
        for changes in self._watches:
            changes.everything = True
            changes.links.update(owners.links)

    def _relax_some(self, now_s: float) -> None:
        self._drop(*self._owners.relax_some(now_s))
