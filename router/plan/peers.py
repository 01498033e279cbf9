# SPDX-License-Identifier: Apache-2.0
"""How other routers decide, as policies to replay a trace with. Their published defaults; not for live traffic.

All of them see our index and our load board, which flatters those that only guess what a worker holds; llm-d's
load comes from the engines' own gauges where the caller has them. None of their rules knows seconds; the plans
they return are priced only for the record and the load board.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol, get_args

from router.plan.candidate import Candidate, Question, Source
from router.plan.paths import Loads, derive_loads, leading_blocks
from router.plan.planner import Planned, Planner

LlmDPolicyName = Literal["affinity", "affinity_pull", "load", "load_pull", "fixed_pull"]
PeerPolicyName = Literal["longest_prefix", "cache_aware", "fixed_credits", LlmDPolicyName]

LLM_D_POLICIES: tuple[LlmDPolicyName, ...] = get_args(LlmDPolicyName)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What an engine's metrics said when they were last read."""

    waiting: int
    """``vllm:num_requests_waiting``."""
    kv_usage: float
    """``vllm:kv_cache_usage_perc``, 0 to 1."""


class FleetView(Protocol):
    """What other routers look at beside index and load; of the request that is being decided, by worker."""

    def gauges(self, worker: str) -> Gauges:
        """As of the last poll."""
        ...

    def tokens_in_use(self, worker: str) -> int:
        """Tokens of full prompt blocks in use there if it had the request too, each block counted once."""
        ...

    def tokens_sent_lately(self, worker: str) -> int:
        """How much of the beginning of the prompt was sent there within the last two seconds, in full blocks."""
        ...


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
        prefill  = (active prefill tokens + prompt tokens) / block size - overlap
        cost     = prefill + blocks in use, those of the request included and each counted once

    NVIDIA Dynamo's KV router (``lib/kv-router/src/scheduling/selector``, ``docs/components/router``, 1.6.1) with its
    defaults: prefill load scale 1, no weight on request counts, temperature 0, output blocks not tracked, blocks
    in use told by their hashes (``router_assume_kv_reuse``).
    """

    name: PeerPolicyName = "fixed_credits"
    looks_at_index = True
    device_credit = 1.0
    host_credit = 0.75
    disk_credit = 0.25

    def __init__(self, planner: Planner, view: FleetView | None = None) -> None:
        """Without a view a block counts once per request that uses it, as the load board has it."""
        self._planner = planner
        self._view = view

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
        prompt_tokens = sum(question.prompt_tokens)
        prefill = (candidate.prefill_tokens + prompt_tokens) / size - overlap
        if self._view is not None:
            return prefill + self._view.tokens_in_use(candidate.worker) / size
        return prefill + (candidate.active_tokens + prompt_tokens) / size


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmDConfig:
    """Weights of the scorers, the picker, and whether a pull follows."""

    prefix: float = 0.0
    queue: float = 0.0
    kv: float = 0.0
    lru: float = 0.0
    speculative: bool = False
    """What was sent to a worker within the last two seconds counts as held in HBM."""
    weighted_random: bool = False
    """Draw by score; otherwise take the highest."""
    pulls: bool = False


LLM_D_CONFIGS: Mapping[LlmDPolicyName, LlmDConfig] = {
    # guides/p2p-kv-cache-sharing/benchmarking: epp-affinity, epp-affinity-p2p, epp-load, epp-load-p2p
    "affinity": LlmDConfig(prefix=3, queue=2, kv=2, lru=2, speculative=True),
    "affinity_pull": LlmDConfig(prefix=3, queue=2, kv=2, lru=2, speculative=True, pulls=True),
    "load": LlmDConfig(queue=3, kv=2, weighted_random=True),
    "load_pull": LlmDConfig(queue=3, kv=2, weighted_random=True, pulls=True),
    # The sample configuration of llm-d-router with these three scorers, and the pull.
    "fixed_pull": LlmDConfig(prefix=3, queue=1, kv=1, pulls=True),
}


class LlmD:
    """Placement by weighted scores, then a pull where a peer leads by a fixed number of tokens.

        prefix   blocks in HBM + 0.8 * blocks below it, over the blocks of the prompt
        queue    1 for the shortest queue down to 0 for the longest
        kv       1 - KV cache usage
        lru      where nobody holds anything: 1 for who took such a request longest ago, down to 0 for the last
        pull     iff the best peer's RAM holds a prefix at least 2,048 tokens longer than the chosen worker's own

    llm-d-router (``pkg/epp/framework/plugins``), weights by configuration; the smallest threshold of its guides.
    Among peers within a block of the longest prefix the source is drawn with weight 1 / (1 + queue). The pull never
    changes the placement.
    """

    looks_at_index = True
    lower_tier_credit = 0.8
    min_lead_tokens = 2048

    def __init__(
        self,
        planner: Planner,
        name: LlmDPolicyName,
        kv_capacity_tokens: int,
        view: FleetView | None = None,
    ) -> None:
        """``kv_capacity_tokens``: what the HBM of one rank holds. Without a view the load board stands in for it."""
        self.name: PeerPolicyName = name
        self._config = LLM_D_CONFIGS[name]
        self._planner = planner
        self._kv_capacity_tokens = kv_capacity_tokens
        self._view = view
        self._cold_order: dict[str, None] = {}
        """Workers in the order in which they last took a request that nobody held anything of."""

    def rank(self, question: Question, random: Random) -> Planned:
        gauges = [self._gauges(one) for one in question.candidates]
        matches = [self._match(question, one) for one in question.candidates]
        cold = not any(matches)
        scores = self._scores(question.candidates, gauges, matches, cold=cold)
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], random.random()))
        if self._config.weighted_random:
            drawn = random.choices(order, [scores[i] for i in order])[0] if any(scores) else order[0]
            order.remove(drawn)
            order.insert(0, drawn)
        ranked = [question.candidates[i] for i in order]
        if cold:
            self._cold_order.pop(ranked[0].worker, None)
            self._cold_order[ranked[0].worker] = None
        source = self._source(question, ranked[0], gauges, random) if self._config.pulls else None
        first = (
            self._planner.price_local(question, ranked[0])
            if source is None
            else self._planner.price_pull(question, ranked[0], source)
        )
        return Planned((first, *(self._planner.price_local(question, one) for one in ranked[1:])))

    def _gauges(self, candidate: Candidate) -> Gauges:
        if self._view is not None:
            return self._view.gauges(candidate.worker)
        waiting = max(candidate.in_flight - candidate.decodes, 0)
        return Gauges(waiting, min(candidate.active_tokens / self._kv_capacity_tokens, 1.0))

    def _match(self, question: Question, candidate: Candidate) -> float:
        loads, size = local_loads(question, candidate), candidate.block_size_tokens
        held = loads.hbm + self.lower_tier_credit * (loads.ram + loads.storage)
        if self._config.speculative and self._view is not None:
            held = max(held, self._view.tokens_sent_lately(candidate.worker) // size)
        return held / max(sum(-(-tokens // size) for tokens in question.prompt_tokens), 1)

    def _scores(
        self,
        candidates: Sequence[Candidate],
        gauges: Sequence[Gauges],
        matches: Sequence[float],
        *,
        cold: bool,
    ) -> list[float]:
        config = self._config
        shortest, longest = min(one.waiting for one in gauges), max(one.waiting for one in gauges)
        spread = longest - shortest
        recency = self._recency(candidates) if cold and config.lru else {}
        scores = []
        for candidate, gauge, match in zip(candidates, gauges, matches, strict=True):
            queue = (longest - gauge.waiting) / spread if spread else 1.0
            lru = recency.get(candidate.worker, 0.5)
            load = config.queue * queue + config.kv * (1.0 - gauge.kv_usage)
            scores.append(config.prefix * match + load + config.lru * lru)
        return scores

    def _recency(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        never = [one.worker for one in candidates if one.worker not in self._cold_order]
        here = {one.worker for one in candidates}
        order = [*never, *(worker for worker in self._cold_order if worker in here)]
        return {worker: 1.0 - i / max(len(order) - 1, 1) for i, worker in enumerate(order)}

    def _source(
        self, question: Question, chosen: Candidate, gauges: Sequence[Gauges], random: Random
    ) -> Source | None:
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
        queues = {
            (one.worker, one.dp_rank): gauge.waiting
            for one, gauge in zip(question.candidates, gauges, strict=True)
        }
        weights = [1 / (1 + queues.get((one.worker, one.dp_rank), 0)) for one in near]
        return random.choices(near, weights)[0]
