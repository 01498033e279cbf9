# SPDX-License-Identifier: Apache-2.0
"""The planner of the native core. It prices the same actions as ``router.plan.planner``, which is its reference:
equal scores to the last bit, ties by another chance.

    NativePlanner.plan(question, random)              one question, all its candidates ranked
    QuestionScorer.plan_question(question, costs, …)  the same without a planner's own costs, for a log of decisions
    QuestionScorer.best_plans([(question, costs), …]) only the best plan of each, some ten microseconds per question
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from indexer import _core
from router.costs.model import Costs
from router.plan import candidate as values
from router.plan.candidate import Candidate, Plan, Question
from router.plan.native_question import FleetCandidates
from router.plan.planner import Planned, Planner

_ALL = 2**32
_SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What a planner is configured with; see ``router.config_sections.PlanConfig``."""

    gpu_seconds_weight: float
    pull_deadline_s: float
    min_pull_tokens: int = 0


class QuestionScorer:
    """Answers questions, each with costs of its own. Not to be called by several threads at once."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._core = _core.QuestionPlanner(
            settings.gpu_seconds_weight,
            settings.pull_deadline_s,
            max(settings.min_pull_tokens, 1),
            _core.PlanTypes(values),
        )

    def plan_question(
        self, question: Question, costs: Costs, random: Random, keep: int | None = None
    ) -> Planned:
        """The ranking of the candidates, or of the ``keep`` best; equal costs are ordered by chance.

        ``costs`` is asked for the model of each candidate, and for its link to each source that is tried. A model is
        read once and then known by its identity. O(candidates x sources x spans).

        Raises:
            ValueError: there are no candidates, or not one residence per prompt.
        """
        seed = random.getrandbits(_SEED_BITS)
        plans = self._core.plan(question, costs, seed, _ALL if keep is None else keep)
        return Planned(plans, len(question.candidates))

    def options(self, question: Question, costs: Costs) -> list[Plan]:
        """All that the only candidate of a question could do, in the order in which ``Planner`` prices it.

        Raises:
            ValueError: there is not just one candidate.
        """
        return self._core.options(question, costs)

    def best_plans(self, questions: Iterable[tuple[Question, Costs]], random: Random) -> list[Plan]:
        """The best plan of each question, in their order.

        Raises:
            ValueError: as ``plan_question``.
        """
        return self._core.best(questions, random.getrandbits(_SEED_BITS))


class NativePlanner(Planner):
    """``Planner`` with ``plan`` in native code; what only comparisons use stays in Python."""

    def __init__(
        self, costs: Costs, gpu_seconds_weight: float, pull_deadline_s: float, min_pull_tokens: int = 0
    ) -> None:
        super().__init__(costs, gpu_seconds_weight, pull_deadline_s, min_pull_tokens)
        self.settings = PlannerSettings(gpu_seconds_weight, pull_deadline_s, min_pull_tokens)
        self._scorer = QuestionScorer(self.settings)

    def plan(self, question: Question, random: Random) -> Planned:
        """As ``Planner.plan``; of a whole fleet (``router.plan.native_fleet``) only the best are in the ranking."""
        asked = question.candidates
        if isinstance(asked, FleetCandidates):
            return asked.rank(question, random.getrandbits(_SEED_BITS))
        return self._scorer.plan_question(question, self._costs, random)

    def best_plan(self, question: Question, candidate: Candidate) -> Plan:
        return min(self.plans(question, candidate), key=lambda plan: plan.score_s)

    def plans(self, question: Question, candidate: Candidate) -> list[Plan]:
        return self._scorer.options(_about(question, candidate), self._costs)


def _about(question: Question, candidate: Candidate) -> Question:
    return replace(question, candidates=[candidate])
