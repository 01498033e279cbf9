# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Plan, Question, Residence, Source
from router.plan.planner import Planner
from router.plan.policies import make_policy
from router.plan.transfer_params import transfer_params

B = 16
PROFILE = load_profile("default")
TOKENS = 8000
BLOCKS = TOKENS // B


def planner(
    weight: float = 0.1, deadline_s: float = 5.0, min_pull_tokens: int = 0, **constants: float
) -> Planner:
    costs = CostModel(msgspec.structs.replace(PROFILE, **constants))
    return Planner(costs, weight, deadline_s, min_pull_tokens)


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


def source(worker: str, ram: int = BLOCKS, pulls: int = 0) -> Source:
    return Source(worker, 0, f"host-{worker}", 5710, Residence(ram=((0, ram),)), pulls)


def choose(question: Question, seed: int = 0, **settings: Any) -> Plan:
    return planner(**settings).plan(question, Random(seed)).chosen


def test_holder_wins_while_it_is_idle() -> None:
    plan = choose(Question([TOKENS], [candidate("a"), candidate("b", hbm=BLOCKS)], [source("b")]))
    assert plan.worker == "b"
    assert plan.path_blocks == {"hbm": BLOCKS - 1, "recompute": 1}
    assert plan.source is None


def test_waiting_at_the_holder_is_compared_with_a_pull() -> None:
    busy = candidate("b", hbm=BLOCKS, queue_s=2.0)
    plan = choose(Question([TOKENS], [candidate("a"), busy], [source("b")]))
    assert plan.worker == "a"
    assert plan.source is not None
    assert plan.source.worker == "b"
    assert plan.path_blocks == {"peer": BLOCKS}


def test_recompute_wins_where_a_pull_takes_longer() -> None:
    question = Question([TOKENS], [candidate("a")], [source("b")])
    assert choose(question, peer_lookup_s=1.7).path_blocks == {"recompute": BLOCKS}
    assert choose(question, peer_lookup_s=0.004).path_blocks == {"peer": BLOCKS}


def test_pull_beyond_its_deadline_is_never_planned() -> None:
    question = Question([TOKENS], [candidate("a")], [source("b")])
    assert "peer" not in choose(question, deadline_s=0.05).path_blocks


def test_pull_below_the_least_size_is_never_planned() -> None:
    question = Question([TOKENS], [candidate("a", sessions=frozenset({"b"}))], [source("b", ram=10)])
    assert "peer" in choose(question).path_blocks
    assert "peer" not in choose(question, min_pull_tokens=161).path_blocks


def test_worker_is_never_its_own_source() -> None:
    plan = choose(Question([TOKENS], [candidate("a")], [source("a")]))
    assert plan.source is None


def test_worker_without_the_p2p_tier_is_never_told_to_pull() -> None:
    plan = choose(Question([TOKENS], [candidate("a", can_pull=False)], [source("b")]))
    assert plan.source is None


def test_several_prompts_are_scored_each_by_itself_and_never_pulled() -> None:
    two = [Residence(hbm=((0, 10),)), Residence(hbm=((0, 5),))]
    plan = choose(Question([160, 81], [candidate("a", residence=two)], [source("b")]))
    assert plan.path_blocks == {"hbm": 14, "recompute": 2}
    assert plan.cached_tokens == 14 * B
    assert plan.source is None


def test_busy_source_loses_against_an_idle_one_with_the_same_blocks() -> None:
    sources = [source("b", pulls=3), source("c", pulls=0)]
    plan = choose(Question([TOKENS], [candidate("a")], sources))
    assert plan.source is not None
    assert plan.source.worker == "c"


def test_first_pull_of_a_pair_pays_for_the_connection() -> None:
    sources = [source("b"), source("c", pulls=0)]
    plan = choose(Question([TOKENS], [candidate("a", sessions=frozenset({"c"}))], sources))
    assert plan.source is not None
    assert plan.source.worker == "c"


def test_ram_is_not_loaded_where_recomputing_is_faster() -> None:
    question = Question([TOKENS], [candidate("a", ram=BLOCKS)])
    assert choose(question).path_blocks == {"ram": BLOCKS}
    plan = choose(question, ram_bytes_per_s=1e8)
    assert plan.path_blocks == {"recompute": BLOCKS}
    assert transfer_params(plan, "id") == {"max_load_tokens": 0}


def test_best_hit_among_lightly_loaded_workers_wins() -> None:
    workers = [
        candidate("a", queue_s=0.010),
        candidate("b", hbm=BLOCKS, queue_s=0.011),
        candidate("c", queue_s=0.030),
    ]
    assert choose(Question([TOKENS], workers)).worker == "b"


def test_equal_workers_share_equally() -> None:
    workers = [candidate(name) for name in "abcde"]
    random = Random(1)
    one = planner()
    counts = Counter(one.plan(Question([TOKENS], workers), random).chosen.worker for _ in range(2000))
    assert all(300 < counts[name] < 500 for name in "abcde")


def test_loading_overlaps_with_the_queue() -> None:
    plan = choose(Question([TOKENS], [candidate("a", ram=BLOCKS, queue_s=0.5)]))
    assert plan.terms.total_s == pytest.approx(0.5 + plan.terms.prefill_s)


def test_plan_without_source_needs_no_parameters() -> None:
    plan = choose(Question([TOKENS], [candidate("a", hbm=BLOCKS)]))
    assert transfer_params(plan, "id") is None


def test_pull_names_the_sources_control_channel_and_the_fresh_id() -> None:
    plan = choose(Question([TOKENS], [candidate("a")], [source("b")]))
    assert transfer_params(plan, "id-1") == {
        "remote_kv_source": {"kv_request_id": "id-1", "remote_host": "host-b", "remote_port": 5710}
    }


def test_round_robin_takes_turns_and_least_load_the_idlest() -> None:
    workers = [candidate(name, in_flight=number) for number, name in enumerate("cab")]
    turns = make_policy("round_robin", planner())
    assert [turns.rank(Question([1], workers), Random(0)).chosen.worker for _ in range(4)] == list("abca")
    assert make_policy("least_load", planner()).rank(Question([1], workers), Random(0)).chosen.worker == "c"


spans = st.integers(0, BLOCKS)


@given(
    workers=st.lists(st.tuples(spans, spans, st.floats(0, 3), st.integers(0, 20)), min_size=1, max_size=6),
    sources=st.lists(st.tuples(spans, st.integers(0, 5)), max_size=4),
    tokens=st.integers(1, TOKENS),
)
def test_plans_are_sound_whatever_is_known(
    workers: list[tuple[int, int, float, int]], sources: list[tuple[int, int]], tokens: int
) -> None:
    candidates = [
        candidate(f"w{i}", hbm, ram, queue_s=queue_s, decodes=decodes)
        for i, (hbm, ram, queue_s, decodes) in enumerate(workers)
    ]
    question = Question(
        [tokens], candidates, [source(f"w{i}", ram, pulls) for i, (ram, pulls) in enumerate(sources)]
    )
    ranking = planner().plan(question, Random(0)).ranking
    assert sorted(plan.worker for plan in ranking) == sorted(one.worker for one in candidates)
    assert [plan.score_s for plan in ranking] == sorted(plan.score_s for plan in ranking)
    for plan in ranking:
        assert sum(plan.path_blocks.values()) == -(-tokens // B)
        assert 0 <= plan.cached_tokens <= tokens
        assert 0 < plan.terms.total_s < float("inf")
        assert plan.source is None or plan.source.worker != plan.worker
        assert (plan.source is not None) == ("peer" in plan.path_blocks)
