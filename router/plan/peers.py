# SPDX-License-Identifier: Apache-2.0
"""How other routers decide, as policies to replay a trace with. Their published defaults; not for live traffic.

All of them see our index and our load board, which flatters those that only guess what a worker holds. None of
their rules knows seconds; the plans they return are priced only for the record and the load board.
"""

from __future__ import annotations

from random import Random
from typing import Literal

from router.plan.candidate import Candidate, Question, Source
from router.plan.paths import Loads, derive_loads, leading_blocks
from router.plan.planner import Planned, Planner

PeerPolicyName = Literal["longest_prefix", "cache_aware", "fixed_credits", "fixed_pull"]


def local_loads(question: Question, candidate: Candidate) -> Loads:
    """Blocks by tier that the candidate would take from its own tiers."""
    total = Loads()
    for tokens, residence in zip(question.prompt_tokens, candidate.residence, strict=True):
        total = total.plus(
            derive_loads(tokens, candidate.block_size_tokens, candidate.chunk_blocks, residence)
        )
    return total


class LongestPrefix:
    """The most cached tokens, on whatever tier; equals by chance, load ignored.

    As ``kv_aware`` of vllm-project/router (``docs/kv_aware.md``, first version) decides.
    """

    name: PeerPolicyName = "longest_prefix"
    looks_at_index = True

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def rank(self, question: Question, random: Random) -> Planned:
        def key(candidate: Candidate) -> tuple[int, float]:
            cached = local_loads(question, candidate).total * candidate.block_size_tokens
            return -cached, random.random()

        order = sorted(question.candidates, key=key)
        return Planned(tuple(self._planner.price_local(question, one) for one in order))


class CacheAware:
    """Longest prefix above a threshold while loads are balanced, else the least load.

        imbalanced   max - min > 64 and max > 1.5 * min, over requests in flight
        imbalanced:  fewest requests in flight
        otherwise:   the longest match if it covers more than 0.3 of the prompt, else the fewest requests

    ``cache_aware`` of the SGLang router and its fork vllm-project/router (``policies/cache_aware``), with the later
    of their published thresholds. On a poor match early versions took the worker with the smallest tree and
    piled requests on it (sgl-project/sglang #14305, #14532); the corrected form is the one here.
    """

    name: PeerPolicyName = "cache_aware"
    looks_at_index = True
    balance_abs = 64
    balance_rel = 1.5
    cache_threshold = 0.3

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def rank(self, question: Question, random: Random) -> Planned:
        least_load = sorted(question.candidates, key=lambda one: (one.in_flight, random.random()))
        order = least_load
        lowest, highest = least_load[0].in_flight, least_load[-1].in_flight
        imbalanced = highest - lowest > self.balance_abs and highest > self.balance_rel * lowest
        if not imbalanced:
            # Stable: equal matches stay in order of load.
            cached = {id(one): local_loads(question, one).total * one.block_size_tokens for one in order}
            by_match = sorted(order, key=lambda one: -cached[id(one)])
            if cached[id(by_match[0])] > self.cache_threshold * sum(question.prompt_tokens):
                order = by_match
        return Planned(tuple(self._planner.price_local(question, one) for one in order))


