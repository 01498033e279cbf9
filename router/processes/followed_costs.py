# SPDX-License-Identifier: Apache-2.0
"""The constants in a process that serves: learnt by the keeper from what all processes observe."""

from __future__ import annotations

from collections.abc import Callable

from router.costs.calibration import Calibration
from router.costs.calibration_state import ScalesState, load_scales
from router.costs.observation import (
    LINK_TERMS,
    WORKER_TERMS,
    DecodeObservation,
    Observation,
    PullObservation,
    TierObservation,
)
from router.costs.profile import CostProfile
from router.processes.seen import DecodeSeen, PullSeen, TierSeen, TtftSeen

CostsSeen = TtftSeen | DecodeSeen | PullSeen | TierSeen


class FollowedCalibration(Calibration):
    """Observations go to the keeper, its factors come back; planning is asked and told as by any calibration."""

    def __init__(
        self, profile: CostProfile, tell: Callable[[CostsSeen], object], monotonic_s: Callable[[], float]
    ) -> None:
        super().__init__(profile)
        self._tell = tell
        self._monotonic_s = monotonic_s

    def observe(self, seen: Observation, now_s: float) -> None:
        self._tell(TtftSeen(seen, now_s))

    def observe_decode(self, seen: DecodeObservation, now_s: float) -> None:
        self._tell(DecodeSeen(seen, now_s))

    def observe_pull(self, seen: PullObservation, now_s: float) -> None:
        self._tell(PullSeen(seen, now_s))

    def observe_tier(self, seen: TierObservation, now_s: float) -> None:
        self._tell(TierSeen(seen, now_s))

    def put_fleet(self, workers: ScalesState, links: ScalesState) -> None:
        """The fleet's factors have moved."""
        if workers.fits(len(WORKER_TERMS)) and links.fits(len(LINK_TERMS)):
            now_s = self._monotonic_s()
            load_scales(self._owners.fleet, workers, now_s)
            load_scales(self._owners.fleet_links, links, now_s)
            self._publish_fleet()

    def put_worker(self, name: str, state: ScalesState | None) -> None:
        """A worker's own factors; None: it is like the rest."""
        if state is None:
            self._owners.workers.pop(name, None)
        elif state.fits(len(WORKER_TERMS)):
            now_s = self._monotonic_s()
            own = self._owners.worker(name, now_s)
            load_scales(own, state, now_s)
            if name in self._models and not own.moved():
                return
        self._drop(name)

    def put_link(self, source: str, destination: str, state: ScalesState | None) -> None:
        """A link's own factors; None: it is like the rest."""
        pair = (source, destination)
        if state is None:
            self._owners.links.pop(pair, None)
        elif state.fits(len(LINK_TERMS)):
            now_s = self._monotonic_s()
            own = self._owners.link(source, destination, now_s)
            load_scales(own, state, now_s)
            if pair in self._pulls and not own.moved():
                return
        self._drop(pair)
