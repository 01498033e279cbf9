# SPDX-License-Identifier: Apache-2.0
"""The peer tier in real engines: a plan's pulls, and that nothing that goes wrong with them changes a token.

The model's greedy text depends on every byte of its KV cache, so equal text and the engine's own count of cached
tokens together say that the right pages came to the right places.
"""

from __future__ import annotations

import time

import pytest

from .asking import B, Workers, assert_heads, complete, forget_hbm, heads, offload, pull_from, text
from .engine import RealWorker, WorkerConfig
from .imports import Version, default_version
from .launch import P2P, Extension
from .peer_engines import (
    BLOCK_BYTES,
    BOTH,
    LEASE_S,
    TCP,
    TIER,
    cached_of,
    counter,
    forget_all,
    only_in_ram,
    paused,
    pull_held_up,
    pulls,
    wait_for,
    wait_until,
)
from .prompts import token_ids

BOUND_S = 10.0
"""Of an answer where the deadline is half a second, or a connection breaks: less than any other wait that there is."""
RESTART_TIMEOUT_S = 600
"""An engine that starts beside two others on two cores takes minutes."""
Trio = tuple[RealWorker, RealWorker, RealWorker]


@pytest.fixture
def trio(real_workers: Workers, vllm_version: Version) -> Trio:
    """Three workers with our tier."""
    config = WorkerConfig(extension=Extension(tiers=(TIER,)), vllm=vllm_version, more_environment=TCP)
    one, two, three = real_workers(config, config, config)
    return one, two, three


def test_a_prefix_that_only_a_peers_ram_holds_is_served_with_the_same_text(trio: Trio) -> None:
    source, _, puller = trio
    prompt = token_ids(20 * B + 5)
    cold = only_in_ram(source, prompt)
    before = counter(puller, "pull_bytes_total")
    from_peers = puller.tokens_by_source().get("p2p", 0)
    pulled = complete(puller, prompt, kv_transfer_params=pulls((source, 0, 20)))
    assert cached_of(pulled) == 20 * B
    assert text(pulled) == cold
    wait_for(puller, before + 20 * BLOCK_BYTES, "pull_bytes_total")
    assert counter(puller, "pull_bytes_total") == before + 20 * BLOCK_BYTES
    puller.wait_for_source("p2p", from_peers + 20 * B)
    assert_heads(puller, prompt, heads(source, prompt))


def test_a_prefix_split_over_two_peers_is_served_with_the_same_text(trio: Trio) -> None:
    left, right, puller = trio
    prompt = token_ids(20 * B + 5)
    cold = only_in_ram(left, prompt)
    only_in_ram(right, prompt)
    served = [counter(one, "served_chunks_total", answer="leased") for one in (left, right)]
    pulled = complete(puller, prompt, kv_transfer_params=pulls((left, 0, 12), (right, 12, 20)))
    assert cached_of(pulled) == 20 * B
    assert text(pulled) == cold
    wait_for(left, served[0] + 12, "served_chunks_total", answer="leased")
    wait_for(right, served[1] + 8, "served_chunks_total", answer="leased")
    assert_heads(puller, prompt, heads(left, prompt))


def test_a_chain_of_peers_serves_what_the_middle_one_pulled_and_computed(trio: Trio) -> None:
    first, middle, last = trio
    prompt = token_ids(16 * B + 3)
    only_in_ram(first, prompt[: 8 * B])
    through = complete(middle, prompt, kv_transfer_params=pulls((first, 0, 8)))
    assert cached_of(through) == 8 * B
    cold = text(complete(first, prompt))
    assert text(through) == cold
    deadline = time.monotonic() + 60
    while True:  # the middle one's own blocks reach its RAM a moment after its answer
        pulled = complete(last, prompt, kv_transfer_params=pulls((middle, 0, 16)))
        if cached_of(pulled) == 16 * B:
            break
        assert text(pulled) == cold
        assert time.monotonic() < deadline
        forget_all(last)
    assert text(pulled) == cold
    assert_heads(last, prompt, heads(first, prompt))


def test_a_source_that_lacks_the_prefix_or_its_tail_costs_a_recomputation_and_no_token(trio: Trio) -> None:
    source, other, puller = trio
    prompt = token_ids(10 * B + 5)
    cold = only_in_ram(source, prompt)
    nothing = complete(puller, prompt[: 4 * B], kv_transfer_params=pulls((other, 0, 4)))
    assert cached_of(nothing) == 0
    forget_all(puller)
    part = complete(puller, prompt, kv_transfer_params=pulls((source, 0, 6), (other, 6, 10)))
    assert cached_of(part) == 6 * B
    assert text(part) == cold


def test_a_salted_prompt_never_hits_another_salt(trio: Trio) -> None:
    source, _, puller = trio
    prompt = token_ids(6 * B + 5)
    offload(source, prompt, cache_salt="blue")
    plain = only_in_ram(source, prompt)
    for salt in ("green", "blue2"):
        asked = complete(puller, prompt, cache_salt=salt, kv_transfer_params=pulls((source, 0, 6)))
        assert cached_of(asked) == 0
        assert text(asked) == plain
    same = complete(puller, prompt, cache_salt="blue", kv_transfer_params=pulls((source, 0, 6)))
    assert cached_of(same) == 6 * B


