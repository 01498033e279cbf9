# SPDX-License-Identifier: Apache-2.0
"""What the product takes for granted about vLLM, asked of vLLM itself. No product code is involved.

If one of these fails after an upgrade of the engine, the place that relies on it is wrong as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from .engine import BLOCK_SIZE_TOKENS, MODEL_NAME, Offload, RealWorker, WorkerConfig
from .events import events_since, next_seq, removed, replay, stored, wait_for_events
from .prompts import token_ids

Pair = tuple[RealWorker, RealWorker]
Workers = Callable[..., tuple[RealWorker, ...]]
B = BLOCK_SIZE_TOKENS

# Chunks of two blocks, and placeholders for what is offloaded; the second worker describes it and sends bytes.
CHUNKED = WorkerConfig(offload=Offload(blocks_per_chunk=2, self_describing=False))
CHUNKED_DESCRIBED = WorkerConfig(offload=Offload(blocks_per_chunk=2), byte_hashes=True)


def complete(worker: RealWorker, prompt: list[int] | str, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer: dict[str, Any] = worker.post("/v1/completions", body | more)
    return answer


def cached(worker: RealWorker, prompt: list[int], **more: Any) -> int:
    """`cached_tokens` as the engine reports them for this prompt now."""
    usage = complete(worker, prompt, **more)["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def pull_from(source: RealWorker) -> dict[str, Any]:
    assert source.p2p is not None
    host, port = source.p2p.split(":")
    return {
        "remote_kv_source": {
            "kv_request_id": uuid.uuid4().hex,
            "remote_host": host,
            "remote_port": int(port),
        },
    }


def compute(worker: RealWorker, prompt: list[int], **more: Any) -> list[dict[str, Any]]:
    """Runs a prompt of at least one block and returns the HBM stores it caused, the first of them its own blocks.

    Other events may be mixed in (a full pool evicts, a reset is announced late), so they are left out here.
    """
    start = next_seq(worker.replay)
    complete(worker, prompt, **more)
    first = prompt[:BLOCK_SIZE_TOKENS]

    def announced(events: list[dict[str, Any]]) -> bool:
        return any(e["token_ids"][: len(first)] == first for e in stored(events, "GPU"))

    return stored(wait_for_events(worker.replay, start, announced), "GPU")


def offload(worker: RealWorker, prompt: list[int]) -> str:
    """Runs the prompt and returns its text once the engine has said that its full chunks are in RAM."""
    start = next_seq(worker.replay)
    answer = text(complete(worker, prompt))
    config = worker.config.offload
    assert config is not None
    chunks = len(prompt) // (B * config.blocks_per_chunk)
    wait_for_events(worker.replay, start, lambda events: len(stored(events, "CPU")) >= chunks)
    return answer


def forget_hbm(worker: RealWorker) -> None:
    worker.post("/reset_prefix_cache")


# Discovery


def test_the_models_endpoint_names_root_parent_and_length(real_pair: Pair) -> None:
    (model,) = real_pair[0].get("/v1/models")["data"]
    assert model["id"] == MODEL_NAME
    assert model["root"] == str(real_pair[0].model_dir)
    assert model["parent"] is None
    assert model["max_model_len"] == 2048


def test_metrics_tell_the_block_size_and_the_start_time_of_the_process(real_pair: Pair) -> None:
    samples = real_pair[0].metrics()
    (info,) = [name for name in samples if name.startswith("vllm:cache_config_info{")]
    assert f'block_size="{B}"' in info
    assert 'num_gpu_blocks="256"' in info
    assert 'enable_prefix_caching="True"' in info
    assert samples["process_start_time_seconds"] > 1.7e9


def test_metrics_have_the_load_gauges_that_polling_reads(real_pair: Pair) -> None:
    names = {name.split("{")[0] for name in real_pair[0].metrics()}
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= names


def test_the_event_sources_endpoint_names_the_sockets_of_each_rank(real_pair: Pair) -> None:
    worker = real_pair[0]
    sources = worker.get("/kv_event_sources")
    assert list(sources) == ["0"]
    assert sources["0"]["endpoint"].endswith(f":{worker.ports.events}")
    assert sources["0"]["replay_endpoint"] == worker.replay
    assert sources["0"]["topic"] == worker.topic


# Tokens


def test_tokenize_takes_a_prompt_or_messages_and_counts_what_completions_count(real_pair: Pair) -> None:
    worker = real_pair[0]
    plain = worker.post("/tokenize", {"model": MODEL_NAME, "prompt": "an old canal"})
    assert plain["count"] == len(plain["tokens"])
    assert plain["tokens"][0] == 1, "a plain prompt gets <s> from the tokenizer's post-processor"
    assert plain["max_model_len"] == 2048
    assert complete(worker, "an old canal")["usage"]["prompt_tokens"] == plain["count"]

    messages = [{"role": "user", "content": "an old canal"}]
    chat = worker.post("/tokenize", {"model": MODEL_NAME, "messages": messages})
    assert chat["tokens"].count(1) == 1, "only the template places <s> in a chat"
    answer = worker.post("/v1/chat/completions", {"model": MODEL_NAME, "messages": messages, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == chat["count"]


# HBM only


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_an_hbm_hit_is_whole_blocks_and_leaves_at_least_one_token(
    real_pair: Pair, blocks: int, beside: int
) -> None:
    prompt = token_ids(blocks * B + beside)
    assert cached(real_pair[0], prompt) == 0
    assert cached(real_pair[0], prompt) == (len(prompt) - 1) // B * B


def test_generated_tokens_are_cached_but_for_the_last(real_pair: Pair) -> None:
    worker = real_pair[0]
    prompt = token_ids(B + 8)
    answer = complete(worker, prompt, max_tokens=2 * B - 8, return_token_ids=True)
    turn = prompt + answer["choices"][0]["token_ids"]
    assert len(turn) == 3 * B
    # The last sampled token was never computed, so the block that it would fill does not exist.
    assert cached(worker, turn + token_ids(5)) == 2 * B


def test_another_salt_is_another_prompt(real_pair: Pair) -> None:
    prompt = token_ids(3 * B + 1)
    assert cached(real_pair[0], prompt, cache_salt="one") == 0
    assert cached(real_pair[0], prompt, cache_salt="two") == 0
    assert cached(real_pair[0], prompt) == 0
    assert cached(real_pair[0], prompt, cache_salt="one") == 3 * B


def test_a_stream_reports_cached_tokens_in_its_last_chunk(real_pair: Pair) -> None:
    worker = real_pair[0]
    prompt = token_ids(2 * B + 1)
    complete(worker, prompt)
    chunks = worker.post_stream(
        "/v1/completions",
        {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    assert chunks[-1] == "[DONE]"
    last = msgspec.json.decode(chunks[-2])
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * B


# Events


def test_a_stored_block_carries_everything_that_identifies_it(real_pair: Pair) -> None:
    worker = real_pair[0]
    prompt = token_ids(2 * B + 5)
    start = next_seq(worker.replay)
    complete(worker, prompt, max_tokens=B, cache_salt="salt")
    events = wait_for_events(worker.replay, start, lambda events: len(stored(events, "GPU")) == 2)
    first, second = stored(events, "GPU")
    assert first["token_ids"] == prompt[: 2 * B]
    assert first["parent_block_hash"] is None
    assert first["block_size"] == B
    assert first["extra_keys"] == [["salt"], None], "the salt is an extra key of the first block only"
    assert first["lora_id"] is None
    assert first["lora_name"] is None
    assert first["group_idx"] == 0
    assert first["kv_cache_spec_kind"] == "full_attention"
    assert len(first["block_hashes"]) == 2
    assert all(0 <= h < 2**64 for h in first["block_hashes"])
    assert second["parent_block_hash"] == first["block_hashes"][1], "decoding chains on to the prompt"
    assert second["token_ids"][:5] == prompt[2 * B :]


def test_a_batch_is_an_array_of_time_events_and_rank_and_its_events_are_maps(real_pair: Pair) -> None:
    worker = real_pair[0]
    start = next_seq(worker.replay)
    compute(worker, token_ids(B + 1))
    (message,) = replay(worker.replay, start)
    time_s, events, rank = msgspec.msgpack.decode(message.payload)
    assert isinstance(time_s, float)
    assert events[-1]["type"] == "BlockStored"
    assert rank == 0


def test_two_workers_give_the_same_block_the_same_hash(real_pair: Pair) -> None:
    prompt = token_ids(2 * B)
    (first,), (second,) = (compute(worker, prompt) for worker in real_pair)
    assert first["block_hashes"] == second["block_hashes"]


def test_a_repeat_that_hits_in_hbm_emits_nothing(real_pair: Pair) -> None:
    worker = real_pair[0]
    prompt = token_ids(2 * B + 1)
    compute(worker, prompt)
    start = next_seq(worker.replay)
    complete(worker, prompt)
    compute(worker, other := token_ids(B))
    assert [e["token_ids"] for e in stored(list(events_since(worker.replay, start)), "GPU")] == [other]


def test_eviction_removes_block_by_block_the_tail_of_the_oldest_first(real_pair: Pair) -> None:
    worker = real_pair[0]
    forget_hbm(worker)
    start = next_seq(worker.replay)
    oldest = token_ids(4 * B)
    complete(worker, oldest)
    for _ in range(8):
        complete(worker, token_ids(32 * B), max_tokens=1)
    events = wait_for_events(worker.replay, start, lambda events: len(removed(events, "GPU")) >= 5)
    (mine,) = [e["block_hashes"] for e in stored(events, "GPU") if e["token_ids"] == oldest]
    assert [e["block_hashes"] for e in removed(events, "GPU")[:4]] == [[h] for h in reversed(mine)]


def test_a_reset_is_announced_with_the_next_request(real_pair: Pair) -> None:
    worker = real_pair[0]
    compute(worker, token_ids(B))
    start = next_seq(worker.replay)
    forget_hbm(worker)
    assert list(events_since(worker.replay, start)) == []
    complete(worker, token_ids(B))
    events = wait_for_events(worker.replay, start, lambda events: len(events) >= 2)
    assert events[0] == {"type": "AllBlocksCleared"}
    assert events[1]["type"] == "BlockStored"


# Replay


def test_replay_returns_the_published_bytes_from_the_asked_sequence_on(real_pair: Pair) -> None:
    worker = real_pair[0]
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.rcvtimeo = 500
        subscriber.subscribe("kv@")
        subscriber.connect(worker.events)
        live = []
        for _ in range(40):  # a publisher drops what it sends before it has seen the subscription
            complete(worker, token_ids(B))
            try:
                live.append(subscriber.recv_multipart())
            except zmq.Again:
                continue
            if len(live) == 3:
                break
    assert len(live) == 3
    topic, first, _ = live[0]
    start = int.from_bytes(first, "big")
    again = replay(worker.replay, start)
    assert [m.seq for m in again] == list(range(start, start + len(again)))
    assert [(m.topic.encode(), m.seq.to_bytes(8, "big"), m.payload) for m in again][:3] == [
        tuple(m) for m in live
    ]
    assert topic.decode() == worker.topic


def test_replay_from_beyond_the_end_is_empty(real_pair: Pair) -> None:
    worker = real_pair[0]
    complete(worker, token_ids(B))
    assert replay(worker.replay, next_seq(worker.replay) + 5) == []


# RAM


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


# Peers


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


# Chunks of several blocks


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
