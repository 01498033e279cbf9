# SPDX-License-Identifier: Apache-2.0
"""What the product takes for granted about vLLM's host tier. Asked of vLLM itself; no product code is involved.

If one of these fails after an upgrade of the engine, the place that relies on it is wrong as well.
"""

from __future__ import annotations

import pytest

from .asking import B, Pair, cached, complete, forget_hbm, offload, text
from .events import next_seq, replay, stored, wait_for_events
from .prompts import token_ids


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [2, 3])
def test_a_ram_hit_may_reach_the_whole_prompt(real_p2p_pair: Pair, blocks: int, beside: int) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(blocks * B + beside)
    cold = offload(worker, prompt)
    forget_hbm(worker)
    before = worker.tokens_by_source()
    again = complete(worker, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // B * B
    assert text(again) == cold
    worker.wait_for_source("host", before.get("host", 0) + len(prompt) // B * B)


def test_beside_ram_a_repeat_of_whole_blocks_hits_all_of_them(real_p2p_pair: Pair) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(3 * B)
    offload(worker, prompt)
    assert cached(worker, prompt) == 3 * B, "two blocks in HBM, and the last one from RAM"


def test_a_second_copy_of_a_block_in_hbm_is_stored_a_second_time(real_p2p_pair: Pair) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(2 * B)
    start = next_seq(worker.replay)
    offload(worker, prompt)
    complete(worker, prompt)
    events = wait_for_events(worker.replay, start, lambda events: len(stored(events, "GPU")) == 2)
    first, second = stored(events, "GPU")
    assert second["block_hashes"] == first["block_hashes"][1:]
    assert second["parent_block_hash"] == first["block_hashes"][0]


def test_ram_stores_come_in_a_later_batch_than_the_blocks_of_hbm(real_p2p_pair: Pair) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(3 * B + 1)
    start = next_seq(worker.replay)
    offload(worker, prompt)
    gpu, cpu = (
        [m.seq for m in replay(worker.replay, start) if stored(m.events, medium)] for medium in ("GPU", "CPU")
    )
    assert max(gpu) < min(cpu)


def test_a_self_describing_ram_store_lacks_only_the_extra_keys(real_p2p_pair: Pair) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(2 * B)
    start = next_seq(worker.replay)
    complete(worker, prompt, cache_salt="salt")
    events = wait_for_events(worker.replay, start, lambda events: len(stored(events, "CPU")) == 2)
    (gpu,) = stored(events, "GPU")
    by_hash = {e["block_hashes"][0]: e for e in stored(events, "CPU")}
    first, second = (by_hash[h] for h in gpu["block_hashes"])
    assert first["token_ids"] + second["token_ids"] == prompt
    assert (first["parent_block_hash"], second["parent_block_hash"]) == (None, gpu["block_hashes"][0])
    assert first["block_size"] == B
    assert gpu["extra_keys"] == [["salt"], None]
    assert first.get("extra_keys") is None


def test_what_ram_gives_back_is_stored_in_hbm_again(real_p2p_pair: Pair) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(2 * B)
    offload(worker, prompt)
    start = next_seq(worker.replay)
    forget_hbm(worker)
    complete(worker, prompt)
    events = wait_for_events(worker.replay, start, lambda events: len(events) >= 2)
    assert events[0] == {"type": "AllBlocksCleared"}
    assert [(e["medium"], e["token_ids"]) for e in events[1:]] == [("GPU", prompt)]


def test_generated_blocks_are_offloaded_only_as_part_of_a_later_prompt(real_p2p_pair: Pair) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(B)
    start = next_seq(worker.replay)
    answer = complete(worker, prompt, max_tokens=B + 1, return_token_ids=True)
    events = wait_for_events(worker.replay, start, lambda events: len(stored(events, "GPU")) == 2)
    generated = stored(events, "GPU")[1]["block_hashes"]
    complete(worker, prompt + answer["choices"][0]["token_ids"] + token_ids(3))
    events = wait_for_events(worker.replay, start, lambda events: len(stored(events, "CPU")) == 2)
    in_turn = [(e["medium"], e["block_hashes"]) for e in events if e["type"] == "BlockStored"]
    assert ("CPU", generated) in in_turn
    assert in_turn.index(("CPU", generated)) > in_turn.index(("GPU", generated))


@pytest.mark.parametrize(("limit", "loaded"), [(0, 0), (B - 1, 0), (B, B), (B + 8, B), (1000, 3 * B)])
def test_max_load_tokens_cuts_an_external_hit_to_whole_blocks(
    real_p2p_pair: Pair, limit: int, loaded: int
) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(3 * B + 4)
    offload(worker, prompt)
    forget_hbm(worker)
    assert cached(worker, prompt, kv_transfer_params={"max_load_tokens": limit}) == loaded


def test_nothing_is_offloaded_beyond_max_offload_tokens(real_p2p_pair: Pair) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(3 * B + 4)
    complete(worker, prompt, kv_transfer_params={"max_offload_tokens": B})
    forget_hbm(worker)
    assert cached(worker, prompt) == B
