# SPDX-License-Identifier: Apache-2.0
"""Plans whose reports may still come, and what is held against whom for them so far.

The engine's total of cached tokens comes with the answer, the report before or after it. Whichever comes first is
believed until the other says more: then trust is corrected by the difference.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from router.decisions.record import DecisionRecord, Observation, PrefillRecord
from router.decisions.reports_evidence import PlanFacts, Shares, shares
from router.decisions.trust import Trust


@dataclass(slots=True)
class Awaited:
    """One plan that was sent to a worker."""

    record: DecisionRecord
    leg: PrefillRecord | None = None
    """The plan is that of the prefill leg."""
    facts: PlanFacts | None = None
    """None where nothing is learnt of it: the client gave parameters of its own, or blocks are handed over."""
    revision: int = -1
    """Of the report that is known; -1 before the first."""
    evicted_blocks: int = 0
    cached_tokens: int | None = None
    reported: Shares | None = None
    held: Shares = field(default_factory=dict)
    """What trust has been told."""

    @property
    def observed(self) -> Observation:
        return self.leg.observed if self.leg is not None else self.record.observed

    @property
    def worker(self) -> str:
        return self.leg.worker if self.leg is not None else self.record.worker


class AwaitedPlans:
    """By plan id, the last ``capacity`` of them. All operations are O(1)."""

    def __init__(self, capacity: int, trust: Trust) -> None:
        self._capacity = capacity
        self._trust = trust
        self._plans: OrderedDict[str, Awaited] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def expect(self, plan_id: str, awaited: Awaited) -> None:
        """A plan went to a worker."""
        self._plans[plan_id] = awaited
        if len(self._plans) > self._capacity:
            self._plans.popitem(last=False)

    def find(self, plan_id: str) -> Awaited | None:
        return self._plans.get(plan_id)

    def counted(self, plan_id: str, facts: PlanFacts, cached_tokens: int, now_s: float) -> None:
        """The engine's total of cached tokens is known."""
        awaited = self._plans.get(plan_id)
        if awaited is None:
            self._tell(shares(facts, cached_tokens, None), {}, now_s)
        else:
            awaited.cached_tokens = cached_tokens
            self._judge(awaited, facts, now_s)

    def reported(self, awaited: Awaited, of_peers: Shares, now_s: float) -> None:
        """A report says what came from each peer."""
        awaited.reported = of_peers
        if awaited.facts is not None:
            self._judge(awaited, awaited.facts, now_s)

    def _judge(self, awaited: Awaited, facts: PlanFacts, now_s: float) -> None:
        found = shares(facts, awaited.cached_tokens, awaited.reported)
        self._tell(found, awaited.held, now_s)
        awaited.held = found

    def _tell(self, found: Shares, held: Shares, now_s: float) -> None:
        for worker in {**held, **found}:
            after = found.get(worker, (0, 0))
            before = held.get(worker)
            if before is None:
                self._trust.observe(worker, *after, now_s)
            elif after != before:
                self._trust.correct(worker, before, after, now_s)