def test_a_frozen_source_costs_the_deadline_and_serves_again_after_the_thaw(trio: Trio) -> None:
    source, _, puller = trio
    for frozen_s in (0, 0, LEASE_S + 0.5):
        prompt = token_ids(10 * B + 5)
        cold = only_in_ram(source, prompt)
        with paused(source):
            began_s = time.monotonic()
            alone = complete(puller, prompt, kv_transfer_params=pulls((source, 0, 10), within_ms=500))
            assert time.monotonic() - began_s < BOUND_S
            time.sleep(frozen_s)
        assert (cached_of(alone), text(alone)) == (0, cold)
    fresh = token_ids(10 * B + 5)
    cold = only_in_ram(source, fresh)
    pulled = complete(puller, fresh, kv_transfer_params=pulls((source, 0, 10)))
    assert (cached_of(pulled), text(pulled)) == (10 * B, cold)


def test_sources_killed_while_they_are_read_or_before_cost_a_recomputation_and_their_successors_serve(
    trio: Trio, vllm_version: Version
) -> None:
    one, two, puller = trio
    # Each restart takes half a minute; where the vLLM version makes no difference, one round of it is enough.
    rounds = ((one, two), (one,)) if vllm_version == default_version() else ((one,),)
    for victims in rounds:
        for source in victims:
            with pull_held_up(source, puller, 10) as (asking, prompt, cold):
                lost = counter(puller, "pulls_total") - counter(puller, "pulls_total", outcome="ok")
                source.kill()
                began_s = time.monotonic()
                alone = asking.answer()
            assert time.monotonic() - began_s < BOUND_S
            assert (cached_of(alone), text(alone)) == (0, cold)
            wait_until(
                lambda lost=lost: (  # type: ignore[misc]
                    counter(puller, "pulls_total") - counter(puller, "pulls_total", outcome="ok") == lost + 1
                ),
                "the count of the pull that failed",
            )
            assert_nothing_held(puller)
            forget_all(puller)
            began_s = time.monotonic()
            alone = complete(puller, prompt, kv_transfer_params=pulls((source, 0, 10), within_ms=500))
            assert time.monotonic() - began_s < BOUND_S
            assert (cached_of(alone), text(alone)) == (0, cold)
            forget_all(puller)
        for source in victims:
            source.launch()
        for source in victims:
            source.wait_ready(RESTART_TIMEOUT_S)
            assert only_in_ram(source, prompt) == cold
            pulled = complete(puller, prompt, kv_transfer_params=pulls((source, 0, 10)))
            assert (cached_of(pulled), text(pulled)) == (10 * B, cold)
            forget_all(puller)


def test_a_pull_that_its_client_left_spoils_no_block_of_a_request_that_wants_the_same_at_once(
    trio: Trio,
) -> None:
    source, other, puller = trio
    for _ in range(3):
        with pull_held_up(source, puller, 10, other) as (asking, prompt, cold):
            asking.leave()
            wait_for(puller, 10, "quarantined_chunks")
            again = complete(puller, prompt, kv_transfer_params=pulls((other, 0, 10)))
            assert (cached_of(again), text(again)) == (10 * B, cold)
        assert_nothing_held(puller)  # what the source had still to send has come, or never will
        forget_hbm(puller)
        assert_heads(puller, prompt, heads(source, prompt))
        assert_nothing_held(source)


def assert_nothing_held(worker: RealWorker) -> None:
    """Chunks and leases are back as they were at the start."""
    for gauge in ("quarantined_chunks", "leased_chunks", "leases"):
        wait_until(lambda gauge=gauge: counter(worker, gauge) == 0, f"{gauge} of {worker.name} is 0")  # type: ignore[misc]


def test_an_in_tree_worker_is_a_source_and_a_consumer_where_that_is_allowed(
    real_workers: Workers, vllm_version: Version
) -> None:
    ours, stock = real_workers(
        WorkerConfig(extension=Extension(tiers=(BOTH,)), vllm=vllm_version),
        WorkerConfig(offload=P2P.offload, vllm=vllm_version),
    )
    theirs = token_ids(10 * B + 5)
    cold = offload(stock, theirs)
    pulled = complete(ours, theirs, kv_transfer_params=pulls((stock, 0, 10), kind="p2p"))
    assert (cached_of(pulled), text(pulled)) == (10 * B, cold)
    named = token_ids(8 * B + 5)
    cold = offload(stock, named)
    pulled = complete(ours, named, kv_transfer_params=pull_from(stock))
    assert (cached_of(pulled), text(pulled)) == (8 * B, cold)
    mine = token_ids(9 * B + 5)
    cold = offload(ours, mine)
    pulled = complete(stock, mine, kv_transfer_params=pull_from(ours))
    assert (cached_of(pulled), text(pulled)) == (9 * B, cold)