class FixedCredits:
    """Blocks to prefill after fixed credits per tier, plus blocks in use; the lowest sum, equals by chance.

        overlap  = 1.0 * device + 0.75 * host + 0.25 * disk
        cost     = (active prefill blocks + prompt blocks - overlap) + (active blocks + prompt blocks)

    NVIDIA Dynamo's KV router (``lib/kv-router``, ``docs/components/router``) with its defaults: prefill load scale 1,
    no weight on request counts, temperature 0. Active blocks count a prefix once per request that uses it.
    """

    name: PeerPolicyName = "fixed_credits"
    looks_at_index = True
    device_credit = 1.0
    host_credit = 0.75
    disk_credit = 0.25

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def rank(self, question: Question, random: Random) -> Planned:
        order = sorted(question.candidates, key=lambda one: (self.cost(question, one), random.random()))
        return Planned(tuple(self._planner.price_local(question, one) for one in order))

    def cost(self, question: Question, candidate: Candidate) -> float:
        """The formula above, in blocks."""
        size = candidate.block_size_tokens
        loads = local_loads(question, candidate)
        overlap = (
            self.device_credit * loads.hbm + self.host_credit * loads.ram + self.disk_credit * loads.storage
        )
        prompt = sum(-(-tokens // size) for tokens in question.prompt_tokens)
        prefill = candidate.prefill_tokens / size + prompt - overlap
        return prefill + candidate.active_tokens / size + prompt


class FixedPull:
    """Placement by weighted scores, then a pull where a peer leads by a fixed number of tokens.

        score    = 3 * prefix + 1 * queue + 1 * kv
        prefix   = blocks in HBM + 0.8 * blocks below it, over the blocks of the prompt
        queue    = 1 for the shortest queue down to 0 for the longest (requests without a first token)
        kv       = 1 - tokens in use / capacity
        pull     iff the best peer's RAM holds a prefix at least 2,048 tokens longer than the chosen worker's own

    llm-d-router (``pkg/epp/framework/plugins``; weights of its sample configuration with these three scorers; the
    smallest threshold of its guides). Among peers within a block of the longest prefix the source is drawn with weight
    1 / (1 + queue). The pull never changes the placement.
    """

    name: PeerPolicyName = "fixed_pull"
    looks_at_index = True
    prefix_weight = 3.0
    queue_weight = 1.0
    kv_weight = 1.0
    lower_tier_credit = 0.8
    min_lead_tokens = 2048

    def __init__(self, planner: Planner, kv_capacity_tokens: int) -> None:
        """``kv_capacity_tokens``: what the HBM of one rank holds."""
        self._planner = planner
        self._kv_capacity_tokens = kv_capacity_tokens

    def rank(self, question: Question, random: Random) -> Planned:
        queues = [_queue(one) for one in question.candidates]
        shortest, longest = min(queues), max(queues)

        def key(candidate: Candidate) -> tuple[float, float]:
            spread = longest - shortest
            queue = (longest - _queue(candidate)) / spread if spread else 1.0
            return -self._score(question, candidate, queue), random.random()

        order = sorted(question.candidates, key=key)
        chosen = order[0]
        source = self._source(question, chosen, random)
        first = (
            self._planner.price_local(question, chosen)
            if source is None
            else self._planner.price_pull(question, chosen, source)
        )
        return Planned((first, *(self._planner.price_local(question, one) for one in order[1:])))

    def _score(self, question: Question, candidate: Candidate, queue: float) -> float:
        loads = local_loads(question, candidate)
        blocks = sum(-(-tokens // candidate.block_size_tokens) for tokens in question.prompt_tokens)
        prefix = (loads.hbm + self.lower_tier_credit * (loads.ram + loads.storage)) / max(blocks, 1)
        free = max(1 - candidate.active_tokens / self._kv_capacity_tokens, 0.0)
        return self.prefix_weight * prefix + self.queue_weight * queue + self.kv_weight * free

    def _source(self, question: Question, chosen: Candidate, random: Random) -> Source | None:
        """The peer to pull from, None where none leads by enough."""
        if not chosen.can_pull or len(question.prompt_tokens) != 1:
            return None
        others = [one for one in question.sources if one.worker != chosen.worker]
        held = [leading_blocks(one.residence.ram) for one in others]
        best = max(held, default=0)
        lead = best - local_loads(question, chosen).total
        if best == 0 or lead * chosen.block_size_tokens < self.min_lead_tokens:
            return None
        near = [one for one, blocks in zip(others, held, strict=True) if blocks >= best - 1]
        queues = {(one.worker, one.dp_rank): _queue(one) for one in question.candidates}
        weights = [1 / (1 + queues.get((one.worker, one.dp_rank), 0)) for one in near]
        return random.choices(near, weights)[0]


def _queue(candidate: Candidate) -> int:
    """Our requests at the worker that have no first token yet."""
    return max(candidate.in_flight - candidate.decodes, 0)
