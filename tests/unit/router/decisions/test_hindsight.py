# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
import pytest
from decision_questions import PROFILE, planner_with, random_question

from router.costs.model import CostModel
from router.decisions.hindsight import alternatives, regret_s, without
from router.decisions.inputs import best_candidates
from router.decisions.pricing import PlacedTokens, placed_tokens, price
from router.plan.candidate import Candidate, Question, Residence

B = 16
COSTS = CostModel(PROFILE)


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_priced_again_with_the_same_constants_costs_the_same(seed: int) -> None:
    question = random_question(Random(seed))
    ranks = {one.worker: one for one in question.candidates}
    for plan in planner_with(COSTS).plan(question, Random(0)).ranking:
        one = ranks[plan.worker]
        placed = placed_tokens(plan.path_blocks, plan.block_size_tokens)
        trust = plan.source.trust if plan.source else 1.0
        expected = one.trust * (placed.total - placed.peer) + trust * placed.peer
        link = COSTS.link(plan.source.worker, plan.worker) if plan.source else None
        terms = price(
            COSTS, link, question.prompt_tokens[0], placed, expected, one.queue_s, plan.circumstances
        )
        assert terms == pytest.approx(plan.terms._replace(decode_s=0.0))


def two_holders() -> Question:
    held = [Residence(hbm=((0, 400),))]
    far = Candidate("far", 0, B, 1, held, 0.3, 0)
    near = Candidate("near", 0, B, 1, held, 0.0, 0)
    return Question([8000], [near, far])


def regret(question: Question, cached_tokens: int, ttft_s: float, costs: CostModel = COSTS) -> float:
    plans = planner_with(COSTS).plan(question, Random(0)).ranking
    return regret_s(alternatives(best_candidates(question, plans), plans), 8000, cached_tokens, ttft_s, costs)


def test_an_answer_as_predicted_by_the_best_candidate_is_not_regretted() -> None:
    chosen = planner_with(COSTS).plan(two_holders(), Random(0)).chosen
    assert regret(two_holders(), chosen.cached_tokens, chosen.terms.total_s) == pytest.approx(0.0)
    assert regret(two_holders(), chosen.cached_tokens, chosen.terms.total_s / 2) == 0.0
    assert regret(two_holders(), chosen.cached_tokens, chosen.terms.total_s + 0.5) == pytest.approx(0.5)


def test_blocks_that_were_not_there_make_the_runner_up_the_better_choice() -> None:
    near, far = planner_with(COSTS).plan(two_holders(), Random(0)).ranking
    alone_s = COSTS.admit_s(0.0) + COSTS.prefill_s(0, 8000, 0)
    assert near.worker == "near"
    assert far.terms.total_s < alone_s
    assert regret(two_holders(), 0, alone_s) == pytest.approx(alone_s - far.terms.total_s)


def test_constants_learnt_since_count() -> None:
    slower = CostModel(msgspec.structs.replace(PROFILE, prefill_s_per_token=PROFILE.prefill_s_per_token * 3))
    chosen = planner_with(slower).plan(two_holders(), Random(0)).chosen
    assert regret(two_holders(), chosen.cached_tokens, chosen.terms.total_s, slower) == pytest.approx(0.0)
    assert regret(two_holders(), chosen.cached_tokens, chosen.terms.total_s) > 0.1


def test_the_doubted_worker_is_expected_to_hold_less() -> None:
    question = two_holders()
    near, far = question.candidates
    doubted = Question([8000], [near, replace(far, trust=0.05)])
    plans = planner_with(COSTS).plan(doubted, Random(0)).ranking
    tried = alternatives(best_candidates(doubted, plans), plans)
    assert {one.plan.worker: one.expected_tokens for one in tried} == {
        "near": 6400,
        "far": pytest.approx(0.05 * 6400),
    }


def test_what_was_not_there_is_missed_where_it_was_least_sure() -> None:
    placed = PlacedTokens(hbm=100, ram=50, peer=30, storage=20)
    assert without(placed, 0) == placed
    assert without(placed, 40) == PlacedTokens(hbm=100, ram=50, peer=0, storage=10)
    assert without(placed, 1000).total == 0
    assert without(placed, -5) == placed
