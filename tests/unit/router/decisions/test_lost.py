# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

import pytest
from decision_questions import PROFILE, planner_with, random_question
from hypothesis import given
from hypothesis import strategies as st

from router.costs.model import CostModel
from router.decisions.lost import LostTokens, lost_tokens, reach_tokens
from router.plan.candidate import NOTHING, Candidate, Question, Residence, Source
from router.plan.paths import derive_walk

B = 16
COUNTS = st.integers(0, 5000)


def candidate(worker: str, hbm: int = 0, ram: int = 0, can_pull: bool = False) -> Candidate:
    residence = Residence(hbm=((0, hbm),) if hbm else (), ram=((0, ram),) if ram else ())
    return Candidate(worker, 0, B, 1, [residence], 0.0, 0, can_pull=can_pull)


def source(worker: str, ram: int, fingerprint: str = "") -> Source:
    return Source(worker, 0, "h", 1, Residence(ram=((0, ram),)), 0, fingerprint=fingerprint)


@given(st.integers(1, 5000), COUNTS, COUNTS, COUNTS)
def test_the_parts_and_what_was_cached_are_the_prompt(
    prompt: int, reach: int, planned: int, observed: int
) -> None:
    lost = lost_tokens(prompt, reach, planned, observed)
    assert min(lost) >= 0
    assert sum(lost) + min(observed, prompt) == prompt


def test_each_part_has_its_cause() -> None:
    assert lost_tokens(100, reach=0, planned=0, observed=0) == LostTokens(workload=100, routing=0, stale=0)
    assert lost_tokens(100, reach=80, planned=0, observed=0) == LostTokens(workload=20, routing=80, stale=0)
    assert lost_tokens(100, reach=80, planned=60, observed=10) == LostTokens(
        workload=20, routing=20, stale=50
    )
    assert lost_tokens(100, reach=96, planned=96, observed=96) == LostTokens(workload=4, routing=0, stale=0)


def test_what_the_engine_found_beyond_the_plan_lessens_routing_then_workload() -> None:
    assert lost_tokens(100, reach=80, planned=60, observed=70) == LostTokens(workload=20, routing=10, stale=0)
    assert lost_tokens(100, reach=80, planned=60, observed=90) == LostTokens(workload=10, routing=0, stale=0)


def test_reach_is_the_best_of_all_whatever_it_costs() -> None:
    ranks = [candidate("a", hbm=5), candidate("b", ram=9), candidate("c")]
    assert reach_tokens(Question([200], ranks)) == 9 * B
    assert reach_tokens(Question([200], [candidate("c")])) == 0


def test_reach_counts_a_source_only_where_somebody_can_pull_from_it() -> None:
    idle, puller = candidate("a"), candidate("b", can_pull=True)
    assert reach_tokens(Question([200], [idle], [source("s", 10)])) == 0
    assert reach_tokens(Question([200], [idle, puller], [source("s", 10)])) == 10 * B
    assert reach_tokens(Question([200], [puller], [source("b", 10)])) == 0
    assert reach_tokens(Question([200], [puller], [source("s", 10, "other")])) == 0


def test_the_last_token_of_a_prompt_of_whole_blocks_is_never_reached_in_hbm() -> None:
    assert reach_tokens(Question([10 * B], [candidate("a", hbm=10)])) == 9 * B


def test_prompts_of_one_request_are_added_up() -> None:
    two = Candidate("a", 0, B, 1, [Residence(hbm=((0, 3),)), NOTHING], 0.0, 0)
    assert reach_tokens(Question([200, 200], [two])) == 3 * B


@pytest.mark.parametrize("seed", range(60))
def test_reach_equals_the_walk_of_every_pair(seed: int) -> None:
    question = random_question(Random(seed), candidates=6)
    [tokens] = question.prompt_tokens
    best = 0
    for one in question.candidates:
        pullable = [
            s for s in question.sources if s.worker != one.worker and s.fingerprint == one.fingerprint
        ]
        for ram in [(), *(s.residence.ram for s in pullable if one.can_pull)]:
            walk = derive_walk(tokens, B, one.chunk_blocks, one.residence[0], ram)
            best = max(best, (walk.hbm + walk.external) * B)
    assert reach_tokens(question) == best
    planned = planner_with(CostModel(PROFILE)).plan(question, Random(0)).chosen.cached_tokens
    assert reach_tokens(question, planned) == best
