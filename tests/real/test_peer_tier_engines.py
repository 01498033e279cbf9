# SPDX-License-Identifier: Apache-2.0
"""The peer tier in real engines: a plan's pulls, and that nothing that goes wrong with them changes a token.

The model's greedy text depends on every byte of its KV cache, so equal text and the engine's own count of cached
tokens together say that the right pages came to the right places.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .asking import B, Workers, complete, forget_hbm, offload, pull_from, text
from .engine import RealWorker, WorkerConfig
from .imports import Version
from .launch import P2P, P2P_PORT, PEER_PORT, Extension
from .prompts import token_ids

BLOCK_BYTES = 8192
"""Of the small model, in the host tier."""
RESTART_TIMEOUT_S = 600
"""An engine that starts beside two others on two cores takes minutes."""
TIER = {
    "type": "PointsmanTier",
    "module_path": "engine_ext.vllm.tier",
    "control": {"port": PEER_PORT, "lease_s": 2.0},
}
BOTH = TIER | {
    "allow_unfingerprinted_peers": True,
    "p2p": {"host": "127.0.0.1", "port": P2P_PORT, "num_threads": 0},
}
Trio = tuple[RealWorker, RealWorker, RealWorker]


@pytest.fixture
def trio(real_workers: Workers, vllm_version: Version) -> Trio:
    """Three workers with our tier."""
    config = WorkerConfig(extension=Extension(tiers=(TIER,)), vllm=vllm_version)
    one, two, three = real_workers(config, config, config)
    return one, two, three


def pulls(
    *wanted: tuple[RealWorker, int, int], within_ms: int = 5000, kind: str = "pointsman"
) -> dict[str, Any]:
    """Request parameters: (source, first block, block after the last) of each pull."""
    return {
        "pointsman": {
            "version": 1,
            "plan_id": uuid.uuid4().hex,
            "pulls": [
                {
                    "source": source.peer if kind == "pointsman" else source.p2p,
                    "kind": kind,
                    "start_token": first * B,
                    "end_token": end * B,
                    "deadline_ms": within_ms,
                }
                for source, first, end in wanted
            ],
        }
    }


def only_in_ram(worker: RealWorker, prompt: list[int]) -> str:
    """Computes the prompt there, leaves its blocks in RAM alone, and returns the cold text."""
    cold = offload(worker, prompt)
    forget_hbm(worker)
    return cold


def counter(worker: RealWorker, name: str, **labels: str) -> float:
    """The sum of a counter's samples that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in worker.metrics().items()
        if sample.startswith(f"vllm:pointsman_{name}") and all(one in sample for one in wanted)
    )


def wait_for(worker: RealWorker, at_least: float, name: str, **labels: str) -> None:
    deadline = time.monotonic() + 20
    while (seen := counter(worker, name, **labels)) < at_least:
        assert time.monotonic() < deadline, f"{worker.name}: {name} is {seen:g}, not {at_least:g}"
        time.sleep(0.05)


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


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


def test_a_chain_of_peers_serves_what_the_middle_one_pulled_and_computed(trio: Trio) -> None:
    first, middle, last = trio
    prompt = token_ids(16 * B + 3)
    only_in_ram(first, prompt[: 8 * B])
    through = complete(middle, prompt, kv_transfer_params=pulls((first, 0, 8)))
    assert cached_of(through) == 8 * B
    cold = text(complete(first, prompt))
    assert text(through) == cold
    deadline = time.monotonic() + 20
    while True:  # the middle one's own blocks reach its RAM a moment after its answer
        pulled = complete(last, prompt, kv_transfer_params=pulls((middle, 0, 16)))
        if cached_of(pulled) == 16 * B:
            break
        assert text(pulled) == cold
        assert time.monotonic() < deadline
        forget_all(last)
    assert text(pulled) == cold


def forget_all(worker: RealWorker) -> None:
    """HBM and RAM."""
    worker.post("/reset_prefix_cache?reset_external=true")


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
    complete(source, prompt, cache_salt="blue")
    plain = only_in_ram(source, prompt)
    for salt in ("green", "blue2"):
        asked = complete(puller, prompt, cache_salt=salt, kv_transfer_params=pulls((source, 0, 6)))
        assert cached_of(asked) == 0
        assert text(asked) == plain
    same = complete(puller, prompt, cache_salt="blue", kv_transfer_params=pulls((source, 0, 6)))
    assert cached_of(same) == 6 * B


@contextmanager
def paused(worker: RealWorker) -> Iterator[None]:
    worker.pause()
    try:
        yield
    finally:
        worker.resume()


def test_a_frozen_source_costs_the_deadline_and_serves_again_after_the_thaw(trio: Trio) -> None:
    source, _, puller = trio
    for _ in range(3):
        prompt = token_ids(10 * B + 5)
        cold = only_in_ram(source, prompt)
        with paused(source):
            began_s = time.monotonic()
            alone = complete(puller, prompt, kv_transfer_params=pulls((source, 0, 10), within_ms=500))
            assert time.monotonic() - began_s < 5
            time.sleep(2.5)  # longer than the lease
        assert (cached_of(alone), text(alone)) == (0, cold)
    fresh = token_ids(10 * B + 5)
    cold = only_in_ram(source, fresh)
    pulled = complete(puller, fresh, kv_transfer_params=pulls((source, 0, 10)))
    assert (cached_of(pulled), text(pulled)) == (10 * B, cold)


def test_a_killed_source_costs_a_recomputation_and_its_successor_serves(trio: Trio) -> None:
    source, helper, puller = trio
    prompt = token_ids(10 * B + 5)
    cold = only_in_ram(source, prompt)
    source.kill()
    for _ in range(3):
        began_s = time.monotonic()
        alone = complete(puller, prompt, kv_transfer_params=pulls((source, 0, 10), within_ms=500))
        assert time.monotonic() - began_s < 5
        assert (cached_of(alone), text(alone)) == (0, cold)
        forget_all(puller)
    source.launch()
    source.wait_ready(RESTART_TIMEOUT_S)
    assert only_in_ram(source, prompt) == cold
    pulled = complete(puller, prompt, kv_transfer_params=pulls((source, 0, 10)))
    assert (cached_of(pulled), text(pulled)) == (10 * B, cold)
    assert helper.alive


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
