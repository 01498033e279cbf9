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
from typing import NamedTuple

from router.costs.model import CostModel, Costs
from router.plan.candidate import Candidate, Circumstances, Plan, Question, Source, Terms
from router.plan.paths import Loads, derive_loads

MAX_SOURCES = 4


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan of each candidate, best first."""

    ranking: tuple[Plan, ...]

    @property
    def chosen(self) -> Plan:
        return self.ranking[0]


class _Action(NamedTuple):
    """One action of one candidate, priced."""

    score_s: float
    loads: Loads
    terms: Terms
    source: Source | None
    external: bool


class Planner:
    """Minimises time to first token plus ``gpu_seconds_weight`` times the GPU seconds a plan burns."""

    def __init__(
        self, costs: Costs, gpu_seconds_weight: float, pull_deadline_s: float, min_pull_tokens: int = 0
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
        best = [self._best(question, candidate, sources) for candidate in question.candidates]
        order = sorted(best, key=lambda plan: (plan.score_s, random.random()))
        return Planned(tuple(order))

    def price_local(self, question: Question, candidate: Candidate) -> Plan:
        """The plan of the engine's own walk, whatever it costs."""
        return self._plan(question, candidate, self._price(question, candidate, None, external=True))

    def price_pull(self, question: Question, candidate: Candidate, source: Source) -> Plan:
        """The plan of a pull from that source, whatever it costs.

        The caller sees to it that the candidate can pull and is not its own source.
        """
        return self._plan(question, candidate, self._price(question, candidate, source, external=True))

    def _best(self, question: Question, candidate: Candidate, sources: Sequence[Source]) -> Plan:
        best = min(self._actions(question, candidate, sources), key=lambda action: action.score_s)
        return self._plan(question, candidate, best)

    def _actions(
        self, question: Question, candidate: Candidate, sources: Sequence[Source]
    ) -> Iterator[_Action]:
        local = self._price(question, candidate, None, external=True)
        yield local
        if local.loads.ram or local.loads.storage:
            yield self._price(question, candidate, None, external=False)
        if not candidate.can_pull or len(question.prompt_tokens) != 1:
            return
        for source in sources:
            # vLLM stalls for its handshake time-out when a request names its own worker.
            if source.worker == candidate.worker:
                continue
            action = self._price(question, candidate, source, external=True)
            pulled_tokens = action.loads.peer * candidate.block_size_tokens
            if pulled_tokens >= self._min_pull_tokens and action.terms.peer_s < self._pull_deadline_s:
                yield action

    def _price(
        self, question: Question, candidate: Candidate, source: Source | None, *, external: bool
    ) -> _Action:
        costs, size = self._costs.model_for(candidate.worker), candidate.block_size_tokens
        prefill_s = 0.0
        total = Loads()
        for tokens, residence in zip(question.prompt_tokens, candidate.residence, strict=True):
            peer_ram = source.residence.ram if source else ()
            loads = derive_loads(tokens, size, candidate.chunk_blocks, residence, peer_ram, external=external)
            # The engine always computes at least the last token.
            missing = max(tokens - loads.total * size, 1)
            prefill_s += costs.prefill_s(tokens - missing, missing, candidate.decodes)
            total = loads if len(question.prompt_tokens) == 1 else total.plus(loads)
        terms = Terms(
            candidate.queue_s,
            costs.profile.admit_s,
            costs.promotion_s(total.ram * size),
            self._peer_s(costs, total.peer * size, candidate, source),
            costs.storage_s(total.storage * size),
            prefill_s,
        )
        score_s = terms.total_s + self._gpu_seconds_weight * prefill_s
        return _Action(score_s, total, terms, source, external)

    def _peer_s(self, costs: CostModel, tokens: int, candidate: Candidate, source: Source | None) -> float:
        if source is None:
            return 0.0
        others = max(candidate.pulls, source.pulls)
        link = self._costs.link(source.worker, candidate.worker)
        return costs.peer_s(tokens, others, connected=source.worker in candidate.sessions, link=link)

    def _plan(self, question: Question, candidate: Candidate, action: _Action) -> Plan:
        size = candidate.block_size_tokens
        blocks = sum(-(-tokens // size) for tokens in question.prompt_tokens)
        return Plan(
            worker=candidate.worker,
            dp_rank=candidate.dp_rank,
            block_size_tokens=size,
            prompt_blocks=blocks,
            path_blocks=_path_blocks(action.loads, blocks),
            cached_tokens=action.loads.total * size,
            terms=action.terms,
            score_s=action.score_s,
            source=action.source,
            external_load=action.external,
            circumstances=Circumstances(
                decodes=candidate.decodes,
                other_pulls=max(candidate.pulls, action.source.pulls) if action.source else 0,
                connected=action.source is None or action.source.worker in candidate.sessions,
            ),
        )


def _most_useful(sources: Sequence[Source]) -> Sequence[Source]:
    if len(sources) <= MAX_SOURCES:
        return sources

    def held(source: Source) -> int:
        return sum(end - start for start, end in source.residence.ram)

    return sorted(sources, key=lambda source: (-held(source), source.pulls))[:MAX_SOURCES]


def _path_blocks(loads: Loads, blocks: int) -> dict[str, int]:
    counts = {"hbm": loads.hbm, "ram": loads.ram, "peer": loads.peer, "storage": loads.storage}
    counts["recompute"] = blocks - loads.total
    return {path: count for path, count in counts.items() if count}
