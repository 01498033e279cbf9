# SPDX-License-Identifier: Apache-2.0
"""The simulator beside what was published of the engines that it stands for."""

from __future__ import annotations

import pytest

from engine_ext.sim.profile import load_profile
from router.costs.profile import load_profile as load_cost_profile
from router.replay.scenarios import CAPACITIES, PROFILE
from router.replay.tiers import engine_config, with_tiers
from router.replay.traces import TraceRequest
from router.replay.virtual import VirtualFleet, VirtualFleetSetup

BLOCK = 64
PUBLISHED_S = {
    # llm-d blog, 2026-08-15: prefix tokens, recompute and pull, seconds to the first token
    2_048: (0.078, 0.035),
    8_192: (0.250, 0.057),
    16_384: (0.510, 0.086),
    32_768: (1.173, 0.165),
    49_152: (1.988, 0.235),
}


def fleet() -> VirtualFleet:
    """Two workers; the one that is asked is the one with the lower load, and pulls where the other leads."""
    setup = VirtualFleetSetup(
        workers=2,
        engine=engine_config("gpu", CAPACITIES),
        engine_profile=load_profile(PROFILE),
        cost_profile=load_cost_profile(PROFILE),
        policy="load_pull",
    )
    return VirtualFleet(with_tiers(setup, "p2p", CAPACITIES))


def prompt(index: int, at_s: float, tokens: int, first_block: int) -> TraceRequest:
    blocks = tokens // BLOCK
    # One more block than the prefix, of its own: the last one is never shared in whole.
    ids = (*range(first_block, first_block + blocks), 10**6 + index)
    return TraceRequest(at_s, tokens + 1, 1, ids, BLOCK, index)


@pytest.mark.parametrize("tokens", PUBLISHED_S)
def test_gpt_oss_recomputes_and_pulls_a_prefix_as_fast_as_published(tokens: int) -> None:
    # Equal prompts until some pull was seen on a pair that has pulled before: placement is by chance.
    requests = [prompt(i, 30.0 * i, tokens, i // 8 * 10_000) for i in range(160)]
    replayed = fleet().run(requests)
    recomputed = [one.ttft_s for one in replayed if not one.cached_tokens]
    pulled = [one.ttft_s for one in replayed if one.cached_by_tier.get("peer") == tokens]
    assert len(recomputed) == 20
    assert len(pulled) > 10
    recompute_s, pull_s = PUBLISHED_S[tokens]
    assert recomputed[-1] == pytest.approx(recompute_s, rel=0.2)
    assert pulled[-1] == pytest.approx(pull_s, rel=0.2)


def test_each_pod_holds_what_was_published() -> None:
    assert CAPACITIES.hbm_blocks * BLOCK == pytest.approx(1.22e6, rel=0.01)
    ram_bytes = CAPACITIES.ram_blocks * BLOCK * load_profile(PROFILE).kv_bytes_per_token
    assert ram_bytes == pytest.approx(88 * 2**30, rel=0.03)


def test_the_stand_in_for_dynamos_engine_takes_as_long_as_its_polynomials() -> None:
    profile = load_profile("dynamo-mocker")
    for tokens in (2_048, 4_096, 8_192):
        theirs_s = (16.50142 + 1.518344e-2 * tokens + 4.209989e-7 * tokens**2) / 1000
        assert profile.prefill_s(tokens, 0) == pytest.approx(theirs_s, rel=0.15)
    capacity = 16_384 * 64
    for share in (0.05, 0.1, 0.2):
        theirs_s = (5.74 + 54.01 * share - 25.74 * share**2) / 1000
        assert profile.step_s(10, int(share * capacity)) == pytest.approx(theirs_s, rel=0.15)
