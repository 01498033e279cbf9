# SPDX-License-Identifier: Apache-2.0
"""The best time to first token that any single decision can give, found by trying them all on copies of the fleet.

Tried are, for every candidate: the engine's own walk; nothing beyond HBM; and a pull from each source that adds
blocks, at most the ``MOST_SOURCES`` that would add most. Each copy runs until the first token of that request, with what is
under way and without what would arrive later. So the oracle is greedy: it knows what the engines will do, not
what will be asked next.

Regret of a decision: how much longer its first token takes than that of the best of them, over the best.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Literal

from router.plan.candidate import Candidate, Plan, Question
from router.plan.planner import Planned, Planner
from router.plan.policies import Policy
from router.replay.forks import ask_copies

MOST_SOURCES = 8

OraclePolicyName = Literal["oracle"]

Trial = Callable[[Plan], float]
"""Seconds to the first token of the request being decided, were it sent as planned; called in a copy."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One decision beside the best one."""

    index: int
    """Of the request."""
    ttft_s: float
    best_ttft_s: float

    @property
    def regret(self) -> float:
        return self.ttft_s / self.best_ttft_s - 1.0


def actions(question: Question, planner: Planner) -> Iterator[Plan]:
    """Every plan that the oracle tries."""
    for candidate in question.candidates:
        local = planner.price_local(question, candidate)
        yield local
        if any(local.path_blocks.get(path) for path in ("ram", "storage")):
            yield _from_hbm_alone(local)
        yield from _pulls(question, candidate, planner)


def _pulls(question: Question, candidate: Candidate, planner: Planner) -> Sequence[Plan]:
    if len(question.prompt_tokens) != 1:
        return ()
    plans = [
        planner.price_pull(question, candidate, source)
        for source in question.sources
        if candidate.can_pull_from(source)
    ]
    useful = [plan for plan in plans if plan.path_blocks.get("peer")]
    splits = (
        [plan for plan in planner.plans(question, candidate) if len(plan.pulls) > 1]
        if candidate.extension
        else []
    )
    return [*sorted(useful, key=lambda plan: -plan.path_blocks["peer"])[:MOST_SOURCES], *splits]


def _from_hbm_alone(local: Plan) -> Plan:
    hbm = local.path_blocks.get("hbm", 0)
    paths = {"hbm": hbm, "recompute": local.prompt_blocks - hbm}
    return replace(
        local,
        path_blocks={path: blocks for path, blocks in paths.items() if blocks},
        cached_tokens=hbm * local.block_size_tokens,
        max_load_tokens=0,
    )


class Oracle:
    """Decides by trying every action."""

    name: OraclePolicyName = "oracle"
    looks_at_index = True

    def __init__(self, planner: Planner, trial: Trial, at_once: int | None = None) -> None:
        self._planner = planner
        self._trial = trial
        self._at_once = at_once or len(os.sched_getaffinity(0))

    def rank(self, question: Question, random: Random) -> Planned:
        """The best plan of each candidate, best first; equals by chance."""
        plans = list(actions(question, self._planner))
        tried = zip(self.ttfts_s(plans), plans, strict=True)
        order = sorted(tried, key=lambda one: (one[0], random.random()))
        best: dict[tuple[str, int], Plan] = {}
        for _, plan in order:
            best.setdefault((plan.worker, plan.dp_rank), plan)
        return Planned(tuple(best.values()))

    def ttfts_s(self, plans: Sequence[Plan]) -> list[float]:
        """What each plan would come to."""
        return ask_copies([partial(self._trial, plan) for plan in plans], self._at_once)

    def judge(self, question: Question, chosen: Plan, index: int) -> Judged:
        """A decision beside the best one, which may be itself."""
        ttft_s, *others_s = self.ttfts_s([chosen, *actions(question, self._planner)])
        return Judged(index, ttft_s, min(ttft_s, *others_s))


class JudgedPolicy:
    """A policy some of whose decisions are judged."""

    def __init__(
        self, policy: Policy, oracle: Oracle, asked: Callable[[], int], sample: Collection[int]
    ) -> None:
        """``asked``: the index of the request being decided; ``sample``: the indices to judge."""
        self._policy = policy
        self._oracle = oracle
        self._asked = asked
        self._sample = sample
        self.judged: list[Judged] = []

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def looks_at_index(self) -> bool:
        return self._policy.looks_at_index

    def rank(self, question: Question, random: Random) -> Planned:
        planned = self._policy.rank(question, random)
        if self._asked() in self._sample:
            self.judged.append(self._oracle.judge(question, planned.chosen, self._asked()))
        return planned


def spread(requests: int, sample: int) -> frozenset[int]:
    """Indices of ``sample`` of ``requests`` requests, evenly spread."""
    count = min(requests, sample)
    return frozenset((2 * i + 1) * requests // (2 * count) for i in range(count))
