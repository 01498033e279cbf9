# SPDX-License-Identifier: Apache-2.0
"""What the product takes for granted about vLLM's offloading chunks of several blocks. Asked of vLLM; no product code is involved.

If one of these fails after an upgrade of the engine, the place that relies on it is wrong as well.
"""

from __future__ import annotations

import pytest

from .asking import B, Workers, cached, complete, forget_hbm, offload, pull_from
from .engine import Offload, WorkerConfig
from .events import next_seq, stored, wait_for_events
from .prompts import token_ids

# Chunks of two blocks, and placeholders for what is offloaded; the second worker describes it and sends bytes.
CHUNKED = WorkerConfig(offload=Offload(blocks_per_chunk=2, self_describing=False))


CHUNKED_DESCRIBED = WorkerConfig(offload=Offload(blocks_per_chunk=2), byte_hashes=True)


@pytest.mark.parametrize(
    ("tokens", "repeated", "from_ram"),
    [(63, 32, 0), (64, 32, 64), (65, 64, 64), (96, 64, 64), (97, 96, 64), (128, 96, 128), (129, 128, 128)],
)
def test_lower_tiers_load_whole_chunks_or_nothing(
    real_workers: Workers, tokens: int, repeated: int, from_ram: int
) -> None:
    worker, puller = real_workers(CHUNKED, CHUNKED_DESCRIBED)
    prompt = token_ids(tokens)
    offload(worker, prompt)
    assert cached(worker, prompt) == repeated
    forget_hbm(worker)
    assert cached(worker, prompt) == from_ram
    assert cached(puller, prompt, kv_transfer_params=pull_from(worker)) == from_ram


@pytest.mark.parametrize(
    ("in_hbm", "tokens", "expected"),
    [(1, 128, 128), (2, 129, 128), (3, 129, 96), (3, 192, 192), (1, 96, 32), (1, 64, 32)],
)
def test_an_external_hit_below_one_chunk_beyond_hbm_is_dropped(
    real_workers: Workers, in_hbm: int, tokens: int, expected: int
) -> None:
    worker, _ = real_workers(CHUNKED, CHUNKED_DESCRIBED)
    prompt = token_ids(tokens)
    offload(worker, prompt)
    forget_hbm(worker)
    complete(worker, prompt[: in_hbm * B] + token_ids(3), kv_transfer_params={"max_load_tokens": 0})
    assert cached(worker, prompt) == expected


def test_a_placeholder_names_only_the_last_block_of_its_chunk(real_workers: Workers) -> None:
    worker, _ = real_workers(CHUNKED, CHUNKED_DESCRIBED)
    start = next_seq(worker.replay)
    complete(worker, token_ids(4 * B))
    events = wait_for_events(worker.replay, start, lambda events: len(stored(events, "CPU")) == 2)
    (gpu,) = stored(events, "GPU")
    placeholders = stored(events, "CPU")
    assert {e["block_hashes"][0] for e in placeholders} == {gpu["block_hashes"][1], gpu["block_hashes"][3]}
    for event in placeholders:
        assert len(event["block_hashes"]) == 1
        assert event["token_ids"] == []
        assert event["block_size"] == 0
        assert event["parent_block_hash"] is None


def test_a_described_chunk_names_all_its_blocks_and_hashes_may_be_bytes(real_workers: Workers) -> None:
    _, worker = real_workers(CHUNKED, CHUNKED_DESCRIBED)
    prompt = token_ids(2 * B)
    start = next_seq(worker.replay)
    complete(worker, prompt)
    events = wait_for_events(worker.replay, start, lambda events: len(stored(events, "CPU")) == 1)
    (gpu,), (cpu,) = stored(events, "GPU"), stored(events, "CPU")
    assert cpu["block_hashes"] == gpu["block_hashes"]
    assert [len(h) for h in cpu["block_hashes"]] == [32, 32]
    assert cpu["token_ids"] == prompt
    assert cpu["block_size"] == B
