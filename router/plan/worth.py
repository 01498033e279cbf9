# SPDX-License-Identifier: Apache-2.0
"""What the router knows of the worth of a request's blocks, and tells workers with our extension. Pure but for chance."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

from router.costs.model import Costs
from router.plan.candidate import Plan, Question
from router.plan.extension_plan import BlockWorth, ExtensionTerms
from router.plan.paths import leading_blocks
from router.plan.planner import most_useful
from router.plan.tails import TailReuse


class Appraiser:
    """Makes the terms of one plan. O(sources tried), some microseconds."""

    def __init__(self, costs: Costs, tails: TailReuse | None, pull_deadline_s: float) -> None:
        """``tails`` None: what prompts share is not learnt."""
        self._costs = costs
        self._tails = tails
        self._pull_deadline_s = pull_deadline_s

    def terms(
        self,
        plan: Plan,
        question: Question | None,
        kind: Hashable,
        tenant: str,
        random: Random,
    ) -> ExtensionTerms | None:
        """None for a worker without our extension. ``kind`` of the request as ``TailReuse`` has it."""
        if not plan.extension:
            return None
        return ExtensionTerms(self._pull_deadline_s, tenant, self._worth(plan, question, kind, random))

    def _worth(self, plan: Plan, question: Question | None, kind: Hashable, random: Random) -> BlockWorth:
        shared = self._tails.shared_by_all(kind) if self._tails is not None else None
        private = self._tails.shared_tokens(kind, random) if self._tails is not None else None
        rebuild_s = None
        copies = 0
        if question is not None and len(question.prompt_tokens) == 1:
            tokens = question.prompt_tokens[0]
            rebuild_s = self._costs.model_for(plan.worker).prefill_s(0, tokens, 0)
            copies = peer_copies(plan, question)
        return BlockWorth(rebuild_s, None, shared or 0, private, copies)


def peer_copies(plan: Plan, question: Question) -> int:
    """Other workers that could serve the first half of the prompt, or more, from RAM; among the sources tried."""
    size = plan.block_size_tokens
    half = question.prompt_tokens[0] // size // 2
    return len(
        {
            source.worker
            for source in most_useful(question.sources)
            if source.worker != plan.worker and leading_blocks(source.residence.ram) >= max(half, 1)
        }
    )
