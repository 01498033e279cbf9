# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from router.costs.calibration import Calibration
from router.costs.model import CostModel, Doubts, Link
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Plan, Question, Residence, Source, Terms
from router.plan.exploration import Explorer, Exploring
from router.plan.observed import observation
from router.plan.planner import Planned, Planner
from router.plan.policies import KvAware

SIZE = 64
BLOCKS = 250
HELD = Residence(ram=((0, BLOCKS),))
SLOW_LINK = {"peer_bytes_per_s": 0.9e9}
"""A pull of the whole prompt then takes about twice as long as computing it."""


class Believed(CostModel):
    """Fixed constants, doubted as told."""

    def __init__(self, peer: float, overrides: dict[str, float] = SLOW_LINK) -> None:
        super().__init__(load_profile("default", overrides))
        self._doubts = Doubts(peer=peer)

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        return self._doubts


def candidate(worker: str, **fields: object) -> Candidate:
    values: dict[str, object] = {
        "dp_rank": 0,
        "block_size_tokens": SIZE,
        "chunk_blocks": 1,
        "residence": [Residence()],
        "queue_s": 0.0,
        "decodes": 0,
        "can_pull": True,
        "sessions": frozenset({"s"}),
    }
    return Candidate(worker, **values | fields)  # type: ignore[arg-type]


def question(*candidates: Candidate, explore: bool = True) -> Question:
    source = Source("s", 0, "s", 1, HELD, 0)
    return Question(
        [BLOCKS * SIZE], candidates or (candidate("a"), candidate("b")), [source], explore=explore
    )


def plans(costs: CostModel) -> tuple[Plan, list[Plan]]:
    """The cheapest plan of one idle worker and all that it could do."""
    planner = Planner(costs, 0.1, 60.0)
    only = question(candidate("a"))
    return planner.plan(only, Random(0)).chosen, planner.plans(only, only.candidates[0])


def test_a_pull_that_may_well_be_faster_is_tried() -> None:
    best, others = plans(Believed(peer=1.4))
    assert best.source is None
    trial = Explorer(Believed(peer=1.4), 0.01).choose(best, others, Random(0))
    assert trial is not None
    assert trial.source is not None
    assert trial.score_s > best.score_s


@pytest.mark.parametrize("doubt", [0.0, 0.3, 0.45])
def test_a_pull_that_is_known_to_be_slow_is_not(doubt: float) -> None:
    best, others = plans(Believed(peer=doubt))
    assert Explorer(Believed(peer=doubt), 0.01).choose(best, others, Random(0)) is None


def test_no_trial_where_a_queue_would_blur_what_it_shows() -> None:
    best, others = plans(Believed(peer=1.4))
    queued = [replace(plan, terms=plan.terms._replace(queue_s=0.3 * plan.terms.total_s)) for plan in others]
    assert Explorer(Believed(peer=1.4), 0.01).choose(best, queued, Random(0)) is None


def test_a_trial_never_more_than_doubles_what_is_predicted() -> None:
    best = Plan("a", 0, SIZE, BLOCKS, {}, 0, Terms(prefill_s=1.0), 1.0)
    source = Source("s", 0, "s", 1, HELD, 0)
    costs = Believed(peer=5.0)
    for score_s, tried in ((1.9, True), (2.1, False)):
        other = replace(best, source=source, terms=Terms(peer_s=score_s), score_s=score_s)
        assert (Explorer(costs, 0.01).choose(best, [other], Random(0)) is not None) is tried


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_what_all_trials_lose_is_bounded_by_the_share(share: float) -> None:
    # Doubts that never shrink: the worst case, trials for ever.
    costs = Believed(peer=1.4)
    planner = Planner(costs, 0.1, 60.0)
    explorer = Explorer(costs, share)
    policy = Exploring(KvAware(planner), planner, explorer)
    random, decisions, lost = Random(1), 3000, 0.0
    for _ in range(decisions):
        planned = policy.rank(question(), random)
        best_s = min(plan.score_s for plan in planner.plan(question(), Random(0)).ranking)
        lost += planned.chosen.score_s / best_s - 1
    assert explorer.trials > 10
    assert lost == pytest.approx(explorer.lost)
    assert 0.3 * share * decisions < lost <= share * decisions + 1


def test_a_trial_is_marked_and_leads_a_ranking_of_all_candidates() -> None:
    costs = Believed(peer=1.4)
    planner = Planner(costs, 0.1, 60.0)
    policy = Exploring(KvAware(planner), planner, Explorer(costs, 0.05))
    random = Random(2)
    rankings = [policy.rank(question(), random).ranking for _ in range(300)]
    tried = [ranking for ranking in rankings if ranking[0].trial]
    assert tried
    for ranking in tried:
        assert {plan.worker for plan in ranking} == {"a", "b"}
        assert len(ranking) == 2
        assert ranking[0].source is not None
    for ranking in rankings:
        assert not any(plan.trial for plan in ranking[1:])


