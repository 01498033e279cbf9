# SPDX-License-Identifier: Apache-2.0
"""What a request would have taken at best, by what is known after it was answered. Pure.

The plans of the best few candidates are priced again with the constants that calibration has by now. The chosen
worker's counts only the blocks that really were there; of the others as many as trust lets expect. Queues and loads
stay those of the moment of the decision, so regret also holds what nobody could have known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.costs.model import Costs
from router.decisions.pricing import PlacedTokens, placed_tokens, price
from router.plan.candidate import Candidate, Plan

TRIED = 8
"""A plan further down the ranking became the best only if constants moved by more than they do in one answer."""


class Alternative(NamedTuple):
    """The best plan of one candidate at the time of the decision."""

    plan: Plan
    placed: PlacedTokens
    expected_tokens: float
    """Cached tokens that were expected to be there."""


def alternatives(kept: Sequence[Candidate], ranking: Sequence[Plan]) -> tuple[Alternative, ...]:
    """Of a request of one prompt, the chosen plan first. ``kept``: the candidates in the order of the ranking."""
    return tuple(_alternative(plan, one.trust) for one, plan in zip(kept[:TRIED], ranking, strict=False))


def regret_s(
    tried: Sequence[Alternative], prompt_tokens: int, cached_tokens: int, ttft_s: float, costs: Costs
) -> float:
    """Seconds by which ``ttft_s`` exceeds the best of ``tried``, whose first was chosen; never below 0.

    ``cached_tokens`` as the engine reported them. O(alternatives), a few microseconds each.
    """
    chosen, *others = tried
    there = without(chosen.placed, chosen.placed.total - cached_tokens)
    known = Alternative(chosen.plan, there, there.total)
    best_s = min(_total_s(one, prompt_tokens, costs) for one in (known, *others))
    return max(ttft_s - best_s, 0.0)


def without(placed: PlacedTokens, lost_tokens: int) -> PlacedTokens:
    """What is left when some were not there: missed where they were least sure."""
    left = placed._asdict()
    for place in ("peer", "storage", "ram", "hbm"):
        missed = min(left[place], max(lost_tokens, 0))
        left[place] -= missed
        lost_tokens -= missed
    return PlacedTokens(**left)


def _alternative(plan: Plan, trust: float) -> Alternative:
    placed = placed_tokens(plan.path_blocks, plan.block_size_tokens)
    source_trust = plan.source.trust if plan.source else 1.0
    return Alternative(plan, placed, trust * (placed.total - placed.peer) + source_trust * placed.peer)


def _total_s(one: Alternative, prompt_tokens: int, costs: Costs) -> float:
    plan = one.plan
    model = costs.model_for(plan.worker)
    link = costs.link(plan.source.worker, plan.worker) if plan.source else None
    expected = min(one.expected_tokens, one.placed.total)
    terms = price(model, link, prompt_tokens, one.placed, expected, plan.terms.queue_s, plan.circumstances)
    return terms.total_s
