# SPDX-License-Identifier: Apache-2.0
"""Answers of the simulated worker over real HTTP."""

from __future__ import annotations

import json

import pytest
from sim_client import PROMPT, parse_events, serving


async def test_whole_and_streamed_answers_say_the_same_and_report_usage() -> None:
    async with serving() as client:
        whole = await client.complete()
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
        status, text = await client.call("POST", "/v1/completions", body)
        chunks = parse_events(text)
        assert status == 200
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"]
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "length"]
        assert chunks[-1]["choices"] == []
        length = len(PROMPT)
        assert chunks[-1]["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": 4,
            "total_tokens": length + 4,
            "prompt_tokens_details": {"cached_tokens": (length - 1) // 16 * 16},
        }
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert whole["object"] == chunks[0]["object"] == "text_completion"


async def test_a_chat_is_what_tokenize_says_and_its_second_turn_hits() -> None:
    async with serving() as client:
        messages = [{"role": "user", "content": "tell me something of a certain length"}]
        tokens = (await client.json("POST", "/tokenize", {"messages": messages}))["tokens"]
        first = await client.json("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 40})
        assert first["usage"]["prompt_tokens"] == len(tokens)
        answer = first["choices"][0]["message"]
        turn = [
            *messages,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "more"},
        ]
        body = {"messages": turn, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
        chunks = parse_events((await client.call("POST", "/v1/chat/completions", body))[1])
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[0]["object"] == "chat.completion.chunk"
        cached = chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(tokens) + 39) // 16 * 16
        assert (await client.json("POST", "/tokenize", {"prompt": "ab"}))["tokens"] == [97, 98]


async def test_every_form_of_prompt_is_taken() -> None:
    async with serving() as client:
        by_text = await client.complete("ab cd")
        by_ids = await client.complete(list(b"ab cd"))
        assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
        both = await client.complete(["ab cd", "ef"])
        lists = await client.complete([list(b"ab cd"), list(b"ef")])
        assert [c["text"] for c in both["choices"]] == [c["text"] for c in lists["choices"]]
        assert [c["index"] for c in both["choices"]] == [0, 1]
        assert both["usage"]["prompt_tokens"] == 7
        status, text = await client.call(
            "POST", "/v1/completions", {"prompt": ["ab cd", "ef"], "max_tokens": 4, "stream": True}
        )
        streamed = ["", ""]
        for chunk in parse_events(text):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert status == 200
        assert streamed == [c["text"] for c in both["choices"]]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[1]", 400),
        ({}, 400),
        ({"prompt": 1}, 400),
        ({"prompt": []}, 400),
        ({"prompt": ["a", 1]}, 400),
        ({"prompt": [-1]}, 400),
        ({"prompt": "a", "max_tokens": "x"}, 400),
        ({"prompt": "a", "max_tokens": 0}, 400),
        ({"prompt": "a", "stream": "yes"}, 400),
        ({"prompt": "a", "cache_salt": ""}, 400),
        ({"prompt": "a", "kv_transfer_params": []}, 400),
        ({"prompt": "x" * 5000}, 400),
        ({"prompt": "a", "model": "other"}, 404),
        ({"prompt": ["a", "b"], "kv_transfer_params": {"remote_decoder": {"kv_request_id": "k"}}}, 500),
    ],
)
async def test_bad_requests_get_vllms_status_and_error_shape(body: object, status: int) -> None:
    async with serving() as client:
        got, text = await client.call("POST", "/v1/completions", body)
        assert got == status
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status
        assert (await client.complete("a"))["usage"]["prompt_tokens"] == 1


async def test_models_list_the_adapters_under_their_base_and_keep_their_blocks_apart() -> None:
    async with serving(model="base", loras=("a1",)) as client:
        base, adapter = (await client.json("GET", "/v1/models"))["data"]
        assert (base["id"], base["root"], base["parent"]) == ("base", "base", None)
        assert base["max_model_len"] == 255 * 16
        assert (adapter["id"], adapter["parent"]) == ("a1", "base")
        await client.complete(model="base")
        assert (await client.complete(model="a1"))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await client.complete(model="a1"))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_metrics_carry_vllms_names() -> None:
    async with serving() as client:
        await client.complete()
        await client.complete()
        status, text = await client.call("GET", "/metrics")
        assert status == 200
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        labels = 'engine="0",model_name="sim-model"'
        length = len(PROMPT)
        hit = (length - 1) // 16 * 16
        for name, value in (
            (f"vllm:num_requests_running{{{labels}}}", 0),
            (f"vllm:num_requests_waiting{{{labels}}}", 0),
            (f"vllm:prefix_cache_queries_total{{{labels}}}", 2 * length),
            (f"vllm:prefix_cache_hits_total{{{labels}}}", hit),
            (f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="device"}}', hit),
            (f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}}', 1),
        ):
            assert float(samples[name]) == value
        assert any('block_size="16",num_gpu_blocks="256"' in name for name in samples)
        assert float(samples["process_start_time_seconds"]) > 1e9
