# SPDX-License-Identifier: Apache-2.0
"""Chooses the worker and the path that cost the least time. Pure: time is in the question, chance an argument.

For every candidate the actions its engine can carry out are priced:

    local   the engine's own walk over HBM, RAM and storage
    none    HBM only (when recomputing is cheaper than loading)
    peer s  the walk with one peer as a further source

Cost: O(candidates x sources x spans). At most ``MAX_SOURCES`` sources are tried per decision, those that hold
most and serve the fewest pulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from router.costs.model import CostModel
from router.plan.candidate import Candidate, Plan, Question, Source, Terms
from router.plan.paths import Loads, derive_loads

MAX_SOURCES = 8


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan of each candidate, best first."""

    ranking: tuple[Plan, ...]

    @property
    def chosen(self) -> Plan:
        return self.ranking[0]


class Planner:
    """Minimises time to first token plus ``gpu_seconds_weight`` times the GPU seconds a plan burns."""

    def __init__(
        self, costs: CostModel, gpu_seconds_weight: float, pull_deadline_s: float, min_pull_tokens: int = 0
    ) -> None:
        self._costs = costs
        self._gpu_seconds_weight = gpu_seconds_weight
        self._pull_deadline_s = pull_deadline_s
        self._min_pull_tokens = max(min_pull_tokens, 1)

    def plan(self, question: Question, random: Random) -> Planned:
        """Rank the candidates; equal costs are ordered by chance, so that equals share the load.

        Raises:
            ValueError: there are no candidates.
        """
        if not question.candidates:
            raise ValueError("a decision needs candidates")
        sources = _most_useful(question.sources)
        best = [
            min(self._plans(question, candidate, sources), key=lambda plan: plan.score_s)
            for candidate in question.candidates
        ]
        order = sorted(best, key=lambda plan: (plan.score_s, random.random()))
        return Planned(tuple(order))

    def price_local(self, question: Question, candidate: Candidate) -> Plan:
        """The plan of the engine's own walk, whatever it costs."""
        return self._price(question, candidate, None, external=True)

    def _plans(self, question: Question, candidate: Candidate, sources: Sequence[Source]) -> Iterator[Plan]:
        local = self.price_local(question, candidate)
        yield local
        if local.path_blocks.keys() & {"ram", "storage"}:
            yield self._price(question, candidate, None, external=False)
        if not candidate.can_pull or len(question.prompt_tokens) != 1:
            return
        for source in sources:
            # vLLM stalls for its handshake time-out when a request names its own worker.
            if source.worker == candidate.worker:
                continue
            plan = self._price(question, candidate, source, external=True)
            pulled_tokens = plan.path_blocks.get("peer", 0) * plan.block_size_tokens
            if pulled_tokens >= self._min_pull_tokens and plan.terms.peer_s < self._pull_deadline_s:
                yield plan

    def _price(
        self, question: Question, candidate: Candidate, source: Source | None, *, external: bool
    ) -> Plan:
        size = candidate.block_size_tokens
        loads = [
            derive_loads(
                tokens,
                size,
                candidate.chunk_blocks,
                candidate.residence[i],
                source.residence.ram if source else (),
                external=external,
            )
            for i, tokens in enumerate(question.prompt_tokens)
        ]
        terms = self._terms(question, candidate, loads, source)
        blocks = sum(-(-tokens // size) for tokens in question.prompt_tokens)
        return Plan(
            worker=candidate.worker,
            dp_rank=candidate.dp_rank,
            block_size_tokens=size,
            prompt_blocks=blocks,
            path_blocks=_path_blocks(loads, blocks),
            cached_tokens=sum(load.total for load in loads) * size,
            terms=terms,
            score_s=terms.total_s + self._gpu_seconds_weight * terms.prefill_s,
            source=source,
            external_load=external,
        )

    def _terms(
        self, question: Question, candidate: Candidate, loads: Sequence[Loads], source: Source | None
    ) -> Terms:
        costs, size = self._costs, candidate.block_size_tokens
        prefill_s = 0.0
        for tokens, load in zip(question.prompt_tokens, loads, strict=True):
            # The engine always computes at least the last token.
            missing = max(tokens - load.total * size, 1)
            prefill_s += costs.prefill_s(tokens - missing, missing, candidate.decodes)
        return Terms(
            queue_s=candidate.queue_s,
            admit_s=costs.profile.admit_s,
            ram_s=costs.promotion_s(sum(load.ram for load in loads) * size),
            peer_s=costs.peer_s(sum(load.peer for load in loads) * size, source.pulls if source else 0),
            storage_s=costs.storage_s(sum(load.storage for load in loads) * size),
            prefill_s=prefill_s,
        )


def _most_useful(sources: Sequence[Source]) -> Sequence[Source]:
    if len(sources) <= MAX_SOURCES:
        return sources

    def held(source: Source) -> int:
        return sum(end - start for start, end in source.residence.ram)

    return sorted(sources, key=lambda source: (-held(source), source.pulls))[:MAX_SOURCES]


def _path_blocks(loads: Sequence[Loads], blocks: int) -> dict[str, int]:
    counts = {
        "hbm": sum(load.hbm for load in loads),
        "ram": sum(load.ram for load in loads),
        "peer": sum(load.peer for load in loads),
        "storage": sum(load.storage for load in loads),
    }
    counts["recompute"] = blocks - sum(counts.values())
    return {path: count for path, count in counts.items() if count}
