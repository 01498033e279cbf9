# SPDX-License-Identifier: Apache-2.0
"""What the keeper does with what serving processes observed: the same as a single process with its own."""

from __future__ import annotations

import logging
from array import array

from indexer.identity import Namespace
from router.costs.calibration import Calibration
from router.decisions.trust import Trust
from router.fleet.fleet import Fleet
from router.map_sources import Maps
from router.plan.decider import Prompts
from router.processes.metric_sums import MetricTotals
from router.processes.publisher import Publisher
from router.processes.seen import (
    Batch,
    BlocksMadeSeen,
    Counted,
    DecodeSeen,
    OutcomeSeen,
    PullSeen,
    Seen,
    SentSeen,
    TierSeen,
    TrustSeen,
    TtftSeen,
)
from router.silence import BlockMakers

_log = logging.getLogger(__name__)


class Observations:
    """Implements ``feed.Takes``. Times of several processes may come out of order: they count as of the latest."""

    def __init__(
        self,
        fleet: Fleet,
        trust: Trust,
        calibration: Calibration | None,
        block_makers: BlockMakers,
        maps: Maps,
        publisher: Publisher,
        totals: MetricTotals,
    ) -> None:
        self._fleet = fleet
        self._trust = trust
        self._calibration = calibration
        self._block_makers = block_makers
        self._maps = maps
        self._publisher = publisher
        self._totals = totals
        self._latest_s = 0.0
        self.dropped = 0
        """Observations that processes could not tell."""

    def take(self, batch: Batch) -> None:
        self.dropped += batch.dropped
        for seen in batch.seen:
            try:
                self._take(seen)
            except Exception:
                # What is learnt from one must not end what is learnt from all.
                _log.exception("an observation could not be taken in")

    def counted(self, process: int, told: Counted) -> None:
        self._totals.add(process, told.families)

    def left(self, process: int) -> None:
        self._totals.forget(process)

    def _take(self, seen: Seen) -> None:
        match seen:
            case OutcomeSeen(worker, outcome, at_s):
                self._fleet.record_outcome(worker, outcome, at_s)
            case BlocksMadeSeen(worker, sent_at_s):
                if self._fleet.get(worker) is not None:
                    self._block_makers.made(worker, sent_at_s)
            case SentSeen():
                self._sent(seen)
            case TrustSeen(worker, before, after, at_s):
                self._take_trust(worker, before, after, self._at(at_s))
            case TtftSeen() | DecodeSeen() | PullSeen() | TierSeen():
                self._learn(seen, self._at(seen.at_s))

    def _sent(self, seen: SentSeen) -> None:
        status = self._fleet.get(seen.worker)
        if status is not None:
            token_ids = [array("I", ids) for ids in seen.token_ids]
            prompts = Prompts(token_ids, Namespace(seen.model, seen.lora), seen.cache_salt)
            self._maps.sent(status, seen.dp_rank, prompts)

    def _take_trust(
        self, worker: str, before: tuple[int, int] | None, after: tuple[int, int], now_s: float
    ) -> None:
        if self._fleet.get(worker) is None:
            return
        if before is None:
            self._trust.observe(worker, *after, now_s)
        else:
            self._trust.correct(worker, before, after, now_s)

    def _learn(self, told: TtftSeen | DecodeSeen | PullSeen | TierSeen, now_s: float) -> None:
        calibration = self._calibration
        if calibration is None or self._fleet.get(told.seen.worker) is None:
            return
        source = None
        match told:
            case TtftSeen(seen):
                source = seen.source if seen.peer_tokens else None
                calibration.observe(seen, now_s)
            case DecodeSeen(decode):
                calibration.observe_decode(decode, now_s)
            case PullSeen(pull):
                source = pull.source
                calibration.observe_pull(pull, now_s)
            case TierSeen(tier):
                calibration.observe_tier(tier, now_s)
        self._publisher.observed(told.seen.worker, source)

    def _at(self, at_s: float) -> float:
        self._latest_s = max(self._latest_s, at_s)
        return self._latest_s
