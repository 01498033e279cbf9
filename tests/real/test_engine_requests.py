# SPDX-License-Identifier: Apache-2.0
"""What the product takes for granted about vLLM's endpoints and its HBM hits. Asked of vLLM itself; no product code is involved.

If one of these fails after an upgrade of the engine, the place that relies on it is wrong as well.
"""

from __future__ import annotations

import msgspec
import pytest

from .asking import B, Pair, cached, complete
from .engine import MODEL_NAME
from .prompts import token_ids


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
