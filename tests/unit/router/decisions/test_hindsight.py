# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest
from decision_questions import PROFILE, extended_question, planner_with, random_question

from router.costs.model import CostModel
from router.decisions.hindsight import alternatives, regret_s, without
from router.decisions.inputs import best_candidates
from router.decisions.pricing import PlacedTokens, Pulled, placed_tokens, price, pulled_s
from router.plan.candidate import Candidate, Question, Residence

B = 16
COSTS = CostModel(PROFILE)


@pytest.mark.parametrize("draw", [random_question, extended_question])
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_priced_again_with_the_same_constants_costs_the_same(
    seed: int, draw: Callable[[Random], Question]
) -> None:
    question = draw(Random(seed))
    ranking = planner_with(COSTS).plan(question, Random(0)).ranking
    ranks = {one.worker: one for one in question.candidates}
    for plan, one in zip(
        ranking, alternatives([ranks[plan.worker] for plan in ranking], ranking), strict=False
    ):
        known = replace(plan, terms=plan.terms._replace(decode_s=0.0))
        if len(plan.pulls) > 1 and min(pull.other_pulls for pull in plan.pulls) > ranks[plan.worker].pulls:
            continue  # how busy the worker's own link was is not kept
        # All that is expected is there, and the answer takes what was predicted: nothing to regret.
        regretted = regret_s([one], question.prompt_tokens[0], plan.cached_tokens, known.terms.total_s, COSTS)
        trusted = ranks[plan.worker].trust == 1.0 and all(p.source.trust == 1.0 for p in plan.pulls)
        if trusted and (plan.source is None or plan.source.trust == 1.0):
            assert regretted == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_terms_of_a_plan_come_out_again(seed: int) -> None:
    question = random_question(Random(seed))
    ranks = {one.worker: one for one in question.candidates}
    for plan in planner_with(COSTS).plan(question, Random(0)).ranking:
        one, around = ranks[plan.worker], plan.circumstances
        placed = placed_tokens(plan.path_blocks, plan.block_size_tokens)
        pulls, expected = [], one.trust * (placed.total - placed.peer)
        if plan.source is not None:
            link = COSTS.link(plan.source.worker, plan.worker)
            pulls = [Pulled(placed.peer, link, around.other_pulls, around.connected)]
            expected += plan.source.trust * placed.peer
        peer_s = pulled_s(COSTS, pulls, 1.0)
        tokens = question.prompt_tokens[0]
        terms = price(COSTS, tokens, placed, expected, one.queue_s, around.decodes, peer_s)
        assert terms == pytest.approx(plan.terms._replace(decode_s=0.0, displaced_s=0.0))


def test_a_part_that_did_not_come_from_one_of_several_sources_lessens_the_regret() -> None:
    """Computed instead, it makes the best that the chosen worker could have done slower."""
    drawn = [extended_question(Random(seed), idle=True) for seed in range(60)]
    split = 0
    for question in drawn:
        plan = planner_with(COSTS).plan(question, Random(0)).chosen
        if len(plan.pulls) < 2:
            continue
        split += 1
        asked = [one for one in question.candidates if one.worker == plan.worker]
        tried, tokens = alternatives(asked, [plan]), question.prompt_tokens[0]
        kept = plan.cached_tokens - plan.pulls[-1].blocks * plan.block_size_tokens
        assert regret_s(tried, tokens, kept, 100.0, COSTS) < regret_s(
            tried, tokens, plan.cached_tokens, 100.0, COSTS
        )
    assert split > 3


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
