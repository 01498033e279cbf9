# SPDX-License-Identifier: Apache-2.0
"""Everything that can break, at once, under generated conversations: nothing hangs, and all of it is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.profile import load_profile
from router.replay.generator import generate_rows
from router.replay.summary import summarize
from router.replay.tiers import Capacities, engine_config, with_tiers
from router.replay.traces import TraceRequest, requests_from_rows
from router.replay.virtual import VirtualFleet, VirtualFleetSetup

CAPACITIES = Capacities(block_size_tokens=64, hbm_blocks=3000, ram_blocks=6000, storage_blocks=0)
LONGEST_INPUT_TOKENS = 20_000


def requests() -> list[TraceRequest]:
    chosen = requests_from_rows(generate_rows(seed=11, duration_s=200))
    return [one for one in chosen if one.input_tokens <= LONGEST_INPUT_TOKENS][:250]


def fleet(seed: int) -> VirtualFleetSetup:
    base = VirtualFleetSetup(
        workers=4,
        engine=engine_config("p2p", CAPACITIES),
        engine_profile=load_engine_profile("default"),
        cost_profile=load_profile("default"),
        policy="load_pull",
        noise=0.2,
        seed=seed,
    )
    return with_tiers(base, "p2p", CAPACITIES)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_is_answered_or_has_failed_and_the_fleet_recovers(seed: int) -> None:
    broken = replace(
        fleet(seed),
        killed_at_s={"w0": 15.0, "w1": 40.5},
        restart_after_s=10.0,
        transport_cut_at_s={"w2": 30.0},
        events_cut_at_s={"w3": 50.0},
        kill_source_of=1,
    )
    replayed = VirtualFleet(broken).run(requests())
    assert [one.failed for one in replayed] == [one.finished_s is None for one in replayed]
    figures = summarize(replayed, 4)
    assert figures.requests == 250
    assert 0 < figures.failed < 60
    assert figures.retried > 0
    assert figures.stale > 0
    assert figures.lookup_total_s > 30.0, "lookups over the cut transport ran into their limit"
    assert {one.worker for one in replayed[-50:]} >= {"w0", "w1"}, "they are used again"
    fine = summarize(VirtualFleet(fleet(seed)).run(requests()), 4)
    assert (fine.failed, fine.retried) == (0, 0)
    assert fine.goodput > figures.goodput


def test_a_fleet_with_faults_and_noise_repeats_itself() -> None:
    broken = replace(fleet(3), killed_at_s={"w0": 10.0}, transport_cut_at_s={"w1": 20.0}, kill_source_of=2)
    first, second = (VirtualFleet(broken).run(requests()[:80]) for _ in range(2))
    assert first == second
