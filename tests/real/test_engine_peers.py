# SPDX-License-Identifier: Apache-2.0
"""What the product takes for granted about pulls between vLLM workers. Asked of vLLM itself; no product code is involved.

If one of these fails after an upgrade of the engine, the place that relies on it is wrong as well.
"""

from __future__ import annotations

import pytest

from .asking import B, Pair, cached, complete, offload, pull_from, text
from .events import events_since, next_seq, stored, wait_for_events
from .prompts import token_ids


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [3, 10])
def test_a_peer_pull_gives_all_whole_blocks_and_the_same_text(
    real_p2p_pair: Pair, blocks: int, beside: int
) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(blocks * B + beside)
    cold = offload(source, prompt)
    before = puller.tokens_by_source()
    pulled = complete(puller, prompt, kv_transfer_params=pull_from(source))
    whole = len(prompt) // B * B
    assert pulled["usage"]["prompt_tokens_details"]["cached_tokens"] == whole
    assert text(pulled) == cold
    puller.wait_for_source("p2p", before.get("p2p", 0) + whole)


def test_a_pull_continues_what_the_puller_holds_in_hbm(real_p2p_pair: Pair) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(4 * B)
    offload(source, prompt)
    complete(puller, prompt[: 2 * B] + token_ids(5), kv_transfer_params={"max_offload_tokens": 0})
    before = puller.tokens_by_source()
    assert cached(puller, prompt, kv_transfer_params=pull_from(source)) == 4 * B
    puller.wait_for_source("p2p", before.get("p2p", 0) + 2 * B)


def test_a_pull_fills_the_pullers_ram_before_its_hbm_and_the_source_says_nothing(real_p2p_pair: Pair) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(3 * B + 1)
    offload(source, prompt)
    start, start_of_source = next_seq(puller.replay), next_seq(source.replay)
    complete(puller, prompt, kv_transfer_params=pull_from(source))
    events = wait_for_events(puller.replay, start, lambda events: bool(stored(events, "GPU")))
    assert [e["medium"] for e in events if e["type"] == "BlockStored"] == ["CPU", "CPU", "CPU", "GPU"]
    (gpu,) = stored(events, "GPU")
    assert {h for e in stored(events, "CPU") for h in e["block_hashes"]} == set(gpu["block_hashes"])
    assert list(events_since(source.replay, start_of_source)) == []


def test_an_empty_list_of_tiers_excludes_the_peer(real_p2p_pair: Pair) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(3 * B + 1)
    offload(source, prompt)
    assert cached(puller, prompt, kv_transfer_params=pull_from(source) | {"kv_load_tiers": []}) == 0


def test_a_list_of_tiers_without_storage_still_lets_the_peer_in(real_p2p_pair: Pair) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(3 * B + 1)
    offload(source, prompt)
    params = pull_from(source) | {"kv_load_tiers": [{"medium": "CPU"}]}
    assert cached(puller, prompt, kv_transfer_params=params) == 3 * B


def test_a_pull_is_cut_short_by_max_load_tokens(real_p2p_pair: Pair) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(10 * B + 1)
    cold = offload(source, prompt)
    before = puller.tokens_by_source()
    pulled = complete(puller, prompt, kv_transfer_params=pull_from(source) | {"max_load_tokens": 6 * B})
    assert pulled["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * B
    assert text(pulled) == cold
    puller.wait_for_source("p2p", before.get("p2p", 0) + 6 * B)


def test_a_source_that_holds_nothing_costs_a_recomputation_and_no_error(real_p2p_pair: Pair) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(3 * B + 1)
    assert cached(puller, prompt, kv_transfer_params=pull_from(source)) == 0
    assert cached(puller, prompt) == 3 * B
