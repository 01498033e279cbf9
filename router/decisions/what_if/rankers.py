# SPDX-License-Identifier: Apache-2.0
"""Decides again: from the inputs of a decision to a ranking under changed constants, settings and policy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol, cast

from router.costs.model import CERTAIN, CostModel, Costs, Doubts, Link
from router.decisions.constants import RowReader
from router.decisions.inputs import DecisionInputs, PlanSettings, costs_of, question_of
from router.decisions.what_if.settings import LOOKS_AT_COSTS, Changes
from router.plan.candidate import Plan, Question
from router.plan.native import PlannerSettings, QuestionScorer
from router.plan.planner import Planner
from router.plan.policies import Policy
from router.replay.policies import make_replay_policy

_KEPT = 2
"""Plans that are made of a ranking: the recorded choice is mostly the best, and another is priced by itself.

That does not go for several prompts, of whose blocks a record has only the sum.
"""


class Ranker(Protocol):
    """What decides again."""

    def rank(self, inputs: DecisionInputs) -> Sequence[Plan]:
        """The best plans, best first, of as many candidates as were made. A source may be one of the inputs."""
        ...


def make_ranker(changes: Changes) -> Ranker:
    """Native code where costs decide, Python for the rules of others."""
    return CostRanker(changes) if changes.policy in {None, LOOKS_AT_COSTS} else PolicyRanker(changes)


class CostRanker:
    """The native planner, which reads the inputs as they are; a few microseconds per candidate."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._reader = RowReader(changes.constants)
        self._random = Random(0)
        self._scorers: dict[PlanSettings, QuestionScorer] = {}

    def rank(self, inputs: DecisionInputs) -> Sequence[Plan]:
        costs = costs_of(inputs, self._reader)
        # The core reads attributes, and the inputs have those of a question.
        question = cast("Question", inputs)
        keep = _KEPT if len(inputs.prompt_tokens) == 1 else None
        return self._scorer(inputs).plan_question(question, costs, self._random, keep).ranking

    def _scorer(self, inputs: DecisionInputs) -> QuestionScorer:
        settings = self._changes.apply(inputs.settings)
        scorer = self._scorers.get(settings)
        if scorer is None:
            scorer = self._scorers[settings] = QuestionScorer(
                PlannerSettings(
                    settings.gpu_seconds_weight, settings.pull_deadline_s, settings.min_pull_tokens
                )
            )
        return scorer


class PolicyRanker:
    """Any policy over the planner in Python. It lives over all decisions, since some policies take turns."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._reader = RowReader(changes.constants)
        self._random = Random(0)
        self._costs = _CostsOfTheRecord()
        self._policies: dict[PlanSettings, Policy] = {}

    def rank(self, inputs: DecisionInputs) -> Sequence[Plan]:
        self._costs.now = costs_of(inputs, self._reader)
        return self._policy(inputs).rank(question_of(inputs), self._random).ranking

    def _policy(self, inputs: DecisionInputs) -> Policy:
        settings = self._changes.apply(inputs.settings)
        policy = self._policies.get(settings)
        if policy is None:
            name = self._changes.policy or LOOKS_AT_COSTS
            planner = Planner(
                self._costs, settings.gpu_seconds_weight, settings.pull_deadline_s, settings.min_pull_tokens
            )
            policy = make_replay_policy(name, planner, self._changes.kv_capacity_tokens)
            self._policies[settings] = policy
        return policy


class _CostsOfTheRecord:
    """Costs for a planner that outlives the record."""

    def __init__(self) -> None:
        self.now: Costs

    def model_for(self, worker: str) -> CostModel:
        return self.now.model_for(worker)

    def link(self, source: str, destination: str) -> Link:
        return self.now.link(source, destination)

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        return CERTAIN
