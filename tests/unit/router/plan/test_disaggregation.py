# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.fleet.worker import Transfer
from router.plan.candidate import EXPECTED_OUTPUT_TOKENS, Candidate, Plan, Question, Residence, Source
from router.plan.disaggregation import MAX_DECODERS, MAX_RANKED, P2P_PATIENCE_S, Disaggregation
from router.plan.displacement import REBUILDS
from router.plan.handover import Prefiller
from router.plan.planner import Planned, Planner
from router.plan.transfer_params import prefill_params, transfer_params

B = 16
COSTS = CostModel(load_profile("default"))
PLANNER = Planner(COSTS, 0.1, 5.0)
TOKENS = 8000
BLOCKS = TOKENS // B
P2P, NIXL = Transfer.P2P, Transfer.NIXL


def candidate(worker: str, hbm: int = 0, ram: int = 0, **fields: Any) -> Candidate:
    residence = Residence(hbm=((0, hbm),) if hbm else (), ram=((0, ram),) if ram else ())
    values: dict[str, Any] = {
        "dp_rank": 0,
        "block_size_tokens": B,
        "chunk_blocks": 1,
        "residence": [residence],
        "queue_s": 0.0,
        "decodes": 0,
        "can_pull": True,
    }
    return Candidate(worker=worker, **values | fields)


def prefiller(worker: str, transfer: Transfer = P2P, **fields: Any) -> Prefiller:
    if transfer is NIXL:
        return Prefiller(candidate(worker, can_pull=False, **fields), NIXL)
    return Prefiller(candidate(worker, **fields), P2P, f"host-{worker}", 5710)


def source(worker: str, ram: int = BLOCKS) -> Source:
    return Source(worker, 0, f"host-{worker}", 5710, Residence(ram=((0, ram),)), 0)


def decide(
    decoders: list[Candidate],
    prefillers: list[Prefiller],
    *,
    tokens: int = TOKENS,
    transfer: Transfer | None = P2P,
    sources: list[Source] | None = None,
    weight: float = 0.1,
    slo_tpot_s: float | None = None,
    seed: int = 0,
) -> Planned:
    question = Question([tokens], decoders, sources or [], slo_tpot_s=slo_tpot_s)
    random = Random(seed)
    planner = Planner(COSTS, weight, 5.0)
    transfers = {one.worker: transfer for one in decoders}
    disaggregation = Disaggregation(planner, COSTS, weight)
    return disaggregation.improve(question, planner.plan(question, random), prefillers, transfers, random)


def chosen(*args: Any, **more: Any) -> Plan:
    return decide(*args, **more).chosen


def test_an_idle_decode_worker_computes_the_prompt_itself() -> None:
    plan = chosen([candidate("d")], [prefiller("p")])
    assert plan.handover is None
    assert plan.path_blocks == {"recompute": BLOCKS}


def test_a_decode_worker_with_running_answers_is_spared_the_prefill() -> None:
    plan = chosen([candidate("d", decodes=20)], [prefiller("p")])
    assert plan.handover is not None
    assert plan.handover.prefill.worker == "p"
    assert (plan.handover.host, plan.handover.port) == ("host-p", 5710)
    assert plan.path_blocks == {"peer": BLOCKS}
    assert plan.cached_tokens == TOKENS


def test_a_short_prompt_is_computed_beside_running_answers() -> None:
    assert chosen([candidate("d", decodes=20)], [prefiller("p")], tokens=40).handover is None


def test_a_queue_at_the_decode_worker_is_avoided_and_one_at_the_prefill_worker_too() -> None:
    busy = [candidate("d", queue_s=0.3, decodes=4)]
    assert chosen(busy, [prefiller("p")]).handover is not None
    assert chosen(busy, [prefiller("p", queue_s=5.0)]).handover is None


