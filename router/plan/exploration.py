# SPDX-License-Identifier: Apache-2.0
"""Trials: now and then a load that looks too slow is planned all the same, to learn what it really takes.

What is never chosen is never observed, so a constant that starts too pessimistic would stay so. A load is worth a
trial if it would be the best plan, were it as fast as one standard deviation of its uncertainty allows (the lower
sixth of what is believed). Observations shrink that uncertainty, so trials of a load that is truly slow end.

What trials may cost is bounded by an account in units of predicted costs: each decision pays ``share`` in, each
trial takes out by how much its predicted cost exceeds that of the best plan, relative to it. At most 1 is saved, so
one trial at most doubles what is predicted, and over n decisions all trials together lose at most ``share * n + 1``
times the mean. Bounded is what was predicted: a first trial of something far slower than believed costs more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from router.costs.model import Costs
from router.plan.candidate import Plan, Question
from router.plan.planner import Planned, Planner
from router.plan.policies import Policy

_MOST_SAVED = 1.0
_MOST_QUEUE = 0.1  # of the time to first token: what waits in a queue tells little of its load
_LEAST_DOUBT = 0.4  # a factor of one and a half: what is known better is not worth a trial
_NEXT = 8
_PRICED = 0.0625  # of all decisions: pricing again what one worker could do takes about as long as a decision


class Explorer:
    """The account, and the choice of a trial."""

    def __init__(self, costs: Costs, share: float) -> None:
        """``share``: of the predicted costs, what trials may lose on average; 0 for no trials."""
        self._costs = costs
        self._share = share
        self._saved = _MOST_SAVED if share > 0 else 0.0
        self.trials = 0
        self.lost = 0.0
        """Sum of the relative losses that were predicted."""

    def decided(self) -> bool:
        """Pay in for one decision; whether it may be a trial."""
        self._saved = min(self._saved + self._share, _MOST_SAVED) if self._share > 0 else 0.0
        return self._saved > 0

    def view(self) -> dict[str, float]:
        """For the admin API."""
        return {"share": self._share, "saved": self._saved, "count": self.trials, "lost": self.lost}

    def choose(self, best: Plan, others: Iterable[Plan], random: Random) -> Plan | None:
        """One of ``others`` that is worth a trial, by chance, the more promising the likelier; None if none is."""
        worth: list[Plan] = []
        hopes: list[float] = []
        for plan in others:
            if not _loads(plan):
                continue
            loss = _loss(plan, best)
            if not 0.0 < loss <= self._saved or plan.terms.queue_s > _MOST_QUEUE * plan.terms.total_s:
                continue
            hope = best.score_s - self._hopeful_score_s(plan)
            if hope > 0:
                worth.append(plan)
                hopes.append(hope)
        if not worth:
            return None
        chosen = random.choices(worth, hopes)[0]
        self._saved -= _loss(chosen, best)
        self.trials += 1
        self.lost += _loss(chosen, best)
        return chosen

    def _hopeful_score_s(self, plan: Plan) -> float:
        terms = plan.terms
        source = plan.source.worker if plan.source else None
        doubts = self._costs.doubts(plan.worker, source, terms.peer_s)
        hopeful = terms._replace(
            ram_s=terms.ram_s * _hope(doubts.ram),
            peer_s=terms.peer_s * _hope(doubts.peer),
            storage_s=terms.storage_s * _hope(doubts.storage),
        )
        return plan.score_s - (terms.total_s - hopeful.total_s)


class Exploring:
    """A policy with trials: of the next in its ranking, and of other plans of the worker that it chose."""

    looks_at_index = True

    def __init__(self, policy: Policy, planner: Planner, explorer: Explorer) -> None:
        self._policy = policy
        self._planner = planner
        self._explorer = explorer

    @property
    def name(self) -> str:
        return self._policy.name

    def rank(self, question: Question, random: Random) -> Planned:
        planned = self._policy.rank(question, random)
        if not question.explore or not self._explorer.decided():
            return planned
        best, others = planned.chosen, [*planned.ranking[1 : 1 + _NEXT]]
        if random.random() < _PRICED:
            others += self._unchosen(question, best)
        trial = self._explorer.choose(best, others, random)
        if trial is None:
            return planned
        rest = [
            plan for plan in planned.ranking if (plan.worker, plan.dp_rank) != (trial.worker, trial.dp_rank)
        ]
        return replace(planned, ranking=(replace(trial, trial=True), *rest))

    def _unchosen(self, question: Question, best: Plan) -> list[Plan]:
        """All actions of the candidate that was chosen."""
        for candidate in question.candidates:
            if (candidate.worker, candidate.dp_rank) == (best.worker, best.dp_rank):
                return self._planner.plans(question, candidate)
        return []


def _loads(plan: Plan) -> bool:
    terms = plan.terms
    return terms.ram_s + terms.peer_s + terms.storage_s > 0


def _hope(doubt: float) -> float:
    return math.exp(-doubt) if doubt > _LEAST_DOUBT else 1.0


def _loss(plan: Plan, best: Plan) -> float:
    return plan.score_s / best.score_s - 1 if best.score_s > 0 else math.inf
