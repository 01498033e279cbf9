# SPDX-License-Identifier: Apache-2.0
"""Chooses the worker and the path that cost the least time. Pure: time is in the question, chance an argument.

For every candidate the actions its engine can carry out are priced:

    local   the engine's own walk over HBM, RAM and storage, whole or cut short (``max_load_tokens``)
    none    HBM only (when recomputing is cheaper than loading)
    peer s  the walk with one peer as a further source, whole or cut short
    split   the walk with two or three peers, each for a part of the prompt (``router.plan.split``); only where our
            engine extension runs

Where a walk may be cut (``router.plan.cuts``) follows from the shape of the cost, so only few cuts are priced.
Cost: O(candidates x sources x spans). At most ``MAX_SOURCES`` sources are tried per decision, those that hold
most and serve the fewest pulls. This is the reference that the native scoring must equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from router.costs.model import CostModel, Costs
from router.plan.candidate import Candidate, Circumstances, Plan, Pull, Question, Source, Terms
from router.plan.cuts import Affine, PlaceRates, cuts
from router.plan.displacement import displaced_s, occupied_s
from router.plan.paths import STORAGE, Loads, Walk, derive_walk
from router.plan.pulling import ends_with_pulls, single_pull, split_pulls

MAX_SOURCES = 4


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan of each candidate, best first."""

    ranking: tuple[Plan, ...]
    """Of all candidates, or only of the best of many."""
    candidates: int | None = None
    """How many there were; None where all are in the ranking."""

    @property
    def chosen(self) -> Plan:
        return self.ranking[0]

    @property
    def count(self) -> int:
        """Candidates that were compared."""
        return len(self.ranking) if self.candidates is None else self.candidates


class _Action(NamedTuple):
    """One action of one candidate, priced."""

    score_s: float
    loads: Loads
    terms: Terms
    source: Source | None
    cap_blocks: int | None
    """Blocks to be loaded behind the HBM hit at most; None leaves the walk whole, or ranges of pulls say it."""
    use_storage: bool
    pulls: tuple[Pull, ...] = ()


class Planner:
    """Minimises the time to first token plus what the GPU seconds that a plan burns cost others.

    A GPU second counts ``gpu_seconds_weight`` on an idle fleet, and the question's ``pressure`` more on a busy one.
    """

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
        sources = most_useful(question.sources)
        best = [self._best(question, candidate, sources) for candidate in question.candidates]
        order = sorted(best, key=lambda plan: (plan.score_s, random.random()))
        return Planned(tuple(order))

    def best_plan(self, question: Question, candidate: Candidate) -> Plan:
        """The cheapest plan of one candidate."""
        return self._best(question, candidate, most_useful(question.sources))

    def plans(self, question: Question, candidate: Candidate) -> list[Plan]:
        """All that one candidate could do."""
        actions = self._actions(question, candidate, most_useful(question.sources))
        return [self._plan(question, candidate, action) for action in actions]

    def price_local(self, question: Question, candidate: Candidate) -> Plan:
        """The plan of the engine's own walk, whatever it costs."""
        return self._plan(question, candidate, self._price(question, candidate, _walks(question, candidate)))

    def price_pull(self, question: Question, candidate: Candidate, source: Source) -> Plan:
        """The plan of a pull from that source, whatever it costs.

        The caller sees to it that the candidate can pull and is not its own source.
        """
        walks = _walks(question, candidate, source)
        return self._plan(question, candidate, self._price(question, candidate, walks, source))

    def _best(self, question: Question, candidate: Candidate, sources: Sequence[Source]) -> Plan:
        best = min(self._actions(question, candidate, sources), key=lambda action: action.score_s)
        return self._plan(question, candidate, best)

    def _actions(
        self, question: Question, candidate: Candidate, sources: Sequence[Source]
    ) -> Iterator[_Action]:
        walks = _walks(question, candidate)
        yield self._price(question, candidate, walks)
        if any(walk.external for walk in walks):
            yield self._price(question, candidate, walks, cap=0)
        if len(walks) != 1:
            return
        for cap in self._cuts(candidate, walks[0], None):
            yield self._price(question, candidate, walks, cap=cap)
        able = [source for source in sources if candidate.can_pull_from(source)]
        for source in able:
            yield from self._pulls(question, candidate, source)
        if candidate.extension and len(able) > 1:
            yield from self._splits(question, candidate, able)

    def _pulls(self, question: Question, candidate: Candidate, source: Source) -> Iterator[_Action]:
        walks = _walks(question, candidate, source)
        for cap in (None, *self._cuts(candidate, walks[0], source)):
            pulled_tokens = walks[0].loads(cap).peer * candidate.block_size_tokens
            if pulled_tokens < self._min_pull_tokens:
                continue
            action = self._price(question, candidate, walks, source, cap)
            if action.terms.peer_s < self._pull_deadline_s:
                yield action

    def _cuts(self, candidate: Candidate, walk: Walk, source: Source | None) -> list[int]:
        costs, size = self._costs.model_for(candidate.worker), candidate.block_size_tokens
        rates = PlaceRates(
            Affine.of(lambda blocks: costs.promotion_s(blocks * size)),
            Affine.of(lambda blocks: self._peer_s(costs, blocks * size, candidate, source)),
            Affine.of(lambda blocks: costs.storage_s(blocks * size)),
        )
        hidden_s = candidate.queue_s - costs.admit_s(candidate.queue_s)
        return cuts(walk, rates, candidate.chunk_blocks, hidden_s, self._pull_deadline_s)

    def _price(
        self,
        question: Question,
        candidate: Candidate,
        walks: Sequence[Walk],
        source: Source | None = None,
        cap: int | None = None,
    ) -> _Action:
        costs, size = self._costs.model_for(candidate.worker), candidate.block_size_tokens
        found = [walk.loads(cap) for walk in walks]
        pulled = sum(loads.peer for loads in found)
        use_storage = cap is None or any(loads.storage for loads in found) or not _finds_storage(walks)
        pulls: tuple[Pull, ...] = ()
        if candidate.extension and source is not None and pulled:
            link = self._costs.link(source.worker, candidate.worker)
            pulls = (single_pull(costs, link, candidate, source, walks[0], cap),)
            if cap is not None and ends_with_pulls(walks[0], cap, candidate):
                cap = None
        return self._action(
            question,
            candidate,
            found,
            [_expected(loads, candidate, source) for loads in found],
            self._peer_s(costs, pulled * size, candidate, source),
            (source, cap, use_storage, pulls),
        )

    def _action(
        self,
        question: Question,
        candidate: Candidate,
        found: Sequence[Loads],
        expected: Sequence[float],
        peer_s: float,
        does: tuple[Source | None, int | None, bool, tuple[Pull, ...]],
    ) -> _Action:
        """``found`` and ``expected`` blocks per prompt; ``does``: the other fields of the action."""
        costs, size = self._costs.model_for(candidate.worker), candidate.block_size_tokens
        prefill_s = 0.0
        total = Loads()
        for tokens, loads, there in zip(question.prompt_tokens, found, expected, strict=True):
            # The engine always computes at least the last token.
            missing = max(tokens - there * size, 1)
            prefill_s += costs.prefill_s(tokens - missing, missing, candidate.decodes)
            total = total.plus(loads)
        terms = Terms(
            candidate.queue_s,
            costs.admit_s(candidate.queue_s),
            costs.promotion_s(total.ram * size),
            peer_s,
            costs.storage_s(total.storage * size),
            prefill_s,
            _excess_s(costs, question, candidate)
            + self._gpu_seconds_weight * _crowding_s(costs, question, candidate),
        )
        weight = self._gpu_seconds_weight + question.pressure
        brought = sum(question.prompt_tokens) - total.hbm * size
        occupied = occupied_s(costs, candidate, question.output_tokens)
        terms = terms._replace(displaced_s=displaced_s(weight, costs, brought) + occupied)
        score_s = terms.total_s + weight * prefill_s + terms.decode_s + terms.displaced_s
        return _Action(score_s, total, terms, *does)

    def _splits(self, question: Question, candidate: Candidate, able: Sequence[Source]) -> Iterator[_Action]:
        size = candidate.block_size_tokens
        for split in split_pulls(self._costs, candidate, question.prompt_tokens[0], able):
            fewest_tokens = min(pull.blocks for pull in split.pulls) * size
            if fewest_tokens < self._min_pull_tokens or split.peer_s >= self._pull_deadline_s:
                continue
            expected = [_expected(split.loads, candidate, None) + split.expected_blocks]
            does = split.pulls[0].source, None, True, split.pulls
            yield self._action(question, candidate, [split.loads], expected, split.peer_s, does)

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
            max_load_tokens=None if action.cap_blocks is None else action.cap_blocks * size,
            use_storage=action.use_storage,
            circumstances=Circumstances(
                decodes=candidate.decodes,
                other_pulls=max(candidate.pulls, action.source.pulls) if action.source else 0,
                connected=action.source is None or action.source.worker in candidate.sessions,
            ),
            pulls=action.pulls,
            extension=candidate.extension,
        )