def test_what_the_prefill_worker_holds_makes_it_worth_while() -> None:
    decoders = [candidate("d", decodes=1)]
    assert chosen(decoders, [prefiller("p", queue_s=0.1)]).handover is None
    plan = chosen(decoders, [prefiller("p", queue_s=0.1, hbm=BLOCKS - 1)])
    assert plan.handover is not None
    assert plan.handover.prefill.path_blocks == {"hbm": BLOCKS - 1, "recompute": 1}


def test_the_prefill_worker_may_pull_from_a_peer_for_the_decode_worker() -> None:
    decoders = [candidate("d", decodes=30, can_pull=False)]
    plan = chosen(decoders, [prefiller("p")], sources=[source("holder")])
    assert plan.handover is not None
    assert plan.handover.prefill.source is not None
    assert plan.handover.prefill.source.worker == "holder"
    params = prefill_params(plan.handover, "pm-1", "pm-2")
    assert params["remote_decoder"] == {"kv_request_id": "pm-1"}
    assert params["remote_kv_source"] == {
        "kv_request_id": "pm-2",
        "remote_host": "host-holder",
        "remote_port": 5710,
    }


def test_the_prefill_worker_never_pulls_from_the_worker_that_waits_for_it() -> None:
    decoders = [candidate("d", hbm=BLOCKS // 2, decodes=60)]
    plan = chosen(decoders, [prefiller("p")], sources=[source("d", BLOCKS // 2)])
    assert plan.handover is not None
    assert plan.handover.prefill.source is None
    others = [source("d", BLOCKS // 2), source("e", BLOCKS // 3)]
    plan = chosen(decoders, [prefiller("p")], sources=others)
    assert plan.handover is not None
    assert plan.handover.prefill.source is not None
    assert plan.handover.prefill.source.worker == "e"


def test_only_blocks_that_the_decode_worker_lacks_are_handed_over() -> None:
    warm = candidate("d", hbm=100, ram=300, decodes=30)
    plan = chosen([warm], [prefiller("p", hbm=400)])
    assert plan.handover is not None
    assert plan.path_blocks == {"hbm": 100, "ram": 200, "peer": BLOCKS - 300}
    assert chosen([candidate("d", hbm=BLOCKS, decodes=30)], [prefiller("p")]).handover is None


def test_the_time_of_a_split_is_that_of_its_parts() -> None:
    plan = chosen([candidate("d", decodes=20, queue_s=0.1)], [prefiller("p", queue_s=0.2)])
    assert plan.handover is not None
    prefill_s = plan.handover.prefill.terms.total_s
    transfer_s = COSTS.peer_s(TOKENS, 0, connected=False)
    last_s = COSTS.prefill_s(TOKENS - 1, 1, 20)
    assert plan.terms.total_s == pytest.approx(max(0.1, prefill_s + transfer_s) + last_s)
    burnt_s = plan.handover.prefill.terms.prefill_s + last_s
    crowding_s = 2 * 20 * COSTS.profile.decode_s_per_request * EXPECTED_OUTPUT_TOKENS
    # Both workers take the whole prompt into HBM.
    others_s = 0.1 * (burnt_s + last_s * 20 + crowding_s + 2 * REBUILDS * COSTS.displaced_s(TOKENS))
    assert plan.score_s == pytest.approx(plan.terms.total_s + others_s)


def test_nixl_waits_for_the_prefill_and_hands_over_the_last_partial_block() -> None:
    plan = chosen(
        [candidate("d", hbm=10, decodes=20)], [prefiller("p", NIXL, hbm=7)], tokens=TOKENS + 3, transfer=NIXL
    )
    assert plan.handover is not None
    assert plan.path_blocks == {"hbm": 10, "peer": BLOCKS + 1 - 10}
    assert plan.cached_tokens == 7 * B  # the engine reports the prefill worker's own hits
    prefill_s = plan.handover.prefill.terms.total_s
    moved = (BLOCKS + 1 - 10) * B
    transfer_s = COSTS.peer_s(moved, 0, connected=False) - COSTS.promotion_s(moved)
    last_s = COSTS.prefill_s(TOKENS + 2, 1, 20)
    expected_s = prefill_s + COSTS.admit_s(0.0) + transfer_s + last_s
    assert plan.terms.total_s == pytest.approx(expected_s)
    assert transfer_params(plan, "pm-1") is None
    assert prefill_params(plan.handover, "pm-1", "pm-2") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


@pytest.mark.parametrize(
    ("decoder", "prefilling"),
    [
        ({"block_size_tokens": 32}, {}),
        ({"chunk_blocks": 4}, {}),
        ({"fingerprint": "fp8"}, {"fingerprint": "bf16"}),
    ],
)
def test_workers_whose_blocks_differ_are_never_paired(
    decoder: dict[str, Any], prefilling: dict[str, Any]
) -> None:
    assert chosen([candidate("d", decodes=50, **decoder)], [prefiller("p", **prefilling)]).handover is None


@pytest.mark.parametrize("transfer", [NIXL, None])
def test_workers_that_transfer_by_other_means_are_never_paired(transfer: Transfer | None) -> None:
    assert chosen([candidate("d", decodes=50)], [prefiller("p")], transfer=transfer).handover is None


def test_a_prefill_that_outlasts_the_patience_of_the_engine_is_not_waited_for() -> None:
    decoders = [candidate("d", decodes=2000)]
    assert chosen(decoders, [prefiller("p", queue_s=P2P_PATIENCE_S)]).handover is None
    assert (
        chosen(decoders, [prefiller("p", NIXL, queue_s=P2P_PATIENCE_S)], transfer=NIXL).handover is not None
    )


def test_the_pace_asked_for_counts_at_the_decode_worker_only() -> None:
    slow_s = COSTS.decode_step_s(41) * 0.9
    decoders = [candidate("full", decodes=40), candidate("free", decodes=10)]

    def answers_lose(slo_tpot_s: float | None) -> dict[str, float]:
        ranking = decide(decoders, [prefiller("p", decodes=200)], slo_tpot_s=slo_tpot_s).ranking
        return {plan.worker: plan.terms.decode_s for plan in ranking}

    asked, unasked = answers_lose(slow_s), answers_lose(None)
    assert asked["full"] > unasked["full"]
    assert asked["free"] == unasked["free"]
    ranking = decide(decoders, [prefiller("p", decodes=200)], slo_tpot_s=slow_s).ranking
    assert all(plan.handover is None or plan.handover.prefill.terms.decode_s == 0 for plan in ranking)


def test_with_no_prefill_worker_the_ranking_stays_as_it_is() -> None:
    question = Question([TOKENS], [candidate("a", decodes=3), candidate("b")])
    planned = PLANNER.plan(question, Random(0))
    improved = Disaggregation(PLANNER, COSTS, 0.1).improve(question, planned, [], {}, Random(0))
    assert improved is planned


def test_several_prompts_are_refused() -> None:
    question = Question([TOKENS, TOKENS], [candidate("a", residence=[Residence(), Residence()])])
    planned = PLANNER.plan(question, Random(0))
    with pytest.raises(ValueError, match="one sequence"):
        Disaggregation(PLANNER, COSTS, 0.1).improve(
            question, planned, [prefiller("p")], {"a": P2P}, Random(0)
        )


def test_of_many_decode_workers_the_idle_and_the_warm_are_tried() -> None:
    crowd = [candidate(f"d{i}", queue_s=1.0, decodes=40) for i in range(50)]
    crowd[20] = candidate("idle", decodes=30)
    crowd[40] = candidate("warm", queue_s=1.0, decodes=40, ram=BLOCKS // 2)
    planned = decide(crowd, [prefiller(f"p{i}") for i in range(20)])
    ranking = planned.ranking
    split = {plan.worker for plan in ranking if plan.handover is not None}
    assert {"idle", "warm"} <= split
    assert len(split) <= MAX_DECODERS
    assert (len(ranking), planned.count) == (MAX_RANKED, 50)
    assert ranking[0].worker == "idle"


def test_equal_prefill_workers_share_the_work_by_chance() -> None:
    seen = set()
    for seed in range(40):
        plan = chosen([candidate("d", decodes=20)], [prefiller("p"), prefiller("q")], seed=seed)
        assert plan.handover is not None
        seen.add(plan.handover.prefill.worker)
    assert seen == {"p", "q"}


def held() -> st.SearchStrategy[int]:
    return st.integers(0, BLOCKS)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Candidate], list[Prefiller], list[Source], Transfer]:
    transfer = draw(st.sampled_from(Transfer))
    load = st.floats(0, 3)
    decoders = [
        candidate(f"d{i}", draw(held()), draw(held()), queue_s=draw(load), decodes=draw(st.integers(0, 60)))
        for i in range(draw(st.integers(1, 3)))
    ]
    prefillers = [
        prefiller(f"p{i}", transfer, hbm=draw(held()), ram=draw(held()), queue_s=draw(load))
        for i in range(draw(st.integers(1, 3)))
    ]
    names = [one.worker for one in decoders] + [one.candidate.worker for one in prefillers]
    sources = [source(name, draw(st.integers(1, BLOCKS))) for name in names]
    return decoders, prefillers, sources, transfer


@given(fleets(), st.integers(1, TOKENS), st.floats(0, 2))
def test_no_plan_breaks_a_rule_of_the_engine(
    fleet: tuple[list[Candidate], list[Prefiller], list[Source], Transfer], tokens: int, weight: float
) -> None:
    decoders, prefillers, sources, transfer = fleet
    ranking = decide(
        decoders, prefillers, tokens=tokens, transfer=transfer, sources=sources, weight=weight
    ).ranking
    assert sorted(plan.worker for plan in ranking) == sorted(one.worker for one in decoders)
    assert list(ranking) == sorted(ranking, key=lambda plan: plan.score_s)
    for plan in ranking:
        params = transfer_params(plan, "one") or {}
        assert sum(plan.path_blocks.values()) == plan.prompt_blocks
        assert not {"remote_prefiller", "remote_kv_source"} <= params.keys()
        assert plan.source is None or plan.source.worker != plan.worker
        if plan.handover is None:
            assert "remote_prefiller" not in params
            continue
        prefill = plan.handover.prefill
        assert prefill.handover is None
        assert prefill.worker != plan.worker
        assert prefill.source is None or prefill.source.worker != prefill.worker
        assert prefill.source is None or prefill.source.worker != plan.worker
        assert plan.source is None
        assert plan.path_blocks["peer"] > 0
        leg = prefill_params(plan.handover, "one", "two")
        roles = {key for key in leg if key.startswith("remote_") and leg[key] is not None}
        assert roles <= {"remote_decoder", "remote_kv_source"}
        if transfer is NIXL:
            assert params == {}
            assert not roles
        else:
            assert params.keys() == {"remote_prefiller"}
            assert leg["remote_decoder"]["kv_request_id"] == params["remote_prefiller"]["kv_request_id"]  # type: ignore[index]
            own = leg.get("remote_kv_source", {"kv_request_id": "two"})
            assert own["kv_request_id"] != leg["remote_decoder"]["kv_request_id"]  # type: ignore[index]


@given(fleets(), st.integers(1, TOKENS))
def test_a_split_is_never_chosen_over_a_cheaper_plan_of_the_same_worker(
    fleet: tuple[list[Candidate], list[Prefiller], list[Source], Transfer], tokens: int
) -> None:
    decoders, prefillers, sources, transfer = fleet
    split = decide(decoders, prefillers, tokens=tokens, transfer=transfer, sources=sources)
    alone = decide(decoders, prefillers, tokens=tokens, transfer=None, sources=sources)
    alone_s = {plan.worker: plan.score_s for plan in alone.ranking}
    for plan in split.ranking:
        assert plan.score_s <= alone_s[plan.worker]
        assert (plan.handover is None) == (plan.score_s == alone_s[plan.worker])
