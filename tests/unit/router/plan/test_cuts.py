# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Plan, Question, Residence, Source
from router.plan.cuts import Affine, PlaceRates, cuts
from router.plan.paths import PEER, RAM, STORAGE, Walk, derive_walk, whole_chunks
from router.plan.planner import Planner
from router.plan.transfer_params import transfer_params

B = 16
PROFILE = load_profile("default")
FREE = Affine(0.0, 0.001)


def choose(candidate: Candidate, tokens: int, source: Source | None = None, **constants: float) -> Plan:
    costs = CostModel(msgspec.structs.replace(PROFILE, **constants))
    question = Question([tokens], [candidate], [source] if source else [])
    return Planner(costs, 0.1, 5.0).plan(question, Random(0)).chosen


def holder(ram: int = 0, storage: int = 0, hbm: int = 0, **fields: Any) -> Candidate:
    residence = Residence(
        hbm=((0, hbm),) if hbm else (),
        ram=((0, ram),) if ram else (),
        storage=((0, storage),) if storage else (),
    )
    values: dict[str, Any] = {"queue_s": 0.0, "decodes": 0, "can_pull": True, "chunk_blocks": 1} | fields
    return Candidate(worker="a", dp_rank=0, block_size_tokens=B, residence=[residence], **values)


def test_storage_is_left_out_where_recomputing_its_part_is_faster() -> None:
    plan = choose(holder(ram=300, storage=500), 500 * B, storage_bytes_per_s=1e7)
    assert plan.path_blocks == {"ram": 300, "recompute": 200}
    assert transfer_params(plan, "id") == {"max_load_tokens": 300 * B, "kv_load_tiers": []}


def test_peer_is_still_asked_where_only_storage_is_left_out() -> None:
    source = Source("b", 0, "host-b", 5710, Residence(ram=((0, 400),)), 0)
    plan = choose(holder(storage=500), 500 * B, source, storage_bytes_per_s=1e7)
    assert plan.path_blocks == {"peer": 400, "recompute": 100}
    params = transfer_params(plan, "id")
    assert params is not None
    assert params["max_load_tokens"] == 400 * B
    assert params["kv_load_tiers"] == [{"medium": "CPU"}]
    assert "remote_kv_source" in params


def test_whole_walk_needs_no_parameters() -> None:
    plan = choose(holder(ram=300, storage=500), 500 * B)
    assert plan.path_blocks == {"ram": 300, "storage": 200}
    assert transfer_params(plan, "id") is None


def test_as_much_is_loaded_as_the_queue_hides() -> None:
    slow = {"ram_bytes_per_s": 5e8, "ram_start_s": 0.001}
    assert choose(holder(ram=500), 500 * B, **slow).path_blocks == {"recompute": 500}
    plan = choose(holder(ram=500, queue_s=1.0), 500 * B, **slow)
    assert 0 < plan.path_blocks["ram"] < 500
    assert plan.terms.admit_s + plan.terms.ram_s <= 1.0
    one_block_s = B * PROFILE.kv_bytes_per_token / 5e8
    assert plan.terms.admit_s + plan.terms.ram_s + one_block_s > 1.0
    assert plan.max_load_tokens == plan.path_blocks["ram"] * B


def test_pull_is_cut_at_its_deadline() -> None:
    source = Source("b", 0, "host-b", 5710, Residence(ram=((0, 500),)), 0)
    costs = CostModel(msgspec.structs.replace(PROFILE, peer_bytes_per_s=2e9, prefill_s_per_token=1e-3))
    plan = Planner(costs, 0.1, 0.4).plan(Question([500 * B], [holder()], [source]), Random(0)).chosen
    assert 0 < plan.path_blocks["peer"] < 500
    assert plan.terms.peer_s < 0.4


def test_cuts_end_with_whole_chunks() -> None:
    walk = Walk(hbm=3, runs=((RAM, 5), (STORAGE, 8)))
    assert cuts(walk, PlaceRates(FREE, FREE, FREE), 4, 0.0071, 5.0) == [5]
    assert whole_chunks(3, 4, 4) == 0  # the chunk that HBM ends in adds one block, less than a chunk
    assert whole_chunks(3, 8, 4) == 5


def test_neighbouring_runs_of_one_place_are_one() -> None:
    walk = derive_walk(10 * B, B, 1, Residence(ram=((0, 4), (4, 8))), ((0, 10),))
    assert walk.runs == ((RAM, 8), (PEER, 2))


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    places = draw(st.lists(st.integers(0, 2), max_size=5))
    runs = [(place, draw(st.integers(1, 60))) for place in places]
    joined: list[tuple[int, int]] = []
    for place, length in runs:
        before = joined.pop()[1] if joined and joined[-1][0] == place else 0
        joined.append((place, before + length))
    return Walk(draw(st.integers(0, 20)), tuple(joined))


rates = st.builds(Affine, st.floats(0, 0.2), st.floats(1e-6, 0.02))


@given(walk=walks(), ram=rates, peer=rates, storage=rates, queue_s=st.floats(0, 2), growth=st.floats(0, 1e-3))
def test_no_other_cut_is_better(
    walk: Walk, ram: Affine, peer: Affine, storage: Affine, queue_s: float, growth: float
) -> None:
    """Against every possible cut, with a prefill that costs more per block the more context it has."""
    places = PlaceRates(ram, peer, storage)
    length = walk.hbm + walk.external + 10

    def total_s(external: int) -> float:
        loads = walk.loads(external)
        load_s = sum(
            rate.start_s + blocks * rate.block_s
            for rate, blocks in zip(places, loads[1:], strict=True)
            if blocks
        )
        missing = length - loads.total
        return max(queue_s, load_s) + 0.002 * missing + growth * missing * (loads.total + missing / 2)

    tried = [0, *cuts(walk, places, 1, queue_s, 1e9), walk.external]
    best_s = min(total_s(external) for external in range(walk.external + 1))
    # The end of the load within the queue falls between two blocks: one block is the error.
    assert min(total_s(external) for external in tried) <= best_s + 1e-9 + 0.002 + growth * length


def test_distrusted_map_counts_for_less() -> None:
    trusted, lying = choose(holder(hbm=400), 500 * B), choose(holder(hbm=400, trust=0.5), 500 * B)
    alone = choose(holder(), 500 * B)
    assert trusted.terms.prefill_s < lying.terms.prefill_s < alone.terms.prefill_s
    assert lying.cached_tokens == 400 * B


def test_source_of_another_fingerprint_is_never_used() -> None:
    source = Source("b", 0, "host-b", 5710, Residence(ram=((0, 500),)), 0, fingerprint="m|16|1|fp8|")
    assert choose(holder(), 500 * B, source).source is None
    assert choose(holder(fingerprint="m|16|1|fp8|"), 500 * B, source).source is source


@pytest.mark.parametrize(("slo_s", "expected"), [(None, "a"), (1e-9, "b")])
def test_worker_with_fewer_decodes_wins_under_a_tight_time_per_token(
    slo_s: float | None, expected: str
) -> None:
    busy = Candidate("a", 0, B, 1, [Residence(hbm=((0, 400),))], 0.0, decodes=2)
    idle = Candidate("b", 0, B, 1, [Residence()], 0.0, decodes=0)
    question = Question([500 * B], [busy, idle], output_tokens=2000, slo_tpot_s=slo_s)
    assert Planner(CostModel(PROFILE), 0.1, 5.0).plan(question, Random(0)).chosen.worker == expected
