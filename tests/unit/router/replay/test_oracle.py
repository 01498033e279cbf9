# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Plan, Question, Residence, Source
from router.plan.planner import Planner
from router.replay.oracle import MOST_SOURCES, Oracle, actions, spread
from router.replay.policies import AnyPolicyName
from router.replay.tiers import Capacities, engine_config, with_tiers
from router.replay.traces import TraceRequest
from router.replay.virtual import ReplayedRequest, VirtualFleet, VirtualFleetSetup

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

BLOCK = 64
BLOCKS = 40


def planner() -> Planner:
    return Planner(CostModel(load_profile("default")), 0.1, 5.0)


def candidate(worker: str, *, hbm: int = 0, ram: int = 0, can_pull: bool = True) -> Candidate:
    held = Residence(
        hbm=((0, hbm),) if hbm else (),
        ram=((0, ram),) if ram else (),
    )
    return Candidate(worker, 0, BLOCK, 1, [held], 0.0, 0, can_pull=can_pull)


def source(worker: str, ram: int) -> Source:
    return Source(worker, 0, worker, 1, Residence(ram=((0, ram),)), 0)


def question(candidates: Sequence[Candidate], sources: Sequence[Source] = ()) -> Question:
    return Question([BLOCKS * BLOCK + 1], candidates, sources)


def tried(asked: Question) -> list[tuple[str, str | None, int | None]]:
    return [
        (plan.worker, plan.source.worker if plan.source else None, plan.max_load_tokens)
        for plan in actions(asked, planner())
    ]


def test_every_worker_is_tried_with_each_source_that_adds_blocks_and_with_hbm_alone() -> None:
    asked = question(
        [candidate("a", hbm=5, ram=9), candidate("b"), candidate("c", can_pull=False)],
        [source("a", 9), source("b", 20), source("d", 8)],
    )
    assert sorted(tried(asked), key=str) == sorted(
        [
            ("a", None, None),
            ("a", None, 0),
            ("a", "b", None),
            ("b", None, None),
            ("b", "a", None),
            ("b", "d", None),
            ("c", None, None),
        ],
        key=str,
    )


def test_a_plan_from_hbm_alone_promises_no_more_than_hbm() -> None:
    local, alone = actions(question([candidate("a", hbm=5, ram=9)]), planner())
    assert (local.cached_tokens, alone.cached_tokens) == (9 * BLOCK, 5 * BLOCK)
    assert alone.path_blocks == {"hbm": 5, "recompute": BLOCKS + 1 - 5}


def test_of_many_sources_those_that_add_most_are_tried() -> None:
    sources = [source(f"s{number}", number + 1) for number in range(MOST_SOURCES + 3)]
    names = [name for _, name, _ in tried(question([candidate("a")], sources)) if name]
    assert names == [f"s{number + 3}" for number in reversed(range(MOST_SOURCES))]


def test_the_best_trial_is_chosen_and_each_worker_is_ranked_once() -> None:
    took_s = {
        ("a", None): 3.0,
        ("a", "b"): 1.0,
        ("b", None): 2.0,
        ("b", "c"): 9.0,
        ("c", None): 4.0,
        ("c", "b"): 5.0,
    }

    def trial(plan: Plan) -> float:
        return took_s[plan.worker, plan.source.worker if plan.source else None]

    asked = question([candidate(name) for name in "abc"], [source("b", 20), source("c", 20)])
    took_s["a", "c"] = 8.0
    ranking = Oracle(planner(), trial, at_once=2).rank(asked, Random(0)).ranking
    assert [plan.worker for plan in ranking] == ["a", "b", "c"]
    assert ranking[0].source is not None
    assert ranking[0].source.worker == "b"


def test_regret_is_what_the_choice_took_over_the_best() -> None:
    asked = question([candidate("a"), candidate("b")])
    oracle = Oracle(planner(), lambda plan: {"a": 3.0, "b": 2.0}[plan.worker], at_once=2)
    first, second = list(actions(asked, planner()))
    judged = [oracle.judge(asked, one, 7) for one in (first, second)]
    assert [one.regret for one in judged] == [pytest.approx(0.5), 0.0]
    assert judged[0].index == 7


def test_a_sample_is_spread_evenly_and_is_never_larger_than_what_it_is_of() -> None:
    assert spread(10, 2) == {2, 7}
    assert spread(3, 10) == {0, 1, 2}


# On a fleet

CAPACITIES = Capacities(block_size_tokens=BLOCK, hbm_blocks=3000, ram_blocks=3000, storage_blocks=None)


def fleet(policy: AnyPolicyName, *judge: int) -> VirtualFleet:
    base = VirtualFleetSetup(
        workers=2,
        engine=engine_config("gpu", CAPACITIES),
        engine_profile=load_engine_profile("default"),
        cost_profile=load_profile("default"),
        policy=policy,
        judge=frozenset(judge),
    )
    return VirtualFleet(with_tiers(base, "p2p", CAPACITIES))


def asked(index: int, at_s: float, first: int, blocks: int) -> TraceRequest:
    ids = (*range(first, first + blocks), 10**6 + index)
    return TraceRequest(at_s, blocks * BLOCK + 1, 1, ids, BLOCK, index)


BUSY_HOLDER = [asked(0, 0.0, 0, 300), asked(1, 50.0, 0, 1300), asked(2, 50.1, 0, 300)]
"""The holder of a prefix is busy with 64,000 tokens when the prefix is asked for again."""


def ttft_s(replayed: Sequence[ReplayedRequest]) -> float:
    found = replayed[2].ttft_s
    assert found is not None
    return found


def test_a_copy_of_the_fleet_tells_what_becomes_of_a_request() -> None:
    judging = fleet("kv_aware", 1, 2)
    replayed = judging.run(BUSY_HOLDER)
    assert [one.index for one in judging.judged] == [1, 2]
    assert [one.ttft_s for one in judging.judged] == [replayed[1].ttft_s, replayed[2].ttft_s]
    assert replayed == fleet("kv_aware").run(BUSY_HOLDER), "looking on changes nothing"


def test_the_oracle_is_never_behind_and_a_choice_that_waits_has_regret() -> None:
    best_s = ttft_s(fleet("oracle").run(BUSY_HOLDER))
    stubborn = fleet("longest_prefix", 2)
    waited_s = ttft_s(stubborn.run(BUSY_HOLDER))
    assert waited_s > 2 * best_s
    assert stubborn.judged[0].regret == pytest.approx(waited_s / best_s - 1, rel=1e-6)
    assert ttft_s(fleet("kv_aware").run(BUSY_HOLDER)) >= best_s