def test_a_ranking_of_the_best_of_many_keeps_their_number() -> None:
    costs = Believed(peer=1.4)
    planner = Planner(costs, 0.1, 60.0)

    class Few(KvAware):
        def rank(self, question: Question, random: Random) -> Planned:
            return replace(super().rank(question, random), candidates=1000)

    policy, random = Exploring(Few(planner), planner, Explorer(costs, 0.05)), Random(2)
    planned = [policy.rank(question(), random) for _ in range(300)]
    assert any(one.chosen.trial for one in planned)
    assert {one.count for one in planned} == {1000}


def test_another_worker_that_would_pull_is_tried_too() -> None:
    # A pull is believed to be faster than computing, but not than waiting for the busy holder.
    costs = Believed(1.4, {"peer_bytes_per_s": 2e9})
    planner = Planner(costs, 0.1, 60.0)
    holder = candidate("s", residence=[HELD], queue_s=0.9)
    other = candidate("b")
    policy = Exploring(KvAware(planner), planner, Explorer(costs, 0.05))
    random = Random(3)
    chosen = [policy.rank(question(holder, other), random).chosen for _ in range(100)]
    assert planner.plan(question(holder, other), Random(0)).chosen.worker == "s"
    assert any(plan.worker == "b" and plan.source is not None and plan.trial for plan in chosen)


def test_dry_runs_and_a_share_of_nothing_never_try() -> None:
    costs = Believed(peer=1.4)
    planner = Planner(costs, 0.1, 60.0)
    dry = Exploring(KvAware(planner), planner, Explorer(costs, 0.05))
    off = Exploring(KvAware(planner), planner, Explorer(costs, 0.0))
    for seed in range(200):
        assert not dry.rank(question(explore=False), Random(seed)).chosen.trial
        assert not off.rank(question(), Random(seed)).chosen.trial
    assert (
        not Exploring(KvAware(planner), planner, Explorer(CostModel(costs.profile), 0.05))
        .rank(question(), Random(0))
        .chosen.trial
    )


def test_equal_seeds_make_equal_trials() -> None:
    costs = Believed(peer=1.4)
    planner = Planner(costs, 0.1, 60.0)

    def run(seed: int) -> list[tuple[str, bool]]:
        policy, random = Exploring(KvAware(planner), planner, Explorer(costs, 0.05)), Random(seed)
        chosen = [policy.rank(question(), random).chosen for _ in range(100)]
        return [(plan.worker, plan.trial) for plan in chosen]

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_calibration_ends_the_trials_of_a_link_that_is_as_slow_as_believed() -> None:
    calibration = Calibration(load_profile("default", SLOW_LINK))
    planner = Planner(calibration, 0.1, 60.0)
    explorer = Explorer(calibration, 1.0)
    policy = Exploring(KvAware(planner), planner, explorer)
    truth = CostModel(calibration.profile)
    random, tried = Random(4), []

    for i in range(400):
        plan = policy.rank(question(), random).chosen
        tried.append(plan.trial)
        ttft_s = _ttft_s(truth, plan) * random.lognormvariate(0, 0.05)
        calibration.observe(observation(plan, BLOCKS * SIZE, plan.cached_tokens, ttft_s), 0.5 * i)
    assert 0 < sum(tried) < 10, "the account would have paid for hundreds"


def _ttft_s(truth: CostModel, plan: Plan) -> float:
    pulled = plan.path_blocks.get("peer", 0) * SIZE
    missing = max(BLOCKS * SIZE - plan.cached_tokens, 1)
    link: Link = truth.link("s", plan.worker)
    load_s = truth.profile.admit_s + truth.peer_s(pulled, 0, connected=True, link=link)
    return load_s + truth.prefill_s(BLOCKS * SIZE - missing, missing, 0)


def test_hope_is_one_standard_deviation() -> None:
    best, others = plans(Believed(peer=0.0))
    pull = max((plan for plan in others if plan.source), key=lambda plan: plan.path_blocks["peer"])
    # The doubt at which the pull, if that much faster, is exactly as good as the best.
    rest_s = pull.score_s - pull.terms.peer_s
    needed = math.log(pull.terms.peer_s / (best.score_s - rest_s))
    for doubt, tried in ((needed * 0.98, False), (needed * 1.02, True)):
        assert (Explorer(Believed(peer=doubt), 0.01).choose(best, [pull], Random(0)) is not None) is tried
