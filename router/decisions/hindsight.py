# SPDX-License-Identifier: Apache-2.0
"""What a request would have taken at best, by what is known after it was answered. Pure.

The plans of the best few candidates are priced again with the constants that calibration has by now. The chosen
worker's counts only the blocks that really were there; of the others as many as trust lets expect. Queues and loads
stay those of the moment of the decision, so regret also holds what nobody could have known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.costs.model import CostModel, Costs
from router.decisions.pricing import PlacedTokens, Pulled, placed_tokens, price, pulled_s
from router.plan.candidate import Candidate, Plan, Source

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
    expected = trust * (placed.total - placed.peer)
    for tokens, source in _sources(plan, placed.peer):
        expected += source.trust * tokens
    return Alternative(plan, placed, expected)


def _total_s(one: Alternative, prompt_tokens: int, costs: Costs) -> float:
    plan = one.plan
    model = costs.model_for(plan.worker)
    expected = min(one.expected_tokens, one.placed.total)
    peer_s = _peer_s(one, model, costs)
    decodes = plan.circumstances.decodes
    terms = price(model, prompt_tokens, one.placed, expected, plan.terms.queue_s, decodes, peer_s)
    return terms.total_s


def _peer_s(one: Alternative, model: CostModel, costs: Costs) -> float:
    plan, around = one.plan, one.plan.circumstances
    beside = [(pull.other_pulls, pull.connected) for pull in plan.pulls]
    pulls = [
        Pulled(tokens, costs.link(source.worker, plan.worker), *others)
        for (tokens, source), others in zip(
            _sources(plan, one.placed.peer),
            beside or [(around.other_pulls, around.connected)],
            strict=False,
        )
    ]
    # How many pulls the worker's own link had is not kept: at most as many as the least busy pair.
    idlest = min((pull.other_pulls for pull in pulls), default=0)
    capacity_bytes_per_s = max((pull.link.share_bytes_per_s(idlest) for pull in pulls), default=1.0)
    return pulled_s(model, [pull for pull in pulls if pull.tokens], capacity_bytes_per_s)


def _sources(plan: Plan, pulled_tokens: int) -> list[tuple[int, Source]]:
    """What each source contributes to ``pulled_tokens``, the first ones most."""
    if not plan.pulls:
        return [(pulled_tokens, plan.source)] if plan.source is not None else []
    found = []
    for pull in plan.pulls:
        tokens = min(pull.blocks * plan.block_size_tokens, pulled_tokens)
        pulled_tokens -= tokens
        found.append((tokens, pull.source))
    return found
