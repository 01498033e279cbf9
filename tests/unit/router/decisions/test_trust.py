# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

import pytest
from decision_questions import PROFILE, planner_with

from router.costs.model import CostModel
from router.decisions.trust import LEAST, Trust, blame
from router.plan.candidate import Candidate, Question, Residence

BLOCK = 16
TOKENS = 8000


def test_a_worker_that_never_disappointed_is_trusted() -> None:
    trust = Trust()
    assert trust.of("a", 0.0) == 1.0
    trust.observe("a", 8000, 8000, 0.0)
    trust.observe("a", 0, 0, 0.0)
    assert trust.of("a", 0.0) == 1.0


def test_one_stale_plan_costs_little_and_a_map_that_is_never_right_all_but_the_least() -> None:
    trust = Trust()
    trust.observe("a", 8000, 0, 0.0)
    assert trust.of("a", 0.0) == pytest.approx(0.8, abs=0.01)
    for _ in range(400):
        trust.observe("a", 8000, 0, 0.0)
    assert LEAST <= trust.of("a", 0.0) < 0.06


def test_the_share_that_is_there_is_what_is_expected_in_the_long_run() -> None:
    trust = Trust()
    for _ in range(1000):
        trust.observe("a", 4000, 3000, 0.0)
    assert trust.of("a", 0.0) == pytest.approx(0.75, abs=0.02)


def test_large_promises_count_for_more_than_small_ones() -> None:
    trust = Trust()
    for _ in range(20):
        trust.observe("a", 100, 0, 0.0)
        trust.observe("a", 9900, 9900, 0.0)
    assert trust.of("a", 0.0) > 0.98


def test_trust_returns_slowly_where_nothing_is_observed_and_is_whole_in_the_end() -> None:
    trust = Trust()
    for _ in range(400):
        trust.observe("a", 8000, 0, 0.0)
    seen = [trust.of("a", minutes * 60.0) for minutes in (0, 5, 10, 20, 40, 600)]
    assert seen == sorted(seen)
    assert seen[1] < 0.2
    assert seen[3] > 0.5
    assert seen[5] == pytest.approx(1.0)


def test_kept_promises_bring_it_back_sooner() -> None:
    trust = Trust()
    for _ in range(20):
        trust.observe("a", 8000, 0, 0.0)
    before = trust.of("a", 0.0)
    for _ in range(60):
        trust.observe("a", 8000, 8000, 0.0)
    assert before < 0.25
    assert trust.of("a", 0.0) > 0.75


def test_another_process_begins_anew() -> None:
    trust = Trust()
    trust.observe("a", 80_000, 0, 0.0)
    trust.forget("a")
    assert trust.of("a", 0.0) == 1.0


def test_a_reader_with_a_copy_learns_whose_record_changed() -> None:
    trust = Trust()
    changed, of_another = trust.watch(), trust.watch()
    trust.observe("a", 1000, 1000, 0.0)
    assert changed == set()
    trust.observe("a", 1000, 0, 0.0)
    trust.observe("b", 1000, 400, 5.0)
    assert changed == {"a", "b"}
    assert trust.record("b") == (1000.0, 400.0, 5.0)
    changed.clear()
    trust.forget("a")
    trust.forget("c")
    assert (changed, of_another, trust.watch()) == ({"a"}, {"a", "b"}, {"b"})
    assert trust.record("a") == trust.record("c") == (0.0, 0.0, 0.0)


def test_more_than_was_promised_is_no_more_than_kept() -> None:
    trust = Trust()
    trust.observe("a", 1000, 0, 0.0)
    low = trust.of("a", 0.0)
    trust.observe("a", 1000, 90_000, 0.0)
    assert low < trust.of("a", 0.0) < 1.0


def test_what_a_pull_lost_is_its_source_s_fault_first() -> None:
    assert blame(500, pulled_tokens=800) == (500, 0)
    assert blame(1000, pulled_tokens=800) == (800, 200)
    assert blame(300, pulled_tokens=0) == (0, 300)
    assert blame(0, pulled_tokens=800) == (0, 0)


def test_a_worker_whose_map_lies_gets_fewer_requests_and_more_again_when_it_is_true() -> None:
    """Each request's prompt is said to be at both of two workers, and its first has evicted it in silence."""
    trust, random, planner = Trust(), Random(1), planner_with(CostModel(PROFILE))

    def at_the_liar(requests: int, now_s: float, *, lies: bool) -> int:
        chosen = 0
        for _ in range(requests):
            # The liar seems a little less busy, so it is chosen as long as it is believed.
            question = Question(
                [TOKENS], [_holder("liar", 0.0, trust, now_s), _holder("true", 0.01, trust, now_s)]
            )
            plan = planner.plan(question, random).chosen
            there = 0 if lies and plan.worker == "liar" else plan.cached_tokens
            trust.observe(plan.worker, plan.cached_tokens, there, now_s)
            chosen += plan.worker == "liar"
        return chosen

    assert at_the_liar(50, 0.0, lies=False) == 50
    # A trial now and then: nobody else holds less, so doubt alone decides.
    assert at_the_liar(50, 1.0, lies=True) <= 5
    assert at_the_liar(50, 2.0, lies=True) == 0
    assert at_the_liar(50, 7200.0, lies=False) == 50


def _holder(worker: str, queue_s: float, trust: Trust, now_s: float) -> Candidate:
    held = Residence(hbm=((0, TOKENS // BLOCK),))
    return Candidate(worker, 0, BLOCK, 1, [held], queue_s, 0, trust=trust.of(worker, now_s))
