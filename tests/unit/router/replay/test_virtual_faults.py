# SPDX-License-Identifier: Apache-2.0
"""What breaks in a virtual fleet, and what the router and the requests make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.profile import load_profile
from router.replay.policies import AnyPolicyName
from router.replay.summary import summarize
from router.replay.tiers import Capacities, TierSet, engine_config, with_tiers
from router.replay.traces import TraceRequest
from router.replay.virtual import ReplayedRequest, VirtualFleet, VirtualFleetSetup

BLOCK = 64
ROOMY = Capacities(block_size_tokens=BLOCK, hbm_blocks=2000, ram_blocks=4000, storage_blocks=0)
PROFILE = load_engine_profile("default")


def setup(
    workers: int, tiers: TierSet = "p2p", policy: AnyPolicyName = "kv_aware", **more: Any
) -> VirtualFleetSetup:
    base = VirtualFleetSetup(
        workers=workers,
        engine=engine_config(tiers, ROOMY),
        engine_profile=PROFILE,
        cost_profile=load_profile("default"),
        policy=policy,
        **more,
    )
    return with_tiers(base, tiers, ROOMY)


def request(
    index: int, arrival_s: float, first_block: int, blocks: int = 16, output_tokens: int = 1
) -> TraceRequest:
    ids = (*range(first_block, first_block + blocks), 10**6 + index)
    return TraceRequest(arrival_s, blocks * BLOCK + 1, output_tokens, ids, BLOCK, index)


def replay(setup: VirtualFleetSetup, requests: Sequence[TraceRequest]) -> list[ReplayedRequest]:
    replayed = VirtualFleet(setup).run(requests)
    assert [one.index for one in replayed] == [one.index for one in requests]
    for one in replayed:
        assert one.failed is (one.finished_s is None), "nothing hangs"
    return replayed


def busy_holder() -> list[TraceRequest]:
    """The holder of a prefix is busy when it is asked for again: the other worker pulls."""
    return [request(0, 0.0, 0, 300), request(1, 50.0, 0, 1300), request(2, 50.1, 0, 300)]


def test_a_pull_over_a_cut_transport_is_given_up_and_computed() -> None:
    pulled = replay(setup(2), busy_holder())[2]
    assert pulled.source is not None
    assert pulled.cached_by_tier["peer"] == 300 * BLOCK
    for worker in (pulled.worker, pulled.source):
        cut = replay(setup(2, transport_cut_at_s={worker: 40.0}), busy_holder())[2]
        assert cut.source is not None
        assert cut.cached_tokens == 0
        assert cut.ttft_s == pytest.approx(PROFILE.peer_timeout_s, abs=3.0)


def test_a_transport_cut_in_the_middle_of_a_pull_ends_it_at_once() -> None:
    slow = replace(
        setup(2), engine_profile=msgspec.structs.replace(PROFILE, peer_bytes_per_s=2e9), pull_deadline_s=60.0
    )
    whole = replay(slow, busy_holder())[2]
    assert whole.source is not None
    assert whole.cached_by_tier["peer"] == 300 * BLOCK
    assert whole.ttft_s > 1.0
    cut = replay(replace(slow, transport_cut_at_s={whole.source: 50.6}), busy_holder())[2]
    assert cut.cached_tokens == 0
    assert cut.ttft_s < 4.0


def test_requests_of_a_dead_worker_are_tried_elsewhere_or_have_failed_if_they_streamed() -> None:
    requests = [
        request(0, 0.0, 0, 16, output_tokens=2000),  # streams when its worker dies
        request(1, 4.0, 500, 600),  # is being computed
        request(2, 5.5, 2000),  # comes before the router has heard of it
        request(3, 20.0, 0),
        request(4, 60.0, 0),
    ]
    one = setup(2, "gpu", "round_robin", killed_at_s={"w0": 5.0})
    fine = replay(replace(one, killed_at_s={}), requests)
    assert not any(each.failed or each.attempts > 1 for each in fine)
    first = fine[0].worker
    other = {"w0": "w1", "w1": "w0"}[first]
    streaming, computing, blind, after, later = replay(replace(one, killed_at_s={first: 5.0}), requests)
    assert (streaming.failed, streaming.worker, streaming.finished_s) == (True, first, None)
    assert streaming.ttft_s is not None
    assert (computing.failed, computing.worker) == (False, other)
    assert {computing.attempts, blind.attempts} <= {1, 2}
    assert blind.worker == other
    assert (after.worker, after.attempts) == (other, 1)
    assert later.attempts == 1
    figures = summarize([streaming, computing, blind, after, later], 2)
    assert figures.failed == 1
    assert figures.retried == computing.attempts + blind.attempts - 2 > 0


def test_a_retried_request_counts_from_its_arrival_and_is_predicted_from_its_last_attempt() -> None:
    # Both workers prefill when one dies; only its own request goes to the other.
    requests = [request(0, 0.0, 0, 300), request(1, 0.0, 1000, 300)]
    replayed = replay(setup(2, "gpu", killed_at_s={"w0": 0.9}), requests)
    (again,) = [one for one in replayed if one.attempts == 2]
    assert again.worker == "w1"
    assert again.delay_s == pytest.approx(0.9)
    assert again.ttft_s > 0.9 + 0.5
    assert again.predicted_ttft_s == pytest.approx(again.ttft_s - 0.9, rel=0.5)


def test_a_worker_comes_back_empty_but_for_its_disk() -> None:
    def again(tiers: TierSet) -> ReplayedRequest:
        requests = [request(0, 0.0, 0), request(1, 30.0, 0)]
        return replay(setup(1, tiers, killed_at_s={"w0": 10.0}, restart_after_s=5.0), requests)[1]

    empty = again("cpu")
    assert (empty.cached_tokens, empty.predicted_cached_tokens) == (0, 0)
    disk = again("storage")
    assert disk.predicted_cached_tokens == disk.cached_tokens == 16 * BLOCK
    assert disk.cached_by_tier["storage"] == 16 * BLOCK


def test_with_nobody_left_requests_fail_at_once_and_later_ones_are_served() -> None:
    requests = [request(0, 12.0, 0), request(1, 30.0, 0)]
    lost, served = replay(setup(1, killed_at_s={"w0": 10.0}, restart_after_s=5.0), requests)
    assert (lost.failed, lost.worker, lost.attempts) == (True, "", 0)
    assert not served.failed


def test_a_quick_restart_that_no_poll_saw_is_noticed_all_the_same() -> None:
    requests = [request(0, 0.0, 0), request(1, 30.0, 0)]
    again = replay(setup(1, "cpu", killed_at_s={"w0": 10.2}, restart_after_s=0.1), requests)[1]
    assert (again.cached_tokens, again.predicted_cached_tokens) == (0, 0)


def test_a_source_killed_after_routing_costs_one_decision_and_hangs_nothing() -> None:
    requests = [*busy_holder(), request(3, 51.0, 0, 300), request(4, 100.0, 0, 300)]
    whole = replay(setup(2), requests)
    assert whole[2].source is not None
    killed = replay(setup(2, kill_source_of=1), requests)
    puller = killed[2]
    assert puller.source == whole[2].source
    assert (puller.cached_tokens, puller.predicted_cached_tokens) == (0, 300 * BLOCK)
    # The first question to a killed peer fails at once.
    assert puller.ttft_s < 3.0
    assert killed[1].attempts == 2
    assert killed[1].worker == puller.worker
    figures = summarize(killed, 2)
    assert (figures.stale, figures.retried, figures.failed) == (1, 1, 0)
    assert replay(setup(2, kill_source_of=2), requests) == whole, "there is only one pull"


def test_noise_varies_with_the_seed_and_repeats_with_it() -> None:
    requests = [request(i, 0.3 * i, 40 * (i % 3), output_tokens=20) for i in range(40)]
    runs = [
        [one.ttft_s for one in replay(setup(3, noise=noise, seed=seed), requests)]
        for noise, seed in ((0.0, 1), (0.0, 1), (0.2, 1), (0.2, 1), (0.2, 2))
    ]
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]
    assert runs[0] != runs[2] != runs[4]


def test_what_dead_workers_held_is_gone_from_the_index() -> None:
    again = replay(
        setup(2, "gpu", killed_at_s={"w0": 10.0, "w1": 10.5}, restart_after_s=3.0),
        [request(0, 0.0, 0), request(1, 20.0, 0)],
    )[1]
    assert again.predicted_cached_tokens == again.cached_tokens == 0


def test_blocks_given_up_and_asked_for_again_are_counted() -> None:
    small = Capacities(block_size_tokens=BLOCK, hbm_blocks=40, ram_blocks=40, storage_blocks=0)

    def last(tiers: TierSet) -> ReplayedRequest:
        base = VirtualFleetSetup(
            workers=1,
            engine=engine_config(tiers, small),
            engine_profile=PROFILE,
            cost_profile=load_profile("default"),
            policy="kv_aware",
        )
        firsts = [0, 100, 200, 300, 0]
        requests = [request(i, 10.0 * i, first) for i, first in enumerate(firsts)]
        return replay(with_tiers(base, tiers, small), requests)[-1]

    assert last("cpu").evicted_blocks == 16
    assert last("storage").evicted_blocks == 0
