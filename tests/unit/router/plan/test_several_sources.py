# SPDX-License-Identifier: Apache-2.0
"""Plans of workers that run our engine extension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import plan_values as values
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Plan, Question, Residence, Source
from router.plan.planner import Planner
from router.plan.transfer_params import transfer_params

B = 16
TOKENS = 8000
BLOCKS = TOKENS // B
PROFILE = msgspec.structs.replace(load_profile("default"), peer_share_exponent=1.0)
COSTS = CostModel(PROFILE)


def planner(deadline_s: float = 5.0, min_pull_tokens: int = 0, **constants: float) -> Planner:
    costs = CostModel(msgspec.structs.replace(PROFILE, **constants))
    return Planner(costs, 0.1, deadline_s, min_pull_tokens)


def reader(**fields: Any) -> Candidate:
    """A worker with our extension that has sessions with everybody."""
    known: dict[str, Any] = {
        "chunk_blocks": 1,
        "residence": [Residence()],
        "queue_s": 0.0,
        "decodes": 0,
        "sessions": frozenset(["a", "b", "c", "head", "tail"]),
    }
    return Candidate("w", 0, B, extension=True, **known | fields)


def source(name: str, end: int = BLOCKS, pulls: int = 0, start: int = 0, **fields: Any) -> Source:
    address: dict[str, Any] = {
        "extension": True,
        "extension_address": f"{name}:5720",
        "p2p": False,
    } | fields
    return Source(name, 0, "", 0, Residence(ram=((start, end),)), pulls, **address)


def best(one: Candidate, *sources: Source, tokens: int = TOKENS, **settings: Any) -> Plan:
    return planner(**settings).best_plan(Question([tokens], [one], sources), one)


def ranges(plan: Plan) -> list[tuple[str, int, int]]:
    return [(pull.source.worker, pull.start_block, pull.end_block) for pull in plan.pulls]


def test_two_busy_sources_are_asked_for_half_each_in_half_the_time() -> None:
    alone = best(reader(), source("a", pulls=3))
    plan = best(reader(), source("a", pulls=3), source("b", pulls=3))
    assert ranges(plan) == [("a", 0, 250), ("b", 250, 500)]
    assert plan.path_blocks == {"peer": BLOCKS}
    wire_s = TOKENS * PROFILE.kv_bytes_per_token / (PROFILE.peer_bytes_per_s / 4)
    assert alone.terms.peer_s - plan.terms.peer_s == pytest.approx(wire_s / 2)
    # So does each of three, until the worker's own link is full.
    three = best(reader(), *(source(name, pulls=3) for name in "abc"))
    assert alone.terms.peer_s - three.terms.peer_s == pytest.approx(wire_s * 2 / 3, rel=0.01)


def test_one_idle_source_that_fills_the_link_is_left_alone() -> None:
    plan = best(reader(), source("a"), source("b"))
    assert [one[1:] for one in ranges(plan)] == [(0, BLOCKS)]


def test_the_worker_s_own_link_bounds_what_comes_through_it() -> None:
    crowded = best(reader(pulls=3), source("a", pulls=3), source("b", pulls=3))
    alone = best(reader(pulls=3), source("a", pulls=3))
    assert crowded.terms.peer_s == pytest.approx(alone.terms.peer_s)


def test_a_busy_source_is_relieved_of_what_another_one_holds_too() -> None:
    plan = best(reader(), source("a", 100, pulls=1), source("b", pulls=3))
    assert ranges(plan) == [("a", 0, 100), ("b", 100, 500)]


def test_all_from_one_where_the_other_has_yet_to_be_connected_to() -> None:
    one = reader(sessions=frozenset("b"))
    plan = best(one, source("a", 100, pulls=1), source("b", pulls=1), peer_connect_s=5.0)
    assert ranges(plan) == [("b", 0, 500)]


def test_two_pieces_make_a_whole() -> None:
    plan = best(reader(), source("head", 200), source("tail", start=150))
    assert [one[0] for one in ranges(plan)] == ["head", "tail"]
    assert plan.path_blocks == {"peer": BLOCKS}
    assert best(reader(), source("head", 200), source("tail", start=201)).path_blocks["peer"] == 200


def test_own_blocks_are_not_asked_for() -> None:
    held = Residence(hbm=((0, 100),), ram=((0, 200),))
    plan = best(reader(residence=[held]), source("a", pulls=3), source("b", pulls=3))
    assert ranges(plan) == [("a", 200, 350), ("b", 350, 500)]
    assert plan.path_blocks == {"hbm": 100, "ram": 100, "peer": 300}
    assert [pull.blocks for pull in plan.pulls] == [150, 150]


def test_cuts_are_at_chunks() -> None:
    one = reader(chunk_blocks=8, residence=[Residence(hbm=((0, 99),))])
    plan = best(one, source("a", pulls=3), source("b", pulls=3), tokens=TOKENS + 5)
    assert len(plan.pulls) == 2
    for pull in plan.pulls:
        assert pull.start_block % 8 == pull.end_block % 8 == 0
    # The chunk that HBM ends in is pulled whole; of its blocks one is used.
    assert plan.pulls[0].start_block == 96
    assert plan.path_blocks == {"hbm": 99, "peer": 397, "recompute": 5}


@pytest.mark.parametrize(
    ("ours", "address", "kind"),
    [
        (True, {}, "pointsman"),
        (True, {"p2p": True}, "pointsman"),
        (True, {"extension": False, "p2p": True}, None),
        (False, {}, None),
    ],
)
def test_a_pull_needs_a_protocol_that_both_speak(
    ours: bool, address: dict[str, bool], kind: str | None
) -> None:
    plan = best(replace(reader(), extension=ours, can_pull=not ours), source("a", **address))
    assert [pull.kind for pull in plan.pulls] == ([kind] if kind else [])
    assert plan.source is None or kind


def test_stock_sources_are_read_only_where_that_is_allowed() -> None:
    stock = replace(source("a"), extension=False, p2p=True, host="a", port=5710)
    plan = best(replace(reader(), can_pull=True), stock)
    assert [pull.kind for pull in plan.pulls] == ["p2p"]
    params = transfer_params(plan, "id")
    assert params is not None
    assert params["pointsman"]["pulls"][0]["source"] == "a:5710"  # type: ignore[index]
    assert "remote_kv_source" not in params


def test_a_stock_worker_still_takes_one_source_under_the_engine_s_own_key() -> None:
    stock = replace(reader(), extension=False, can_pull=True)
    held = replace(source("a", pulls=3), p2p=True, host="a", port=5710)
    plan = best(stock, held, replace(held, worker="b"))
    assert plan.pulls == ()
    assert transfer_params(plan, "id") == {
        "remote_kv_source": {"kv_request_id": "id", "remote_host": "a", "remote_port": 5710}
    }


def test_the_range_says_where_a_pull_ends() -> None:
    plan = best(reader(), source("a"), deadline_s=0.4, peer_bytes_per_s=2e9, prefill_s_per_token=1e-3)
    assert 0 < plan.path_blocks["peer"] < BLOCKS
    assert plan.terms.peer_s < 0.4
    assert plan.max_load_tokens is None
    assert ranges(plan) == [("a", 0, plan.path_blocks["peer"])]


def test_where_storage_goes_on_behind_a_range_the_engine_is_told_to_stop() -> None:
    one = reader(residence=[Residence(storage=((0, BLOCKS),))])
    plan = best(one, source("a", 400), storage_bytes_per_s=1e7)
    assert plan.path_blocks == {"peer": 400, "recompute": 100}
    params = transfer_params(plan, "id")
    assert params is not None
    assert params["max_load_tokens"] == 400 * B
    assert "kv_load_tiers" not in params


def test_fewest_tokens_hold_for_each_source() -> None:
    pair = source("a", pulls=3), source("b", pulls=3)
    assert len(best(reader(), *pair, min_pull_tokens=4000).pulls) == 2
    assert len(best(reader(), *pair, min_pull_tokens=4001).pulls) == 1


@given(asked=values.extended_questions(), costs=values.costs(), deadline_s=st.sampled_from([0.05, 5.0]))
def test_no_plan_breaks_a_rule(asked: Question, costs: values.DifferentCosts, deadline_s: float) -> None:
    one_planner = Planner(costs, 0.1, deadline_s)
    for one in asked.candidates:
        for plan in one_planner.plans(asked, one):
            workers = [pull.source.worker for pull in plan.pulls]
            assert one.worker not in workers
            assert len(set(workers)) == len(workers) <= 3
            assert sum(pull.blocks for pull in plan.pulls) == plan.path_blocks.get("peer", 0)
            assert bool(plan.pulls) == (plan.source is not None)
            end = 0
            for pull in plan.pulls:
                assert one.can_pull_from(pull.source)
                assert end <= pull.start_block < pull.end_block
                assert pull.end_block * one.block_size_tokens <= asked.prompt_tokens[0]
                assert pull.start_block % one.chunk_blocks == pull.end_block % one.chunk_blocks == 0
                assert 0 < pull.blocks <= pull.end_block - pull.start_block
                assert 0 <= pull.seconds <= plan.terms.peer_s + 1e-9
                end = pull.end_block
            if plan.pulls:
                assert plan.terms.peer_s < deadline_s
            assert sum(plan.path_blocks.values()) == plan.prompt_blocks
