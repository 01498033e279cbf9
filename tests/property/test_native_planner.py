# SPDX-License-Identifier: Apache-2.0
"""The native planner and the plain one give every candidate the same plan, whatever is asked and whatever it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import plan_values as values
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Plan, Question, Residence
from router.plan.native import NativePlanner, PlannerSettings, QuestionScorer
from router.plan.planner import Planned, Planner

settings = st.builds(
    PlannerSettings,
    gpu_seconds_weight=st.sampled_from([0.0, 0.1, 1.0]),
    pull_deadline_s=st.sampled_from([0.01, 0.3, 5.0]),
    min_pull_tokens=st.sampled_from([0, 33, 200]),
)


def by_rank(planned: Planned) -> dict[tuple[str, int], Plan]:
    return {(plan.worker, plan.dp_rank): plan for plan in planned.ranking}


any_question = st.one_of(values.questions(), values.extended_questions())


@given(asked=any_question, costs=values.costs(), settings=settings)
def test_native_planner_equals_the_reference(
    asked: Question, costs: values.DifferentCosts, settings: PlannerSettings
) -> None:
    arguments = settings.gpu_seconds_weight, settings.pull_deadline_s, settings.min_pull_tokens
    native, plain = NativePlanner(costs, *arguments), Planner(costs, *arguments)
    planned, reference = (one.plan(asked, Random(0)) for one in (native, plain))
    assert planned.count == reference.count == len(asked.candidates)
    # Scores are equal to the last bit, and of equal actions both take the first.
    assert by_rank(planned) == by_rank(reference)
    scores = [plan.score_s for plan in planned.ranking]
    assert scores == sorted(scores)
    for one in asked.candidates:
        assert native.best_plan(asked, one) == plain.best_plan(asked, one)
        assert native.plans(asked, one) == plain.plans(asked, one)


@given(asked=any_question, costs=values.costs(), settings=settings, keep=st.integers(1, 6))
def test_only_the_best_are_kept_if_so_asked(
    asked: Question, costs: values.DifferentCosts, settings: PlannerSettings, keep: int
) -> None:
    scorer = QuestionScorer(settings)
    everything = scorer.plan_question(asked, costs, Random(7))
    best = scorer.plan_question(asked, costs, Random(7), keep)
    assert best.ranking == everything.ranking[:keep]
    assert best.count == len(asked.candidates)
    assert [plan.score_s for plan in scorer.best_plans([(asked, costs)] * 2, Random(1))] == [
        everything.chosen.score_s
    ] * 2


def candidate(worker: str) -> Candidate:
    return Candidate(worker, 0, 16, 1, [Residence()], queue_s=0.0, decodes=0)


def scorer() -> QuestionScorer:
    return QuestionScorer(PlannerSettings(0.1, 5.0))


COSTS = CostModel(load_profile("default"))


def test_equal_candidates_share_equally() -> None:
    asked = Question([1000], [candidate(name) for name in "abcde"])
    one, random = scorer(), Random(1)
    firsts = Counter(one.plan_question(asked, COSTS, random).chosen.worker for _ in range(2000))
    lasts = Counter(one.plan_question(asked, COSTS, random).ranking[-1].worker for _ in range(2000))
    assert all(300 < firsts[name] < 500 for name in "abcde")
    assert all(300 < lasts[name] < 500 for name in "abcde")


def test_question_without_candidates_is_refused() -> None:
    with pytest.raises(ValueError, match="candidates"):
        scorer().plan_question(Question([16], []), COSTS, Random(0))


@pytest.mark.parametrize(
    "broken",
    [
        {"block_size_tokens": 0},
        {"chunk_blocks": 0},
        {"residence": []},
        {"queue_s": "long"},
        {"residence": [Residence(hbm=((0, 1, 2),))]},  # type: ignore[arg-type]
        {"residence": [Residence(ram=(3,))]},  # type: ignore[arg-type]
        {"residence": [None]},
    ],
)
def test_values_that_are_none_are_refused_and_do_no_harm(broken: dict[str, object]) -> None:
    one = scorer()
    asked = Question([1000], [replace(candidate("a"), **broken)])  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError, AttributeError)):
        one.plan_question(asked, COSTS, Random(0))
    fine = Question([1000], [candidate("a")])
    assert one.plan_question(fine, COSTS, Random(0)).chosen.worker == "a"
