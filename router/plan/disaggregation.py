# SPDX-License-Identifier: Apache-2.0
"""Whether one worker should compute the prompt and another the answer. Pure.

A request is split into a prefill leg at P (its own best path, pulls from a peer included) and a decode leg at D,
which takes what it does not hold itself from P:

    p2p     T = max(queue(D), max(prefill(P), admit(D)) + ram(D) + transfer(P, D)) + last step(D)
    nixl    T = max(queue(D), prefill(P) + admit(D) + transfer(P, D)) + last step(D)

Through vLLM's P2P tier both legs run at once; NixlConnector needs P's answer first. What a split buys is that a
prefill no longer runs beside the requests that decode on D. So here, where a split is possible, every plan also
pays for those it slows: ``gpu_seconds_weight * prefill * decodes beside it``, each second of a prefill taking about
a second from each of them. A split is chosen where its sum is the lower one (conditional disaggregation).

Only workers of role ``prefill`` prefill for others: one of role ``both`` that computes a prompt answers sooner
itself, because a handover never costs less than nothing.

Cost: O(prefillers + candidates) to rank both, then at most ``MAX_DECODERS * MAX_PREFILLERS`` pairs are priced.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from router.costs.model import Costs
from router.fleet.worker import Transfer
from router.plan.candidate import Candidate, Circumstances, Plan, Question, Residence, Source, Terms
from router.plan.displacement import displaced_s, occupied_s
from router.plan.handover import Handover, Prefiller
from router.plan.paths import Loads, derive_loads, leading_blocks
from router.plan.planner import Planned, Planner

MAX_DECODERS = 8
MAX_PREFILLERS = 3
MAX_RANKED = 16
"""Plans of the ranking that is returned."""
P2P_PATIENCE_S = 15.0
"""Half of the 30 s after which vLLM's decode worker gives up its prefiller and computes the prompt itself
(``_LOAD_TIMEOUT_S`` of ``kv_offload/tiering/p2p/session/client.py``)."""


class _Scored(NamedTuple):
    """A plan with the score that counts here."""

    score_s: float
    plan: Plan


class Disaggregation:
    """Improves a ranking by plans that are split over two workers."""

    def __init__(self, planner: Planner, costs: Costs, gpu_seconds_weight: float) -> None:
        self._planner = planner
        self._costs = costs
        self._weight = gpu_seconds_weight

    def improve(
        self,
        question: Question,
        planned: Planned,
        prefillers: Sequence[Prefiller],
        transfers: Mapping[str, Transfer | None],
        random: Random,
    ) -> Planned:
        """The best of the ranking, with the better of both plans, alone and split, for each candidate.

        ``transfers``: by worker, how it takes over blocks; None where it cannot. Only for a question of one
        sequence: the keys of a handover name one sequence.

        Raises:
            ValueError: more than one prompt.
        """
        if len(question.prompt_tokens) != 1:
            raise ValueError("only a request of one sequence can be split")
        if not prefillers or planned.chosen.trial:
            return planned
        weight = self._weight + question.pressure
        best = {
            (plan.worker, plan.dp_rank): _Scored(plan.score_s + _slowed_s(weight, plan), plan)
            for plan in planned.ranking
        }
        ranked = self._rank_prefillers(question, prefillers, random)
        for decoder in _useful_decoders(question, transfers):
            rank = decoder.worker, decoder.dp_rank
            if rank not in best:
                continue
            alone = best[rank].plan
            for prefiller, plan in _fitting(ranked, decoder, transfers[decoder.worker]):
                prefill = self._not_from(decoder, question, prefiller, plan, random)
                split = self._split(question, alone, decoder, prefiller, prefill)
                if split is not None and split.score_s < best[rank].score_s:
                    best[rank] = _Scored(split.score_s, split)
        order = heapq.nsmallest(MAX_RANKED, best.values(), key=lambda one: (one.score_s, random.random()))
        return Planned(tuple(replace(one.plan, score_s=one.score_s) for one in order), planned.count)

    def _rank_prefillers(
        self, question: Question, prefillers: Sequence[Prefiller], random: Random
    ) -> list[tuple[Prefiller, Plan]]:
        """With the best plan of each, cheapest first."""
        by_rank = {(one.candidate.worker, one.candidate.dp_rank): one for one in prefillers}
        candidates = [one.candidate for one in prefillers]
        plans = self._planner.plan(_prefill_of(question, candidates, question.sources), random).ranking
        return [(by_rank[plan.worker, plan.dp_rank], plan) for plan in plans]

    def _not_from(
        self, decoder: Candidate, question: Question, prefiller: Prefiller, plan: Plan, random: Random
    ) -> Plan:
        """The plan of the prefill leg, priced again where it would pull from the worker that waits for it.

        Seen with vLLM 0.32: D answers a lookup only when it knows of every block asked for, and those that it has
        just asked P for are pending there, so both wait until the lookup times out, twice 5 s.
        """
        if decoder.worker not in plan.source_workers:
            return plan
        others = [one for one in question.sources if one.worker != decoder.worker]
        return self._planner.plan(_prefill_of(question, [prefiller.candidate], others), random).chosen

    def _split(
        self,
        question: Question,
        alone: Plan,
        decoder: Candidate,
        prefiller: Prefiller,
        prefill: Plan,
    ) -> Plan | None:
        """The decode leg with its handover; None where nothing would be handed over or D would not wait for it."""
        tokens, size = question.prompt_tokens[0], decoder.block_size_tokens
        loads = _loads(tokens, decoder, prefiller.transfer)
        if not loads.peer:
            return None
        p2p = prefiller.transfer is Transfer.P2P
        costs = self._costs.model_for(decoder.worker)
        others = max(decoder.pulls, prefiller.candidate.pulls)
        connected = prefill.worker in decoder.sessions
        link = self._costs.link(prefill.worker, decoder.worker)
        transfer_s = costs.peer_s(loads.peer * size, others, connected=connected, link=link)
        if not p2p:
            # NixlConnector writes into HBM: nothing is left to be promoted.
            transfer_s -= costs.promotion_s(loads.peer * size)
        admit_s, prefill_s = costs.admit_s(decoder.queue_s), prefill.terms.total_s
        if p2p and max(prefill_s - admit_s, 0.0) + transfer_s > P2P_PATIENCE_S:
            return None
        # NixlConnector hands over the last partial block too, but its last token is computed here in any case.
        cached = tokens - 1 if not p2p else loads.total * size
        missing = max(tokens - cached, 1)
        terms = Terms(
            queue_s=decoder.queue_s,
            admit_s=admit_s,
            ram_s=costs.promotion_s(loads.ram * size),
            peer_s=transfer_s,
            prefill_s=costs.prefill_s(tokens - missing, missing, decoder.decodes),
            decode_s=alone.terms.decode_s,
            remote_s=prefill_s if p2p else prefill_s + admit_s,
            displaced_s=displaced_s(self._weight + question.pressure, costs, tokens - loads.hbm * size)
            + occupied_s(costs, decoder, question.output_tokens)
            + prefill.terms.displaced_s,
        )
        split = Plan(
            worker=decoder.worker,
            dp_rank=decoder.dp_rank,
            block_size_tokens=size,
            prompt_blocks=alone.prompt_blocks,
            path_blocks=_path_blocks(loads, alone.prompt_blocks, whole=not p2p),
            cached_tokens=loads.total * size if p2p else prefill.cached_tokens,
            terms=terms,
            score_s=0.0,
            circumstances=Circumstances(decoder.decodes, others, connected),
            handover=Handover(prefill, prefiller.transfer, prefiller.host, prefiller.port),
            extension=decoder.extension,
        )
        burnt_s = terms.prefill_s + prefill.terms.prefill_s
        weight = self._weight + question.pressure
        slowed_s = _slowed_s(weight, split) + _slowed_s(weight, prefill)
        lost_s = terms.decode_s + terms.displaced_s
        return replace(split, score_s=terms.total_s + weight * burnt_s + slowed_s + lost_s)


def _slowed_s(weight: float, plan: Plan) -> float:
    """Weighted seconds taken from the requests that decode beside the prefill of ``plan``."""
    return weight * plan.terms.prefill_s * plan.circumstances.decodes


def _prefill_of(question: Question, candidates: Sequence[Candidate], sources: Sequence[Source]) -> Question:
    """The same prompt for workers that do not answer: the pace of the answer is not theirs, nothing is tried out."""
    return replace(
        question, candidates=candidates, sources=sources, slo_tpot_s=None, output_tokens=0, explore=False
    )


def _loads(tokens: int, decoder: Candidate, transfer: Transfer) -> Loads:
    """Blocks by place of the decode leg; ``peer`` is what the prefill worker hands over.

    Behind its own blocks D asks P for all the others: of the P2P tier whole chunks, chunk by chunk behind its RAM;
    of NixlConnector everything behind HBM, the last partial block included.
    """
    size, residence = decoder.block_size_tokens, decoder.residence[0]
    blocks = -(-tokens // size)
    if transfer is Transfer.P2P:
        own = Residence(residence.hbm, residence.ram)
        return derive_loads(tokens, size, decoder.chunk_blocks, own, ((0, blocks),))
    hbm = min(leading_blocks(residence.hbm), max(tokens - 1, 0) // size)
    return Loads(hbm=hbm, peer=blocks - hbm)


def _path_blocks(loads: Loads, blocks: int, *, whole: bool) -> dict[str, int]:
    counts = {"hbm": loads.hbm, "ram": loads.ram, "peer": loads.peer}
    if not whole:
        counts["recompute"] = blocks - loads.total
    return {path: count for path, count in counts.items() if count}


def _useful_decoders(question: Question, transfers: Mapping[str, Transfer | None]) -> Sequence[Candidate]:
    """Those least busy and those that hold most of the prompt; O(candidates)."""
    able = [one for one in question.candidates if transfers.get(one.worker) is not None]
    if len(able) <= MAX_DECODERS:
        return able

    def held(one: Candidate) -> int:
        spans = one.residence[0]
        return max(leading_blocks(spans.hbm), leading_blocks(spans.ram)) * one.block_size_tokens

    idle = heapq.nsmallest(MAX_DECODERS // 2, able, key=lambda one: (one.queue_s, one.decodes))
    warm = heapq.nlargest(MAX_DECODERS // 2, able, key=held)
    return [*idle, *(one for one in warm if one not in idle)]


def _fitting(
    ranked: Sequence[tuple[Prefiller, Plan]], decoder: Candidate, transfer: Transfer | None
) -> Iterator[tuple[Prefiller, Plan]]:
    """The best few whose blocks the decode worker can take over."""
    found = 0
    for prefiller, plan in ranked:
        one = prefiller.candidate
        if (
            one.worker != decoder.worker
            and prefiller.transfer is transfer
            and one.fingerprint == decoder.fingerprint
            and one.block_size_tokens == decoder.block_size_tokens
            and (transfer is Transfer.NIXL or one.chunk_blocks == decoder.chunk_blocks)
        ):
            yield prefiller, plan
            found += 1
            if found == MAX_PREFILLERS:
                return