def most_useful(sources: Sequence[Source]) -> Sequence[Source]:
    """The ``MAX_SOURCES`` that hold most; of equals, those that serve the fewest pulls."""
    if len(sources) <= MAX_SOURCES:
        return sources

    def held(source: Source) -> int:
        return sum(end - start for start, end in source.residence.ram)

    return sorted(sources, key=lambda source: (-held(source), source.pulls))[:MAX_SOURCES]


def _walks(question: Question, candidate: Candidate, source: Source | None = None) -> list[Walk]:
    size, chunk = candidate.block_size_tokens, candidate.chunk_blocks
    peer_ram = source.residence.ram if source else ()
    return [
        derive_walk(tokens, size, chunk, residence, peer_ram)
        for tokens, residence in zip(question.prompt_tokens, candidate.residence, strict=True)
    ]


def _expected(loads: Loads, candidate: Candidate, source: Source | None) -> float:
    """Blocks that will be there, by what was there of late of all that was promised."""
    own = loads.hbm + loads.ram + loads.storage
    return candidate.trust * own + (source.trust * loads.peer if source else 0.0)


def _crowding_s(costs: CostModel, question: Question, candidate: Candidate) -> float:
    """Seconds that this answer and those that decode beside it take from each other."""
    each_s = costs.profile.decode_s_per_request * question.output_tokens
    return 2 * candidate.decodes * each_s


def _excess_s(costs: CostModel, question: Question, candidate: Candidate) -> float:
    """By how much the whole answer would exceed the time per output token asked for."""
    if question.slo_tpot_s is None:
        return 0.0
    excess_s = costs.decode_step_s(candidate.decodes + 1) - question.slo_tpot_s
    return max(excess_s, 0.0) * question.output_tokens


def _finds_storage(walks: Sequence[Walk]) -> bool:
    return any(place == STORAGE for walk in walks for place, _ in walk.runs)


def _path_blocks(loads: Loads, blocks: int) -> dict[str, int]:
    counts = {"hbm": loads.hbm, "ram": loads.ram, "peer": loads.peer, "storage": loads.storage}
    counts["recompute"] = blocks - loads.total
    return {path: count for path, count in counts.items() if count}
