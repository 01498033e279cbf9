# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.profile import load_profile
from router.replay.policies import ReplayPolicyName
from router.replay.tiers import TIER_SETS, Capacities, TierSet, engine_config, with_tiers
from router.replay.traces import TraceRequest
from router.replay.virtual import ReplayedRequest, VirtualFleet, VirtualFleetSetup

BLOCK = 64
SMALL = Capacities(block_size_tokens=BLOCK, hbm_blocks=40, ram_blocks=40, storage_blocks=0)
ROOMY = Capacities(block_size_tokens=BLOCK, hbm_blocks=2000, ram_blocks=4000, storage_blocks=0)


def setup(
    tiers: TierSet, capacities: Capacities, workers: int = 1, policy: ReplayPolicyName = "kv_aware"
) -> VirtualFleetSetup:
    base = VirtualFleetSetup(
        workers=workers,
        engine=engine_config(tiers, capacities),
        engine_profile=load_engine_profile("default"),
        cost_profile=load_profile("default"),
        policy=policy,
    )
    return with_tiers(base, tiers, capacities)


def request(index: int, arrival_s: float, first_block: int, blocks: int = 16) -> TraceRequest:
    ids = tuple(range(first_block, first_block + blocks))
    return TraceRequest(arrival_s, blocks * BLOCK + 1, 1, (*ids, 10**6 + index), BLOCK, index)


def one_prompt_after_two_others() -> list[TraceRequest]:
    """The first prompt comes back when small HBM and RAM have both forgotten it."""
    firsts = [0, 100, 200, 300, 0]
    return [request(i, 10.0 * i, first) for i, first in enumerate(firsts)]


def replay(setup: VirtualFleetSetup, requests: Sequence[TraceRequest]) -> list[ReplayedRequest]:
    return VirtualFleet(setup).run(requests)


def test_each_fleet_has_one_path_more_than_the_one_before() -> None:
    setups = [setup(tiers, ROOMY) for tiers in TIER_SETS]
    assert [one.engine.ram_blocks > 0 for one in setups] == [False, True, True, True]
    assert [one.endless_storage for one in setups] == [False, False, True, True]
    assert [one.use_peers for one in setups] == [False, False, False, True]
    assert len({(one.engine.hbm_blocks, one.engine.block_size_tokens) for one in setups}) == 1


def test_bounded_storage_is_the_engines_own() -> None:
    bounded = Capacities(block_size_tokens=BLOCK, hbm_blocks=40, ram_blocks=40, storage_blocks=7)
    one = setup("storage", bounded)
    assert (one.engine.storage_blocks, one.endless_storage) == (7, False)
    assert setup("cpu", bounded).engine.storage_blocks == 0


def test_blocks_on_disk_are_known_to_the_index_and_read_back() -> None:
    last = replay(setup("storage", SMALL), one_prompt_after_two_others())[-1]
    assert last.cached_by_tier["storage"] == 16 * BLOCK
    assert last.predicted_cached_tokens == last.cached_tokens == 16 * BLOCK
    assert replay(setup("cpu", SMALL), one_prompt_after_two_others())[-1].cached_tokens == 0


def test_a_fleet_without_lower_tiers_reads_only_from_hbm() -> None:
    again = replay(setup("gpu", ROOMY), [request(0, 0.0, 0), request(1, 10.0, 0)])[1]
    assert {tier: tokens for tier, tokens in again.cached_by_tier.items() if tokens} == {"hbm": 16 * BLOCK}


def test_only_the_fleet_with_peers_pulls() -> None:
    # The holder is busy with a prompt of 64,000 tokens when its own prefix is asked for again.
    requests = [request(0, 0.0, 0, 300), request(1, 50.0, 0, 1300), request(2, 50.1, 0, 300)]
    pulled = replay(setup("p2p", ROOMY, workers=2), requests)[2]
    assert pulled.source is not None
    assert pulled.cached_by_tier["peer"] == 300 * BLOCK
    assert replay(setup("storage", ROOMY, workers=2), requests)[2].source is None


def test_nothing_published_after_a_cut_reaches_the_index() -> None:
    requests = [request(0, 0.0, 0), request(1, 50.0, 0), request(2, 60.0, 500), request(3, 90.0, 500)]
    cut = replace(setup("gpu", ROOMY), events_cut_at_s={"w0": 55.0})
    predicted = [one.predicted_cached_tokens for one in replay(cut, requests)]
    assert predicted == [0, 16 * BLOCK, 0, 0]
    assert replay(cut, requests)[3].cached_tokens == 16 * BLOCK, "the engine still has it"


def test_equal_seeds_give_equal_replays() -> None:
    requests = [request(i, 0.3 * i, 40 * (i % 3)) for i in range(30)]
    ours = [replay(setup("p2p", ROOMY, workers=3), requests) for _ in range(2)]
    assert ours[0] == ours[1]


def test_requests_ask_for_the_time_per_token_that_the_setup_names() -> None:
    # A short prefix whose holder decodes for another one: worth following unless decodes beside it count.
    first, again = request(0, 0.0, 0, 4), request(1, 1.0, 0, 4)
    requests = [replace(first, output_tokens=2000), again]
    content = setup("gpu", ROOMY, workers=2)
    together = replay(content, requests)
    assert together[1].worker == together[0].worker
    apart = replay(replace(content, slo_tpot_s=1e-6), requests)
    assert apart[1].worker != apart[0].worker
