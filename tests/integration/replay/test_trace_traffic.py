# SPDX-License-Identifier: Apache-2.0
"""The shape of traffic that herds: every request begins with the same block. Eight workers, virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_ext.sim.config import SimConfig
from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.profile import load_profile as load_cost_profile
from router.plan.policies import PolicyName
from router.replay.generator import generate_rows
from router.replay.summary import ReplaySummary, summarize
from router.replay.traces import TraceRequest, load_trace, requests_from_rows
from router.replay.virtual import VirtualFleet, VirtualFleetSetup

WORKERS = 8
TRACE = "mooncake_fast25_conversation_trace.jsonl.gz"


def replay(requests: Sequence[TraceRequest], policy: PolicyName) -> ReplaySummary:
    engine = SimConfig(
        block_size_tokens=64,
        hbm_blocks=16_384,
        ram_blocks=32_768,
        max_model_len=200_000,
        track_identity=False,
    )
    setup = VirtualFleetSetup(
        workers=WORKERS,
        engine=engine,
        engine_profile=load_engine_profile("default"),
        cost_profile=load_cost_profile("default"),
        policy=policy,
    )
    replayed = VirtualFleet(setup).run(requests)
    assert all(one.ttft_s is not None and one.cached_tokens is not None for one in replayed)
    return summarize(replayed, WORKERS)


def assert_spreads_and_wins(requests: Sequence[TraceRequest]) -> None:
    ours = replay(requests, "kv_aware")
    print("kv_aware", ours)
    assert ours.largest_share <= 2.0
    assert ours.pulls > 0
    assert ours.stale <= ours.requests / 100
    for policy in ("round_robin", "least_load"):
        other = replay(requests, policy)
        print(policy, other)
        assert ours.hit_rate > 1.5 * other.hit_rate
        assert ours.ttft_p50_s < other.ttft_p50_s
        assert ours.ttft_p99_s < other.ttft_p99_s


def test_generated_conversations_spread_and_beat_round_robin_and_least_load() -> None:
    assert_spreads_and_wins(requests_from_rows(generate_rows(seed=7, duration_s=300))[:900])


@pytest.mark.trace
def test_recorded_conversations_spread_and_beat_round_robin_and_least_load(traces: Path) -> None:
    assert_spreads_and_wins(load_trace(traces / TRACE, limit=2000))
