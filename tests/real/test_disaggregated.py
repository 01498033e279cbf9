# SPDX-License-Identifier: Apache-2.0
"""One real worker computes the prompt, another answers: the text is that of one worker alone, the counts are the plan's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from .engine import RealWorker
from .launch import BLOCK_SIZE_TOKENS, MODEL_NAME, NIXL
from .prompts import token_ids
from .routed import Gateway, Pair, gateway, settled

GREEDY = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@asynccontextmanager
async def split_gateway(pair: Pair, tmp_path: Path) -> AsyncIterator[Gateway]:
    """The first worker prefills, the second decodes, and prompts are dear enough beside its answers to be split."""
    more = {"costs.calibrate": False}
    roles = ("prefill", "decode")
    async with gateway(pair, tmp_path, recompute_s_per_token=0.01, roles=roles, more=more) as one:
        board, now_s = one.app.brain.board, asyncio.get_running_loop().time()
        for _ in range(50):  # answers that seem to run on the decode worker
            board.first_token(board.promise(f"127.0.0.1:{pair[1].ports.http}", 0, 0.0, 0.0, now_s), now_s)
        yield one


async def alone(worker: RealWorker, body: dict[str, Any]) -> str:
    """What the worker says by itself."""
    answer = await asyncio.to_thread(worker.post, "/v1/completions", GREEDY | body)
    text: str = answer["choices"][0]["text"]
    return text


def was_split(record: dict[str, Any], prefill: RealWorker, decode: RealWorker) -> dict[str, Any]:
    """Both legs were carried out as planned; the record of the prefill leg."""
    assert record["worker"] == f"127.0.0.1:{decode.ports.http}"
    leg: dict[str, Any] = record["prefill"]
    assert leg["worker"] == f"127.0.0.1:{prefill.ports.http}"
    assert (leg["observed"]["outcome"], record["observed"]["outcome"]) == ("ok", "ok")
    assert leg["observed"]["cached_tokens"] == leg["predicted_cached_tokens"], record
    assert record["observed"]["cached_tokens"] == record["predicted_cached_tokens"], record
    return leg


@pytest.mark.parametrize("beside", [-1, 0, 1, 13])
async def test_the_p2p_tier_hands_over_every_whole_block(
    real_p2p_pair: Pair, tmp_path: Path, beside: int
) -> None:
    prefill, decode = real_p2p_pair
    prompt = token_ids(9 * BLOCK_SIZE_TOKENS + beside)
    whole = len(prompt) // BLOCK_SIZE_TOKENS
    async with split_gateway(real_p2p_pair, tmp_path) as one:
        before = decode.tokens_by_source().get("p2p", 0.0)
        answer, record = await one.complete(prompt)
        was_split(record, prefill, decode)
        assert record["path_blocks"]["peer"] == whole
        assert record["predicted_cached_tokens"] == whole * BLOCK_SIZE_TOKENS
        await asyncio.to_thread(decode.wait_for_source, "p2p", before + whole * BLOCK_SIZE_TOKENS)
    assert answer["choices"][0]["text"] == await alone(prefill, {"prompt": prompt})


async def test_what_the_decode_worker_holds_is_neither_handed_over_nor_pulled_from_it(
    real_p2p_pair: Pair, tmp_path: Path
) -> None:
    """It would answer the pull of a worker that it waits for only after two time-outs of 5 s."""
    prefill, decode = real_p2p_pair
    prompt = token_ids(20 * BLOCK_SIZE_TOKENS + 5)
    known = prompt[: 12 * BLOCK_SIZE_TOKENS]
    async with split_gateway(real_p2p_pair, tmp_path) as one:
        await one.drain(prefill, True)
        await one.complete(known)
        await settled(one, decode, known)
        await one.drain(prefill, False)
        answer, record = await one.complete(prompt)
        leg = was_split(record, prefill, decode)
        assert leg["source"] is None
        assert leg["path_blocks"] == {"recompute": 21}
        assert record["path_blocks"] == {"hbm": 12, "peer": 8, "recompute": 1}
    assert answer["choices"][0]["text"] == await alone(prefill, {"prompt": prompt})


async def test_a_streamed_chat_is_split_whatever_limits_its_body_names(
    real_p2p_pair: Pair, tmp_path: Path
) -> None:
    prefill, decode = real_p2p_pair
    words = " ".join(f"w{n}" for n in token_ids(150))
    body = GREEDY | {
        "messages": [{"role": "user", "content": words}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 8,
        "max_completion_tokens": 8,
    }
    async with (
        split_gateway(real_p2p_pair, tmp_path) as one,
        one.session.post(one.url + "/v1/chat/completions", json=body) as response,
    ):
        lines = (await response.text()).splitlines()
        assert response.status == 200, lines
        record = await one.get(f"/admin/api/decisions/{response.headers['x-request-id']}")
        assert response.headers["x-pointsman-prefill-worker"] == record["prefill"]["worker"]
    was_split(record, prefill, decode)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    plain = {k: v for k, v in body.items() if not k.startswith("stream")}
    answer = await asyncio.to_thread(prefill.post, "/v1/chat/completions", plain)
    assert text == answer["choices"][0]["message"]["content"]
    assert record["observed"]["ttft_s"] is not None


async def test_a_refused_prefill_costs_the_decode_worker_no_peer_timeout(
    real_p2p_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = real_p2p_pair
    prompt = token_ids(9 * BLOCK_SIZE_TOKENS + 3)
    monkeypatch.setattr("router.gateway.prefill.one_token_keys", lambda _: {"max_tokens": -5})
    async with split_gateway(real_p2p_pair, tmp_path) as one:
        answer, record = await one.complete(prompt)
    [first] = record["earlier_attempts"]
    assert first["prefill"]["observed"]["status"] == 400
    assert first["observed"]["outcome"] == "cancelled"
    assert (record["prefill"], record["worker"]) == (None, first["worker"])
    assert record["observed"]["duration_s"] < 20  # its own peer time-out is 30 s
    assert answer["choices"][0]["text"] == await alone(prefill, {"prompt": prompt})
    assert decode.metrics()['vllm:num_requests_waiting{engine="0",model_name="tiny"}'] == 0


async def test_nixl_connector_hands_over_the_whole_prompt(
    real_workers: Callable[..., Pair], tmp_path: Path
) -> None:
    prefill, decode = pair = real_workers(NIXL, NIXL)
    for beside in (-1, 0, 13):
        prompt = token_ids(9 * BLOCK_SIZE_TOKENS + beside)
        async with split_gateway(pair, tmp_path) as one:
            before = external_tokens(decode)
            answer, cold = await one.complete(prompt)
            was_split(cold, prefill, decode)
            assert cold["path_blocks"] == {"peer": -(-len(prompt) // BLOCK_SIZE_TOKENS)}
            assert external_tokens(decode) - before >= len(prompt) - 1
        assert answer["choices"][0]["text"] == await alone(prefill, {"prompt": prompt})


def external_tokens(worker: RealWorker) -> float:
    family = "vllm:prompt_tokens_by_source_total{"
    samples = worker.metrics().items()
    return sum(v for name, v in samples if name.startswith(family) and "external_kv_transfer" in name)
