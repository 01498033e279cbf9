# SPDX-License-Identifier: Apache-2.0
"""A fleet whose workers run our extension, in virtual time: plans over several sources are carried out as planned."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

import msgspec
import pytest

from engine_ext.sim.config import SimConfig
from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.profile import load_profile
from router.plan.candidate import Plan
from router.plan.load import Resident
from router.replay.replayed import ReplayedRequest
from router.replay.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest
from router.replay.virtual import VirtualFleet, VirtualFleetSetup

LINK_BYTES_PER_S = 8e9
DOCUMENT_BLOCKS = 60
ENGINE = SimConfig(
    block_size_tokens=64,
    hbm_blocks=4_000,
    ram_blocks=32_768,
    max_model_len=200_000,
    track_identity=False,
    extension=True,
)


@pytest.fixture(autouse=True)
def spread_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.replay.virtual.SPECULATIVE_S", 0.0)


@dataclass
class Followed:
    """Requests with the plans that they were sent with."""

    requests: list[ReplayedRequest]
    plans: dict[int, Plan]


def question(at_s: float, index: int, document: int, output_tokens: int = 4) -> TraceRequest:
    ids = (*(document * 1000 + block for block in range(DOCUMENT_BLOCKS)), 1_000_000 + index)
    return TraceRequest(
        at_s, len(ids) * MOONCAKE_BLOCK_TOKENS, output_tokens, ids, MOONCAKE_BLOCK_TOKENS, index
    )


def crowd() -> list[TraceRequest]:
    """Documents that two workers come to hold each, then all at once many questions about each of them."""
    requests = [question(20.0 * i, i, i // 2) for i in range(8)]
    # Two at the same instant go to two workers: neither is followed to where the other went (``spread_out``).
    requests = [replace(one, arrival_s=20.0 * (one.index // 2)) for one in requests]
    for document in range(4):
        at_s = 120.0 + 20.0 * document
        requests += [question(at_s, len(requests) + i, document) for i in range(24)]
    return requests


def replay(setup: VirtualFleetSetup) -> Followed:
    fleet = VirtualFleet(setup)
    plans: dict[int, Plan] = {}
    dispatch = fleet._dispatch

    def followed(plan: Plan, replayed: ReplayedRequest, resident: Resident) -> bool:
        plans[replayed.index] = plan
        return dispatch(plan, replayed, resident)

    fleet._dispatch = followed  # type: ignore[method-assign]
    return Followed(fleet.run(crowd()), plans)


def setup(engine: SimConfig) -> VirtualFleetSetup:
    """Computing is slow, so that a crowd does not wait for the two that hold its document; the router knows it."""
    slow = {"prefill_s_per_token": 1e-3}
    constants = {"peer_bytes_per_s": LINK_BYTES_PER_S, "peer_lookup_s": 0.002, "peer_connect_s": 0.01}
    return VirtualFleetSetup(
        workers=8,
        engine=engine,
        engine_profile=msgspec.structs.replace(
            load_engine_profile("default"), peer_bytes_per_s=LINK_BYTES_PER_S, **slow
        ),
        cost_profile=msgspec.structs.replace(load_profile("default"), **slow, **constants),
        policy="kv_aware",
    )


def test_prompts_come_from_several_workers_as_they_were_promised() -> None:
    done = replay(setup(ENGINE))
    splits = [one for one in done.requests if len(done.plans[one.index].pulls) > 1]
    assert len(splits) > 10
    for one in done.requests:
        assert not one.failed
        assert one.cached_tokens == one.predicted_cached_tokens
    pulled = {one.index: sum(pull.blocks for pull in done.plans[one.index].pulls) for one in splits}
    for one in splits:
        assert one.cached_by_tier["peer"] <= pulled[one.index] * ENGINE.block_size_tokens


def test_a_crowd_is_served_sooner_than_by_one_source_each() -> None:
    ours, stock = (replay(setup(replace(ENGINE, extension=extended))) for extended in (True, False))
    assert not any(plan.pulls for plan in stock.plans.values())
    mean_s = [statistics.mean(one.ttft_s or 0.0 for one in done.requests) for done in (ours, stock)]
    assert mean_s[0] < 0.95 * mean_s[1]
